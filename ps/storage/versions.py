"""Versions of the values: immutable for whoever holds one, in a few buffers that take turns."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from protocol.arena import Arena, aligned_empty
from protocol.errors import LocalProtocolError, NoProgress
from protocol.tensors import Layout

VERSIONS = 3
"""Buffers of values: the current one, one to write, and one for those who are still sending an older version."""

GRACE_S = 1.0
"""Seconds that the readers of the oldest version have left when a buffer is wanted. Sending 100 MB over a link of
a gigabit takes about that long, so who is merely in the midst of it is spared; all rounds wait for it meanwhile."""


@dataclass(frozen=True)
class Version:
    """Values after `step` closed rounds; `buffer` is read-only, `values_bytes` long, with gaps of zeros."""

    step: int
    buffer: memoryview


class Hold:
    """Keeps one version from being overwritten until it is released; a context manager."""

    __slots__ = ("_buffer", "_versions", "cut_off", "version")

    def __init__(
        self, versions: "Versions", buffer: int, version: Version, cut_off: Callable[[], None] | None
    ) -> None:
        self.version = version
        self.cut_off = cut_off
        self._versions = versions
        self._buffer = buffer

    def release(self) -> None:
        """Let the version go; further calls do nothing."""
        self._versions.release(self, self._buffer)

    def __enter__(self) -> Version:
        return self.version

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Versions:
    """The buffers and who holds them. Thread-safe; only one thread at a time may reserve and publish.

    Args:
        layout: of the values.
        release_timeout_s: seconds that `reserve` waits after it has cut readers off.
        count: of buffers, at least 3.
        grace_s: seconds that it waits before.
    """

    def __init__(
        self, layout: Layout, release_timeout_s: float, count: int = VERSIONS, grace_s: float = GRACE_S
    ) -> None:
        self.arenas = tuple(_zeroed(layout) for _ in range(count))
        self._buffers = tuple(arena.buffer.data.toreadonly() for arena in self.arenas)
        self._release_timeout_s = release_timeout_s
        self._grace_s = grace_s
        self._changed = threading.Condition(threading.Lock())  # guards all below
        self._current: int | None = None
        self._versions: list[Version | None] = [None] * count
        self._holds: tuple[set[Hold], ...] = tuple(set() for _ in range(count))

    def current(self) -> tuple[int, Version]:
        """Return the index of the current version's arena, and the version.

        Raises:
            LocalProtocolError: nothing was published yet.
        """
        with self._changed:
            return self._newest()

    def hold(self, cut_off: Callable[[], None] | None) -> Hold:
        """Pin the current version; see `ps.storage.store.Store.hold`."""
        with self._changed:
            buffer, version = self._newest()
            hold = Hold(self, buffer, version, cut_off)
            self._holds[buffer].add(hold)
        return hold

    def release(self, hold: Hold, buffer: int) -> None:
        """Forget a hold."""
        with self._changed:
            self._holds[buffer].discard(hold)
            if not self._holds[buffer]:
                self._changed.notify_all()

    def reserve(self) -> int:
        """Return the index of an arena that nobody reads.

        If none becomes free in the time of grace, those who hold the oldest that may be cut off are cut off.

        Raises:
            NoProgress: nobody released one in time even then.
        """
        with self._changed:
            free = self._free()
            if free is None and self._grace_s > 0:
                self._changed.wait_for(lambda: self._free() is not None, self._grace_s)
                free = self._free()
            if free is not None:
                return free
            blocking = self._oldest_that_may_be_cut_off()
        for hold in blocking:  # outside the lock: it may release at once
            if hold.cut_off is not None:
                hold.cut_off()
        with self._changed:
            self._changed.wait_for(lambda: self._free() is not None, self._release_timeout_s)
            free = self._free()
            if free is None:
                raise NoProgress(
                    f"the values of steps {self._held_steps()} have been in use for over "
                    f"{self._release_timeout_s:g} s, so there is no room for new ones; "
                    f"see which reader or checkpoint is stuck"
                )
            return free

    def publish(self, buffer: int, step: int) -> Version:
        """Make an arena's contents, no longer to be written, the current version."""
        version = Version(step, self._buffers[buffer])
        with self._changed:
            self._versions[buffer] = version
            self._current = buffer
        return version

    def _newest(self) -> tuple[int, Version]:
        version = None if self._current is None else self._versions[self._current]
        if self._current is None or version is None:
            raise LocalProtocolError("the store has no values yet")
        return self._current, version

    def _free(self) -> int | None:
        free = (index for index in range(len(self.arenas)) if index != self._current and not self._holds[index])
        return next(free, None)

    def _oldest_that_may_be_cut_off(self) -> tuple[Hold, ...]:
        steps = {
            version.step: index
            for index, version in enumerate(self._versions)
            if version and index != self._current and all(hold.cut_off for hold in self._holds[index])
        }
        return tuple(self._holds[steps[min(steps)]]) if steps else ()

    def _held_steps(self) -> list[int]:
        return sorted(v.step for index, v in enumerate(self._versions) if v and index != self._current)


def _zeroed(layout: Layout) -> Arena:
    buffer = aligned_empty(layout.values_bytes)
    buffer[:] = 0
    return Arena(layout, buffer)
