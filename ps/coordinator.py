"""The course of a run as a pure object: event in, instructions out, time as an argument.

Nothing here blocks, sends, reads a clock or touches a tensor. `ps.server` feeds it events and carries out what it
returns, in order; every policy can be tested with made-up events and made-up time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from protocol.ensemble import Weighting
from protocol.messages import Logits, Push, Role, Status
from ps.instructions import (
    Announce,
    AskInitial,
    CloseRound,
    Contribution,
    Drop,
    Finish,
    Instruction,
    Reply,
    SendWeights,
    SkipRound,
    Take,
    WeighAnswers,
)
from ps.members import Granted, Identity, Member, Registry, SessionId, name_ranks
from ps.rounds import Answer, OpenRound, may_close, other_labels, refusals
from ps.validation import ALL_ROUNDS, ValidatedRounds

MAX_VOID_ROUNDS = 10
"""So many rounds in a row with nothing to apply end the run as diverged."""


@dataclass(frozen=True)
class RunPolicy:
    """What a run is, and how long each wait may last (seconds).

    The end waits for so many `evaluators` also when they come late, like a worker's goodbye. The start waits for so
    many `validators`; there is room for `validator_slots` of them, and `validated` says which rounds they judge.
    `weighting` makes it an ensemble: each rank gives initial values of its own, and all must have the same labels.
    """

    workers: int
    steps: int
    start_timeout_s: float
    round_timeout_s: float
    rejoin_timeout_s: float
    drain_timeout_s: float
    evaluators: int = 0
    validators: int = 0
    validator_slots: int = 0
    validated: ValidatedRounds = ALL_ROUNDS
    weighting: Weighting | None = None


class Phase(StrEnum):
    """Where a run stands."""

    GATHERING = "gathering"
    INITIALISING = "initialising"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True)
class _Pending:
    """What a connection that waits for values will be told with them; see `Reply`."""

    seq: int = 0
    min_step: int = 0
    applied: bool = False
    reason: str = ""


@dataclass
class Coordinator:
    """Decides when rounds close, who is answered, whom we wait for, and how the run ends.

    Attributes:
        policy: what the run is.
        registry: who is who.
        epoch: random number of this start of the server.
        step: number of closed rounds.
        phase: where the run stands.
        void_rounds: rounds that closed with nothing to apply.
        short_rounds: rounds that closed with fewer usable pushes than there are workers.
        predicted_rounds: rounds that were to be validated and closed without waiting longer for a validator.
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
    has_left_early: bool = False
    pushes: dict[int, int] = field(default_factory=dict)
    duplicates: dict[int, int] = field(default_factory=dict)
    stale: dict[int, int] = field(default_factory=dict)
    rejected: dict[int, int] = field(default_factory=dict)
    _round: OpenRound = field(init=False)
    _void_in_a_row: int = 0
    _pending: dict[SessionId, _Pending] = field(default_factory=dict)
    _asked: SessionId | None = None
    _initialised: set[int] = field(default_factory=set)
    _phase_began: float = 0.0
    _evaluators_seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.registry = Registry(self.policy.workers, self.policy.validator_slots)
        self._round = self._new_round()
        self._phase_began = self.now

    # ---- events: who is there --------------------------------------------------------------------------

    def joined(
        self, session: SessionId, who: Identity, granted: Granted, threads: int, now: float
    ) -> list[Instruction]:
        """A connection has been welcomed under an identity that `registry.claim` granted."""
        before = self.registry.member(who.role, granted.rank)
        returns = before is not None and before.session is None
        member = self.registry.bind(session, who, granted, threads, now)
        if self.phase is Phase.ENDED:
            return []
        if member is None:
            self._evaluators_seen.add(who.incarnation)
            return [Announce(f"evaluator {granted.name} has joined")]
        told: list[Instruction] = [
            Announce(f"{member.label} on {who.host} has {'returned' if returns else 'joined'}")
        ]
        if self.phase is Phase.GATHERING and not self.registry.missing() and not self._validators_missing():
            told += self._start(now)
        return told

    def left(self, session: SessionId, reason: str, now: float, on_purpose: bool = False) -> list[Instruction]:
        """A connection has ended: `on_purpose` by a bye, otherwise it is lost."""
        self._pending.pop(session, None)
        was_evaluator = session in self.registry.evaluators
        member = self.registry.release(session, reason, now, finished=on_purpose)
        if self.phase is Phase.ENDED:
            return []
        told: list[Instruction] = []
        if member is not None:
            told += self._member_left(member, reason, on_purpose, now)
        elif was_evaluator and not on_purpose:
            told.append(Announce(f"an evaluator is lost: {reason}", warning=True))
        if session == self._asked and self.phase is Phase.INITIALISING:
            told += self._ask_next()
        if self.phase is Phase.DRAINING:
            told += self._drained(now)
        return told

    def _member_left(self, member: Member, reason: str, on_purpose: bool, now: float) -> Iterator[Instruction]:
        if self.phase is Phase.DRAINING:
            return
        if self.phase is Phase.GATHERING:
            member.finished = False
            how = "has left" if on_purpose else f"is lost ({reason})"
            yield Announce(f"{member.label} {how} before the start; waiting for it", warning=True)
            return
        is_validator = member.role is Role.VALIDATOR
        if not on_purpose:
            patience_s = self.policy.round_timeout_s if is_validator else self.policy.rejoin_timeout_s
            what = (
                "the next round to validate waits for it, but not longer than"
                if is_validator
                else "it may return within"
            )
            yield Announce(f"{member.label} is lost: {reason}; {what} {patience_s:g} s", warning=True)
            return
        self.has_left_early = True
        if self._round.weighed is None:
            self._round.answers.pop(member.rank, None)
        how = "rounds are judged" if is_validator else "rounds close"
        yield Announce(f"{member.label} has left; {how} without it from now on", warning=True)
        if not self.registry.active():
            yield from self._finish(
                Status.NO_PROGRESS, f"all workers have left at step {self.step} of {self.policy.steps}"
            )
        else:
            yield from self._weigh_if_complete(now)
            yield from self._close_if_complete(now)

    # ---- events: the start -----------------------------------------------------------------------------

    def _start(self, now: float) -> list[Instruction]:
        judges = len(self.registry.live_validators())
        also = f", and {judges} to validate" if judges else ""
        told: list[Instruction] = [Announce(f"all workers are there: {self.policy.workers}{also}")]
        if self.has_values:
            return told + self._run(now)
        self._enter(Phase.INITIALISING, now)
        return told + self._ask_next()

    def _ask_next(self) -> list[Instruction]:
        workers = [m for rank, m in sorted(self.registry.members.items()) if rank not in self._initialised]
        candidates = [*self.registry.live_validators(), *workers]
        self._asked = next((m.session for m in candidates if m.session is not None), None)
        return [] if self._asked is None else [AskInitial(self._asked)]

    def may_initialise(self, session: SessionId) -> bool:
        """Say whether this connection's initial values are wanted now."""
        return self.phase is Phase.INITIALISING and session == self._asked

    def initialised(self, session: SessionId, problem: str, now: float) -> list[Instruction]:
        """The values that a connection was asked for are in the store, or have a `problem`."""
        member = self.registry.of(session)
        label = member.label if member else "a worker"
        if problem:
            return list(self._finish(Status.DIVERGED, f"the initial values of {label} cannot be used: {problem}"))
        told: list[Instruction] = [Announce(f"initial values came from {label}")]
        if self.policy.weighting is not None and member is not None:
            self._initialised.add(member.rank)
            if len(self._initialised) < self.policy.workers:
                return told + self._ask_next()
        self.has_values = True
        return told + self._run(now)

    def _run(self, now: float) -> list[Instruction]:
        self._enter(Phase.RUNNING, now)
        return list(self._answer())

    # ---- events: pulls and pushes ----------------------------------------------------------------------

    def pulled(self, session: SessionId, min_step: int, now: float) -> list[Instruction]:
        """A connection asks for values of a step of at least `min_step`."""
        self._pending[session] = _Pending(min_step=min_step)
        told: list[Instruction] = []
        if self.phase is Phase.INITIALISING and self.registry.of(session) is not None and self._asked is None:
            told += self._ask_next()
        return [*told, *self._answer()]

    def _answer(self) -> Iterator[Instruction]:
        """Answer all whose values are there.

        A rank that is in the open round gets its values when that closes, a validator when a round is validated.
        """
        if self.phase not in (Phase.RUNNING, Phase.DRAINING):
            return
        for session, pending in list(self._pending.items()):
            member = self.registry.of(session)
            in_round = member is not None and self._in_round(member)
            asked = member is None or member.role is Role.WORKER or self._round.validated
            due = (asked and self.step >= pending.min_step) or self.phase is Phase.DRAINING
            if due and not in_round:
                del self._pending[session]
                yield Reply(session, pending.seq, pending.applied, pending.reason)

    def push_begins(self, session: SessionId, push: Push) -> Take | Drop:
        """The header of a push is here; decide where its payload goes. Only a `Take` may count."""
        member = self.registry.of(session)
        if member is None:
            return Drop(())
        untimely = self._untimely(member, push)
        if untimely is not None:
            return untimely
        if member.role is Role.VALIDATOR and not self._round.validated:
            return self._drop(member, push, self.stale, f"round {self.step} is not one to validate")
        if self._in_round(member):
            reason = f"an earlier push of {member.label} is in round {self.step} already"
            return self._drop(member, push, self.duplicates, reason)
        if self._weighs_examples and member.rank not in (self._round.weighed or ()):
            return self._drop(member, push, self.stale, "its logits must be weighed before its gradient")
        return Take(member.rank)

    @property
    def _weighs_examples(self) -> bool:
        return self.policy.weighting is Weighting.SAMPLE

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
        known = self._round.references if member.role is Role.VALIDATOR else self._round.pushes
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
        self._pending[member.session] = _Pending(push.seq, min_step, applied, why)
        return Drop(tuple(self._answer()))

    def push_arrived(
        self,
        session: SessionId,
        push: Push,
        gradient_norm: float,
        bad_variable: str | None,
        now: float,
        problem: str = "",
    ) -> list[Instruction]:
        """The payload of a push that was to be taken is complete.

        Args:
            session: who sent it.
            push: its header.
            gradient_norm: of its trainable part, float64.
            bad_variable: the first variable with a NaN or infinity, or None.
            now: monotonic seconds.
            problem: why what it carries beside the gradient cannot be used, or empty.
        """
        member = self.registry.of(session)
        if member is None:
            return []  # its connection was replaced while the payload came in: the newcomer speaks for the rank
        if self.phase is not Phase.RUNNING or push.step != self.step or self._in_round(member):
            if member.role is Role.VALIDATOR:  # its round has closed without it
                reason = f"the push is of step {push.step}, the round is {self.step}"
                return list(self._drop(member, push, self.stale, reason).then)
            return []
        refused = problem
        if bad_variable is not None:
            refused = f"the gradient of {bad_variable!r} is not finite"
        elif push.loss is not None and not math.isfinite(push.loss):
            refused = f"the loss is {push.loss}"
        elif push.examples == 0:
            refused = "its batch has no examples"
        elif self._weighs_examples and push.labels != self._round.answers[member.rank].labels:
            refused = "its labels are not those of its logits"
        told: list[Instruction] = []
        if refused:
            self.rejected[member.rank] = self.rejected.get(member.rank, 0) + 1
            told.append(Announce(f"{member.label}: push of step {push.step} refused: {refused}", warning=True))
        self.pushes[member.rank] = self.pushes.get(member.rank, 0) + 1
        member.last_seq, member.last_applied, member.last_reason = push.seq, not refused, refused
        contribution = Contribution(
            member.rank,
            session,
            push.seq,
            push.loss,
            push.accuracy,
            push.examples,
            gradient_norm,
            refused,
            push.labels,
        )
        self._round.take(contribution, member.role is Role.VALIDATOR, now)
        member.excused = False
        self._pending[session] = _Pending(push.seq, applied=not refused, reason=refused)
        return [*told, *self._close_if_complete(now)]

    # ---- events: logits, where each example is weighed ---------------------------------------------------

    def logits_begin(self, session: SessionId, logits: Logits) -> Take | Drop:
        """The header of a member's logits is here; decide where they go."""
        member = self.registry.of(session)
        if member is None:
            return Drop(())
        untimely = self._untimely(member, logits)
        if untimely is not None:
            return untimely
        weighed = self._round.weighed
        if self._in_round(member) or (weighed is not None and member.rank not in weighed):
            reason = f"{member.label} takes no part in round {self.step}, which is under way"
            return self._drop(member, logits, self.stale, reason, min_step=self.step + 1)
        if weighed is not None:  # as they were computed before: a member that started again computes the same
            return Drop((SendWeights(session, member.rank, logits.seq),))
        return Take(member.rank)

    def logits_arrived(self, session: SessionId, logits: Logits, problem: str, now: float) -> list[Instruction]:
        """A member's logits are complete; `problem` says why they cannot be used, or is empty."""
        member = self.registry.of(session)
        if member is None or self.phase is not Phase.RUNNING or logits.step != self.step or self._in_round(member):
            return []  # its connection was replaced while the payload came in: the newcomer speaks for the rank
        if self._round.weighed is not None:
            return [SendWeights(session, member.rank, logits.seq)]
        if self._round.began is None:
            self._round.began = now
        answer = Answer(session, logits.seq, logits.labels)
        told = list(self._refuse_answer(member, answer, problem, now)) if problem else []
        if not problem:
            self._round.answers[member.rank] = answer
        return [*told, *self._weigh_if_complete(now)]

    def _refuse_answer(self, member: Member, answer: Answer, reason: str, now: float) -> Iterator[Instruction]:
        """Count a member that cannot be weighed as present in this round, with weight 0."""
        self._round.answers.pop(member.rank, None)
        refused = Contribution(
            member.rank, answer.session, answer.seq, None, None, 0, math.inf, reason, answer.labels
        )
        self._round.take(refused, False, now)
        yield self._refuse(member, refused)

    def _refuse(self, member: Member, refused: Contribution) -> Announce:
        self.rejected[member.rank] = self.rejected.get(member.rank, 0) + 1
        if refused.seq >= member.last_seq:
            member.last_seq, member.last_applied, member.last_reason = refused.seq, False, refused.refused
        waits = None if member.session is None else self._pending.get(member.session)
        if member.session == refused.session or (waits is not None and waits.seq == refused.seq):
            assert member.session is not None
            self._pending[member.session] = _Pending(refused.seq, reason=refused.refused)
        return Announce(f"{member.label}: push of step {self.step} refused: {refused.refused}", warning=True)

    def _weigh_if_complete(self, now: float) -> Iterator[Instruction]:
        """Weigh the answers once those of all ranks are here that have not left on purpose."""
        known = self._round
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

    # ---- rounds ----------------------------------------------------------------------------------------

    def _close_if_complete(self, now: float) -> Iterator[Instruction]:
        awaited = frozenset(m.rank for m in self._awaited_validators())
        active = frozenset(self.registry.active())
        if self._round.weighed is not None:  # who came later takes no part
            active &= self._round.weighed
        deserted = self._round.weighed is not None and not active
        if not deserted and not may_close(frozenset(self._round.pushes), active, awaited):
            return
        yield from self._refuse_other_labels()
        contributions = self._round.contributions()
        usable = sum(not c.refused for c in contributions)
        if usable:
            self._void_in_a_row = 0
            yield CloseRound(self.step, contributions, self._round.usable_references())
        else:
            self._void_in_a_row += 1
            self.void_rounds += 1
            yield Announce(f"round {self.step} is void: no push can be used", warning=True)
            yield SkipRound(self.step, contributions)
        self.short_rounds += 0 < usable < self.policy.workers
        self.step += 1
        self._round = self._new_round()
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
        pushes = self._round.pushes
        digests = {rank: push.labels for rank, push in pushes.items() if not push.refused}
        for rank, reason in other_labels(digests).items():
            pushes[rank] = replace(pushes[rank], refused=reason)
            yield self._refuse(self.registry.members[rank], pushes[rank])

    def _new_round(self) -> OpenRound:
        return OpenRound(self.step, self.step in self.policy.validated)

    def _awaited_validators(self) -> list[Member]:
        """Return the validators whose gradient the open round still waits for."""
        if not self._round.validated:
            return []
        return [
            m
            for m in self.registry.validators.values()
            if not (m.finished or m.excused or m.rank in self._round.references)
        ]

    def _validators_missing(self) -> bool:
        return len(self.registry.live_validators()) < self.policy.validators

    # ---- time, and the end -----------------------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: end every wait that has lasted too long."""
        match self.phase:
            case Phase.GATHERING if now - self._phase_began >= self.policy.start_timeout_s:
                reason = (
                    f"{self._missing_text()} did not come within {self.policy.start_timeout_s:g} s; "
                    "start what is missing, or allow more with --start-timeout"
                )
                return list(self._finish(Status.NO_PROGRESS, reason))
            case Phase.INITIALISING if now - self._phase_began >= self.policy.round_timeout_s:
                reason = f"{self._asked_label()} sent no initial values within {self.policy.round_timeout_s:g} s"
                return list(self._finish(Status.NO_PROGRESS, reason))
            case Phase.INITIALISING | Phase.RUNNING:
                return list(self._check_lost(now)) or list(self._check_late(now))
            case Phase.DRAINING:
                return list(self._drained(now))
        return []

    def _check_lost(self, now: float) -> Iterator[Instruction]:
        for member in self.registry.members.values():
            if member.finished or member.lost_at is None or now - member.lost_at < self.policy.rejoin_timeout_s:
                continue
            reason = (
                f"{member.label} was lost at step {self.step} ({member.lost_reason}) and has not returned "
                f"within {self.policy.rejoin_timeout_s:g} s"
            )
            yield from self._finish(Status.LOST, reason)
            return

    def _check_late(self, now: float) -> Iterator[Instruction]:
        """End the run when a rank that is connected holds the round; one that is lost has a deadline of its own.

        A round that only validators hold closes without them.
        """
        began = self._round.began
        if began is None:
            return
        end = now - self.policy.round_timeout_s
        absent = [self.registry.members[rank] for rank in self._absent()]
        late = [m.rank for m in absent if m.session is not None and max(began, m.joined_at) <= end]
        if late:
            reason = (
                f"round {self.step} waited {self.policy.round_timeout_s:g} s for {name_ranks(late)}, alive but late"
            )
            yield from self._finish(Status.NO_PROGRESS, reason)
        elif not absent and began <= end:
            for validator in self._awaited_validators():
                validator.excused = True
                yield Announce(
                    f"round {self.step} waited {self.policy.round_timeout_s:g} s for {validator.label} and closes "
                    "without it, as do the next ones until it is back",
                    warning=True,
                )
            self.predicted_rounds += 1
            yield from self._close_if_complete(now)

    def _absent(self) -> list[int]:
        there = set(self._round.pushes)
        if self._weighs_examples and self._round.weighed is None:
            there |= set(self._round.answers)
        active = self.registry.active()
        if self._round.weighed is not None:
            active = [rank for rank in active if rank in self._round.weighed]
        return [rank for rank in active if rank not in there]

    def waiting_for(self, now: float) -> str:
        """Say in words for whom the run waits and since when; empty if for nobody."""
        waited = now - self._phase_began
        match self.phase:
            case Phase.GATHERING:
                return f"the start waits for {self._missing_text()} since {waited:.0f} s"
            case Phase.INITIALISING:
                return f"the start waits for the initial values of {self._asked_label()} since {waited:.0f} s"
            case Phase.RUNNING:
                return self._round_waits_for(now)
            case Phase.DRAINING:
                missing = self.registry.active()
                judges = self.registry.live_validators()
                whom = [name_ranks(missing)] if missing else []
                whom += [validator.label for validator in judges]
                whom += ["an evaluator"] if self.registry.evaluators or self._evaluator_missing() else []
                return f"the end waits for the goodbye of {' and of '.join(whom)} since {waited:.0f} s"
        return ""

    def _round_waits_for(self, now: float) -> str:
        absent = self._absent()
        lost_at = {rank: at for rank in absent if (at := self.registry.members[rank].lost_at) is not None}
        began = self._round.began
        if began is None and not lost_at:
            return ""
        if began is not None and not absent:
            labels = [validator.label for validator in self._awaited_validators()]
            return f"round {self.step} waits for {' and '.join(labels)} since {now - began:.0f} s"
        since = now - (began if began is not None else min(lost_at.values()))
        whom = absent if began is not None else sorted(lost_at)
        text = f"round {self.step} waits for {name_ranks(whom)} since {since:.0f} s"
        if lost_at:
            left = min(lost_at.values()) + self.policy.rejoin_timeout_s - now
            text += f" ({name_ranks(sorted(lost_at))} lost, may return within {max(0.0, left):.0f} s)"
        return text

    def _drained(self, now: float) -> Iterator[Instruction]:
        missing, judges = self.registry.active(), self.registry.live_validators()
        over = now - self._phase_began >= self.policy.drain_timeout_s
        if (missing or judges or self.registry.evaluators or self._evaluator_missing()) and not over:
            return
        if missing:
            yield Announce(f"{name_ranks(missing)} did not take leave after the last step", warning=True)
        for validator in judges:
            yield Announce(f"{validator.label} did not take leave after the last step", warning=True)
        if self.registry.evaluators:
            yield Announce("an evaluator did not take leave after the last step", warning=True)
        if self._evaluator_missing():
            yield Announce("an evaluator did not come in time to measure the final values", warning=True)
        yield from self._finish(Status.DONE, "")

    def _evaluator_missing(self) -> bool:
        return len(self._evaluators_seen) < self.policy.evaluators

    def _missing_text(self) -> str:
        missing = self.registry.missing()
        short = self.policy.validators - len(self.registry.live_validators())
        judges = ["a validator" if short == 1 else f"{short} validators"] if short > 0 else []
        return " and ".join([*([name_ranks(missing)] if missing else []), *judges])

    def _asked_label(self) -> str:
        member = None if self._asked is None else self.registry.of(self._asked)
        return member.label if member is not None else "a worker"

    def stop(self, status: Status, reason: str) -> list[Instruction]:
        """End the run now, from outside: a signal, or a fault of the server itself."""
        return list(self._finish(status, reason))

    def _finish(self, status: Status, reason: str) -> Iterator[Instruction]:
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            yield Finish(status, reason)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._phase_began = phase, now
