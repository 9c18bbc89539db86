"""What becomes of a run that has ended: its last checkpoint, its values, its summary, its exit code."""

from typing import Any

from numpy.typing import NDArray

from protocol.errors import ExitCode, Interrupted
from protocol.messages import Status
from ps.checkpointing import Checkpointing, Parts
from ps.coordination.instructions import Finish
from ps.modes import Mode
from ps.storage.store import Store

RESUMABLE = (Status.DONE, Status.INTERRUPTED, Status.LOST, Status.NO_PROGRESS)
"""A run that ends so leaves a last checkpoint: with more steps, or more luck, another can go on from it."""

EXIT_CODES = {
    Status.DONE: ExitCode.DONE,
    Status.DIVERGED: ExitCode.DIVERGED,
    Status.LOST: ExitCode.NO_PROGRESS,
    Status.NO_PROGRESS: ExitCode.NO_PROGRESS,
    Status.INTERRUPTED: ExitCode.SIGTERM,
    Status.FAILED: ExitCode.CONFIGURATION,
}


class Ending:
    """Asked when `ParameterServer.run` has returned, or is about to.

    Args:
        parts: of the server.
        mode: may have more to say in the summary.
        checkpoints: where the last one goes, or None.

    Attributes:
        signal: by which the run was asked to end, or None.
        seconds: that it took.
    """

    def __init__(self, parts: Parts, mode: Mode, checkpoints: Checkpointing | None) -> None:
        self.signal: str | None = None
        self.seconds = 0.0
        self._parts = parts
        self._mode = mode
        self._checkpoints = checkpoints

    @property
    def _store(self) -> Store | None:
        return self._parts.agreement.store

    def checked(self, finish: Finish) -> Finish:
        """Return how the run ended: as diverged if values overflowed so late that no push told of it."""
        bad = self._store.first_not_finite() if finish.status is Status.DONE and self._store is not None else None
        if bad is None:
            return finish
        why = f"the final values of {bad!r} are not finite; try a lower --learning-rate, or --clip-norm"
        return Finish(Status.DIVERGED, why)

    def keep_last(self, finish: Finish) -> None:
        """Write the last checkpoint of a run that another one may go on from; it waits for the disk.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._checkpoints is not None and finish.status in RESUMABLE:
            self._checkpoints.last(self._parts)

    def exit_code(self, finish: Finish) -> ExitCode:
        """Return the code with which the process ends."""
        if self.signal and finish.status is Status.INTERRUPTED:
            return Interrupted(self.signal).exit_code
        return EXIT_CODES[finish.status]  # a signal that came after the end changes nothing of it

    def summary(self, finish: Finish) -> dict[str, Any]:
        """Return what became of the run, ready for JSON."""
        summary = self._parts.record.summary(self._parts.course, finish.status, self.seconds)
        if self._checkpoints is not None:
            summary["checkpoint_step"] = self._checkpoints.last_step
            summary["checkpoint_failures"] = self._checkpoints.failures
        return {**summary, **self._mode.summary()}

    def final_values(self) -> dict[str, NDArray[Any]] | None:
        """Return the final values by name (their moving average if one is kept), or None if there are none."""
        return self._store.export() if self._store is not None and self._parts.course.has_values else None
