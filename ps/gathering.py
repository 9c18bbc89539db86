"""Count the workers that come, until none more comes: how many take part where nobody has said it.

It is over before the run begins: clients are let in, prove themselves, and are held. Then the number is known, a
server is made for it, and takes over the connections as they are.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from protocol.errors import ConfigurationError, Interrupted, NoProgress, Refused, WeighmasterError
from protocol.injector import Faults
from protocol.messages import AUTO_RANK, RefusalCode, Role, Status
from protocol.tokens import Grant
from protocol.transport import Listener
from ps.build import policy_of
from ps.compiling import Compiling
from ps.connections.door import TICK_S, Door
from ps.connections.session import Session
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import Finish
from ps.coordination.members import Identity, SessionId
from ps.monitoring.narration import WAITING_S
from ps.record import Record
from ps.settings.combinations import MAX_WORKERS
from ps.settings.config import ServerConfig

if TYPE_CHECKING:
    from ps.server import ParameterServer

logger = logging.getLogger("weighmaster.ps")


class Headcount:
    """Who has come, and whether more are to be waited for. Pure: events come in, and the time as an argument.

    Who calls twice counts once: the same process, or the same name or rank where one was given. Who goes does not
    count.

    Args:
        quiet_s: time without a further worker after which those who are there are all.
        timeout_s: longest time to count; it begins with those who are there then.
        began: when the first might have come (monotonic seconds).
    """

    def __init__(self, quiet_s: float, timeout_s: float, began: float) -> None:
        self._quiet_s = quiet_s
        self._timeout_s = timeout_s
        self._began = began
        self._callers: dict[SessionId, Identity] = {}
        self._last_came = began
        self._count = 0

    def came(self, caller: SessionId, who: Identity, now: float) -> None:
        """Take note of a worker's connection; again is harmless. Other roles are no workers."""
        if who.role is not Role.WORKER or caller in self._callers:
            return
        before = self.count
        self._callers[caller] = who
        self._count = _how_many(self._callers.values())
        if self.count > before:
            self._last_came = now

    def left(self, caller: SessionId) -> None:
        """Take note that a connection has ended."""
        if self._callers.pop(caller, None) is not None:
            self._count = _how_many(self._callers.values())

    @property
    def callers(self) -> frozenset[SessionId]:
        """The connections of all who count."""
        return frozenset(self._callers)

    @property
    def count(self) -> int:
        """How many workers are there; not more than there may be."""
        return min(self._count, MAX_WORKERS)

    def is_settled(self, now: float) -> bool:
        """Whether those who are there are all."""
        return bool(self._callers) and self._left_s(now) <= 0.0

    def is_in_vain(self, now: float) -> bool:
        """Whether nobody is there, and nobody is waited for any longer."""
        return not self._callers and now - self._began >= self._timeout_s

    @property
    def is_full(self) -> bool:
        """Whether as many connections are there as there may be workers."""
        return len(self._callers) >= MAX_WORKERS

    def misfit(self) -> Identity | None:
        """Return somebody who asks for a rank that a run for those who are there does not have, or None."""
        return next((who for who in self._callers.values() if who.rank >= self.count), None)

    def asks_for_rank(self, caller: SessionId) -> bool:
        """Say whether a connection that counts asks for a certain rank."""
        who = self._callers.get(caller)
        return who is not None and who.rank != AUTO_RANK

    def waiting_for(self, now: float) -> str:
        """Say in words for what the start waits."""
        if not self._callers:
            seconds = round(now - self._began)
            return f"the start waits for the first worker{f' since {seconds} s' if seconds else ''}"
        left_s = max(0.0, self._left_s(now))
        return f"the start waits for more workers: {self.count} so far; the run begins in {left_s:.0f} s"

    def _left_s(self, now: float) -> float:
        return min(self._last_came + self._quiet_s, self._began + self._timeout_s) - now


def _how_many(callers: Iterable[Identity]) -> int:
    """Count who is not the same as one before: in the process, or in a name or rank that was given."""
    seen: set[tuple[str, int | str]] = set()
    count = 0
    for who in callers:
        marks: set[tuple[str, int | str]] = {("incarnation", who.incarnation)}
        if who.name:
            marks.add(("name", who.name))
        if who.rank != AUTO_RANK:
            marks.add(("rank", who.rank))
        if not marks & seen:
            count += 1
            seen |= marks
    return count


class Gathering:
    """Holds the clients that come until it is known how many workers there are; a context manager.

    An exception that leaves it before a server has taken over is told to all clients.

    Attributes:
        config: what the operator asked for; the number of workers is open.
        grants: who may join with which token; empty admits everyone.
        faults: what is to break on purpose.
        lock: of all state, which becomes the server's.
        door: through which clients come, which becomes the server's.
        compiling: makes the kernels ready that the run needs, which becomes the server's.
    """

    def __init__(self, config: ServerConfig, grants: Sequence[Grant], faults: Faults) -> None:
        self.config = config
        self.grants = tuple(grants)
        self.faults = faults
        self.lock = threading.RLock()
        self.door = Door(lambda number, channel: Session(number, channel, self), self.broke)
        self.compiling = Compiling(config, self._nudge_all, self.broke)
        self._began = time.monotonic()
        self._headcount = Headcount(config.gather_timeout, config.start_timeout, self._began)
        self._counted: frozenset[SessionId] | None = None
        self._server: ParameterServer | None = None
        self._signal: str | None = None
        self._fault: BaseException | None = None
        self._listener: Listener | None = None
        self._said = 0
        self._said_at = self._began

    # ---- counting --------------------------------------------------------------------------------------

    def gather(self, listener: Listener) -> int:
        """Let clients in, and return how many workers there are when no more come.

        Raises:
            NoProgress: nobody came in time.
            Interrupted: a signal came.
        """
        self._listener = listener
        self.compiling.begin(("float32",))  # while clients come
        self.door.open(listener)
        pause = threading.Event()
        while not (count := self._counted_now()):
            pause.wait(TICK_S)
        logger.info("no further worker has come: the run is for %d", count)
        return count

    def _counted_now(self) -> int:
        """Return the number if it is settled, or 0."""
        with self.lock:
            now, headcount = time.monotonic(), self._headcount
            if self._fault is not None:
                raise self._fault
            if self._signal is not None:
                raise Interrupted(self._signal)
            if headcount.is_in_vain(now):
                raise NoProgress(
                    f"no worker came within {self.config.start_timeout:g} s; "
                    "start some, or allow more with --start-timeout"
                )
            if headcount.is_settled(now):
                if misfit := headcount.misfit():
                    raise ConfigurationError(
                        f"a worker on {misfit.host} asks for rank {misfit.rank}, and with --workers auto the run "
                        f"is for {headcount.count}, the workers that have come: start workers without --rank"
                    )
                self._counted = headcount.callers
                return headcount.count
            self._say(now)
        return 0

    def _say(self, now: float) -> None:
        count = self._headcount.count
        if count != self._said:
            self._said, self._said_at = count, now
            logger.info(
                "workers so far: %d; the run begins when no other has come for %g s",
                count,
                self.config.gather_timeout,
            )
        elif now - self._said_at >= WAITING_S:
            self._said_at = now
            logger.info("%s", self._headcount.waiting_for(now))

    def interrupt(self, signal_name: str) -> None:
        """Ask for the end at the next tick; safe from a signal handler."""
        self._signal = signal_name

    # ---- the end: a server takes over, or all are turned away ------------------------------------------

    def hand_over(self, server: "ParameterServer") -> None:
        """Have a server that is ready serve the clients that are held, and all that come."""
        with self.lock:
            self._server = server
            if self._signal is not None:
                server.interrupt(self._signal)
            if self._fault is not None:
                server.broke(self._fault)
        self._nudge_all()

    def _nudge_all(self) -> None:
        for session in self.door.sessions():
            session.nudge()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._server is None and self._listener is not None:
            self.door.announce(self.ending(error))
            self.door.close(self._listener)

    def ending(self, error: BaseException) -> Finish:
        """Return as what a run ends that never began."""
        if isinstance(error, Interrupted):
            return Finish(Status.INTERRUPTED, f"the server was stopped by {self._signal}")
        if isinstance(error, WeighmasterError):
            return Finish(Status.NO_PROGRESS if isinstance(error, NoProgress) else Status.FAILED, str(error))
        return Finish(Status.FAILED, f"the server itself has failed: {error!r}")

    def summary(self, error: BaseException) -> dict[str, Any]:
        """Return what became of a run that never began, ready for JSON."""
        course = Coordinator(policy_of(self.config, b""), 0, self._began)
        record = Record(self.config.run_dir)
        return record.summary(course, self.ending(error).status, time.monotonic() - self._began)

    # ---- called by sessions ----------------------------------------------------------------------------

    @property
    def server(self) -> "ParameterServer":
        """The one that has taken over; a session asks for it when it is held no longer."""
        assert self._server is not None
        return self._server

    def holds(self, session: Session, who: Identity) -> str:
        """Say for what a client that has proved itself has to wait; empty when the server may have it.

        Raises:
            Refused: there are as many workers as there may be.
        """
        with self.lock:
            server = self._server
            if server is None:
                now = time.monotonic()
                is_new = who.role is Role.WORKER and session.number not in self._headcount.callers
                if is_new and self._headcount.is_full:
                    raise Refused(RefusalCode.FULL, f"{MAX_WORKERS} workers are here already, as many as may be")
                self._headcount.came(session.number, who, now)
                return (
                    "the start waits for the server to be ready"
                    if self._counted
                    else self._headcount.waiting_for(now)
                )
            if who.role is Role.WORKER and self._are_joining(session, who):
                return "the start waits for the workers that come first"
        return server.holds(session, who)

    def _are_joining(self, session: Session, who: Identity) -> bool:
        """Whether anybody who goes first has not got a rank yet.

        First go those who were counted and ask for a certain rank, then those counted who do not, then all others.
        """
        counted = self._counted or frozenset()
        if session.number in counted:
            if who.rank != AUTO_RANK:
                return False
            counted = frozenset(filter(self._headcount.asks_for_rank, counted))
        first = [self.door.session(number) for number in counted]
        return any(other is not None and not other.joined for other in first)

    def left(self, session: Session, reason: str, on_purpose: bool = False) -> None:
        """A session has ended."""
        with self.lock:
            if self._server is not None:
                self._server.left(session, reason, on_purpose)
            else:
                self.door.forget(session.number)
                self._headcount.left(session.number)

    def broke(self, error: BaseException) -> None:
        """A thread met a fault of the server itself: end everything rather than go on in doubt."""
        with self.lock:
            if self._server is not None:
                self._server.broke(error)
            elif self._fault is None:
                if not isinstance(error, WeighmasterError):
                    logger.error("the server itself has failed", exc_info=error)
                    error = ConfigurationError(f"the server itself has failed: {error!r}")
                self._fault = error
