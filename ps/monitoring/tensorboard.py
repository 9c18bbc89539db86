"""Scalars for TensorBoard: loss, accuracy, learning rate, throughput and weights by step. Nobody waits for them.

What is written is computed by pure functions; a thread of its own makes the files, and a disk that is full ends the
files, not the run.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigurationError
from protocol.extras import installing
from ps.coordination.instructions import CloseRound, SkipRound
from ps.monitoring.metrics import Metrics, TestResult

if TYPE_CHECKING:
    from ps.storage.schedules import Schedule

logger = logging.getLogger("weighmaster.ps")

ALL_KEPT = 10_000
"""Up to this step each round is a point; then half as many with each doubling: 45,000 points in a million steps."""

MOST_NAMES = 256
"""Workers that get a line of their own: in an elastic run names may come without end."""

MOST_WAITING = 1000
"""Points that may wait for a slow disk; further ones are dropped."""

FLUSH_S = 2.0
"""Longest time from a point to the disk, which TensorBoard then reads every few seconds."""

CLOSE_S = 5.0
"""The end waits so long for the last points; a disk that hangs keeps them."""


def is_kept(step: int) -> bool:
    """Say whether the round of this step becomes a point."""
    return step % (1 << (step // ALL_KEPT).bit_length()) == 0


def weights_by_name(
    closing: CloseRound | SkipRound, weights: Mapping[int, float], names: Sequence[str]
) -> dict[str, float]:
    """Return what each worker that pushed counted in a round; nothing for one in which no push could be used.

    Args:
        closing: the round.
        weights: of the ranks that counted.
        names: who the contributions are from.
    """
    if isinstance(closing, SkipRound):
        return {}
    return {name: weights.get(c.rank, 0.0) for name, c in zip(names, closing.contributions, strict=True)}


def round_scalars(
    metrics: Metrics, learning_rate: float, weights: Mapping[str, float], now: float
) -> dict[str, float]:
    """Return the scalars of a closed round by tag; what is not known has none.

    Args:
        metrics: with that round in them.
        learning_rate: of that round.
        weights: by worker, of those who pushed.
        now: monotonic seconds, of the throughput.
    """
    rate = metrics.examples_per_s(now)
    scalars = {
        "loss": metrics.loss,
        "accuracy": metrics.accuracy,
        "learning_rate": learning_rate,
        "examples_per_s": rate if rate > 0 else None,
        **{f"weight/{name}": weight for name, weight in weights.items()},
    }
    return {tag: value for tag, value in scalars.items() if value is not None}


def report_scalars(result: TestResult) -> dict[str, float]:
    """Return the scalars of an evaluator's report by tag."""
    scalars = {"test_loss": result.loss, "test_accuracy": result.accuracy}
    return {tag: value for tag, value in scalars.items() if value is not None}


@dataclass(frozen=True)
class Point:
    """What is known at one step; `wall_time` is seconds since 1970."""

    step: int
    wall_time: float
    scalars: Mapping[str, float]


def check_installed() -> None:
    """Check that the package is there that writes.

    Raises:
        ConfigurationError: it is missing.
    """
    try:
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--tensorboard needs a package that is not installed ({error.name}): {installing('tensorboard')}"
        ) from error


class EventFile:
    """One file of events, in TensorBoard's own format; not safe for several threads."""

    def __init__(self, directory: Path, first_step: int, wall_time: float) -> None:
        """Open a new file, which takes back what earlier files say of `first_step` and later.

        Args:
            directory: of all files of this run; it is made when it is not there.
            first_step: where this server begins.
            wall_time: seconds since 1970.

        Raises:
            ConfigurationError: the package that writes is missing, or the directory cannot be written.
        """
        check_installed()
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # Readers take files in the order of their names, which have but whole seconds without this.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer: Any = EventsWriter(str(directory.absolute() / "events"), suffix)
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(self._event(wall_time=wall_time, step=first_step, session_log=start))
            self._writer.flush()
        except OSError as error:
            raise ConfigurationError(
                f"--tensorboard {directory} cannot be written: {error.strerror}; name another directory"
            ) from error

    def write(self, point: Point) -> None:
        """Append a point.

        Raises:
            OSError: the disk is full, or broken.
        """
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars.items()]
        summary = self._summary(value=values)
        self._writer.write_event(self._event(wall_time=point.wall_time, step=point.step, summary=summary))

    def flush(self) -> None:
        """Bring everything to the disk.

        Raises:
            OSError: the disk is full, or broken.
        """
        self._writer.flush()

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: the disk is full, or broken.
        """
        self._writer.close()


class TensorBoard:
    """Takes the figures of a run, and has a thread write them."""

    def __init__(self, directory: Path, schedule: "Schedule", first_step: int, wall_time: float) -> None:
        """Open the file and start the thread.

        Args:
            directory: as `--tensorboard` names it.
            schedule: of the learning rate.
            first_step: where this server begins: 0, or the step that it resumed at.
            wall_time: seconds since 1970.

        Raises:
            ConfigurationError: the package that writes is missing, or the directory cannot be written.
        """
        self._directory = directory
        self._schedule = schedule
        self._names: set[str] = set()
        self._tested: TestResult | None = None
        self._dropped = 0
        self._points: queue.Queue[Point | None] = queue.Queue(MOST_WAITING)
        self._file = EventFile(directory, first_step, wall_time)
        self._thread = threading.Thread(target=self._write_all, name="tensorboard", daemon=True)
        self._thread.start()

    def round_closed(
        self, step: int, metrics: Metrics, weights: Mapping[str, float], now: float, wall_time: float
    ) -> None:
        """Take note of a closed round.

        Args:
            step: of the round.
            metrics: with that round in them.
            weights: by worker, of those who pushed.
            now: monotonic seconds.
            wall_time: seconds since 1970.
        """
        self.tested(metrics, wall_time)
        if is_kept(step):
            scalars = round_scalars(metrics, self._schedule(step), self._bounded(weights), now)
            self._post(Point(step, wall_time, scalars))

    def tested(self, metrics: Metrics, wall_time: float) -> None:
        """Take note of the evaluator's last report, if it is a new one."""
        result = metrics.test
        if result is not None and result != self._tested:
            self._tested = result
            self._post(Point(result.step, wall_time, report_scalars(result)))

    def close(self) -> None:
        """Write what is left, and close the file; again is harmless."""
        with contextlib.suppress(queue.Full):
            self._points.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._dropped:
            logger.warning("%d points for TensorBoard were dropped: the disk is slow", self._dropped)
            self._dropped = 0

    def _bounded(self, weights: Mapping[str, float]) -> dict[str, float]:
        for name in weights:
            if len(self._names) < MOST_NAMES:
                self._names.add(name)
        return {name: weight for name, weight in weights.items() if name in self._names}

    def _post(self, point: Point) -> None:
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._dropped += 1

    def _write_all(self) -> None:
        try:
            self._write_until_closed()
            self._file.close()
        except OSError as error:
            logger.warning(
                "TensorBoard's files in %s cannot be written (%s): the run goes on without them",
                self._directory,
                error.strerror,
            )
            with contextlib.suppress(OSError):
                self._file.close()
            while self._points.get() is not None:  # nobody may find the queue full
                pass

    def _write_until_closed(self) -> None:
        flush_at: float | None = None
        while True:
            wait_s = None if flush_at is None else flush_at - time.monotonic()
            try:
                point = self._points.get(timeout=None if wait_s is None else max(wait_s, 0.0))
            except queue.Empty:
                point = Point(0, 0.0, {})
            if point is None:
                return
            if point.scalars:
                self._file.write(point)
                flush_at = flush_at or time.monotonic() + FLUSH_S
            if flush_at is not None and time.monotonic() >= flush_at:
                self._file.flush()
                flush_at = None
