"""What a checkpoint holds of a server, and when one is taken: between the run and the files of `ps.checkpoints`."""

import contextlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from protocol.errors import CheckpointError, ConfigurationError, ManifestMismatch
from protocol.injector import CheckpointFaults, Faults
from protocol.tensors import Manifest
from ps.agreement import Agreement
from ps.checkpoints.directory import CheckpointDirectory, Snapshot
from ps.checkpoints.resume import check_resumable, reason_not_comparable, settings_of
from ps.checkpoints.writer import CheckpointWriter
from ps.closing import RoundCloser
from ps.coordination import course_state
from ps.coordination.coordinator import Coordinator
from ps.ensemble_mode import EnsembleMode
from ps.record import Record
from ps.settings.config import ServerConfig
from ps.storage.snapshots import StoreSnapshot
from ps.storage.store_config import NotFinite

logger = logging.getLogger("weighmaster.ps")

PACKAGES = ("numpy", "numba", "safetensors")
"""Their versions are kept: with others the last bits may differ."""


@dataclass(frozen=True, eq=False)
class Parts:
    """All of a server that lives on in a checkpoint."""

    course: Coordinator
    closer: RoundCloser
    record: Record
    agreement: Agreement
    ensemble: EnsembleMode | None


def software() -> dict[str, str]:
    """Return on what a server computes: versions, and the kind of machine."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


class Checkpointing:
    """Takes checkpoints while training goes on, and a last one.

    Methods are called under the server's lock, so none of them waits for the disk; `last` and `close` do, and are
    called without it when the run has ended.

    Args:
        directory: where they are kept.
        config: says when.
        epoch: random number of this start.
        secret: that draws the validated rounds.
        resumed_at: step that the run goes on from, or None.
        written: called without the lock, from the thread that writes, each time that it is through with one.

    Attributes:
        failures: checkpoints that could not be written.
        last_step: of the newest one that was written by this server, or None.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        config: ServerConfig,
        epoch: int,
        secret: bytes,
        resumed_at: int | None = None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._writer = CheckpointWriter(directory, written)
        self._config = config
        self._epoch = epoch
        self._secret = secret
        self._resumed_at = resumed_at
        self._is_due = False
        self._is_awaited = False
        self._waits = config.checkpoint_every == 1
        self._run_state: dict[str, Any] | None = None

    @property
    def failures(self) -> int:
        """Checkpoints that could not be written."""
        return self._writer.failures

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint that this server has written, or None."""
        return self._writer.last_step

    @property
    def waits(self) -> bool:
        """Whether the newest values are to be on the disk before anybody gets them.

        The last ones always are: who has got them leaves, and cannot help a server that died before it kept them.
        """
        return self._waits

    @property
    def holds_back(self) -> bool:
        """Whether nobody may get the current values yet, since their checkpoint is still to be written."""
        return self._is_awaited and (self._writer.busy or (self._waits and self._is_due))

    def accept_history(self) -> None:
        """Set aside checkpoints of later steps than the one that the run goes on from: they come again.

        Raises:
            CheckpointError: one cannot be renamed.
        """
        if self._resumed_at is not None:
            self._directory.abandon_after(self._resumed_at)

    def begin(self, parts: Parts) -> None:
        """Take what the first round begins with; values are held back until it is kept, or has failed."""
        self._run_state = course_state.state_of(parts.course)
        self._take(parts)
        self._is_awaited = True

    def round_closed(self, course: Coordinator) -> None:
        """Note where the run stands if a checkpoint is due; one that is being written delays the next."""
        is_last = course.step >= self._config.steps
        self._waits = is_last or self._config.checkpoint_every == 1
        self._is_awaited |= self._waits
        self._is_due |= is_last or course.step % self._config.checkpoint_every == 0
        if self._is_due and not self._writer.busy:
            self._run_state = course_state.state_of(course)

    def take_due(self, parts: Parts) -> None:
        """Take what is due, before the next update changes it."""
        if self._run_state is not None:
            self._take(parts)
            self._is_awaited = self._waits

    def take_delayed(self, parts: Parts) -> None:
        """Take what came due while another was written, if values are held back for it; all rounds must be settled.

        Only rounds that close without waiting for everybody's answer close meanwhile: those of single pushes. One
        checkpoint then serves for all of them.
        """
        if self.holds_back and not self._writer.busy:
            self._run_state = course_state.state_of(parts.course)
            self.take_due(parts)

    def _take(self, parts: Parts) -> None:
        run, self._run_state = self._run_state, None
        assert run is not None and parts.agreement.store is not None
        self._is_due = False
        held = parts.agreement.store.snapshot(parts.closer.references)
        try:
            snapshot = self._snapshot(parts, held, run)
            self._writer.begin(snapshot, held.release)
        except BaseException:
            held.release()
            raise

    def last(self, parts: Parts) -> None:
        """Write where a run has ended, if that is not written yet.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._writer.wait()
        store = parts.agreement.store
        newest = self._resumed_at if self._writer.last_step is None else self._writer.last_step
        if store is None or not parts.course.has_values or newest == parts.course.step:
            return
        if store.current.step != parts.course.step:
            logger.warning(
                "no last checkpoint is written, since the values of step %d could not be made: "
                "a run that goes on begins with an earlier one",
                parts.course.step,
            )
            return
        held = store.snapshot(parts.closer.references)
        try:
            self._writer.write_now(self._snapshot(parts, held, course_state.state_of(parts.course)))
        finally:
            held.release()

    def close(self) -> None:
        """End the writer, once what it writes is written."""
        self._writer.close()

    def _snapshot(self, parts: Parts, held: StoreSnapshot, run: Mapping[str, Any]) -> Snapshot:
        store = parts.agreement.store
        assert store is not None and held.step == run["step"], "values and state must be of one step"
        state = {
            "settings": settings_of(self._config),
            "software": software(),
            "secret": self._secret,
            "workers": self._config.ranks,
            "updates": held.updates,
            "run": run,
            "closer": parts.closer.state(),
            "record": parts.record.state(),
            "manifest": store.layout.manifest.to_wire() if parts.ensemble is None else None,
            "ensemble": None if parts.ensemble is None else parts.ensemble.state(),
        }
        return Snapshot(int(run["step"]), self._epoch, held.tensors, state)


@contextlib.contextmanager
def open_checkpoints(
    config: ServerConfig, faults: Faults
) -> Iterator[tuple[CheckpointDirectory | None, Snapshot | None]]:
    """Open the directory of checkpoints, if there is to be one, and find out where to go on from, if anywhere.

    Raises:
        ConfigurationError: there are checkpoints, and they are not to be gone on from or cannot be with these
            options; or another server uses the directory.
        CheckpointError: there are checkpoints and none is good, or the directory cannot be written.
    """
    if config.checkpoint_dir is None:
        yield None, None
        return
    directory = CheckpointDirectory.open(config.checkpoint_dir, config.keep, CheckpointFaults(faults))
    try:
        yield directory, _resumed_from(config, directory)
    finally:
        directory.close()


def _resumed_from(config: ServerConfig, directory: CheckpointDirectory) -> Snapshot | None:
    if not config.resume:
        if directory.has_checkpoints:
            raise ConfigurationError(
                f"there are checkpoints in {directory.path}: go on from them with --resume, "
                "or name another --checkpoint-dir"
            )
        return None
    snapshot = directory.newest()
    if snapshot is None:
        logger.info("no checkpoint in %s yet: the run starts afresh", directory.path)
        return None
    if config.gathers:
        config = with_known_workers(config, snapshot)
        logger.info("the checkpoint is of a run for %d workers, and so is this one", config.ranks)
    try:
        changes = check_resumable(snapshot.state["settings"], config)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint of step {snapshot.step} does not say of which run it is") from error
    for change in changes:
        logger.warning("%s", change)
    logger.info("going on from step %d of %d, of a checkpoint in %s", snapshot.step, config.steps, directory.path)
    if snapshot.step >= config.steps:
        logger.info("no step is left to do; more --steps would go on")
    return snapshot


def with_known_workers(config: ServerConfig, restored: Snapshot | None) -> ServerConfig:
    """Return a configuration with the checkpoint's number of workers, if it leaves that open and there is one.

    Raises:
        ConfigurationError: an option does not go with so many.
        CheckpointError: the checkpoint does not say the number.
    """
    if restored is None or not config.gathers:
        return config
    settings = restored.state.get("settings")
    if isinstance(settings, Mapping) and settings.get("workers", 0) is None:
        raise ConfigurationError(
            f"the checkpoint of step {restored.step} is of a run to which workers come and go: it has no number of "
            "workers for --workers auto; leave --workers out and give the same --shards, or give a number"
        )
    workers = restored.state.get("workers")
    if not isinstance(workers, int):
        raise CheckpointError(f"the checkpoint of step {restored.step} does not say how many workers there are")
    return config.for_workers(workers)


def restore(parts: Parts, config: ServerConfig, snapshot: Snapshot) -> None:
    """Put a server that nobody has joined yet where a checkpoint was taken.

    Raises:
        CheckpointError: the checkpoint cannot be used: something is missing, or does not fit the rest.
        ConfigurationError: the memory does not suffice, or an option does not fit what the checkpoint holds.
    """
    state = snapshot.state
    try:
        moved = config.ranks - int(state["workers"])
        if parts.ensemble is None:
            store = parts.agreement.restore(Manifest.from_wire(state["manifest"]))
            store.restore(snapshot.step, int(state["updates"]), snapshot.tensors, moved)
            parts.closer.restore(state["closer"], moved, store.validator_rows)
        else:
            parts.ensemble.restore(state["ensemble"], snapshot.step, int(state["updates"]), snapshot.tensors)
            parts.agreement.restore_ensemble()
        parts.record.restore(state["record"], snapshot.step)
        course_state.restore(parts.course, state["run"], moved)
    except KeyError as error:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} cannot be used: it says nothing of {error}"
        ) from error
    except (ManifestMismatch, NotFinite, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint of step {snapshot.step} cannot be used: {error}") from error


def changes_since(config: ServerConfig, snapshot: Snapshot) -> str | None:
    """Return why values may differ from those of a run that was never stopped, or None."""
    here, there = software(), dict(snapshot.state["software"])
    changed = [name for name in here if there.get(name) != here[name]]
    if changed:
        return f"resumed with another {' and '.join(changed)}"
    return reason_not_comparable(snapshot.state["settings"], config)
