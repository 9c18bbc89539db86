"""The state of a run as plain values, for a checkpoint, and back: who took part, what was counted, where it stands.

What belongs to one start of the server is left out: connections, push numbers, waits.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from protocol.messages import Role
from ps.coordination.members import Member
from ps.coordination.rounds import OpenRound

if TYPE_CHECKING:
    from ps.coordination.course import Course

COUNTS = ("void_rounds", "short_rounds", "predicted_rounds", "left_out_rounds")
BY_RANK = ("pushes", "duplicates", "stale", "late", "rejected")
FLAGS = ("alarmed", "has_left_early")

NO_INCARNATION = -1
"""No process has this one: whoever comes after a restart is new to the server."""


def state_of(run: "Course") -> dict[str, Any]:
    """Return what a run that goes on from here must know; call it right after a round has closed."""
    members = [*run.registry.members.values(), *run.registry.validators.values()]
    return {
        "step": run.step,
        "validated": run.open_round.validated,
        "void_in_a_row": run.void_in_a_row,
        "has_changed": run.has_changed,
        **{name: getattr(run, name) for name in (*COUNTS, *FLAGS)},
        **{name: dict(getattr(run, name)) for name in BY_RANK},
        "members": [
            {
                "rank": member.rank,
                "name": member.name,
                "host": member.host,
                "role": member.role.value,
                "threads": member.threads,
                "finished": member.left_early,  # a goodbye after the last step is no reason not to go on
                "late_rounds": member.late_rounds,
                "on_probation": member.on_probation,
                "clock": member.clock,
                "software": member.software,
            }
            for member in members
        ],
    }


def restore(run: "Course", state: Mapping[str, Any], moved: int = 0) -> None:
    """Put a run that nobody has joined yet where another one was; ranks that have no place any more are forgotten.

    Args:
        run: a fresh one.
        state: of `state_of`.
        moved: by how much the numbers of validators have moved, with the number of workers.
    """
    run.is_resumed = run.has_values = True
    run.step = int(state["step"])
    run.void_in_a_row = int(state["void_in_a_row"])
    run.has_changed = state["has_changed"]
    for name in COUNTS:
        setattr(run, name, int(state[name]))
    for name in FLAGS:
        setattr(run, name, bool(state[name]))
    for name in BY_RANK:
        counts = {_moved(run, int(rank), moved): int(count) for rank, count in state[name].items()}
        setattr(run, name, {rank: count for rank, count in counts.items() if rank is not None})
    for known in state["members"]:
        _restore_member(run, known, moved)
    run.open_round = OpenRound(run.step, bool(state["validated"]), opened=run.now)


def _moved(run: "Course", rank: int, moved: int) -> int | None:
    """Return what a rank, or the number of a validator, has become; None if it has no place any more."""
    registry = run.registry
    if rank < registry.workers - moved:
        return rank if rank < registry.workers else None
    number = rank + moved
    return number if number < registry.workers + registry.validator_slots else None


def _restore_member(run: "Course", known: Mapping[str, Any], moved: int) -> None:
    role, registry = Role(known["role"]), run.registry
    rank = _moved(run, int(known["rank"]), moved)
    if rank is None:
        return
    member = Member(rank, known["name"], known["host"], NO_INCARNATION, int(known["threads"]), role=role)
    member.finished = member.left_early = bool(known["finished"])
    member.late_rounds, member.on_probation = int(known["late_rounds"]), bool(known["on_probation"])
    member.clock, member.software = int(known["clock"]), str(known["software"])
    (registry.validators if role is Role.VALIDATOR else registry.members)[rank] = member
