"""How long a wait of several steps may last, and how slow a peer may be."""

import time

from protocol.errors import PeerSilent

MIN_BYTES_PER_S = 16 << 10
"""A peer that moves a payload slower than this on average is as good as dead."""

GRACE_S = 10.0
"""Added to the time that the minimum rate allows."""


class Deadline:
    """A point on the monotonic clock that ends a wait of several steps."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end


class Patience:
    """How long one transfer may take: no silence over `silence_s`, and a minimum rate over the whole.

    `has_begun` is False where the peer may yet have nothing to say: its silence is told otherwise than one that
    comes within a frame.
    """

    def __init__(
        self, size_bytes: int, silence_s: float, total_s: float | None = None, *, has_begun: bool = True
    ) -> None:
        now = time.monotonic()
        self._has_begun = has_begun
        self._silence_s = silence_s
        self._last = now
        self._end = now + (GRACE_S + size_bytes / MIN_BYTES_PER_S if total_s is None else total_s)

    def moved(self) -> None:
        """Note that bytes have moved."""
        self._last = time.monotonic()
        self._has_begun = True

    def check(self, peer: str) -> None:
        """Raise `PeerSilent` when either limit has passed."""
        now = time.monotonic()
        if now - self._last >= self._silence_s:
            where = " in mid-transfer" if self._has_begun else ""
            raise PeerSilent(f"{peer} has been silent for {now - self._last:.0f} s{where}")
        if now >= self._end:
            raise PeerSilent(f"{peer} moves too few bytes: the transfer has not ended in time")
