"""The directory of checkpoints: who may use it, which is the newest good one, which are kept."""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from protocol.errors import CheckpointError, ConfigurationError
from ps.checkpoints.files import sync_directory
from ps.checkpoints.format import (
    NAME,
    NO_FAULTS,
    Faults,
    NoFaults,
    Snapshot,
    directory_name,
    load,
    write_into,
)
from ps.settings.directories import make_own_directory

__all__ = ["NO_FAULTS", "CheckpointDirectory", "Faults", "NoFaults", "Snapshot", "checkpoints_in", "load"]

logger = logging.getLogger("weighmaster.ps")

LOCK = "lock"
_WRITING, _REMOVING = ".writing", ".removing"


class CheckpointDirectory:
    """A directory of checkpoints that this server alone uses, by a lock that ends with the process.

    Several threads may read; only one at a time may write. Make one with `open`.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, keep: int, faults: Faults, lock: int) -> None:
        self.path = path
        self._keep = keep
        self._faults = faults
        self._lock: int | None = lock
        self._damaged: set[str] = set()

    @classmethod
    def open(cls, path: Path, keep: int, faults: Faults = NO_FAULTS) -> "CheckpointDirectory":
        """Make the directory when it is not there, lock it, and remove what an interrupted server left unfinished.

        Args:
            path: the directory; what is made is for the owner alone.
            keep: how many checkpoints stay, at least 1.
            faults: faults on purpose, in the writing.

        Raises:
            ConfigurationError: another server uses it, or it is not safe to use: a link, somebody else's, others
                may write in it.
            CheckpointError: it cannot be made or written.
        """
        if keep < 1:
            raise ConfigurationError(f"at least 1 checkpoint must be kept, not {keep}")
        try:
            _make_directory(path)
            lock = _take_lock(path)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint directory {path} cannot be written: {error.strerror}; "
                "name another, or see to it that this one can be"
            ) from error
        directory = cls(path, keep, faults, lock)
        try:
            directory._remove_leftovers()
        except BaseException:
            directory.close()
            raise
        return directory

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is any, good or damaged; those that were abandoned do not count."""
        return bool(checkpoints_in(self.path))

    def newest(self) -> Snapshot | None:
        """Return the newest one that verifies; those that do not are named in the log and passed over.

        Returns:
            None when there is none at all.

        Raises:
            CheckpointError: there are some, and none can be used.
        """
        paths = checkpoints_in(self.path)
        problem = ""
        for path in paths:
            try:
                return load(path)
            except CheckpointError as error:
                problem = str(error)
                self._damaged.add(path.name)
                logger.warning("%s; it is passed over", problem)
        if not paths:
            return None
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {self.path} can be used ({problem}); "
            "put a copy in their place, or name another directory to start afresh"
        )

    def abandon_after(self, step: int) -> None:
        """Rename all of a greater step to `*.abandoned`: they are no part of the history that goes on.

        Raises:
            CheckpointError: one cannot be renamed.
        """
        for path in checkpoints_in(self.path):
            match = NAME.fullmatch(path.name)
            if match is None or int(match[1]) <= step:
                continue
            number, target = 1, path.with_name(f"{path.name}.abandoned")
            while os.path.lexists(target):
                number += 1
                target = path.with_name(f"{path.name}.{number}.abandoned")
            try:
                path.rename(target)
                sync_directory(self.path)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {path}, later than step {step}, cannot be renamed: {error.strerror}"
                ) from error
            logger.warning("checkpoint %s is later than step %d and is now %s", path, step, target.name)

    def write(self, snapshot: Snapshot, copied: Callable[[], None] | None = None) -> Path:
        """Write a checkpoint so that it is there whole, synced, or not at all; then remove those that are too many.

        One of the same step and epoch that is there already is left as it is.

        Args:
            snapshot: what to write.
            copied: called, at most once, when the snapshot is no longer read, which is before its files are synced.

        Raises:
            CheckpointError: it cannot be written; the others are all kept.
            LocalProtocolError: the snapshot holds what cannot be written.
        """
        name = directory_name(snapshot.step, snapshot.epoch)
        path, beside = self.path / name, self.path / f".{name}{_WRITING}"
        if path.is_dir() and not path.is_symlink():
            return path
        try:
            if beside.exists():  # could not be removed when it failed
                shutil.rmtree(beside)
            beside.mkdir(mode=0o700)
            written = datetime.now(UTC).isoformat(timespec="seconds")
            write_into(beside, snapshot, written, self._faults, copied or (lambda: None))
            self._faults.at("rename", snapshot.step)
            beside.rename(path)
            self._faults.at("parent", snapshot.step)
            sync_directory(self.path)
        except Exception as error:
            shutil.rmtree(beside, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"checkpoint of step {snapshot.step} cannot be written in {self.path}: {error.strerror}"
            ) from error
        logger.debug("checkpoint %s is written", path)
        self.prune()
        return path

    def prune(self) -> None:
        """Keep the newest ones and remove the others; one that is known to be damaged does not count as kept."""
        try:
            paths = checkpoints_in(self.path)
        except CheckpointError as error:
            logger.warning("%s; old checkpoints are not removed", error)
            return
        good = [index for index, path in enumerate(paths) if path.name not in self._damaged]
        if len(good) > self._keep:
            for path in paths[good[self._keep - 1] + 1 :]:
                self._remove(path)

    def close(self) -> None:
        """Let other servers use the directory; further calls do nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _remove(self, path: Path) -> None:
        beside = path.with_name(f".{path.name}{_REMOVING}")  # never a checkpoint with half of its files
        try:
            if beside.exists():
                shutil.rmtree(beside)
            path.rename(beside)
            shutil.rmtree(beside)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be removed: %s", path, error.strerror)

    def _remove_leftovers(self) -> None:
        for path in sorted(self.path.glob(".step-*")):
            if path.suffix not in (_WRITING, _REMOVING) or not NAME.fullmatch(path.stem[1:]):
                continue
            logger.info("removing %s: its server ended before it was finished", path)
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error.strerror)


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in a directory, good or damaged: greatest step first, of equal ones the latest.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    found = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                match = NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    found.append((int(match[1]), entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    except OSError as error:
        raise CheckpointError(f"the checkpoint directory {path} cannot be read: {error.strerror}") from error
    return [path / name for _, _, name in sorted(found, reverse=True)]


def _make_directory(path: Path) -> None:
    is_new = not os.path.lexists(path)
    make_own_directory("the checkpoint directory", path)
    if is_new:
        sync_directory(path.parent)


def _take_lock(path: Path) -> int:
    """Lock a directory and write our process id there; it must be possible to write a file, too."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        probe = path / f".probe{_WRITING}"
        with contextlib.suppress(FileExistsError):
            probe.mkdir(mode=0o700)
        probe.rmdir()
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise ConfigurationError(
            f"the checkpoint directory {path} is in use by another server, process {holder}; "
            "stop that one, or name another directory"
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return lock
