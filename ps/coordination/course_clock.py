"""The time of a run's course: it stands while values are held back, since nobody can be late then.

Pure: the clock that it reads is an argument.
"""

from collections.abc import Callable


class CourseClock:
    """Tells the time that deadlines of a run are held against. Used under the server's lock.

    Args:
        read_s: a monotonic clock, in seconds.
    """

    def __init__(self, read_s: Callable[[], float]) -> None:
        self._read_s = read_s
        self._stood_s = 0.0
        self._stands_since: float | None = None

    @property
    def stood_s(self) -> float:
        """Seconds by which it is behind."""
        return self._stood_s + (0.0 if self._stands_since is None else self._read_s() - self._stands_since)

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._read_s() - self.stood_s if self._stands_since is None else self._stands_since - self._stood_s

    def stand(self, stands: bool) -> None:
        """Let it stand, or go on; again is harmless."""
        now = self._read_s()
        if stands and self._stands_since is None:
            self._stands_since = now
        elif not stands and self._stands_since is not None:
            self._stood_s += now - self._stands_since
            self._stands_since = None
