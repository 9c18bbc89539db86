"""What is logged of connections that have not joined: a flood of them must not fill the log's disk."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("weighmaster.ps")

BURST_LINES = 200
"""Lines that are written at once: all that a start with a slip in it, or a scan of ports, brings about."""

LINES_PER_S = 1.0
"""Beyond that: some 10 MB a day."""


class StrangerLog:
    """Writes lines, as many as a flood may cost; says how many it left out. Safe from any thread.

    Args:
        read_s: a monotonic clock, in seconds.
    """

    def __init__(self, read_s: Callable[[], float] = time.monotonic) -> None:
        self._read_s = read_s
        self._lock = threading.Lock()  # guards all below
        self._lines_left = float(BURST_LINES)
        self._counted_at = read_s()
        self._left_out = 0

    def say(self, level: int, text: str) -> None:
        """Log a sentence, unless there have been too many lately."""
        with self._lock:
            now = self._read_s()
            self._lines_left = min(self._lines_left + LINES_PER_S * (now - self._counted_at), BURST_LINES)
            self._counted_at = now
            if self._lines_left < 1.0:
                self._left_out += 1
                return
            self._lines_left -= 1.0
            left_out, self._left_out = self._left_out, 0
        if left_out:
            logger.warning("lines on connections that have not joined were left out: %d", left_out)
        logger.log(level, "%s", text)
