"""The course of a run as a pure object: event in, instructions out, time as an argument.

Nothing here blocks, sends, reads a clock or touches a tensor. `ps.server` feeds it events and carries out what it
returns, in order; every policy can be tested with made-up events and made-up time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from protocol.messages import Logits, Push, Role, Status
from ps.coordination import attendance, waits
from ps.coordination.course import OF_NOBODY, Pending
from ps.coordination.instructions import (
    Announce,
    AskInitial,
    Begin,
    Contribution,
    Drop,
    Instruction,
    SendWeights,
    Take,
    Useless,
)
from ps.coordination.members import Granted, Identity, Member, SessionId, labelled, name_ranks
from ps.coordination.policy import Phase
from ps.coordination.weighing import Weighing


@dataclass
class Coordinator(Weighing):
    """Decides at each event what is to be done, for whom we wait, and when a wait has lasted too long."""

    # ---- events: who is there ------------------------------------------------------------------------

    def joined(
        self, session: SessionId, who: Identity, granted: Granted, threads: int, now: float
    ) -> list[Instruction]:
        """A connection has been welcomed under an identity that `registry.claim` granted."""
        before = self.registry.member(who.role, granted.rank)
        returns = before is not None and before.session is None
        is_new = before is None or before.incarnation != who.incarnation
        least = attendance.clock_of_newcomers(self)
        were_too_few = attendance.decisive_loss(self) is not None
        software = before.software if before is not None else ""
        member = self.registry.bind(session, who, granted, threads, now)
        if self.phase is Phase.ENDED:
            return []
        if member is None:
            self._evaluators_seen.add(who.incarnation)
            return [Announce(f"{labelled(Role.EVALUATOR, granted.name)} has joined")]
        told: list[Instruction] = [
            Announce(f"{member.label} on {who.host} has {'returned' if returns else 'joined'}")
        ]
        if software and who.software and software != who.software:
            self.has_changed = f"{member.label} computes on {who.software}, and before on {software}"
            told.append(Announce(f"{self.has_changed}: the last bits may differ", warning=True))
        member.clock = max(member.clock, least)
        if (
            were_too_few and attendance.decisive_loss(self) is None
        ):  # that wait is over: who is here may take its time
            self.last_push_at = now
        if is_new and self.policy.shrink and self.phase is Phase.RUNNING and self.open_round.has_begun:
            member.since_step = self.step + 1
        if self.phase is Phase.GATHERING and self._may_start(now):
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
        if session == self.asked and self.phase is Phase.INITIALISING:
            told += self._ask_next()
        if self.phase is Phase.RUNNING and not self.policy.is_sync:  # others may have waited for this one
            told += self._answer()
            self._note_who_is_held(now, anew=True)
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
            if not is_validator:
                member.lost_at = self.open_round.lose(member.rank, now)
            yield Announce(waits.lost(self, member, is_validator, now), warning=True)
            if self.policy.leaves_out:
                yield from self._weigh_if_complete(now)
                yield from self._close_if_complete(now)
            return
        self.has_left_early = member.left_early = True
        if self.open_round.weighed is None:
            self.open_round.answers.pop(member.rank, None)
        how = "rounds are judged" if is_validator else "rounds close" if self.policy.is_sync else "the run goes on"
        yield Announce(f"{member.label} has left; {how} without it from now on", warning=True)
        left = len(attendance.active(self))
        if not is_validator and self.policy.quorum is not None and 0 < left < self.policy.quorum:
            shrinks = f"the quorum of {self.policy.quorum} shrinks to {left} until another worker comes"
            yield Announce(shrinks, warning=True)
        if not attendance.active(self):
            yield from self._finish(
                Status.NO_PROGRESS, f"all workers have left at step {self.step} of {self.policy.steps}"
            )
        else:
            yield from self._weigh_if_complete(now)
            yield from self._close_if_complete(now)

    # ---- events: the start ---------------------------------------------------------------------------

    def _may_start(self, now: float) -> bool:
        if self._validators_missing():
            return False
        there = len(attendance.live(self))
        if not self.registry.missing():
            return there > 0
        if self.policy.elastic:
            return there > 0
        # Whoever was left out before a restart of the server may never come back.
        waited = now - self.phase_began >= self.policy.rejoin_timeout_s
        return self.is_resumed and self.policy.leaves_out and waited and there >= max(1, attendance.needed(self))

    def _start(self, now: float) -> list[Instruction]:
        judges = len(self.registry.live_validators())
        also = f", and {judges} to validate" if judges else ""
        there, everyone = attendance.live(self), not self.registry.missing()
        who = f"all workers are there: {len(there)}" if everyone else f"the run begins with {name_ranks(there)}"
        told: list[Instruction] = [Announce(f"{who}{also}")]
        if self.has_values:
            return told + self._run(now)
        self._enter(Phase.INITIALISING, now)
        return told + self._ask_next()

    def _validators_missing(self) -> bool:
        return len(self.registry.live_validators()) < self.policy.validators

    def _ask_next(self) -> list[Instruction]:
        workers = [m for rank, m in sorted(self.registry.members.items()) if rank not in self._initialised]
        candidates = [*self.registry.live_validators(), *workers]
        self.asked = next((m.session for m in candidates if m.session is not None), None)
        return [] if self.asked is None else [AskInitial(self.asked)]

    def may_initialise(self, session: SessionId) -> bool:
        """Say whether this connection's initial values are wanted now."""
        return self.phase is Phase.INITIALISING and session == self.asked

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
        self.last_push_at = now
        if self.step >= self.policy.steps:  # restored at its end
            self._enter(Phase.DRAINING, now)
            return list(self._answer())
        self._enter(Phase.RUNNING, now)
        if not self.is_resumed:
            self.open_round = self._new_round(now)
        self.open_round.opened = now
        for member in self.registry.members.values():
            if member.session is None and not member.finished and member.lost_at is None:
                member.lost_at = self.open_round.lose(member.rank, now)
        return [Begin(self.step), *self._answer()]

    # ---- events: pulls and pushes --------------------------------------------------------------------

    def pulled(self, session: SessionId, min_step: int, now: float) -> list[Instruction]:
        """A connection asks for values of a step of at least `min_step`."""
        member = self.registry.of(session)
        since = member.since_step if member is not None else 0
        self._pending[session] = Pending(min_step=max(min_step, since))
        told: list[Instruction] = []
        if self.phase is Phase.INITIALISING and self.registry.of(session) is not None and self.asked is None:
            told += self._ask_next()
        return [*told, *self._answer()]

    def push_begins(self, session: SessionId, push: Push) -> Take | Drop:
        """The header of a push is here; decide where its payload goes. Only a `Take` may count."""
        member = self.registry.of(session)
        if member is None:
            return OF_NOBODY
        untimely = self._untimely(member, push)
        if untimely is not None:
            return untimely
        if member.role is Role.VALIDATOR and not self.open_round.validated:
            return Drop(Useless.STALE, f"round {self.step} is not one to validate")
        if self._in_round(member):
            reason = f"an earlier push of {member.label} is in round {self.step} already"
            return Drop(Useless.DUPLICATE, reason)
        if self._weighs_examples and member.rank not in (self.open_round.weighed or ()):
            return Drop(Useless.STALE, "its logits must be weighed before its gradient")
        return Take(member.rank)

    def dropped(self, session: SessionId, message: Push | Logits, verdict: Drop, now: float) -> list[Instruction]:
        """The payload of a push, or of logits, that was to be dropped has been read: count and answer it.

        Args:
            session: who sent it.
            message: its header.
            verdict: what was decided of it when that came.
            now: monotonic seconds.
        """
        member = self.registry.of(session)
        if member is None:
            return []  # an evaluator's, or its connection was replaced: the newcomer speaks for the rank
        if verdict.counted is None:
            if self._has_weights(member, message):
                return [SendWeights(session, member.rank, message.seq)]
            verdict = self._too_late(member, message) or self._not_in_round(member)
        return list(self._forget(member, message, verdict, now))

    def push_arrived(
        self,
        session: SessionId,
        push: Push,
        gradient_norm: float,
        bad_variable: str | None,
        now: float,
        problem: str = "",
        state_norm: float = 0.0,
    ) -> list[Instruction]:
        """The payload of a push that was to be taken is complete.

        Args:
            session: who sent it.
            push: its header.
            gradient_norm: of its trainable part, float64.
            bad_variable: the first variable with a NaN or infinity, or None.
            now: monotonic seconds.
            problem: why what it carries beside the gradient cannot be used, or empty.
            state_norm: of the changes of its floating state, float64.
        """
        member = self.registry.of(session)
        if member is None:
            return []  # its connection was replaced while the payload came in: the newcomer speaks for the rank
        if self._is_worker(member):
            self.last_push_at = now
        too_late = self._too_late(member, push)
        if too_late is not None or self._in_round(member):
            if too_late is not None and (member.role is Role.VALIDATOR or self.policy.leaves_out):
                return list(self._forget(member, push, too_late, now))  # its round has closed without it
            return []
        refused = self._why_unusable(member, push, bad_variable, problem)
        told: list[Instruction] = []
        if refused:
            self.rejected[member.rank] = self.rejected.get(member.rank, 0) + 1
            told.append(Announce(f"{member.label}: push of step {push.step} refused: {refused}", warning=True))
        if self._is_worker(member):
            self._count_push(member.rank)
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
            self.step - push.step,
            state_norm,
        )
        self._pending[session] = Pending(push.seq, applied=not refused, reason=refused)
        if not self.policy.is_sync:
            return [*told, *self._apply_alone(contribution, member, now)]
        self.open_round.take(contribution, member.role is Role.VALIDATOR, now)
        member.excused = member.on_probation = False
        member.late_rounds = 0
        return [*told, *self._close_if_complete(now)]

    def _why_unusable(self, member: Member, push: Push, bad_variable: str | None, problem: str) -> str:
        """Say why a push that is complete counts with weight 0; empty if it can be used."""
        if bad_variable is not None:
            return f"the gradient of {bad_variable!r} is not finite"
        if push.loss is not None and not math.isfinite(push.loss):
            return f"the loss is {push.loss}"
        if push.examples == 0:
            return "its batch has no examples"
        if self._weighs_examples and push.labels != self.open_round.answers[member.rank].labels:
            return "its labels are not those of its logits"
        return problem

    # ---- events: time, and the end from outside ------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: end every wait that has lasted too long."""
        match self.phase:
            case Phase.GATHERING if self.is_resumed and self.step >= self.policy.steps:
                self.began_at_end = True
                self._enter(Phase.DRAINING, now)
                return list(self._answer())
            case Phase.GATHERING if self._may_start(now):
                return self._start(now)
            case Phase.GATHERING if now - self.phase_began >= self.policy.start_timeout_s:
                return list(self._finish(Status.NO_PROGRESS, waits.not_come(self)))
            case Phase.INITIALISING if now - self.phase_began >= self.policy.round_timeout_s:
                reason = f"{waits.asked(self)} sent no initial values within {self.policy.round_timeout_s:g} s"
                return list(self._finish(Status.NO_PROGRESS, reason))
            case Phase.INITIALISING | Phase.RUNNING:
                late = self._check_late if self.policy.is_sync else self._check_held
                return list(self._check_lost(now)) or list(late(now)) or list(self._check_idle(now))
            case Phase.DRAINING:
                return list(self._drained(now))
        return []

    def _check_lost(self, now: float) -> Iterator[Instruction]:
        member = attendance.decisive_loss(self)
        if member is None or member.lost_at is None or now - member.lost_at < self.policy.rejoin_timeout_s:
            return
        yield from self._finish(Status.LOST, waits.not_returned(self, member))

    def _check_idle(self, now: float) -> Iterator[Instruction]:
        """End the run when nobody pushes at all: workers that beat and compute for ever are not seen otherwise.

        While too few are there, what counts is the time in which somebody may return; a validator that alone holds
        a round has the time of the round.
        """
        idle_since = max(self.last_push_at, self.open_round.opened)
        if self.phase is not Phase.RUNNING or now - idle_since < self.policy.idle_timeout_s:
            return
        if attendance.decisive_loss(self) is None and not self.only_validators_hold():
            yield from self._finish(Status.NO_PROGRESS, waits.idle(self))

    def _check_held(self, now: float) -> Iterator[Instruction]:
        """SSP: wait no longer for ranks that are alive but have held others for too long."""
        self._note_who_is_held(now, anew=False)
        if self.held_since is None or now - self.held_since < self.policy.round_timeout_s:
            return
        for rank in attendance.laggards(self):
            self.registry.members[rank].on_probation = True
            yield Announce(waits.put_on_probation(self, rank), warning=True)
        yield from self._answer()
        self._note_who_is_held(now, anew=True)

    def _check_late(self, now: float) -> Iterator[Instruction]:
        """Act on a rank that is connected and holds the round; one that is lost has a deadline of its own.

        The run ends, or the round closes without it. A round that only validators hold closes without them.
        """
        began = self.open_round.began
        if began is None:
            return
        end = now - self.policy.round_timeout_s
        judges = self.only_validators_hold()
        if judges:
            if began <= end:
                yield from self._close_by_prediction(judges, now)
            return
        absent = [self.registry.members[rank] for rank in self.absent()]
        late = [m for m in absent if m.session is not None and max(began, m.joined_at) <= end]
        if late and self.policy.shrink and (self.open_round.pushes or self.open_round.answers):
            yield from self._leave_behind(late, now)
        elif late:
            names = name_ranks([m.rank for m in late])
            reason = f"round {self.step} waited {self.policy.round_timeout_s:g} s for {names}, alive but late"
            yield from self._finish(Status.NO_PROGRESS, reason)

    def _close_by_prediction(self, judges: list[Member], now: float) -> Iterator[Instruction]:
        for validator in judges:
            validator.excused = True
            yield Announce(
                f"round {self.step} waited {self.policy.round_timeout_s:g} s for {validator.label} and closes "
                "without it, as do the next ones until it is back",
                warning=True,
            )
        self.predicted_rounds += 1
        yield from self._close_if_complete(now)

    def _leave_behind(self, late: list[Member], now: float) -> Iterator[Instruction]:
        for member in late:
            self.open_round.left_behind.add(member.rank)
            member.late_rounds += 1
            yield Announce(waits.left_behind(self, member), warning=True)
            if member.late_rounds >= attendance.MAX_LATE_ROUNDS and not member.on_probation:
                member.on_probation = True
                yield Announce(waits.put_on_probation(self, member.rank), warning=True)
        yield from self._weigh_if_complete(now)
        yield from self._close_if_complete(now)

    def waiting_for(self, now: float, names_validators: bool = False) -> str:
        """Say in words for whom the run waits and since when; empty if for nobody.

        Args:
            now: monotonic seconds.
            names_validators: what is said is for the server's own log, and stays there.
        """
        return waits.waiting_for(self, now, names_validators)

    def stop(self, status: Status, reason: str) -> list[Instruction]:
        """End the run now, from outside: a signal, or a fault of the server itself.

        A signal after the last step ends only the wait for goodbyes: the run is done.
        """
        if self.phase is Phase.DRAINING and status is Status.INTERRUPTED:
            return list(self._done())
        return list(self._finish(status, reason))
