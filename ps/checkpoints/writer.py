"""Writes checkpoints beside the training: one thread, one snapshot at a time."""

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.errors import LocalProtocolError
from ps.checkpoints.directory import CheckpointDirectory, Snapshot

logger = logging.getLogger("weighmaster.ps")


class CheckpointWriter:
    """Writes snapshots in a thread of its own. A failure is told, counted, and does not stop anybody.

    Args:
        directory: where they go.
        idle: called from the writer's thread each time that one is written, or has failed, and another may begin.

    Attributes:
        failures: checkpoints that could not be written.
        last_step: of the last one that was written; None before the first.
        last_error: what was wrong with the last one that failed; "" before the first.
    """

    def __init__(self, directory: CheckpointDirectory, idle: Callable[[], None] = lambda: None) -> None:
        self.failures = 0
        self.last_step: int | None = None
        self.last_error = ""
        self._directory = directory
        self._idle = idle
        self._told: set[str] = set()
        self._changed = threading.Condition()  # guards all below
        self._task: tuple[Snapshot, Callable[[], None]] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written."""
        with self._changed:
            return self._task is not None

    def begin(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        """Have a snapshot written, and return at once.

        Args:
            snapshot: nothing in it may change before `done`.
            done: called once, from the writer's thread, when the snapshot is no longer read, written or not. The
                writer is busy for some time after that: files are synced.

        Raises:
            LocalProtocolError: another is being written, or the writer is closed.
        """
        with self._changed:
            if self._task is not None or self._closing:
                raise LocalProtocolError("a checkpoint cannot be begun while another is written, or after the end")
            self._task = (snapshot, done)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weighmaster-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; return whether that is so (not after a time-out)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._task is None, timeout_s)

    def write_now(self, snapshot: Snapshot) -> Path:
        """Wait for the one that is being written, then write another in the caller's thread.

        Raises:
            CheckpointError: it cannot be written; this is counted too.
        """
        self.wait()
        try:
            path = self._directory.write(snapshot)
        except Exception as error:
            self._count(error)
            raise
        self.last_step = snapshot.step
        return path

    def close(self) -> None:
        """Finish what is being written and end the thread; further calls do nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._task is not None or self._closing)
                if self._task is None:
                    return
                snapshot, done = self._task
            try:
                self._write(snapshot, _once(done))
            finally:
                del snapshot, done  # the memory may be needed before the next one comes
                with self._changed:
                    self._task = None
                    self._changed.notify_all()
                self._idle()

    def _write(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        try:
            try:
                self._directory.write(snapshot, done)
            finally:
                done()
        except Exception as error:  # noqa: BLE001 - a checkpoint less must not end the training
            self._count(error)
            kind = _kind(error)
            if kind not in self._told:
                self._told.add(kind)
                cure = "; make room, or give a lower --keep" if kind == "ENOSPC" else ""
                logger.warning("%s; training goes on without it, and this reason is told once%s", error, cure)
        else:
            self.last_step = snapshot.step

    def _count(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = str(error)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    calls = [call]

    def first_time_only() -> None:
        if calls:
            calls.pop()()

    return first_time_only


def _kind(error: Exception) -> str:
    """Return what failures of the same reason share, whatever step they name."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno is not None:
        return errno.errorcode.get(cause.errno, str(cause.errno))
    return type(error).__name__
