"""A few threads that share the ranges of an update; kernels release the GIL."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

PIECE_ELEMENTS = 1 << 17
"""Least elements of a range that is worth handing to another thread (about 0.1 ms)."""

PIECES_PER_RUN = 4
"""Ranges into which a large run is divided: a core that is busy elsewhere does fewer of them."""

_LINE_ELEMENTS = 64
"""Ranges start at multiples of this: a whole number of cache lines in every dtype."""


def pieces(elements: int) -> list[tuple[int, int]]:
    """Divide `elements` into ranges [start, stop), whatever the number of threads, so that sums are the same."""
    size = max(PIECE_ELEMENTS, -(-elements // PIECES_PER_RUN // _LINE_ELEMENTS) * _LINE_ELEMENTS)
    return [(start, min(start + size, elements)) for start in range(0, elements, size)]


class ThreadTeam:
    """Runs calls on `threads` threads, the caller's among them; the others are started when first needed.

    A round waits for this, so the threads are woken by a bare lock each: an executor takes several times as long.
    """

    def __init__(self, threads: int) -> None:
        self._others = threads - 1
        self._threads: list[threading.Thread] = []
        self._wake: list[threading.Lock] = []
        self._finished: list[threading.Lock] = []
        self._waiting: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._closing = False

    def run(self, calls: Sequence[Callable[[], None]], elements: int) -> None:
        """Run all calls, in any order, and return when they are done.

        Args:
            calls: independent of each other.
            elements: what they work on together; a little is done by the caller's thread alone.

        Raises:
            BaseException: what one of the calls raised; the others are done or left out.
        """
        self._waiting.extend(calls)
        if not self._others or elements < 2 * PIECE_ELEMENTS or len(calls) < 2:
            self._work()
        else:
            if not self._threads:
                self._start()
            for lock in self._wake:
                lock.release()
            self._work()
            for lock in self._finished:
                lock.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the other threads."""
        self._closing = True
        for lock in self._wake:
            lock.release()
        for thread in self._threads:
            thread.join()
        self._threads, self._wake, self._finished, self._closing = [], [], [], False

    def _start(self) -> None:
        for number in range(self._others):
            wake, finished = threading.Lock(), threading.Lock()
            wake.acquire()
            finished.acquire()
            thread = threading.Thread(
                target=self._help, args=(wake, finished), name=f"weighmaster-update-{number}", daemon=True
            )
            self._wake.append(wake)
            self._finished.append(finished)
            self._threads.append(thread)
            thread.start()

    def _help(self, wake: threading.Lock, finished: threading.Lock) -> None:
        while True:
            wake.acquire()
            if self._closing:
                return
            self._work()
            finished.release()

    def _work(self) -> None:
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                self._error = error
                self._waiting.clear()
                return
