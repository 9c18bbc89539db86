"""Carry out the faults of a plan: to this process, or to the connection at hand.

Without a plan a step costs one look at `is_armed`.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from protocol.errors import ConnectionLost
from protocol.injection import NOTHING, Action, Injection, Part, Plan, Point
from protocol.link import Link
from protocol.messages import AUTO_RANK


def _signal_me(number: signal.Signals) -> None:
    # Sent to this very thread: it executes nothing more, while a signal to the process may take effect in another
    # thread, and this one would go on for a moment.
    signal.pthread_kill(threading.get_ident(), number)


ON_PROCESS: Mapping[Action, Callable[[float], None]] = {
    Action.KILL: lambda seconds: _signal_me(signal.SIGKILL),
    Action.STOP: lambda seconds: _signal_me(signal.SIGSTOP),
    Action.DELAY: time.sleep,
}


def _cut(link: Link) -> None:
    link.abort()
    # What the kernel holds already could still be read: nothing may come of it.
    raise ConnectionLost(f"the connection to {link.peer} was cut on purpose")


ON_LINK: Mapping[Action, Callable[[Link], None]] = {
    Action.CUT: _cut,
    Action.DROP: _cut,
    Action.HALF_CLOSE: Link.half_close,
}


class Faults:
    """The faults that are still to come; safe from any thread.

    Attributes:
        is_armed: whether there are any.
    """

    def __init__(self, plan: Plan = NOTHING) -> None:
        self._to_come = list(plan.injections)
        self._lock = threading.Lock()
        self.is_armed = bool(self._to_come)

    def at(
        self, point: Point, rank: int | None = None, step: int | None = None, part: Part | None = None
    ) -> Action | None:
        """Fire what is due at a point: say so on standard error, then kill, stop or delay this process.

        Args:
            point: where the process stands.
            rank: whose push or reply this is; None, or -1, of nobody with a rank.
            step: see `Point`.
            part: of a checkpoint.

        Returns:
            What the caller is to do to its connection, or to its push; None: nothing.
        """
        if not self.is_armed:
            return None
        rank = None if rank == AUTO_RANK else rank
        for_caller = None
        for injection in self._due(point, rank, step, part):
            _say(f"injected: {injection.describe(rank, step, part)}")
            if injection.action in ON_PROCESS:
                ON_PROCESS[injection.action](injection.seconds)
            else:
                for_caller = injection.action
        return for_caller

    def on(self, link: Link, point: Point, rank: int, step: int) -> bool:
        """Fire what is due, to the process and to its connection; say whether a push is to be sent once more.

        Raises:
            ConnectionLost: the connection was cut.
        """
        action = self.at(point, rank, step)
        if action is not None and action in ON_LINK:
            ON_LINK[action](link)
        return action is Action.DUPLICATE

    def midway(self, link: Link, point: Point, rank: int, step: int) -> Callable[[], object] | None:
        """Return what `Link` is to call in the middle of a payload; None when no faults are to come."""
        return partial(self.on, link, point, rank, step) if self.is_armed else None

    def _due(self, point: Point, rank: int | None, step: int | None, part: Part | None) -> list[Injection]:
        """Take out what fires now; of those that are for the caller one at a time."""
        with self._lock:
            due: list[Injection] = []
            for injection in list(self._to_come):
                is_second = injection.action not in ON_PROCESS and any(i.action not in ON_PROCESS for i in due)
                if injection.meets(point, rank, step, part) and not is_second:
                    due.append(injection)
                    self._to_come.remove(injection)
            self.is_armed = bool(self._to_come)
            return due


NONE: Final = Faults()


class CheckpointFaults:
    """The points within a checkpoint, as its writer calls them."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def at(self, point: str, step: int) -> None:
        """Fire what is due at a part of a checkpoint: file, manifest, rename or parent."""
        if self._faults.is_armed:
            self._faults.at(Point.MID_CHECKPOINT, None, step, Part(point))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be reading
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
