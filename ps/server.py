"""The parameter server: sessions bring events, the coordinator decides, and here it is carried out.

All state is behind one lock. Nobody who has it waits for the disk or a compiler, and what tells clients that the
server is alive does without it. `_update` is the one place where the weights are updated.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.addresses import Address
from protocol.errors import NoProgress, WeighmasterError
from protocol.injection import Point
from protocol.injector import NONE, Faults
from protocol.messages import (
    Logits,
    Push,
    Report,
    Status,
    TestLogits,
    Weights,
)
from protocol.tokens import Grant
from protocol.transport import Listener
from ps.admission import Admissions
from ps.agreement import Agreement
from ps.build import make_ensemble, make_rule, make_schedule, policy_of, secret_of
from ps.checkpointing import Checkpointing, Parts, changes_since, restore
from ps.checkpoints.directory import CheckpointDirectory, Snapshot
from ps.closing import MAX_UNAPPLIED, Closed, RoundCloser
from ps.compiling import Compiling
from ps.connections.door import TICK_S, Door
from ps.connections.session import Answered, Session
from ps.coordination import attendance
from ps.coordination.coordinator import Coordinator
from ps.coordination.course_clock import CourseClock
from ps.coordination.instructions import (
    Announce,
    AskInitial,
    Begin,
    CloseRound,
    Drop,
    Finish,
    Instruction,
    Reply,
    SendWeights,
    SkipRound,
    Take,
    WeighAnswers,
)
from ps.coordination.members import Identity
from ps.coordination.policy import Phase
from ps.ending import Ending
from ps.gathering import Gathering
from ps.modes import MembersMode, Mode, SharedMode
from ps.monitoring.console import Console
from ps.monitoring.metrics import TestResult
from ps.monitoring.narration import Narration
from ps.monitoring.status import Pause
from ps.onlookers import Onlookers
from ps.record import Record
from ps.replies import Replies
from ps.settings.config import ServerConfig
from ps.storage.receiver import PushCheck, Receiver
from ps.storage.store import Store
from ps.storage.store_config import NotFinite

logger = logging.getLogger("weighmaster.ps")


class ParameterServer:
    """One run: from listening to the last goodbye.

    Attributes:
        config, epoch, grants, faults: as given.
        admissions: lets clients in.
        compiling: makes the kernels ready that the run needs.
        replies: the values that sessions send.
        ending: what becomes of the run when `run` has returned.
    """

    def __init__(
        self,
        config: ServerConfig,
        console: Console,
        epoch: int,
        grants: Sequence[Grant] = (),
        initial_values: dict[str, NDArray[Any]] | None = None,
        checkpoints: CheckpointDirectory | None = None,
        restored: Snapshot | None = None,
        faults: Faults = NONE,
        gathering: Gathering | None = None,
    ) -> None:
        """Make everything that can be made before a worker comes.

        Args:
            config: what the operator asked for.
            console: for the progress line.
            epoch: random number of this start.
            grants: who may join with which token; empty admits everyone.
            initial_values: to begin with, or None.
            checkpoints: where checkpoints are kept, or None.
            restored: where to go on from, or None.
            faults: what is to break on purpose.
            gathering: whose clients it takes over, or None.

        Raises:
            ConfigurationError: something that was asked for cannot be done.
            CheckpointError: `restored` cannot be used.
        """
        self.config = config
        self.epoch = epoch
        self.grants = tuple(grants)
        self.faults = faults
        self._closer = RoundCloser(
            make_rule(config), make_schedule(config), config.clip_worker_norm, config.staleness_discount
        )
        self._gathering = gathering
        self._lock = threading.RLock() if gathering is None else gathering.lock
        self._began = time.monotonic()
        self._clock = CourseClock(time.monotonic)
        secret = secret_of(config) if restored is None else bytes(restored.state["secret"])
        self._coordinator = Coordinator(
            policy_of(config, secret), epoch, self._began, has_values=initial_values is not None
        )
        self._record = Record(config.run_dir)
        self._narration = Narration(console)
        self._onlookers = Onlookers(config, epoch, self._began, [grant.token for grant in grants])
        ensemble = make_ensemble(config, initial_values)
        self._unsettled: deque[tuple[CloseRound | SkipRound, Closed]] = deque()
        self._agreement = Agreement(config, ensemble, initial_values, self._lock, self._cannot_hold)
        self._members = None if ensemble is None else MembersMode(ensemble)
        self._mode: Mode = self._members or SharedMode(self._agreement, self._closer)
        self.admissions = Admissions(
            config, epoch, self._lock, self._coordinator, self._clock, self._agreement, self._carry_out
        )
        self._door = (
            Door(lambda number, channel: Session(number, channel, self), self.broke)
            if gathering is None
            else gathering.door
        )
        self.compiling = Compiling(config, self._nudge_all, self.broke)
        self._ended = threading.Event()
        self._rule_is_idle = False
        self._finish: Finish | None = None
        self._parts = Parts(self._coordinator, self._closer, self._record, self._agreement, ensemble)
        if restored is not None:
            restore(self._parts, config, restored)
            course = self._coordinator
            course.has_changed = course.has_changed or changes_since(config, restored)
        self._checkpoints = None
        if checkpoints is not None:
            resumed_at = None if restored is None else restored.step
            self._checkpoints = Checkpointing(checkpoints, config, epoch, secret, resumed_at, self._written)
        self.replies = Replies(
            config, epoch, self._lock, self._coordinator, self._agreement, self._mode, self._checkpoints
        )
        self.ending = Ending(self._parts, self._mode, self._checkpoints)
        self._held_back = ""
        self._waiting = self._coordinator.waiting_for(self._began)

    @property
    def _store(self) -> Store | None:
        return self._agreement.store

    def _cannot_hold(self, reason: str) -> None:
        self.stop(Status.FAILED, reason)

    # ---- the course of a run ---------------------------------------------------------------------------

    def listen(self) -> Listener:
        """Open the port.

        Raises:
            ConfigurationError: it is taken, or the address is not of this machine.
        """
        return Listener(Address(self.config.host, self.config.port), self.config.congestion_control)

    def run(self, listener: Listener) -> Finish:
        """Serve until the run has ended; every connection is closed when this returns."""
        page = self._onlookers.open(self._coordinator.step)
        if page is not None:
            logger.info("the status page is at %s", page)
        self.compiling.begin(("float32",))  # while the workers load TensorFlow; who comes too early is told to wait
        if self._gathering is None:
            self._door.open(listener)
        else:
            self._gathering.hand_over(self)
        try:
            while not self._ended.wait(TICK_S):
                self._guarded(self.tick)
        finally:
            self._ended.set()
            self._door.close(listener)
            self._guarded(self.settle)
            self._guarded(self._show)
            self._record.close()
            if self._coordinator.step:  # the last line shows where the run ended, not where it was a moment before
                self._show_progress(time.monotonic())
        assert self._finish is not None
        return self.ending.checked(self._finish)

    def accept_history(self) -> None:
        """Make a resumed run's history the one that counts, now that nothing stands against going on.

        Raises:
            CheckpointError: a checkpoint that is to be set aside cannot be renamed.
        """
        if self._checkpoints is not None:
            self._checkpoints.accept_history()

    def close(self) -> None:
        """Release what outlives `run`."""
        self._onlookers.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._store is not None:
            self._store.close()

    def interrupt(self, signal_name: str) -> None:
        """Ask the run to end at its next tick; safe from a signal handler."""
        self.ending.signal = signal_name

    def _guarded(self, call: Callable[[], None]) -> None:
        """Do what must not leave clients without a word, and the operator without a summary."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a fault of ours must end the run in the ordinary way
            self.broke(error)

    def tick(self) -> None:
        """Let time pass: check deadlines, redraw the progress line."""
        with self._lock:
            now = time.monotonic()
            if self.ending.signal is not None:
                self.stop(Status.INTERRUPTED, f"the server was stopped by {self.ending.signal}")
            self._clock.stand(self.replies.are_held_back)  # nobody is late who could not have got any values
            if self.replies.are_held_back:
                self._held_back = f"step {self._coordinator.step} waits for its checkpoint to be on the disk"
                self._waiting = said = self._held_back
            else:
                self._held_back = ""
                self._carry_out(self._coordinator.tick(self._clock.now()))
                self._waiting = self._coordinator.waiting_for(self._clock.now())
                said = self._coordinator.waiting_for(self._clock.now(), names_validators=True)
            self.settle()
            self._record.flush()
            if self._coordinator.phase is Phase.RUNNING:
                self._show_progress(now)
            self._narration.whom_we_wait_for(self._coordinator, said, now)
        self._show()

    def _show(self) -> None:
        """Show those who look where the run stands; what they read is made without the lock."""
        with self._lock:
            pause = Pause(self._held_back, self._clock.stood_s)
            taken = self._onlookers.take(self._coordinator, self._record, self._checkpoints, self._finish, pause)
        self._onlookers.show(taken)

    def stop(self, status: Status, reason: str) -> None:
        """End the run from outside: a signal, or a fault of the server itself. Safe from any thread."""
        with self._lock:
            self._carry_out(self._coordinator.stop(status, reason))

    def _written(self) -> None:
        """A checkpoint has been written, or has failed: whose values were held back for it gets them now."""
        self._guarded(self._take_delayed)
        self._nudge_all()

    def _take_delayed(self) -> None:
        with self._lock:
            if self._checkpoints is not None and not self._ended.is_set():
                self._checkpoints.take_delayed(self._parts)

    def _nudge_all(self) -> None:
        for session in self._door.sessions():
            session.nudge()

    def _show_progress(self, now: float) -> None:
        self._narration.progress(self._coordinator, self._record.metrics, now)

    # ---- who is there: called by sessions --------------------------------------------------------------

    @property
    def server(self) -> "ParameterServer":
        """The one that sessions ask for; a `Gathering` has another."""
        return self

    def holds(self, session: Session, who: Identity) -> str:
        """Say for what a client that has proved itself has to wait, or nothing."""
        return self.compiling.what_waits()

    def session(self, number: int) -> Session | None:
        """Return a live session by its number."""
        return self._door.session(number)

    def left(self, session: Session, reason: str, on_purpose: bool = False) -> None:
        """A session has ended; the coordinator hears of it if it had joined."""
        with self._lock:
            if self._door.forget(session.number) and session.joined:
                self._carry_out(self._coordinator.left(session.number, reason, self._clock.now(), on_purpose))

    # ---- events: called by sessions --------------------------------------------------------------------

    def pulled(self, session: Session, min_step: int) -> None:
        """A session asks for values."""
        with self._lock:
            self._carry_out(self._coordinator.pulled(session.number, min_step, self._clock.now()))

    def push_begins(self, session: Session, push: Push) -> Receiver | None:
        """A push is on its way; return where it goes, or None if its payload is not wanted."""
        with self._lock:
            match self._coordinator.push_begins(session.number, push):
                case Take(rank):
                    if rank >= self.config.ranks:
                        self._closer.reference_arrives(rank)
                    receiver = self._agreement.receivers[rank]
                    receiver.restart()
                    return receiver
                case Drop() as verdict:
                    session.after_payload = lambda: self._dropped(session, push, verdict)
                    return None

    def push_arrived(self, session: Session, push: Push, check: PushCheck) -> None:
        """The payload of a push is in its slot; this may close the round."""
        with self._lock:
            member = self._coordinator.registry.of(session.number)
            problem = "" if member is None else self._mode.problem_of(member.rank, push.labels)
            self._carry_out(
                self._coordinator.push_arrived(
                    session.number,
                    push,
                    check.gradient_norm,
                    check.bad_variable,
                    self._clock.now(),
                    problem,
                    check.state_norm,
                )
            )

    def _dropped(self, session: Session, message: Push | Logits, verdict: Drop) -> None:
        """The payload of what is not taken has been read."""
        with self._lock:
            self._carry_out(self._coordinator.dropped(session.number, message, verdict, self._clock.now()))

    def logits_begin(self, session: Session, logits: Logits) -> bool:
        """A member's logits are on their way; say whether they are wanted."""
        with self._lock:
            match self._coordinator.logits_begin(session.number, logits):
                case Take():
                    return True
                case Drop() as verdict:
                    session.after_payload = lambda: self._dropped(session, logits, verdict)
            return False

    def logits_arrived(self, session: Session, logits: Logits, payload: NDArray[np.uint8]) -> None:
        """A member's logits are here; those of the last member let all be weighed."""
        with self._lock:
            member = self._coordinator.registry.of(session.number)
            if self._members is None or member is None:
                return
            problem = self._members.show(member.rank, payload, logits.labels)
            self._carry_out(self._coordinator.logits_arrived(session.number, logits, problem, self._clock.now()))

    def tested(self, session: Session, logits: TestLogits, payload: NDArray[np.uint8]) -> None:
        """A member has answered the test set at the values of a step."""
        with self._lock:
            member, course = self._coordinator.registry.of(session.number), self._coordinator
            if self._members is None or member is None or (logits.epoch, logits.step) != (self.epoch, course.step):
                return
            self._members.tested(member.rank, logits.step, payload, attendance.live(course))
            self._take_vote()

    def _take_vote(self) -> None:
        result = self._mode.voted()
        if result is not None:
            self._record.metrics.tested(result)

    def initial_arrived(self, session: Session, buffer: NDArray[Any]) -> None:
        """Initial values are here."""
        with self._lock:
            member = self._coordinator.registry.of(session.number)
            if member is None or not self._coordinator.may_initialise(session.number):
                return
            problem = ""
            try:
                self._mode.initialise(member.rank, buffer)
            except NotFinite as error:
                problem = str(error)
            self._carry_out(self._coordinator.initialised(session.number, problem, self._clock.now()))

    def reported(self, report: Report) -> None:
        """An evaluator has measured the values of a step."""
        with self._lock:
            if report.epoch == self.epoch and report.step <= self._coordinator.step:
                self._record.metrics.tested(TestResult(report.step, report.loss, report.accuracy))

    def waiting_for(self) -> str:
        """Say in words for whom the run waits, as of the last tick; without the lock, so that nothing delays it."""
        return self._waiting

    def broke(self, error: BaseException) -> None:
        """A thread met a fault of the server itself: end the run rather than go on in doubt."""
        if isinstance(error, WeighmasterError):
            why = Finish(Status.NO_PROGRESS if isinstance(error, NoProgress) else Status.FAILED, str(error))
        else:
            logger.error("the server itself has failed", exc_info=error)
            why = Finish(Status.FAILED, f"the server itself has failed: {error!r}")
        with self._lock:
            # The coordinator may have ended the run already, and the error kept its word from being carried out.
            self._carry_out(self._coordinator.stop(why.status, why.reason) or [why])

    # ---- instructions ----------------------------------------------------------------------------------

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Begin():
                    if self._checkpoints is not None and not self._coordinator.is_resumed:
                        self._checkpoints.begin(self._parts)
                case CloseRound() | SkipRound():
                    self.settle()  # a rule decides by all that it could learn, and a checkpoint has all of it
                    self._unsettled.append((instruction, self._close_round(instruction)))
                    if self._checkpoints is not None and self._checkpoints.waits:
                        self.settle()  # nobody gets values that are not on the disk
                case WeighAnswers(ranks=ranks):
                    assert self._members is not None
                    self._members.weigh(ranks)
                case SendWeights():
                    self._post_weights(instruction)
                case Reply(session=number) | AskInitial(session=number):
                    session = self._door.session(number)
                    if session is not None:
                        session.post(instruction)
                case Announce(text, warning):
                    logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
                case Finish() if self._finish is None:
                    self._end(instruction)

    def _end(self, finish: Finish) -> None:
        try:
            self._mode.vote_now()
            self._take_vote()
        except Exception as error:  # it may be why the run ends; the end must come all the same
            logger.error("the server itself has failed", exc_info=error)
        self._finish = finish
        self.ending.seconds = time.monotonic() - self._began
        self.admissions.is_over = finish.status is not Status.DONE
        self._door.announce(finish)
        self._ended.set()

    def settle(self) -> None:
        """Learn from the rounds that have closed, and keep them; after the replies: nobody waits for it."""
        while self._unsettled:
            with self._lock:
                if self._unsettled:
                    self._after_round(*self._unsettled.popleft())

    def _close_round(self, closing: CloseRound | SkipRound) -> Closed:
        closed = Closed()
        if isinstance(closing, CloseRound):
            self.faults.at(Point.BEFORE_APPLY, _only_rank(closing), closing.step)
            closed = self._update(closing)
            self._coordinator.alarmed = self._closer.wants_validation
            self._take_vote()
            self.faults.at(Point.AFTER_APPLY, _only_rank(closing), closing.step)
            self._note_if_void(closing.step, closed)
        else:
            self._mode.skip()
        if self._checkpoints is not None:
            self._checkpoints.round_closed(self._coordinator)
        return closed

    def _note_if_void(self, step: int, closed: Closed) -> None:
        """Count a round of which the rule applies nothing; the first of several in a row is told."""
        was_void, self._rule_is_idle = self._rule_is_idle, not closed.weights
        if self._rule_is_idle:
            self._coordinator.void_rounds += 1
            if not was_void:
                rule = self.config.aggregation
                logger.warning("round %d is void: the rule %s found nothing to apply", step, rule)

    def _update(self, closing: CloseRound) -> Closed:
        """Make values(step + 1) of values(step) and the round's gradients: here the weights are updated.

        With one set of variables for all, the way from here is:

        1. `SharedMode.close` (ps/modes.py),
        2. `RoundCloser.close` (ps/closing.py): the rule gives each gradient its weight,
        3. `Store.apply`, or `Store.apply_trimmed`, and `Store._close` (ps/storage/store.py),
        4. `update_calls` (ps/storage/runs.py): the work is divided among threads,
        5. the optimizer's kernel, such as `_adam` (ps/storage/kernels.py): the formula itself.

        In an ensemble it is `MembersMode.close`; `EnsembleMode.close` (ps/ensemble_mode.py): the master weighs the
        answers; `MemberStore.apply_members` (ps/storage/member_store.py); then 4 and 5.
        """
        return self._mode.close(closing, self._names_in(closing))

    def _post_weights(self, sending: SendWeights) -> None:
        session = self._door.session(sending.session)
        if session is not None and self._members is not None:
            message = Weights(self.epoch, self._coordinator.step, sending.seq)
            session.post(Answered(message, self._members.weights_for(sending.rank)))

    def _names_in(self, closing: CloseRound | SkipRound) -> list[str]:
        return [self._coordinator.registry.members[c.rank].name for c in closing.contributions]

    def _after_round(self, closing: CloseRound | SkipRound, closed: Closed) -> None:
        self._mode.learn()
        names = self._names_in(closing)
        self._record.add(closing, closed, names, self._closer.rule, time.monotonic())
        self._onlookers.round_closed(closing, closed, names, self._record)
        if self._checkpoints is not None:
            self._checkpoints.take_due(self._parts)
        if self._closer.unapplied >= MAX_UNAPPLIED:
            self.stop(
                Status.DIVERGED,
                f"the rule {self.config.aggregation} found no gradient to apply in {MAX_UNAPPLIED} rounds in a row",
            )


def _only_rank(closing: CloseRound) -> int | None:
    """Return the rank whose push is applied alone, or None where those of several are."""
    return closing.contributions[0].rank if len(closing.contributions) == 1 else None
