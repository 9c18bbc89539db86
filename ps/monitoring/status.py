"""Where a run stands, as plain data for the status page and for Prometheus: see `docs/STATUS.md`. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ps.coordination import attendance, waits
from ps.coordination.coordinator import Coordinator
from ps.coordination.members import Member
from ps.coordination.policy import Phase

if TYPE_CHECKING:
    from ps.record import Record

SCHEMA = 1
"""Of `/status.json`. It grows when a field is taken away or means something else, not when one is added."""


class WorkerState(StrEnum):
    """How a worker takes part."""

    HERE = "here"
    LATE = "late"
    PROBATION = "probation"
    LOST = "lost"
    LEFT = "left"
    AWAITED = "awaited"


@dataclass(frozen=True)
class RunFacts:
    """What the run is, and how far.

    Attributes:
        phase: gathering, initialising, running, draining or ended.
        outcome: how it has ended, or None.
        step: closed rounds, or applied pushes.
        steps: of the whole run.
        seconds: since this server started.
        seconds_left: at the pace of the last half minute; None: not known.
        mode, consistency, aggregation, optimizer: as asked for.
        learning_rate: before the schedule.
        resumed: it goes on from a checkpoint.
        deterministic: whether the same seed gives the same bits again.
        deterministic_reason: why not.
        void_rounds: rounds with nothing to apply.
        short_rounds: rounds with fewer usable pushes than workers.
        predicted_rounds: rounds that closed without waiting longer for a validator.
        left_out_rounds: rounds that closed without somebody who had not left.
    """

    phase: str
    outcome: str | None
    step: int
    steps: int
    seconds: float
    seconds_left: float | None
    mode: str
    consistency: str
    aggregation: str
    optimizer: str
    learning_rate: float
    resumed: bool
    deterministic: bool
    deterministic_reason: str | None
    void_rounds: int
    short_rounds: int
    predicted_rounds: int
    left_out_rounds: int


@dataclass(frozen=True)
class Figures:
    """Loss and accuracy of the last round, before its update; throughput; the evaluator's last report (or None)."""

    loss: float | None
    accuracy: float | None
    examples_per_s: float
    test_loss: float | None
    test_accuracy: float | None
    test_step: int | None


@dataclass(frozen=True)
class Waiting:
    """For whom the run waits: a sentence (empty: for nobody), the ranks, and since when in seconds."""

    sentence: str
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class WorkerRow:
    """One rank, present or not.

    Attributes:
        rank: its number.
        name: who it is; empty if nobody has taken the rank yet.
        host: where it runs.
        state: how it takes part.
        seconds: since it is lost, or has left, or else since it joined; None before.
        lost_reason: why its connection ended, or empty.
        weight: mean over the last 20 rounds; absent counts 0.
        share: in the last round of this worker, in fair shares (1: as much as an equal part); None before.
        muted: the rule gives it next to nothing.
        muted_rounds: rounds in which it did.
        pushes, rejected, stale, late, duplicates: pushes in time; of them unusable; of another step or epoch; come
            when their round had closed; repetitions.
        clock: async, SSP: pushes that were answered.
        staleness: async, SSP: updates between the values and the push, of the last one; 0 in sync.
        last_reason: why its last push that did not count did not, or empty.
    """

    rank: int
    name: str
    host: str
    state: WorkerState
    seconds: float | None
    lost_reason: str
    weight: float
    share: float | None
    muted: bool
    muted_rounds: int
    pushes: int
    rejected: int
    stale: int
    late: int
    duplicates: int
    clock: int
    staleness: int
    last_reason: str


@dataclass(frozen=True)
class ValidatorRow:
    """A client on trusted data: `connected`, and how many references it has given."""

    name: str
    host: str
    connected: bool
    pushes: int


@dataclass(frozen=True)
class CheckpointFacts:
    """Whether checkpoints are kept and how often (steps), the newest that this server has written, and failures."""

    kept: bool
    every: int
    last_step: int | None
    failures: int


@dataclass(frozen=True)
class Refusal:
    """Pushes of a worker that did not count: about which step, how many, of which kind, and why (may be empty)."""

    step: int
    name: str
    kind: str
    count: int
    reason: str


@dataclass(frozen=True)
class Status:
    """All that is shown of a run beside its history; `time` is in seconds since 1970."""

    schema: int
    epoch: str
    time: float
    run: RunFacts
    figures: Figures
    waiting: Waiting
    workers: tuple[WorkerRow, ...]
    validators: tuple[ValidatorRow, ...]
    evaluators: int
    checkpoints: CheckpointFacts
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class Pushed:
    """What is remembered of a worker's pushes: share and staleness of the last one, and why one did not count."""

    share: float | None = None
    staleness: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Pause:
    """That a run's course stands.

    Attributes:
        reason: what it waits for, in words; empty if it does not stand.
        stood_s: seconds that it has stood in all.
    """

    reason: str
    stood_s: float


NO_PAUSE = Pause("", 0.0)


def waiting(course: Coordinator, now: float, held_back: str = "") -> Waiting:
    """Return for whom a run waits; for nobody where values are `held_back`, for a reason in words."""
    if held_back:
        return Waiting(held_back, (), 0.0)
    sentence = course.waiting_for(now)
    if not sentence:
        return Waiting("", (), 0.0)
    ranks: Sequence[int] = ()
    since = course.phase_began
    if course.phase is Phase.GATHERING:
        ranks = waits.missing_ranks(course)
    elif course.phase is Phase.RUNNING and course.policy.is_sync:
        absent = course.absent()
        ranks = [] if waits.hides_who_is_absent(course) else absent
        lost = [m.lost_at for r in absent if (m := course.registry.members.get(r)) and m.lost_at is not None]
        began = course.open_round.began
        since = began if began is not None else min(lost, default=course.open_round.opened)
    elif course.phase is Phase.RUNNING:
        ranks = [] if course.held_since is None else attendance.laggards(course)
        since = course.last_push_at if course.held_since is None else course.held_since
    return Waiting(sentence, tuple(ranks), max(0.0, now - since))


def worker_rows(
    course: Coordinator, record: "Record", pushed: Mapping[str, Pushed], now: float
) -> tuple[WorkerRow, ...]:
    """Return a row for each rank that is known or awaited, ascending."""
    muted, muted_rounds = set(record.trust.muted), record.trust.muted_rounds()
    known = course.registry.members
    ranks = sorted(known) if course.policy.elastic else range(course.policy.workers)
    rows = []
    for rank in ranks:
        member = known.get(rank)
        name = "" if member is None else member.name
        last = pushed.get(name, Pushed())
        rows.append(
            WorkerRow(
                rank=rank,
                name=name,
                host="" if member is None else member.host,
                state=_state(course, member),
                seconds=_seconds(member, now),
                lost_reason="" if member is None or member.finished else member.lost_reason,
                weight=record.metrics.weight(rank),
                share=last.share,
                muted=name in muted,
                muted_rounds=muted_rounds.get(name, 0),
                pushes=course.pushes.get(rank, 0) - _is_hidden(course, rank),
                rejected=course.rejected.get(rank, 0),
                stale=course.stale.get(rank, 0),
                late=course.late.get(rank, 0),
                duplicates=course.duplicates.get(rank, 0),
                clock=0 if member is None else member.clock,
                staleness=last.staleness,
                last_reason=last.reason,
            )
        )
    return tuple(rows)


def _is_hidden(course: Coordinator, rank: int) -> bool:
    """Say whether a rank's push of the open round is not shown yet: see `waits.hides_who_is_absent`."""
    return waits.hides_who_is_absent(course) and rank in course.open_round.pushes


def _state(course: Coordinator, member: Member | None) -> WorkerState:
    if member is None:
        return WorkerState.AWAITED
    if member.finished:
        return WorkerState.LEFT
    if member.session is None:
        return WorkerState.LOST
    if member.on_probation:
        return WorkerState.PROBATION
    is_late = member.late_rounds > 0 or member.rank in course.open_round.left_behind
    return WorkerState.LATE if is_late else WorkerState.HERE


def _seconds(member: Member | None, now: float) -> float | None:
    if member is None:
        return None
    return max(0.0, now - (member.joined_at if member.lost_at is None else member.lost_at))


def validator_rows(course: Coordinator) -> tuple[ValidatorRow, ...]:
    """Return a row for each validator that has come, in the order of their numbers."""
    return tuple(
        ValidatorRow(judge.name, judge.host, judge.session is not None, course.pushes.get(number, 0))
        for number, judge in sorted(course.registry.validators.items())
    )


def plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, ready for JSON: numbers with 6 digits, and null for NaN and infinity.

    Raises:
        TypeError: something else is in it.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {name: plain(item) for name, item in vars(value).items()}
    raise TypeError(f"a status holds no {type(value).__name__}")


def rounded(value: float, digits: int = 6) -> float | None:
    """Return a number with so many significant digits, but whole numbers whole; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if abs(value) < 10**digits else float(round(value))
