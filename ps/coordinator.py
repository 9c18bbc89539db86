"""The course of a run as a pure object: event in, instructions out, time as an argument.

Nothing here blocks, sends, reads a clock or touches a tensor. `ps.server` feeds it events and carries out what it
returns, in order; every policy can be tested with made-up events and made-up time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.messages import Push, Status
from ps.members import Granted, Identity, Member, Registry, SessionId, name_ranks

MAX_VOID_ROUNDS = 10
"""So many rounds in a row with nothing to apply end the run as diverged."""


@dataclass(frozen=True)
class RunPolicy:
    """What a run is, and how long each wait may last (seconds)."""

    workers: int
    steps: int
    start_timeout_s: float
    round_timeout_s: float
    rejoin_timeout_s: float
    drain_timeout_s: float


class Phase(StrEnum):
    """Where a run stands."""

    GATHERING = "gathering"
    INITIALISING = "initialising"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True)
class Contribution:
    """One rank's push in a round; `refused` says why it counts with weight 0, or is empty."""

    rank: int
    session: SessionId
    seq: int
    loss: float | None
    accuracy: float | None
    examples: int
    gradient_norm: float
    refused: str = ""


# ---- instructions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskInitial:
    """Ask this connection for the initial values."""

    session: SessionId


@dataclass(frozen=True)
class CloseRound:
    """Turn the contributions (rank order, refused ones included) into one and make values(step + 1)."""

    step: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class SkipRound:
    """The round is void: values stay, step + 1."""

    step: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Reply:
    """Send the current values; `seq` names the push that this answers, 0 a pull."""

    session: SessionId
    seq: int
    applied: bool
    reason: str = ""


@dataclass(frozen=True)
class Announce:
    """Tell the operator."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Finish:
    """The run has ended; tell every connection that still is there, write what is to be written, exit."""

    status: Status
    reason: str


Instruction = AskInitial | CloseRound | SkipRound | Reply | Announce | Finish


@dataclass(frozen=True)
class Take:
    """Receive the push's payload into the slot of this rank."""

    rank: int


@dataclass(frozen=True)
class Drop:
    """Read the payload and forget it, then do `then`."""

    then: tuple[Instruction, ...]


@dataclass
class _Pending:
    """A connection that waits for values."""

    seq: int
    min_step: int


def may_close(present: frozenset[int], active: frozenset[int]) -> bool:
    """Say whether a round may close: every rank that has not left on purpose is present (refused ones are)."""
    return bool(present) and active <= present


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
        has_left_early: whether a worker said bye before the last step.
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
    has_left_early: bool = False
    pushes: dict[int, int] = field(default_factory=dict)
    duplicates: dict[int, int] = field(default_factory=dict)
    stale: dict[int, int] = field(default_factory=dict)
    rejected: dict[int, int] = field(default_factory=dict)
    _round: dict[int, Contribution] = field(default_factory=dict)
    _round_began: float | None = None
    _void_in_a_row: int = 0
    _pending: dict[SessionId, _Pending] = field(default_factory=dict)
    _asked: SessionId | None = None
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self.registry = Registry(self.policy.workers)
        self._phase_began = self.now

    # ---- events: who is there --------------------------------------------------------------------------

    def joined(
        self, session: SessionId, who: Identity, granted: Granted, threads: int, now: float
    ) -> list[Instruction]:
        """A connection has been welcomed under an identity that `registry.claim` granted."""
        before = self.registry.members.get(granted.rank)
        returns = before is not None and before.session is None
        member = self.registry.bind(session, who, granted, threads)
        if member is None:
            return [Announce(f"evaluator {granted.name} has joined")]
        told: list[Instruction] = [
            Announce(f"{member.label} on {who.host} has {'returned' if returns else 'joined'}")
        ]
        if self.phase is Phase.GATHERING and not self.registry.missing():
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
        if not on_purpose:
            yield Announce(
                f"{member.label} is lost: {reason}; it may return within {self.policy.rejoin_timeout_s:g} s",
                warning=True,
            )
            return
        self.has_left_early = True
        yield Announce(f"{member.label} has left; rounds close without it from now on", warning=True)
        if not self.registry.active():
            yield from self._finish(
                Status.NO_PROGRESS, f"all workers have left at step {self.step} of {self.policy.steps}"
            )
        else:
            yield from self._close_if_complete(now)

    # ---- events: the start -----------------------------------------------------------------------------

    def _start(self, now: float) -> list[Instruction]:
        told: list[Instruction] = [Announce(f"all {self.policy.workers} workers are there")]
        if self.has_values:
            return told + self._run(now)
        self._enter(Phase.INITIALISING, now)
        return told + self._ask_next()

    def _ask_next(self) -> list[Instruction]:
        self._asked = next(
            (m.session for _, m in sorted(self.registry.members.items()) if m.session is not None), None
        )
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
        self.has_values = True
        return [Announce(f"initial values came from {label}"), *self._run(now)]

    def _run(self, now: float) -> list[Instruction]:
        self._enter(Phase.RUNNING, now)
        return list(self._answer_pulls())

    # ---- events: pulls and pushes ----------------------------------------------------------------------

    def pulled(self, session: SessionId, min_step: int, now: float) -> list[Instruction]:
        """A connection asks for values of a step of at least `min_step`.

        A rank that is already in the open round gets its values when that round has closed.
        """
        self._pending[session] = _Pending(0, min_step)
        told: list[Instruction] = []
        if self.phase is Phase.INITIALISING and self.registry.of(session) is not None and self._asked is None:
            told += self._ask_next()
        return [*told, *self._answer_pulls()]

    def _answer_pulls(self) -> Iterator[Instruction]:
        if self.phase not in (Phase.RUNNING, Phase.DRAINING):
            return
        for session, pending in list(self._pending.items()):
            member = self.registry.of(session)
            in_round = member is not None and member.rank in self._round
            due = self.step >= pending.min_step or self.phase is Phase.DRAINING
            if pending.seq == 0 and due and not in_round:
                del self._pending[session]
                yield Reply(session, 0, applied=False)

    def push_begins(self, session: SessionId, push: Push) -> Take | Drop:
        """The header of a push is here; decide where its payload goes. Only a `Take` may count."""
        member = self.registry.of(session)
        if member is None:
            return Drop(())
        rank = member.rank
        if push.epoch != self.epoch:
            return self._drop_stale(member, push, "the push was computed before the server started anew")
        if push.seq <= member.last_seq:
            self.duplicates[rank] = self.duplicates.get(rank, 0) + 1
            mine = self._round.get(rank)
            if mine is not None and mine.seq == push.seq:
                self._pending[session] = _Pending(push.seq, 0)
                return Drop(())
            return Drop((Reply(session, push.seq, member.last_applied, member.last_reason),))
        if self.phase is not Phase.RUNNING or push.step != self.step:
            return self._drop_stale(member, push, f"the push is of step {push.step}, the round is {self.step}")
        if rank in self._round:
            member.last_seq, member.last_applied = push.seq, False
            member.last_reason = f"an earlier push of rank {rank} is in round {self.step} already"
            self.duplicates[rank] = self.duplicates.get(rank, 0) + 1
            self._pending[session] = _Pending(push.seq, 0)
            return Drop(())
        return Take(rank)

    def _drop_stale(self, member: Member, push: Push, reason: str) -> Drop:
        assert member.session is not None
        self.stale[member.rank] = self.stale.get(member.rank, 0) + 1
        member.last_seq, member.last_applied, member.last_reason = push.seq, False, reason
        return Drop((Reply(member.session, push.seq, False, reason),))

    def push_arrived(
        self, session: SessionId, push: Push, gradient_norm: float, bad_variable: str | None, now: float
    ) -> list[Instruction]:
        """The payload of a push that was to be taken is complete.

        Args:
            session: who sent it.
            push: its header.
            gradient_norm: of its trainable part, float64.
            bad_variable: the first variable with a NaN or infinity, or None.
            now: monotonic seconds.
        """
        member = self.registry.of(session)
        if (
            member is None
            or self.phase is not Phase.RUNNING
            or push.step != self.step
            or member.rank in self._round
        ):
            return []  # its connection was replaced while the payload came in: the newcomer speaks for the rank
        refused = ""
        if bad_variable is not None:
            refused = f"the gradient of {bad_variable!r} is not finite"
        elif push.loss is not None and not math.isfinite(push.loss):
            refused = f"the loss is {push.loss}"
        told: list[Instruction] = []
        if refused:
            self.rejected[member.rank] = self.rejected.get(member.rank, 0) + 1
            told.append(Announce(f"{member.label}: push of step {push.step} refused: {refused}", warning=True))
        self.pushes[member.rank] = self.pushes.get(member.rank, 0) + 1
        member.last_seq, member.last_applied, member.last_reason = push.seq, not refused, refused
        if not self._round:
            self._round_began = now
        self._round[member.rank] = Contribution(
            member.rank, session, push.seq, push.loss, push.accuracy, push.examples, gradient_norm, refused
        )
        self._pending[session] = _Pending(push.seq, 0)
        return [*told, *self._close_if_complete(now)]

    # ---- rounds ----------------------------------------------------------------------------------------

    def _close_if_complete(self, now: float) -> Iterator[Instruction]:
        if not may_close(frozenset(self._round), frozenset(self.registry.active())):
            return
        contributions = tuple(self._round[rank] for rank in sorted(self._round))
        usable = sum(not c.refused for c in contributions)
        if usable:
            self._void_in_a_row = 0
            yield CloseRound(self.step, contributions)
        else:
            self._void_in_a_row += 1
            self.void_rounds += 1
            yield Announce(f"round {self.step} is void: no push can be used", warning=True)
            yield SkipRound(self.step, contributions)
        self.short_rounds += 0 < usable < self.policy.workers
        self.step += 1
        answered, self._round, self._round_began = self._round, {}, None
        if self._void_in_a_row >= MAX_VOID_ROUNDS:
            why = "; ".join(f"rank {c.rank}: {c.refused}" for c in contributions)
            yield from self._finish(
                Status.DIVERGED, f"{MAX_VOID_ROUNDS} rounds in a row had nothing to apply ({why})"
            )
            return
        if self.step >= self.policy.steps:
            self._enter(Phase.DRAINING, now)
        for rank in sorted(answered):
            yield from self._answer_push(rank)
        yield from self._answer_pulls()
        if self.phase is Phase.DRAINING:
            yield from self._drained(now)

    def _answer_push(self, rank: int) -> Iterator[Instruction]:
        member = self.registry.members[rank]
        if member.session is None:
            return
        pending = self._pending.get(member.session)
        if pending is not None and pending.seq:
            del self._pending[member.session]
            yield Reply(member.session, pending.seq, member.last_applied, member.last_reason)

    # ---- time, and the end -----------------------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: end every wait that has lasted too long."""
        match self.phase:
            case Phase.GATHERING if now - self._phase_began >= self.policy.start_timeout_s:
                missing = name_ranks(self.registry.missing())
                reason = f"{missing} did not come within {self.policy.start_timeout_s:g} s"
                return list(self._finish(Status.NO_PROGRESS, reason))
            case Phase.INITIALISING if now - self._phase_began >= self.policy.round_timeout_s:
                reason = f"no initial values came within {self.policy.round_timeout_s:g} s"
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
        if self._round_began is not None and now - self._round_began >= self.policy.round_timeout_s:
            late = name_ranks(self._absent())
            reason = f"round {self.step} waited {self.policy.round_timeout_s:g} s for {late}, alive but late"
            yield from self._finish(Status.NO_PROGRESS, reason)

    def _absent(self) -> list[int]:
        return [rank for rank in self.registry.active() if rank not in self._round]

    def waiting_for(self, now: float) -> str:
        """Say in words for whom the run waits and since when; empty if for nobody."""
        waited = now - self._phase_began
        match self.phase:
            case Phase.GATHERING:
                return f"the start waits for {name_ranks(self.registry.missing())} since {waited:.0f} s"
            case Phase.INITIALISING:
                return f"the start waits for initial values since {waited:.0f} s"
            case Phase.RUNNING:
                return self._round_waits_for(now)
            case Phase.DRAINING:
                here = [f"rank {m.rank}" for m in self.registry.members.values() if m.session is not None]
                here += ["the evaluator"] * bool(self.registry.evaluators)
                return f"the end waits for the goodbye of {', '.join(here)}" if here else ""
        return ""

    def _round_waits_for(self, now: float) -> str:
        absent = self._absent()
        lost = [m for r in absent if (m := self.registry.members.get(r)) is not None and m.lost_at is not None]
        began = self._round_began
        if began is None and not lost:
            return ""
        since = now - (began if began is not None else min(m.lost_at or now for m in lost))
        text = f"round {self.step} waits for {name_ranks(absent)} since {since:.0f} s"
        if lost:
            left = min((m.lost_at or now) + self.policy.rejoin_timeout_s - now for m in lost)
            text += f" ({name_ranks(sorted(m.rank for m in lost))} lost, may return within {max(0.0, left):.0f} s)"
        return text

    def _drained(self, now: float) -> Iterator[Instruction]:
        missing = [r for r in range(self.policy.workers) if not self._has_said_bye(r)]
        over = now - self._phase_began >= self.policy.drain_timeout_s
        if (missing or self.registry.evaluators) and not over:
            return
        if missing:
            yield Announce(f"{name_ranks(missing)} did not take leave after the last step", warning=True)
        if self.registry.evaluators:
            yield Announce("an evaluator did not take leave after the last step", warning=True)
        yield from self._finish(Status.DONE, "")

    def _has_said_bye(self, rank: int) -> bool:
        member = self.registry.members.get(rank)
        return member is not None and member.finished

    def stop(self, status: Status, reason: str) -> list[Instruction]:
        """End the run now, from outside: a signal, or a fault of the server itself."""
        return list(self._finish(status, reason))

    def _finish(self, status: Status, reason: str) -> Iterator[Instruction]:
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            yield Finish(status, reason)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._phase_began = phase, now
