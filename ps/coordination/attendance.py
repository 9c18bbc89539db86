"""Whom a run waits for: which ranks a round needs, who is too far ahead, and who must return for it.

Pure words over the state of a run, as `ps.coordination.waits` has the sentences for them.
"""

from typing import TYPE_CHECKING

from ps.coordination.members import Member
from ps.coordination.policy import Consistency, Phase

if TYPE_CHECKING:
    from ps.coordination.course import Course

MAX_LATE_ROUNDS = 3
"""After so many late rounds in a row a rank is on probation: not waited for until a push of it comes in time."""


def active(run: "Course") -> list[int]:
    """Return the ranks that count, ascending: those that have not left on purpose.

    Before a start that waits for all, each of them counts. Afterwards, and in an elastic run, only those do that
    have ever come: a run that is resumed with more workers may go on without one of whom nothing is known yet.
    """
    ranks = run.registry.active()
    if run.policy.elastic or run.phase not in (Phase.GATHERING, Phase.INITIALISING):
        return [rank for rank in ranks if rank in run.registry.members]
    return ranks


def live(run: "Course") -> list[int]:
    """Return the active ranks that are connected, ascending."""
    members = run.registry.members
    return [rank for rank in active(run) if rank in members and members[rank].session is not None]


def without_goodbye(run: "Course") -> list[int]:
    """Return the ranks for whose goodbye the end of a run waits, ascending.

    Who is lost is waited for only where it is waited for all along; but after a restart of the server at the end
    nobody is lost: who knows of the end does not call, and who does not is about to.
    """
    return live(run) if run.policy.leaves_out and not run.began_at_end else active(run)


def attending(run: "Course") -> list[int]:
    """Return the live ranks that the open round counts on: neither on probation nor come too late for it."""
    members = run.registry.members
    return [rank for rank in live(run) if not members[rank].on_probation and members[rank].since_step <= run.step]


def needed(run: "Course") -> int:
    """Return how many ranks must be live for the run to go on."""
    everyone = len(active(run))
    if run.policy.shrink or not run.policy.is_sync:
        return min(1, everyone)
    return everyone if run.policy.quorum is None else min(run.policy.quorum, everyone)


def awaited(run: "Course") -> list[int]:
    """Return the ranks of which the open round needs a push, whether it has come or not, ascending."""
    weighed = run.open_round.weighed
    if run.policy.shrink or (run.policy.quorum is not None and len(live(run)) >= needed(run)):
        ranks = [rank for rank in attending(run) if rank not in run.open_round.left_behind]
    else:
        ranks = active(run)
    return ranks if weighed is None else [rank for rank in ranks if rank in weighed]


def decisive_loss(run: "Course") -> Member | None:
    """Return the rank with whose loss too few were left for the run to go on, or None if enough are live."""
    ranks = active(run)
    members = [run.registry.members[rank] for rank in ranks if rank in run.registry.members]
    lost = sorted((m for m in members if m.lost_at is not None), key=lambda m: (m.lost_at or 0.0, m.rank))
    spare = len(ranks) - needed(run)
    return lost[spare] if len(lost) > spare else None


# ---- who is ahead (SSP) --------------------------------------------------------------------------------


def slowest(run: "Course") -> int | None:
    """Return the smallest number of pushes of a rank that attends, or None if nobody does."""
    members = run.registry.members
    return min((members[rank].clock for rank in attending(run)), default=None)


def clock_of_newcomers(run: "Course") -> int:
    """Return the number of pushes at which a rank begins that joins or returns, at least.

    It is that of the slowest who attends. Where nobody does, all were lost: then the fastest of them, who may
    return too, must not be further ahead than the bound allows.
    """
    clocks = [member.clock for member in run.registry.members.values()]
    least = slowest(run)
    return max(0, max(clocks, default=0) - run.policy.ssp_bound) if least is None else least


def must_wait(run: "Course", member: Member) -> bool:
    """Say whether a rank's next push would put it further ahead of the slowest one than the bound allows.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013,
    section 3; clocks count pushes here.
    """
    if run.policy.consistency is not Consistency.SSP:
        return False
    least = slowest(run)
    return least is not None and member.clock - least >= run.policy.ssp_bound


def laggards(run: "Course") -> list[int]:
    """Return the attending ranks that are slowest, ascending."""
    least = slowest(run)
    return [rank for rank in attending(run) if run.registry.members[rank].clock == least]
