"""Who is connected: connections are let in while the run lasts, and seen off when it has ended."""

import logging
import threading
from collections.abc import Callable

from protocol.errors import ConfigurationError, NetworkError
from protocol.messages import Status
from protocol.transport import Channel, Deadline, Listener
from ps.instructions import Finish
from ps.session import Session

logger = logging.getLogger("weighmaster.ps")

TICK_S = 0.25
"""How often it is checked whether the run has ended; pause when connections cannot be taken."""

FAREWELL_S = 2.0
"""How long connections may take to deliver the news that the run has ended."""

MAX_UNPROVEN = 32
"""Connections that have not proved themselves; more wait in the accept queue."""


class Door:
    """Accepts connections in a thread of its own, and knows the session of each.

    Args:
        lock: of the server's state, under which sessions come and go.
        session_of: makes the session of a connection, from its number.
        broke: told when no connection can be taken at all.
    """

    def __init__(
        self,
        lock: threading.RLock,
        session_of: Callable[[int, Channel], Session],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._lock = lock
        self._session_of = session_of
        self._broke = broke
        self._sessions: dict[int, Session] = {}
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
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

    def proven(self) -> None:
        """A connection has proved itself, or ended before it could."""
        self._unproven.release()

    # ---- coming and going ------------------------------------------------------------------------------

    def open(self, listener: Listener) -> None:
        """Begin to let connections in."""
        self._accepting = threading.Thread(target=self.accept, args=(listener,), name="accept")
        self._accepting.start()

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
        for session in self._leaving:
            session.link.abort()
        for session in self._leaving:
            session.join()

    def accept(self, listener: Listener) -> None:
        """Let connections in until all are dismissed."""
        number, is_short = 0, False
        while not self._dismissed.is_set():
            if not self._unproven.acquire(timeout=TICK_S):
                continue
            try:
                channel = listener.accept(TICK_S)
            except ConfigurationError as error:  # the congestion control that was asked for
                self._broke(error)
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
                self._start(number, channel)
            except (OSError, RuntimeError) as error:  # descriptors or threads are short: others may end
                logger.warning(
                    "%s was turned away: the server cannot take more connections: %s", channel.peer, error
                )
                channel.close()
                self._unproven.release()

    def _start(self, number: int, channel: Channel) -> None:
        session = self._session_of(number, channel)
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
