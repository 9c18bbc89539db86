"""Who is connected: connections are let in while the run lasts, and seen off when it has ended."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from protocol.deadlines import Deadline
from protocol.errors import ConfigurationError, NetworkError
from protocol.messages import Status
from protocol.transport import Listener, PlainChannel, Wake
from ps.connections.doorstep import Doorstep, Source, source_of
from ps.connections.session import Session
from ps.connections.stranger_log import StrangerLog
from ps.coordination.instructions import Finish

logger = logging.getLogger("weighmaster.ps")

TICK_S = 0.25
"""How often it is checked whether the run has ended, or a wait is over; pause when connections cannot be taken."""

FAREWELL_S = 2.0
"""How long connections may take to deliver the news that the run has ended."""


class Door:
    """Accepts connections in a thread of its own, and knows the session of each.

    Args:
        session_of: makes the session of a connection, from its number.
        broke: told when no connection can be taken at all.
    """

    def __init__(
        self,
        session_of: Callable[[int, PlainChannel], Session],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._lock = threading.Lock()  # its own: who calls need not wait for an update
        self._session_of = session_of
        self._broke = broke
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._doorstep: Doorstep[PlainChannel] = Doorstep()
        self._at_doorstep = threading.Lock()
        self._strangers = StrangerLog()
        self._is_crowded = False
        self._wake: Wake | None = None
        self._dismissed = threading.Event()
        self._leaving: list[Session] = []
        self._news: Finish | None = None
        self._accepting: threading.Thread | None = None

    # ---- who is there ----------------------------------------------------------------------------------

    def session(self, number: int) -> Session | None:
        """Return a live session by its number."""
        with self._lock:
            return self._sessions.get(number)

    def sessions(self) -> list[Session]:
        """Return all live sessions."""
        with self._lock:
            return list(self._sessions.values())

    def forget(self, number: int) -> bool:
        """Take out a session that has ended; say whether it was there."""
        with self._lock:
            return self._sessions.pop(number, None) is not None

    # ---- coming and going ------------------------------------------------------------------------------

    def open(self, listener: Listener) -> None:
        """Begin to let connections in."""
        self._wake = Wake()
        self._accepting = threading.Thread(target=self._accept_or_tell, args=(listener,), name="accept")
        self._accepting.start()

    def _accept_or_tell(self, listener: Listener) -> None:
        try:
            self.accept(listener)
        except Exception as error:  # noqa: BLE001 - a fault of ours must end the run, not leave all before the door
            self._broke(error)

    def announce(self, news: Finish) -> None:
        """Tell all that the run has ended, those who are still to come too; after its last step replies say so."""
        with self._lock:
            self._news = news
            if news.status is not Status.DONE:
                for session in self._sessions.values():
                    session.post(news)

    def close(self, listener: Listener) -> None:
        """See all off, let nobody in any more, and end every connection."""
        self._see_off()
        self._dismissed.set()
        if self._accepting is not None:
            self._accepting.join()
        listener.close()
        for channel in self._doorstep.clear():
            channel.close()
        for session in self._leaving:
            session.link.abort()
        for session in self._leaving:
            session.join()
        if self._wake is not None:
            self._wake.close()

    def accept(self, listener: Listener) -> None:
        """Let connections in until all are dismissed."""
        is_short = False
        while not self._dismissed.is_set():
            channel = None
            try:
                channel = listener.accept(TICK_S, self._wake)
                is_short = is_short and channel is None
            except ConfigurationError as error:  # the congestion control that was asked for
                self._broke(error)
                return
            except NetworkError as error:  # descriptors are short: others may end
                if not is_short:
                    logger.warning("the server cannot take more connections for now: %s", error)
                is_short = True
                self._dismissed.wait(TICK_S)
            if self._wake is not None:
                self._wake.clear()
            self._receive(channel)

    def _receive(self, channel: PlainChannel | None) -> None:
        """Have a new caller wait for its turn, and serve those whose turn it is."""
        now = time.monotonic()
        with self._at_doorstep:
            gone = self._doorstep.give_up(now)
            displaced = None if channel is None else self._doorstep.arrive(channel, source_of(channel.peer), now)
            is_empty = self._doorstep.is_empty
        if displaced is not None and not self._is_crowded:
            logger.warning("too many connections wait to be let in; %s is the first to be closed", displaced.peer)
        self._is_crowded = displaced is not None or (self._is_crowded and not is_empty)
        for other in [*gone, *([] if displaced is None else [displaced])]:
            other.close()
        while True:
            with self._at_doorstep:
                turn = self._doorstep.next(now)
            if turn is None:
                return
            caller, source = turn
            try:
                self._start(next(self._numbers), caller, source)
            except (OSError, RuntimeError) as error:  # descriptors or threads are short: others may end
                logger.warning(
                    "%s was turned away: the server cannot take more connections: %s", caller.peer, error
                )
                caller.close()
                self._left(source)

    def _failed(self, source: Source) -> None:
        """A connection could not prove itself."""
        with self._at_doorstep:
            self._doorstep.failed(source, time.monotonic())

    def _left(self, source: Source) -> None:
        """A connection has proved itself, or ended before it could."""
        with self._at_doorstep:
            self._doorstep.leave(source)
        if self._wake is not None:
            self._wake.set()

    def _start(self, number: int, channel: PlainChannel, source: Source) -> None:
        session = self._session_of(number, channel)
        session.leaves_door = partial(self._left, source)
        session.proof_failed = partial(self._failed, source)
        session.strangers = self._strangers
        with self._lock:
            self._sessions[number] = session
            if self._news is not None:  # who calls now is told that the run has ended, and need not try again
                self._leaving.append(session)
                if self._news.status is not Status.DONE:
                    session.post(self._news)
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
