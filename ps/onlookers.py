"""What can be seen of a run while it lasts: the status page and TensorBoard's files. Training waits for neither."""

import time
from collections.abc import Sequence

from ps import outcome
from ps.build import make_schedule
from ps.checkpointing import Checkpointing
from ps.closing import Closed
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import CloseRound, Finish, SkipRound
from ps.monitoring.status import Pause
from ps.monitoring.status_feed import StatusFeed, Taken
from ps.monitoring.status_server import StatusServer
from ps.monitoring.tensorboard import TensorBoard, weights_by_name
from ps.record import Record
from ps.settings.config import ServerConfig


class Onlookers:
    """Tells those who look at a run what becomes of it; those who were not asked for cost nothing.

    Args:
        config: says who looks.
        epoch: random number of this start.
        began: when the server started (monotonic seconds).
        tokens: one of which the status page asks for where it is not on a loopback address.
    """

    def __init__(self, config: ServerConfig, epoch: int, began: float, tokens: Sequence[bytes]) -> None:
        self._config = config
        self._tokens = tuple(tokens)
        self._feed = StatusFeed(config, epoch, began) if config.status_port is not None else None
        self._page: StatusServer | None = None
        self._board: TensorBoard | None = None

    def open(self, first_step: int) -> str | None:
        """Begin to serve the page and to write the files; return where the page is, or None.

        Args:
            first_step: where this server begins.

        Raises:
            ConfigurationError: the page's port is taken, or the files cannot be written.
        """
        config = self._config
        if config.tensorboard is not None:
            self._board = TensorBoard(config.tensorboard, make_schedule(config), first_step, time.time())
        feed = self._feed
        if feed is None or config.status_port is None:
            return None
        self._page = StatusServer(config.status_host, config.status_port, lambda: feed.latest, self._tokens)
        if config.status_port_file is not None:
            outcome.write_port_file(config.status_port_file, self._page.port)
        self._page.start()
        host = f"[{config.status_host}]" if ":" in config.status_host else config.status_host
        return f"http://{host}:{self._page.port}/"

    def round_closed(
        self, closing: CloseRound | SkipRound, closed: Closed, names: Sequence[str], record: Record
    ) -> None:
        """Tell of a closed round, once the record has it; under the lock of the run's state."""
        now = time.monotonic()
        if self._feed is not None:
            self._feed.round_closed(closing, closed, names, record, now)
        if self._board is not None:
            weights = weights_by_name(closing, closed.weights, names)
            self._board.round_closed(closing.step, record.metrics, weights, now, time.time())

    def take(
        self,
        course: Coordinator,
        record: Record,
        checkpoints: Checkpointing | None,
        finish: Finish | None,
        pause: Pause,
    ) -> Taken | None:
        """Copy what is to be shown, if it is time to; under the lock of the run's state."""
        if self._board is not None:
            self._board.tested(record.metrics, time.time())
        if self._feed is None:
            return None
        ended = None if finish is None else finish.status.value
        return self._feed.take(course, record, checkpoints, time.monotonic(), time.time(), ended, pause)

    def show(self, taken: Taken | None) -> None:
        """Show what was taken; without the lock, and by one thread only."""
        if self._feed is not None:
            self._feed.publish(taken)

    def close(self) -> None:
        """End the page, and write the last of the files."""
        if self._page is not None:
            self._page.close()
        if self._board is not None:
            self._board.close()
