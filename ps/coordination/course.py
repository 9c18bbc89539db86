"""The state of a run, and what all its events share: who is answered, when rounds close, how the run ends.

Pure, as are `weighing` and `coordinator` beside it, which make it whole with the events themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from protocol.ensemble import Weighting
from protocol.messages import Logits, Push, Role, Status
from ps.coordination import attendance, waits
from ps.coordination.instructions import (
    Announce,
    CloseRound,
    Contribution,
    Drop,
    Finish,
    Instruction,
    Reply,
    SkipRound,
    Useless,
)
from ps.coordination.members import Member, Registry, SessionId
from ps.coordination.policy import Phase, RunPolicy
from ps.coordination.rounds import OpenRound, may_close, other_labels, refusals

OF_NOBODY = Drop(Useless.STALE, "it comes from nobody who may push")

MAX_VOID_ROUNDS = 10
"""So many rounds in a row with nothing to apply end the run as diverged."""


@dataclass(frozen=True)
class Pending:
    """What a connection that waits for values will be told with them; see `Reply`."""

    seq: int = 0
    min_step: int = 0
    applied: bool = False
    reason: str = ""


@dataclass
class Course:
    """Knows where a run stands, and decides who is answered, when a round closes, and that a run has ended.

    Attributes:
        policy: what the run is.
        registry: who is who.
        epoch: random number of this start of the server.
        step: number of closed rounds.
        phase: where the run stands.
        void_rounds: rounds that closed with nothing to apply.
        void_in_a_row: the last of them, without one between them that had something to apply.
        short_rounds: rounds that closed with fewer usable pushes than there are workers.
        predicted_rounds: rounds that were to be validated and closed without waiting longer for a validator.
        alarmed: whether rounds that open are validated more often. The server sets it from what the rule made of a
            round, when the next is open already: it counts from the one after that.
        open_round: the pushes of the step that is being trained.
        asked: the connection whose initial values are wanted, or None.
        phase_began: when the phase began (monotonic seconds).
        is_done: whether the run has ended by its last step: who still asks gets the final values.
        has_left_early: whether a worker or validator said bye before the last step.
        pushes: pushes by rank that arrived in their round; a validator's are counted when that closes.
        duplicates, stale, rejected: pushes by rank that were a repetition, of another step or epoch, not finite.
        late: pushes by rank that came when their round had closed without them.
        left_out_rounds: rounds that closed without a rank that had not left on purpose.
        last_push_at: when the last push of a worker came, or the run began to wait for one, as it does anew when
            enough ranks are back (monotonic seconds).
        held_since: SSP: since when somebody waits for slower ranks, or None (monotonic seconds).
        is_resumed: the run goes on from a checkpoint.
        began_at_end: that was of its last step.
        has_changed: what became different in the course of the run, by which bits may differ, or None.
    """

    policy: RunPolicy
    epoch: int
    now: float
    has_values: bool = False
    registry: Registry = field(init=False)
    step: int = 0
    phase: Phase = Phase.GATHERING
    void_rounds: int = 0
    short_rounds: int = 0
    predicted_rounds: int = 0
    alarmed: bool = False
    has_left_early: bool = False
    pushes: dict[int, int] = field(default_factory=dict)
    duplicates: dict[int, int] = field(default_factory=dict)
    stale: dict[int, int] = field(default_factory=dict)
    rejected: dict[int, int] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    left_out_rounds: int = 0
    last_push_at: float = 0.0
    held_since: float | None = None
    is_resumed: bool = False
    began_at_end: bool = False
    has_changed: str | None = None
    void_in_a_row: int = 0
    open_round: OpenRound = field(init=False)
    _pending: dict[SessionId, Pending] = field(default_factory=dict)
    asked: SessionId | None = None
    _initialised: set[int] = field(default_factory=set)
    phase_began: float = 0.0
    is_done: bool = False
    _evaluators_seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.registry = Registry(self.policy.workers, self.policy.validator_slots)
        self.open_round = self._new_round(self.now)
        self.phase_began = self.now

    # ---- who is answered -----------------------------------------------------------------------------

    def _answer(self) -> Iterator[Instruction]:
        """Answer all whose values are there.

        A rank that is in the open round gets its values when that closes, a validator when a round is validated.
        """
        over = self.phase is Phase.DRAINING or self.is_done
        if not over and self.phase is not Phase.RUNNING:
            return
        for session, pending in list(self._pending.items()):
            member = self.registry.of(session)
            in_round = member is not None and self._in_round(member)
            asked = member is None or member.role is Role.WORKER or self.open_round.validated
            due = (asked and self.step >= pending.min_step and not self._is_held(member)) or over
            if due and not in_round:
                del self._pending[session]
                yield Reply(session, pending.seq, pending.applied, pending.reason)

    @staticmethod
    def _is_worker(member: Member | None) -> bool:
        return member is not None and member.role is Role.WORKER

    def _is_held(self, member: Member | None) -> bool:
        return member is not None and self._is_worker(member) and attendance.must_wait(self, member)

    def _note_who_is_held(self, now: float, anew: bool) -> None:
        """Take note since when somebody waits for slower ranks; `anew` when those have come on."""
        held = any(self._is_held(self.registry.of(session)) for session in self._pending)
        self.held_since = None if not held else now if anew or self.held_since is None else self.held_since

    def _untimely(self, member: Member, message: Push | Logits) -> Drop | None:
        """Drop what cannot count at the present step, or was judged before; None if it is neither."""
        if message.epoch != self.epoch:
            return Drop(Useless.STALE, "the push was computed before the server started anew")
        if message.seq <= member.last_seq:
            return Drop(Useless.DUPLICATE)
        if self.phase in (Phase.GATHERING, Phase.INITIALISING):
            return Drop(Useless.STALE, "the push came before the first values")
        return self._too_late(member, message)

    def _too_late(self, member: Member, message: Push | Logits) -> Drop | None:
        """Drop what is of a step that has no use for it any more, or not yet; None if it can be used."""
        problem = self._of_other_step(message.step)
        if not problem and self.phase is Phase.RUNNING:
            return None
        reason = problem or f"the push is of step {message.step}, the run has ended at {self.step}"
        was_left_behind = self.policy.is_sync and self.policy.leaves_out and message.step < self.step
        is_late = was_left_behind and self._is_worker(member)
        return Drop(Useless.LATE if is_late else Useless.STALE, reason)

    def _of_other_step(self, step: int) -> str:
        """Say why a gradient computed at values(step) cannot be used now; empty if it can."""
        policy, age = self.policy, self.step - step
        if policy.is_sync:
            return f"the push is of step {step}, the round is {self.step}" if age else ""
        if age < 0:
            return f"the push is of step {step}, which this server has not reached: it is at {self.step}"
        if policy.max_staleness is not None and age > policy.max_staleness:
            return f"its values are {age} steps old, above --max-staleness {policy.max_staleness}"
        return ""

    def _in_round(self, member: Member) -> bool:
        known = self.open_round.references if member.role is Role.VALIDATOR else self.open_round.pushes
        return member.rank in known

    def _forget(self, member: Member, push: Push | Logits, verdict: Drop, now: float) -> Iterator[Instruction]:
        """Count a push that is not taken, and answer it as soon as there are values for it."""
        assert member.session is not None and verdict.counted is not None
        counter: dict[int, int] = getattr(self, verdict.counted)
        counter[member.rank] = counter.get(member.rank, 0) + 1
        least, reason = attendance.slowest(self), verdict.reason
        if reason is not None and push.seq > member.last_seq:
            member.last_seq, member.last_applied, member.last_reason = push.seq, False, reason
            self._comes_on(member)
        applied, why = (member.last_applied, member.last_reason) if reason is None else (False, reason)
        self._pending[member.session] = Pending(push.seq, verdict.min_step, applied, why)
        yield from self._answer()
        if self.phase is Phase.RUNNING and not self.policy.is_sync:
            self._note_who_is_held(now, anew=attendance.slowest(self) != least)

    def _comes_on(self, member: Member) -> None:
        """Count a push that is answered, whether it is used or not; a rank on probation is back with it."""
        if not self.policy.is_sync and self._is_worker(member):
            member.clock = max(member.clock, attendance.slowest(self) or 0) if member.on_probation else member.clock
            member.clock += 1
            member.on_probation = False

    def _refuse(self, member: Member, refused: Contribution) -> Announce:
        self.rejected[member.rank] = self.rejected.get(member.rank, 0) + 1
        if refused.seq >= member.last_seq:
            member.last_seq, member.last_applied, member.last_reason = refused.seq, False, refused.refused
        waits = None if member.session is None else self._pending.get(member.session)
        if member.session == refused.session or (waits is not None and waits.seq == refused.seq):
            assert member.session is not None
            self._pending[member.session] = Pending(refused.seq, reason=refused.refused)
        return Announce(f"{member.label}: push of step {self.step} refused: {refused.refused}", warning=True)

    # ---- when a round closes -------------------------------------------------------------------------

    def _count_push(self, rank: int) -> None:
        self.pushes[rank] = self.pushes.get(rank, 0) + 1

    def _new_round(self, now: float) -> OpenRound:
        rounds = self.policy.validated.more_often() if self.alarmed else self.policy.validated
        return OpenRound(self.step, self.step in rounds, opened=now)

    def awaited_validators(self) -> list[Member]:
        """Return the validators whose gradient the open round still waits for."""
        if not self.open_round.validated:
            return []
        return [
            m
            for m in self.registry.validators.values()
            if not (m.finished or m.excused or m.rank in self.open_round.references)
        ]

    @property
    def _weighs_examples(self) -> bool:
        return self.policy.weighting is Weighting.SAMPLE

    def present(self) -> set[int]:
        """Return the ranks that have done what the open round asks for now: pushed, or shown their answers."""
        there = set(self.open_round.pushes)
        if self._weighs_examples and self.open_round.weighed is None:
            there |= set(self.open_round.answers)
        return there

    def absent(self) -> list[int]:
        """Return the ranks that the open round waits for, ascending."""
        there = self.present()
        return [rank for rank in attendance.awaited(self) if rank not in there]

    def _may_close(self, judges: list[Member]) -> bool:
        """Say whether the open round may close that waits for these validators."""
        present, awaited = frozenset(self.open_round.pushes), frozenset(attendance.awaited(self))
        refused = frozenset(rank for rank, push in self.open_round.pushes.items() if push.refused)
        deserted = self.open_round.weighed is not None and not awaited
        missing = frozenset(judge.rank for judge in judges)
        return deserted or may_close(present, refused, awaited, missing, self.policy.quorum)

    def only_validators_hold(self) -> list[Member]:
        """Return the validators that the open round waits for if it waits for nobody else, else none."""
        judges = self.awaited_validators()
        return judges if self.policy.is_sync and judges and self._may_close([]) else []

    def _close_if_complete(self, now: float) -> Iterator[Instruction]:
        if not self._may_close(self.awaited_validators()):
            return
        for number in self.open_round.references:  # not before: it would tell that the round is validated
            self._count_push(number)
        yield from self._refuse_other_labels()
        contributions = self.open_round.contributions()
        usable = sum(not c.refused for c in contributions)
        if usable:
            self.void_in_a_row = 0
            late = tuple(sorted(self.open_round.left_behind))
            yield CloseRound(self.step, contributions, self.open_round.usable_references(), late)
        else:
            self.void_in_a_row += 1
            self.void_rounds += 1
            yield Announce(f"round {self.step} is void: no push can be used", warning=True)
            yield SkipRound(self.step, contributions)
        expected = attendance.active(self) if self.policy.elastic else self.registry.active()
        self.short_rounds += 0 < usable < (len(expected) if self.policy.elastic else self.policy.workers)
        self.left_out_rounds += not set(expected) <= {c.rank for c in contributions}
        yield from self._next_step(contributions, now)

    def _next_step(self, contributions: tuple[Contribution, ...], now: float) -> Iterator[Instruction]:
        self.step += 1
        self.open_round = self._new_round(now)
        yield from self._end_if_void(contributions)
        if self.phase is Phase.ENDED:
            return
        if self.step >= self.policy.steps:
            self._enter(Phase.DRAINING, now)
        yield from self._answer()
        if self.phase is Phase.DRAINING:
            yield from self._drained(now)

    def _end_if_void(self, contributions: tuple[Contribution, ...]) -> Iterator[Instruction]:
        if self.void_in_a_row >= MAX_VOID_ROUNDS:
            what = "rounds" if self.policy.is_sync else "pushes"
            yield from self._finish(
                Status.DIVERGED,
                f"{MAX_VOID_ROUNDS} {what} in a row had nothing to apply ({refusals(contributions)})",
            )

    def _apply_alone(self, push: Contribution, member: Member, now: float) -> Iterator[Instruction]:
        """Apply one push at once, where each counts for itself; a refused one takes no step."""
        least = attendance.slowest(self)
        self._comes_on(member)
        if push.refused:
            self.void_in_a_row += 1
            yield from self._end_if_void((push,))
            if self.phase is Phase.RUNNING:
                yield from self._answer()
        else:
            self.void_in_a_row = 0
            yield CloseRound(self.step, (push,))
            yield from self._next_step((push,), now)
        self._note_who_is_held(now, anew=attendance.slowest(self) != least)

    def _refuse_other_labels(self) -> Iterator[Instruction]:
        if self.policy.weighting is not Weighting.BATCH:
            return
        pushes = self.open_round.pushes
        digests = {rank: push.labels for rank, push in pushes.items() if not push.refused}
        for rank, reason in other_labels(digests).items():
            pushes[rank] = replace(pushes[rank], refused=reason)
            yield self._refuse(self.registry.members[rank], pushes[rank])

    # ---- how it ends ---------------------------------------------------------------------------------

    def _drained(self, now: float) -> Iterator[Instruction]:
        missing = attendance.without_goodbye(self)
        judges = self.registry.live_validators()
        # After a restart at the end nobody is known to have heard of it, and who comes has yet to load its model.
        patience_s = self.policy.rejoin_timeout_s if self.began_at_end else self.policy.drain_timeout_s
        over = now - self.phase_began >= patience_s
        if (missing or judges or self.registry.evaluators or self.evaluator_missing()) and not over:
            return
        yield from self._done()

    def _done(self) -> Iterator[Instruction]:
        for text in waits.without_leave(self):
            yield Announce(text, warning=True)
        yield from self._finish(Status.DONE, "")

    def evaluator_missing(self) -> bool:
        """Say whether an evaluator that the end waits for has not come yet."""
        return len(self._evaluators_seen) < self.policy.evaluators

    def _finish(self, status: Status, reason: str) -> Iterator[Instruction]:
        if self.phase is not Phase.ENDED:
            self.phase, self.is_done = Phase.ENDED, status is Status.DONE
            yield Finish(status, reason)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self.phase_began = phase, now
