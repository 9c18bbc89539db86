"""A few threads that share the ranges of an update; kernels release the GIL."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

PIECE_ELEMENTS = 1 << 17
"""Least elements of a range that is worth handing to another thread (about 0.1 ms)."""

PIECES_PER_RUN = 8
"""Ranges into which a large run is divided: a core that is busy elsewhere does fewer of them."""

_LINE_ELEMENTS = 64
"""Ranges start at multiples of this: a whole number of cache lines in every dtype."""


def pieces(elements: int) -> list[tuple[int, int]]:
    """Divide `elements` into ranges [start, stop), whatever the number of threads, so that sums are the same."""
    size = max(PIECE_ELEMENTS, -(-elements // PIECES_PER_RUN // _LINE_ELEMENTS) * _LINE_ELEMENTS)
    return [(start, min(start + size, elements)) for start in range(0, elements, size)]


class ThreadTeam:
    """Runs calls on `threads` threads, the caller's among them; the others are started when first needed."""

    def __init__(self, threads: int) -> None:
        self._others = threads - 1
        self._pool: ThreadPoolExecutor | None = None

    def run(self, calls: Sequence[Callable[[], None]], elements: int) -> None:
        """Run all calls, in any order, and return when they are done.

        Args:
            calls: independent of each other.
            elements: what they work on together; a little is done by the caller's thread alone.
        """
        waiting = deque(calls)

        def work() -> None:
            while True:
                try:
                    call = waiting.popleft()
                except IndexError:
                    return
                call()

        if not self._others or elements < 2 * PIECE_ELEMENTS:
            work()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._others, "weighmaster-update")
        futures = [self._pool.submit(work) for _ in range(self._others)]
        try:
            work()
        finally:
            for future in futures:
                future.result()

    def close(self) -> None:
        """End the other threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
