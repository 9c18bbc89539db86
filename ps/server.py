"""The parameter server: sessions bring events, the coordinator decides, and here it is carried out.

All state is behind one lock. `_update` is the one place where the weights are updated.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import (
    ConfigurationError,
    ExitCode,
    Interrupted,
    ManifestMismatch,
    NetworkError,
    NoProgress,
    Refused,
    WeighmasterError,
)
from protocol.messages import (
    AUTO_RANK,
    Logits,
    Offer,
    Push,
    RefusalCode,
    Report,
    Role,
    Status,
    TestLogits,
    Values,
    Weights,
    Welcome,
)
from protocol.tensors import Layout, Manifest
from protocol.tokens import Grant
from protocol.transport import Address, Channel, Deadline, Listener
from ps.build import make_ensemble, make_rule, make_schedule, make_store, policy_of, warm_up
from ps.closing import MAX_UNAPPLIED, Closed, RoundCloser
from ps.config import ServerConfig
from ps.console import Console
from ps.coordinator import Coordinator
from ps.ensemble_mode import Terms
from ps.instructions import (
    Announce,
    AskInitial,
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
from ps.members import Claim, Granted, Identity
from ps.metrics import TestResult
from ps.policy import Phase
from ps.record import Record
from ps.session import Answered, Session
from ps.store import Hold, NotFinite, PushCheck, Receiver, Store

logger = logging.getLogger("weighmaster.ps")

TICK_S = 0.25
"""How often deadlines are checked and the progress line is drawn."""

WAITING_S = 10.0
"""How often the operator is told for whom the run waits."""

FAREWELL_S = 2.0
"""How long connections may take to deliver the news that the run has ended."""

MAX_UNPROVEN = 32
"""Connections that have not proved themselves; more wait in the accept queue."""

EXIT_CODES = {
    Status.DONE: ExitCode.DONE,
    Status.DIVERGED: ExitCode.DIVERGED,
    Status.LOST: ExitCode.NO_PROGRESS,
    Status.NO_PROGRESS: ExitCode.NO_PROGRESS,
    Status.INTERRUPTED: ExitCode.SIGTERM,
    Status.FAILED: ExitCode.CONFIGURATION,
}


@dataclass(frozen=True)
class Admission:
    """What a client is told when it has joined, and what holds for its connection from then on."""

    welcome: Welcome
    terms: Terms


class ParameterServer:
    """One run: from listening to the last goodbye.

    Attributes:
        config: what the operator asked for.
        epoch: random number of this start.
        grants: who may join with which token; empty admits everyone.
        is_compiling: the kernels that every run needs are not ready yet.
    """

    def __init__(
        self,
        config: ServerConfig,
        console: Console,
        epoch: int,
        grants: Sequence[Grant] = (),
        initial_values: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.grants = tuple(grants)
        self._console = console
        self._initial_values = initial_values
        self._closer = RoundCloser(make_rule(config), make_schedule(config), config.clip_worker_norm)
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._coordinator = Coordinator(
            policy_of(config), epoch, self._began, has_values=initial_values is not None
        )
        self._record = Record(config.run_dir)
        self._ensemble = make_ensemble(config, initial_values)
        self.is_compiling = False
        self._unsettled: deque[tuple[CloseRound | SkipRound, Closed]] = deque()
        self._store: Store | None = None
        self._receivers: tuple[Receiver, ...] = ()
        self._sessions: dict[int, Session] = {}
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
        self._ended = threading.Event()
        self._dismissed = threading.Event()
        self._leaving: list[Session] = []
        self._finish: Finish | None = None
        self._finished_at = 0.0
        self._signal: str | None = None
        self._waits_at: tuple[Phase, int] | None = None
        self._waiting_said_at = 0.0

    # ---- the course of a run ---------------------------------------------------------------------------

    def listen(self) -> Listener:
        """Open the port.

        Raises:
            ConfigurationError: it is taken, or the address is not of this machine.
        """
        return Listener(Address(self.config.host, self.config.port), self.config.congestion_control)

    def run(self, listener: Listener) -> Finish:
        """Serve until the run has ended; every connection is closed when this returns."""
        # While the workers load TensorFlow; who comes too early is told to wait.
        self.is_compiling = True
        threading.Thread(target=self._compile, name="compile", daemon=True).start()
        accepting = threading.Thread(target=self._accept, args=(listener,), name="accept")
        accepting.start()
        try:
            while not self._ended.wait(TICK_S):
                self.tick()
        finally:
            self._ended.set()
            self._see_off()
            self._dismissed.set()
            accepting.join()
            listener.close()
            self._dismiss()
            if self._coordinator.step:  # the last line shows where the run ended, not where it was a moment before
                self._show_progress(time.monotonic())
        assert self._finish is not None
        return self._checked(self._finish)

    def _checked(self, finish: Finish) -> Finish:
        """Return how the run ended: as diverged if values overflowed so late that no push told of it."""
        bad = self._store.first_not_finite() if finish.status is Status.DONE and self._store is not None else None
        if bad is None:
            return finish
        why = f"the final values of {bad!r} are not finite; try a lower --learning-rate, or --clip-norm"
        return Finish(Status.DIVERGED, why)

    def interrupt(self, signal_name: str) -> None:
        """Ask the run to end at its next tick; safe from a signal handler."""
        self._signal = signal_name

    def tick(self) -> None:
        """Let time pass: check deadlines, redraw the progress line."""
        with self._lock:
            now = time.monotonic()
            if self._signal is not None:
                self.stop(Status.INTERRUPTED, f"the server was stopped by {self._signal}")
            self._carry_out(self._coordinator.tick(now))
            self.settle()
            self._record.flush()
            if self._coordinator.phase is Phase.RUNNING:
                self._show_progress(now)
            self._say_whom_we_wait_for(now)

    def stop(self, status: Status, reason: str) -> None:
        """End the run from outside: a signal, or a fault of the server itself. Safe from any thread."""
        with self._lock:
            self._carry_out(self._coordinator.stop(status, reason))

    def exit_code(self, finish: Finish) -> ExitCode:
        """Return the code with which the process ends."""
        if self._signal and finish.status is Status.INTERRUPTED:
            return Interrupted(self._signal).exit_code
        return EXIT_CODES[finish.status]  # a signal that came after the end changes nothing of it

    def summary(self, finish: Finish) -> dict[str, Any]:
        """Return what became of the run, ready for JSON."""
        summary = self._record.summary(self._coordinator, finish.status, self._finished_at - self._began)
        return summary if self._ensemble is None else summary | {"ensemble": self._ensemble.summary()}

    def final_values(self) -> dict[str, NDArray[Any]] | None:
        """Return the final values by name (their moving average if one is kept), or None if there are none."""
        return self._store.export() if self._store is not None and self._coordinator.has_values else None

    def _compile(self) -> None:
        """Make the kernels ready that every run needs, then call those who wait for it."""
        try:
            warm_up(self.config)
        finally:
            self.is_compiling = False
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                session.nudge()

    def _accept(self, listener: Listener) -> None:
        number, is_short = 0, False
        while not self._dismissed.is_set():
            if not self._unproven.acquire(timeout=TICK_S):
                continue
            try:
                channel = listener.accept(TICK_S)
            except ConfigurationError as error:  # the congestion control that was asked for
                self.broke(error)
                return
            except NetworkError as error:  # descriptors are short: others may end
                self._unproven.release()
                if not is_short:
                    logger.warning("the server cannot take more connections for now: %s", error)
                is_short = True
                self._dismissed.wait(TICK_S)
                continue
            if channel is None:
                self._unproven.release()
                continue
            number, is_short = number + 1, False
            try:
                self._start_session(number, channel)
            except (OSError, RuntimeError) as error:  # descriptors or threads are short: others may end
                logger.warning(
                    "%s was turned away: the server cannot take more connections: %s", channel.peer, error
                )
                channel.close()
                self._unproven.release()

    def _start_session(self, number: int, channel: Channel) -> None:
        session = Session(number, channel, self)
        with self._lock:
            self._sessions[number] = session
            if self._finish is not None:  # who calls now is told that the run has ended, and need not try again
                self._leaving.append(session)
                if self._finish.status is not Status.DONE:
                    session.post(self._finish)
            try:
                session.start()
            except RuntimeError:
                del self._sessions[number]
                self._leaving = [other for other in self._leaving if other is not session]
                raise

    def _see_off(self) -> None:
        """Wait a while until all have heard of the end; those who call meanwhile hear of it too."""
        deadline = Deadline(FAREWELL_S)
        with self._lock:
            self._leaving += self._sessions.values()
        while not deadline.over and (there := [session for session in self._leaving if session.is_alive()]):
            there[0].join(deadline.left_s)

    def _dismiss(self) -> None:
        for session in self._leaving:
            session.link.abort()
        for session in self._leaving:
            session.join()
        self.settle()
        self._record.close()
        if self._store is not None:
            self._store.close()

    def _show_progress(self, now: float) -> None:
        test = self._record.metrics.test
        self._console.progress(
            self._coordinator.step,
            self._record.metrics.loss,
            test.accuracy if test else None,
            self._record.metrics.examples_per_s(now),
            now,
        )

    def _say_whom_we_wait_for(self, now: float) -> None:
        waiting = self._coordinator.waiting_for(now)
        if not waiting:
            self._waits_at = None
            return
        at = (self._coordinator.phase, self._coordinator.step)
        if at != self._waits_at:  # each round waits for somebody at some time; what counts is one that stays open
            self._waits_at, self._waiting_said_at = at, now
        if now - self._waiting_said_at >= WAITING_S:
            self._waiting_said_at = now
            logger.info("%s", waiting)

    # ---- admission: called by sessions -----------------------------------------------------------------

    def proven(self) -> None:
        """A connection has proved itself, or ended before it could."""
        self._unproven.release()

    def claim(self, who: Identity) -> Claim:
        """Judge an identity; changes nothing."""
        with self._lock:
            return self._coordinator.registry.claim(who)

    def session(self, number: int) -> Session | None:
        """Return a live session by its number."""
        with self._lock:
            return self._sessions.get(number)

    @property
    def has_variables(self) -> bool:
        """Whether a worker has defined them."""
        with self._lock:
            return self._store is not None or self._ensemble is not None  # that one takes no evaluators

    def check_offer(self, who: Identity, offer: Offer) -> None:
        """Check what an offer says before the identity is settled; in mode shared, agree on the variables.

        Raises:
            Refused: other variables, another seed, a dtype that cannot be served, or too many bytes.
        """
        if offer.seed is not None and offer.seed != self.config.seed:
            raise Refused(
                RefusalCode.SEED,
                f"the worker was started with --seed {offer.seed}, the server with {self.config.seed}: "
                "leave it out on the worker",
            )
        if self._finish is not None and self._finish.status is not Status.DONE:
            return  # it hears of the end next; nothing is to be made for it
        if self._ensemble is None:
            self._agree(Manifest.from_wire(offer.manifest))
        elif who.role is not Role.WORKER:
            raise Refused(
                RefusalCode.MANIFEST,
                f"this server trains an ensemble, which takes no {who.role}: its members measure themselves",
            )

    def _agree(self, manifest: Manifest) -> None:
        """Agree on the variables: the first worker's offer defines them, every other must be the same."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store(manifest)
                slots = self.config.workers + self.config.validator_slots
                self._receivers = tuple(self._store.receiver(slot) for slot in range(slots))
                return
        try:
            self._store.layout.manifest.check_same_variables(manifest, "the server", "the worker")
        except ManifestMismatch as error:
            raise Refused(RefusalCode.MANIFEST, str(error)) from error

    def _terms(self, offer: Offer, rank: int) -> Terms:
        """Return what is agreed with one client; in an ensemble the last member's offer makes the store."""
        if self._ensemble is None:
            assert self._store is not None
            return Terms(self._store.layout, {})
        with self._failing():
            terms = self._ensemble.agree(offer, rank)
        if self._store is None and self._ensemble.store is not None:
            self._store = self._ensemble.store
            self._receivers = tuple(self._store.receiver(slot) for slot in range(self.config.workers))
        return terms

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End the run when the server cannot hold what the workers have, and refuse who brought it."""
        try:
            yield
        except ManifestMismatch as error:
            self.stop(Status.FAILED, str(error))
            raise Refused(RefusalCode.MANIFEST, str(error)) from error
        except ConfigurationError as error:
            self.stop(Status.FAILED, str(error))
            raise Refused(RefusalCode.TOO_LARGE, str(error)) from error

    def _make_store(self, manifest: Manifest) -> Store:
        if not manifest.variables:
            raise Refused(RefusalCode.MANIFEST, "the worker has no variables, so there is nothing to train")
        layout = Layout.of(manifest)
        if layout.payload_bytes > self.config.max_model_bytes:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"the variables take {layout.payload_bytes} bytes, above --max-model-bytes "
                f"{self.config.max_model_bytes} of the server",
            )
        with self._failing():
            return make_store(self.config, layout, self._initial_values)

    def join(self, session: Session, who: Identity, granted: Granted, offer: Offer) -> Admission | None:
        """Welcome a session under an identity; None if the identity was taken meanwhile.

        Raises:
            Refused: it cannot be a member of the ensemble.
        """
        with self._lock:
            again = self._coordinator.registry.claim(who)
            if not isinstance(again, Granted) or again.replaces is not None:
                return None
            known = self._coordinator.registry.member(who.role, granted.rank)
            threads = known.threads if known is not None and who.role is not Role.EVALUATOR else offer.threads
            terms = self._terms(offer, again.rank)
            told = self._coordinator.joined(session.number, who, again, threads, time.monotonic())
            welcome = Welcome(
                epoch=self.epoch,
                step=self._coordinator.step,
                steps=self.config.steps,
                rank=again.rank if who.role is Role.WORKER else AUTO_RANK,
                name=again.name,
                seed=self.config.seed,
                threads=threads,
                workers=self.config.workers,
                shards=self.config.shard_count,
                mode=self.config.mode,
                codec="raw",
                heartbeat_interval=float(self.config.heartbeat_interval),
                heartbeat_timeout=float(self.config.heartbeat_timeout),
                manifest=terms.layout.manifest.to_wire(),
                weighting=self.config.weighting if self._ensemble is not None else "",
            )
            self._carry_out(told)
            return Admission(welcome, terms)

    def left(self, session: Session, reason: str, on_purpose: bool = False) -> None:
        """A session has ended; the coordinator hears of it if it had joined."""
        with self._lock:
            if self._sessions.pop(session.number, None) is not None and session.joined:
                self._carry_out(self._coordinator.left(session.number, reason, time.monotonic(), on_purpose))

    # ---- events: called by sessions --------------------------------------------------------------------

    def pulled(self, session: Session, min_step: int) -> None:
        """A session asks for values."""
        with self._lock:
            self._carry_out(self._coordinator.pulled(session.number, min_step, time.monotonic()))

    def push_begins(self, session: Session, push: Push) -> Receiver | None:
        """A push is on its way; return where it goes, or None if its payload is not wanted."""
        with self._lock:
            match self._coordinator.push_begins(session.number, push):
                case Take(rank):
                    if rank >= self.config.workers:
                        self._closer.reference_arrives(rank)
                    receiver = self._receivers[rank]
                    receiver.restart()
                    return receiver
                case Drop(then):
                    session.after_payload = lambda: self._carry_out_locked(then)
                    return None

    def push_arrived(self, session: Session, push: Push, check: PushCheck) -> None:
        """The payload of a push is in its slot; this may close the round."""
        with self._lock:
            member, problem = self._coordinator.registry.of(session.number), ""
            if self._ensemble is not None and member is not None:
                problem = self._ensemble.problem_of(member.rank, push.labels)
            self._carry_out(
                self._coordinator.push_arrived(
                    session.number, push, check.gradient_norm, check.bad_variable, time.monotonic(), problem
                )
            )

    def logits_begin(self, session: Session, logits: Logits) -> bool:
        """A member's logits are on their way; say whether they are wanted."""
        with self._lock:
            match self._coordinator.logits_begin(session.number, logits):
                case Take():
                    return True
                case Drop(then):
                    session.after_payload = lambda: self._carry_out_locked(then)
            return False

    def logits_arrived(self, session: Session, logits: Logits, payload: NDArray[np.uint8]) -> None:
        """A member's logits are here; those of the last member let all be weighed."""
        with self._lock:
            member = self._coordinator.registry.of(session.number)
            if self._ensemble is None or member is None:
                return
            problem = self._ensemble.show(member.rank, payload, logits.labels)
            self._carry_out(self._coordinator.logits_arrived(session.number, logits, problem, time.monotonic()))

    def tested(self, session: Session, logits: TestLogits, payload: NDArray[np.uint8]) -> None:
        """A member has answered the test set at the values of a step."""
        with self._lock:
            member, course = self._coordinator.registry.of(session.number), self._coordinator
            if self._ensemble is None or member is None or (logits.epoch, logits.step) != (self.epoch, course.step):
                return
            self._ensemble.tested(member.rank, logits.step, payload, course.registry.active())
            self._take_vote()

    def _take_vote(self) -> None:
        if self._ensemble is not None and self._ensemble.votes is not None:
            step, vote = self._ensemble.votes
            self._record.metrics.tested(TestResult(step, float("nan"), vote.weighted))

    def initial_arrived(self, session: Session, buffer: NDArray[Any]) -> None:
        """Initial values are here."""
        with self._lock:
            if not self._coordinator.may_initialise(session.number):
                return
            assert self._store is not None
            problem = ""
            try:
                member = self._coordinator.registry.of(session.number)
                if self._ensemble is not None and self._ensemble.store is not None and member is not None:
                    self._ensemble.store.initialise_part(member.rank, buffer)
                else:
                    self._store.initialise(buffer)
            except NotFinite as error:
                problem = str(error)
            self._carry_out(self._coordinator.initialised(session.number, problem, time.monotonic()))

    def reported(self, report: Report) -> None:
        """An evaluator has measured the values of a step."""
        with self._lock:
            if report.epoch == self.epoch and report.step <= self._coordinator.step:
                self._record.metrics.tested(TestResult(report.step, report.loss, report.accuracy))

    def waiting_for(self) -> str:
        """Say in words for whom the run waits."""
        with self._lock:
            return self._coordinator.waiting_for(time.monotonic())

    def hold_values(self, session: Session, reply: Reply) -> tuple[Values, Hold]:
        """Pin the current values for a reply; whoever sends them releases the hold."""
        assert self._store is not None
        hold = self._store.hold(session.link.abort)
        return self._values(hold.version.step, reply), hold

    def part_of(self, session: Session, buffer: memoryview) -> list[memoryview]:
        """Return the pieces of values that a client gets: all, or a member's part."""
        if self._ensemble is None or self._ensemble.store is None:
            return [buffer]
        with self._lock:
            member = self._coordinator.registry.of(session.number)
        if member is None:  # its connection has been replaced, and what is sent will not arrive
            return [buffer]
        return self._ensemble.store.part_of(buffer, member.rank)

    def smooth_values(self, reply: Reply, out: NDArray[Any]) -> Values:
        """Copy the moving average of the values into `out` (uint8 [values_bytes]) for an evaluator's reply."""
        assert self._store is not None
        return self._values(self._store.evaluation_values(out).step, reply)

    def _values(self, step: int, reply: Reply) -> Values:
        done = step >= self.config.steps
        return Values(self.epoch, step, reply.seq, reply.applied, reply.reason, done)

    def broke(self, error: BaseException) -> None:
        """A thread met a fault of the server itself: end the run rather than go on in doubt."""
        if isinstance(error, WeighmasterError):
            status = Status.NO_PROGRESS if isinstance(error, NoProgress) else Status.FAILED
            self.stop(status, str(error))
            return
        logger.error("the server itself has failed", exc_info=error)
        self.stop(Status.FAILED, f"the server itself has failed: {error!r}")

    # ---- instructions ----------------------------------------------------------------------------------

    def _carry_out_locked(self, instructions: Iterable[Instruction]) -> None:
        with self._lock:
            self._carry_out(instructions)

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case CloseRound():
                    self._unsettled.append((instruction, self._update(instruction)))
                case SkipRound():
                    assert self._store is not None
                    if self._ensemble is not None:
                        self._ensemble.skip()
                    else:
                        self._store.skip()
                    self._unsettled.append((instruction, Closed()))
                case WeighAnswers(ranks=ranks):
                    assert self._ensemble is not None
                    self._ensemble.weigh(ranks)
                case SendWeights():
                    self._post_weights(instruction)
                case Reply(session=number) | AskInitial(session=number):
                    session = self._sessions.get(number)
                    if session is not None:
                        session.post(instruction)
                case Announce(text, warning):
                    logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
                case Finish():
                    if self._ensemble is not None:
                        self._ensemble.vote_now()
                        self._take_vote()
                    self._finish, self._finished_at = instruction, time.monotonic()
                    if instruction.status is not Status.DONE:
                        for session in self._sessions.values():
                            session.post(instruction)
                    self._ended.set()

    def settle(self) -> None:
        """Learn from the rounds that have closed, and write them down; after the replies: nobody waits for it."""
        while self._unsettled:
            with self._lock:
                if self._unsettled:
                    self._after_round(*self._unsettled.popleft())

    def _update(self, closing: CloseRound) -> Closed:
        """Make values(step + 1) of values(step) and the round's gradients: here the weights are updated."""
        assert self._store is not None
        if self._ensemble is not None:
            weights = self._ensemble.close(closing)
            self._take_vote()
            return Closed(weights=weights)
        closed = self._closer.close(self._store, closing, [self._name_of(c.rank) for c in closing.contributions])
        self._coordinator.alarmed = self._closer.wants_validation
        return closed

    def _post_weights(self, sending: SendWeights) -> None:
        session = self._sessions.get(sending.session)
        if session is not None and self._ensemble is not None:
            message = Weights(self.epoch, self._coordinator.step, sending.seq)
            session.post(Answered(message, self._ensemble.weights_for(sending.rank)))

    def _name_of(self, rank: int) -> str:
        return self._coordinator.registry.members[rank].name

    def _after_round(self, closing: CloseRound | SkipRound, closed: Closed) -> None:
        if self._ensemble is not None:
            self._ensemble.learn()
        self._closer.learn()
        self._record.add(closing, closed, self._closer.rule, time.monotonic())
        if self._closer.unapplied >= MAX_UNAPPLIED:
            self.stop(
                Status.DIVERGED,
                f"the rule {self.config.aggregation} found no gradient to apply in {MAX_UNAPPLIED} rounds in a row",
            )
