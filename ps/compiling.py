"""Kernels that are loaded or compiled beside the run: whoever waits for them goes on being heard."""

import threading
from collections.abc import Callable, Collection

from ps.build import warm_up
from ps.settings.config import ServerConfig


class Compiling:
    """Makes the kernels of each dtype ready once, in a thread of its own. Safe from any thread.

    Args:
        config: says which kernels.
        finished: called when those of another dtype are ready.
        broke: told when they cannot be made.
    """

    def __init__(
        self, config: ServerConfig, finished: Callable[[], None], broke: Callable[[BaseException], None]
    ) -> None:
        self._config = config
        self._finished = finished
        self._broke = broke
        self._lock = threading.Lock()  # guards both below
        self._begun: set[str] = set()
        self._under_way: set[str] = set()

    def begin(self, dtypes: Collection[str]) -> None:
        """Begin with what no earlier call has begun with, and return at once.

        Args:
            dtypes: "float32", "float64", both or none.
        """
        with self._lock:
            new = sorted(set(dtypes) - self._begun)
            self._begun.update(new)
            self._under_way.update(new)
        for dtype in new:
            threading.Thread(target=self._make, args=(dtype,), name=f"compile-{dtype}", daemon=True).start()

    def what_waits(self) -> str:
        """Say in words what a newcomer waits for; empty when all that was begun is ready."""
        with self._lock:
            return "the server to compile its kernels" if self._under_way else ""

    def _make(self, dtype: str) -> None:
        try:
            warm_up(self._config, dtype)
        except Exception as error:  # noqa: BLE001 - a fault of ours must end the run, not one thread of it
            self._broke(error)
        finally:
            with self._lock:
                self._under_way.discard(dtype)
            self._finished()
