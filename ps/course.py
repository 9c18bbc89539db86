"""The state of a run, and what all its events share: who is answered, when rounds close, how the run ends.

Pure, as is `ps.coordinator`, which makes it whole with the events themselves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from protocol.ensemble import Weighting
from protocol.messages import Logits, Push, Role, Status
from ps import waits
from ps.instructions import (
    Announce,
    CloseRound,
    Contribution,
    Drop,
    Finish,
    Instruction,
    Reply,
    SendWeights,
    SkipRound,
    WeighAnswers,
)
from ps.members import Member, Registry, SessionId
from ps.policy import Phase, RunPolicy
from ps.rounds import Answer, OpenRound, may_close, other_labels, refusals

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
        short_rounds: rounds that closed with fewer usable pushes than there are workers.
        predicted_rounds: rounds that were to be validated and closed without waiting longer for a validator.
        alarmed: whether rounds that open are validated more often. The server sets it from what the rule made of a
            round, when the next is open already: it counts from the one after that.
        open_round: the pushes of the step that is being trained.
        asked: the connection whose initial values are wanted, or None.
        phase_began: when the phase began (monotonic seconds).
        is_done: whether the run has ended by its last step: who still asks gets the final values.
        has_left_early: whether a worker or validator said bye before the last step.
        pushes: pushes by rank that arrived in their round.
        duplicates, stale, rejected: pushes by rank that were a repetition, of another step or epoch, not finite.
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
    open_round: OpenRound = field(init=False)
    _void_in_a_row: int = 0
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
            due = (asked and self.step >= pending.min_step) or over
            if due and not in_round:
                del self._pending[session]
                yield Reply(session, pending.seq, pending.applied, pending.reason)

    def _untimely(self, member: Member, message: Push | Logits) -> Drop | None:
        """Drop what is not of the open round, or was judged before; None if it is neither."""
        if message.epoch != self.epoch:
            return self._drop(member, message, self.stale, "the push was computed before the server started anew")
        if message.seq <= member.last_seq:
            return self._drop(member, message, self.duplicates)
        if self.phase in (Phase.GATHERING, Phase.INITIALISING):
            return self._drop(member, message, self.stale, "the push came before the first values")
        if self.phase is not Phase.RUNNING or message.step != self.step:
            reason = f"the push is of step {message.step}, the round is {self.step}"
            return self._drop(member, message, self.stale, reason)
        return None

    def _in_round(self, member: Member) -> bool:
        known = self.open_round.references if member.role is Role.VALIDATOR else self.open_round.pushes
        return member.rank in known

    def _drop(
        self,
        member: Member,
        push: Push | Logits,
        counter: dict[int, int],
        reason: str | None = None,
        min_step: int = 0,
    ) -> Drop:
        """Count a push that is not taken, and answer it as soon as there are values for it.

        Args:
            member: who sent it.
            push: its header.
            counter: where it is counted.
            reason: why it is not taken; None: it was judged before and is answered from memory.
            min_step: values of an earlier step are no answer.
        """
        assert member.session is not None
        counter[member.rank] = counter.get(member.rank, 0) + 1
        if reason is not None and push.seq > member.last_seq:
            member.last_seq, member.last_applied, member.last_reason = push.seq, False, reason
        applied, why = (member.last_applied, member.last_reason) if reason is None else (False, reason)
        self._pending[member.session] = Pending(push.seq, min_step, applied, why)
        return Drop(tuple(self._answer()))

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

    def absent(self) -> list[int]:
        """Return the ranks that the open round waits for, ascending."""
        there = set(self.open_round.pushes)
        if self._weighs_examples and self.open_round.weighed is None:
            there |= set(self.open_round.answers)
        active = self.registry.active()
        if self.open_round.weighed is not None:
            active = [rank for rank in active if rank in self.open_round.weighed]
        return [rank for rank in active if rank not in there]

    def _close_if_complete(self, now: float) -> Iterator[Instruction]:
        awaited = frozenset(m.rank for m in self.awaited_validators())
        active = frozenset(self.registry.active())
        if self.open_round.weighed is not None:  # who came later takes no part
            active &= self.open_round.weighed
        deserted = self.open_round.weighed is not None and not active
        if not deserted and not may_close(frozenset(self.open_round.pushes), active, awaited):
            return
        yield from self._refuse_other_labels()
        contributions = self.open_round.contributions()
        usable = sum(not c.refused for c in contributions)
        if usable:
            self._void_in_a_row = 0
            yield CloseRound(self.step, contributions, self.open_round.usable_references())
        else:
            self._void_in_a_row += 1
            self.void_rounds += 1
            yield Announce(f"round {self.step} is void: no push can be used", warning=True)
            yield SkipRound(self.step, contributions)
        self.short_rounds += 0 < usable < self.policy.workers
        self.step += 1
        self.open_round = self._new_round(now)
        if self._void_in_a_row >= MAX_VOID_ROUNDS:
            why = refusals(contributions)
            yield from self._finish(
                Status.DIVERGED, f"{MAX_VOID_ROUNDS} rounds in a row had nothing to apply ({why})"
            )
            return
        if self.step >= self.policy.steps:
            self._enter(Phase.DRAINING, now)
        yield from self._answer()
        if self.phase is Phase.DRAINING:
            yield from self._drained(now)

    def _refuse_other_labels(self) -> Iterator[Instruction]:
        if self.policy.weighting is not Weighting.BATCH:
            return
        pushes = self.open_round.pushes
        digests = {rank: push.labels for rank, push in pushes.items() if not push.refused}
        for rank, reason in other_labels(digests).items():
            pushes[rank] = replace(pushes[rank], refused=reason)
            yield self._refuse(self.registry.members[rank], pushes[rank])

    # ---- when the examples of a round are weighed ----------------------------------------------------

    @property
    def _weighs_examples(self) -> bool:
        return self.policy.weighting is Weighting.SAMPLE

    def _weigh_if_complete(self, now: float) -> Iterator[Instruction]:
        """Weigh the answers once those of all ranks are here that have not left on purpose."""
        known = self.open_round
        if not self._weighs_examples or known.weighed is not None or self.phase is not Phase.RUNNING:
            return
        there = frozenset(known.answers) | frozenset(known.pushes)
        if not there or not frozenset(self.registry.active()) <= there:
            return
        digests = {rank: answer.labels for rank, answer in known.answers.items()}
        for rank, reason in other_labels(digests).items():
            yield from self._refuse_answer(self.registry.members[rank], known.answers[rank], reason, now)
        if not known.answers:
            yield from self._close_if_complete(now)
            return
        known.weighed, known.began = frozenset(known.answers), now
        yield WeighAnswers(self.step, tuple(sorted(known.answers)))
        for rank, answer in sorted(known.answers.items()):
            yield SendWeights(answer.session, rank, answer.seq)

    def _refuse_answer(self, member: Member, answer: Answer, reason: str, now: float) -> Iterator[Instruction]:
        """Count a member that cannot be weighed as present in this round, with weight 0."""
        self.open_round.answers.pop(member.rank, None)
        refused = Contribution(
            member.rank, answer.session, answer.seq, None, None, 0, math.inf, reason, answer.labels
        )
        self.open_round.take(refused, False, now)
        yield self._refuse(member, refused)

    # ---- how it ends ---------------------------------------------------------------------------------

    def _drained(self, now: float) -> Iterator[Instruction]:
        missing, judges = self.registry.active(), self.registry.live_validators()
        over = now - self.phase_began >= self.policy.drain_timeout_s
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
