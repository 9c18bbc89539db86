"""What is said of waits: for whom, since when, and who did not come. Pure words over the state of a run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ps.coordination import attendance
from ps.coordination.members import Member, name_ranks
from ps.coordination.policy import Phase

if TYPE_CHECKING:
    from ps.coordination.course import Course


def waiting_for(run: "Course", now: float, names_validators: bool = False) -> str:
    """Say in words for whom a run waits and since when; empty if for nobody.

    Which rounds are validated is a secret: only the server's own log says that a round waits for a validator. What
    clients hear and the page shows must be the same, as far as can be, whether or not a round is validated.
    """
    since = _since(now - run.phase_began)
    match run.phase:
        case Phase.GATHERING:
            return f"the start waits for {missing(run)}{since}"
        case Phase.INITIALISING:
            return f"the start waits for the initial values of {asked(run)}{since}"
        case Phase.RUNNING:
            return _round_waits_for(run, now, names_validators)
        case Phase.DRAINING:
            absent = attendance.without_goodbye(run)
            whom = [name_ranks(absent)] if absent else []
            whom += [validator.label for validator in run.registry.live_validators()]
            whom += ["an evaluator"] if run.registry.evaluators or run.evaluator_missing() else []
            return f"the end waits for the goodbye of {' and of '.join(whom)}{since}"
    return ""


def _step_waits_for(run: "Course", now: float) -> str:
    """Say who holds others where each push counts for itself, or that nobody is there."""
    if run.held_since is not None:
        behind = name_ranks(attendance.laggards(run))
        return f"{behind} may not fall further behind; the others wait{_since(now - run.held_since)}"
    since = _since(now - run.last_push_at)
    if not attendance.live(run):
        return f"step {run.step} waits for any worker to return{since}"
    return f"step {run.step} has no push yet,{since}" if since else ""


def hides_who_is_absent(run: "Course") -> bool:
    """Say whether the ranks that have not pushed would tell those that see them which rounds are validated.

    With a quorum they would: a round that has it and stays open waits for a validator.
    """
    return run.policy.is_sync and run.policy.quorum is not None and run.policy.validator_slots > 0


def _round_waits_for(run: "Course", now: float, names_validators: bool) -> str:
    if not run.policy.is_sync:
        return _step_waits_for(run, now)
    judges = run.only_validators_hold() if names_validators else []
    absent = run.absent()
    lost_at = {rank: at for rank in absent if (at := run.registry.members[rank].lost_at) is not None}
    began, name = run.open_round.began, f"round {run.step}"
    if judges and began is not None:
        return f"{name} waits for {' and '.join(judge.label for judge in judges)}{_since(now - began)}"
    if run.policy.leaves_out and not attendance.live(run):
        return f"{name} waits for any worker to return{_since(now - run.last_push_at)}"
    if began is None and not lost_at:
        since = _since(now - run.open_round.opened)
        return f"{name} has no push yet,{since}" if since else ""
    if began is not None and hides_who_is_absent(run) and not names_validators:
        return f"{name} waits until a quorum of {run.policy.quorum} lets it close{_since(now - began)}"
    if began is not None and not absent:
        return f"{name} has the pushes of all workers and closes soon{_since(now - began)}"
    began_at = began if began is not None else min(lost_at.values())
    whom = absent if began is not None else sorted(lost_at)
    text = f"{name} waits for {name_ranks(whom)}{_since(now - began_at)}"
    decisive = attendance.decisive_loss(run)
    if lost_at and decisive is not None and decisive.lost_at is not None:
        left_s = max(0.0, decisive.lost_at + run.policy.rejoin_timeout_s - now)
        text += f" ({name_ranks(sorted(lost_at))} lost, may return within {left_s:.0f} s)"
    return text


def _since(seconds: float) -> str:
    """Return ` since 12 s`, or nothing when that would be 0 s."""
    return f" since {seconds:.0f} s" if round(seconds) else ""


def missing_ranks(run: "Course") -> list[int]:
    """Return the ranks that the start waits for, ascending; none in an elastic run, where any will do."""
    return [] if run.policy.elastic else run.registry.missing()


def missing(run: "Course") -> str:
    """Name the ranks, and count the validators, that the start waits for; where any rank will do, say so."""
    ranks = missing_ranks(run)
    short = run.policy.validators - len(run.registry.live_validators())
    judges = ["a validator" if short == 1 else f"{short} validators"] if short > 0 else []
    workers = [name_ranks(ranks)] if ranks else []
    if run.policy.elastic and not attendance.live(run):
        workers = ["a worker"]
    return " and ".join([*workers, *judges])


def asked(run: "Course") -> str:
    """Name who was asked for the initial values."""
    member = None if run.asked is None else run.registry.of(run.asked)
    return member.label if member is not None else "a worker"


def not_come(run: "Course") -> str:
    """Say why a run ends whose start has waited too long."""
    return (
        f"{missing(run)} did not come within {run.policy.start_timeout_s:g} s; "
        "start what is missing, or allow more with --start-timeout"
    )


def lost(run: "Course", member: Member, is_validator: bool, now: float) -> str:
    """Say that a connection was lost, and how long it may be away."""
    if is_validator:
        then = f"the next round to validate waits for it, but not longer than {run.policy.round_timeout_s:g} s"
        return f"{member.label} is lost: {member.lost_reason}; {then}"
    decisive = attendance.decisive_loss(run)
    if run.policy.leaves_out and decisive is None:
        without = "rounds close" if run.policy.is_sync else "the run goes on"
        return f"{member.label} is lost: {member.lost_reason}; {without} without it until it returns"
    if run.policy.leaves_out:
        few, s = _too_few(run), f"{run.policy.rejoin_timeout_s:g} s"
        return f"{member.label} is lost: {member.lost_reason}; {few}: one may return within {s}"
    times = run.open_round.losses.get(member.rank, [])
    if len(times) < 2:
        then = f"it may return within {run.policy.rejoin_timeout_s:g} s"
        return f"{member.label} is lost: {member.lost_reason}; {then}"
    left_s = max(0.0, times[0] + run.policy.rejoin_timeout_s - now)
    return (
        f"{member.label} is lost for the {_ordinal(len(times))} time in round {run.step}: {member.lost_reason}; "
        f"it may return within {left_s:.0f} s"
    )


def not_returned(run: "Course", member: Member) -> str:
    """Say why a run ends that has waited too long for a rank's return."""
    if run.policy.leaves_out:
        s = f"{run.policy.rejoin_timeout_s:g} s"
        return f"{_too_few(run)} since {member.label} was lost ({member.lost_reason}), and none returned within {s}"
    timeout, times = f"{run.policy.rejoin_timeout_s:g} s", run.open_round.losses.get(member.rank, [])
    if len(times) < 2:
        how = f"was lost at step {run.step} ({member.lost_reason})"
        return f"{member.label} {how} and has not returned within {timeout}"
    return (
        f"{member.label} was lost {len(times)} times in round {run.step} (at last: {member.lost_reason}) "
        f"and has not pushed within {timeout} of the first; look at its log"
    )


def _too_few(run: "Course") -> str:
    there, needed = len(attendance.live(run)), attendance.needed(run)
    if not there:
        return "no worker is left"
    are = "1 worker is" if there == 1 else f"{there} workers are"
    return f"{are} left, fewer than the {needed} of --quorum"


def left_behind(run: "Course", member: Member) -> str:
    """Say that a round closes without a rank that is alive but late."""
    return (
        f"round {run.step} waited {run.policy.round_timeout_s:g} s for {member.label}, alive but late, "
        "and closes without it"
    )


def put_on_probation(run: "Course", rank: int) -> str:
    """Say that a rank is not waited for until it is in time again."""
    member = run.registry.members[rank]
    if not run.policy.is_sync:
        return (
            f"{member.label} is alive and has held the others for {run.policy.round_timeout_s:g} s: "
            "they go on without waiting for it until its next push"
        )
    return (
        f"{member.label} was late in {member.late_rounds} rounds in a row: it is on probation, "
        "and not waited for until a push of it comes in time"
    )


def idle(run: "Course") -> str:
    """Say why a run ends to which nobody pushes: who could, and has not."""
    there = run.present()
    silent = [rank for rank in attendance.live(run) if rank not in there]
    match len(silent):
        case 0:
            who = "and nobody is connected who could; start workers"
        case 1:
            who = f"though {name_ranks(silent)} is connected; look at what it does"
        case _:
            who = f"though {name_ranks(silent)} are connected; look at what they do"
    return (
        f"no push has come for {run.policy.idle_timeout_s:g} s at step {run.step}, {who}, "
        "or allow more with --idle-timeout"
    )


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def without_leave(run: "Course") -> Iterator[str]:
    """Say of each client that still is there, or is expected, that it did not take leave."""
    absent = attendance.without_goodbye(run)
    names = [name_ranks(absent)] if absent else []
    names += [validator.label for validator in run.registry.live_validators()]
    names += ["an evaluator"] if run.registry.evaluators else []
    for name in names:
        yield f"{name} did not take leave after the last step"
    if run.evaluator_missing():
        yield "an evaluator did not come in time to measure the final values"
