"""What a run leaves behind: its directory, the port file, the exported values, the summary."""

import contextlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from protocol.errors import CheckpointError, ConfigurationError
from protocol.tensors import FLOATING
from ps.checkpoints.tensor_files import TAGS
from ps.settings.directories import make_own_directory
from ps.storage.receiver import COMPUTED

logger = logging.getLogger("weighmaster.ps")

INITIAL_DTYPES = frozenset(tag for name, tag in TAGS.items() if name in COMPUTED or name not in FLOATING)
"""What safetensors calls the dtypes that a variable can have."""


def make_run_directory(path: Path) -> None:
    """Make the directory of a run, for the owner alone; one that is there must be his own.

    Raises:
        ConfigurationError: it cannot be made, is a link, belongs to somebody else, or others may write in it.
    """
    try:
        make_own_directory("the run directory", path)
    except OSError as error:
        raise ConfigurationError(f"the run directory {path} cannot be made: {error.strerror}") from error


def check_writable(option: str, path: Path) -> None:
    """Check at the start that a file can be written at the end.

    Raises:
        ConfigurationError: its directory is missing or not writable, a directory stands in its place, or no file
            can have this name.
    """
    try:
        for each in (path, _beside(path)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # which is said below, in other words
                each.lstat()
        is_directory, has_directory = path.is_dir(), path.parent.is_dir()
    except OSError as error:
        raise ConfigurationError(f"{option} {path} cannot be written: {error.strerror}") from error
    if is_directory:
        raise ConfigurationError(f"{option} {path} is a directory; name a file")
    if not has_directory or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{option} {path}: the directory {path.parent} is missing or cannot be written")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all: beside it, synced, then renamed into place."""
    write_all(path, (data,))


def write_all(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of parts, one after the other, so that it is there whole or not at all; see `write_whole`."""
    beside = _beside(path)
    beside.unlink(missing_ok=True)  # left by one of the same number that was killed, as in a container's restart
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """Return where a file is written before it is renamed; the name is longer than its own."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_port_file(path: Path, port: int) -> None:
    """Tell the port: in decimal, and a newline.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        write_whole(path, f"{port}\n".encode())
    except OSError as error:
        raise ConfigurationError(f"--port-file {path} cannot be written: {error.strerror}") from error


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary as JSON.

    Raises:
        CheckpointError: the file cannot be written.
    """
    _write_result(path, lambda: json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")


def export_values(path: Path, values: Mapping[str, NDArray[Any]]) -> None:
    """Write values by name as safetensors.

    Raises:
        CheckpointError: the file cannot be written.
    """
    _write_result(path, lambda: save(dict(values)))


def _write_result(path: Path, content: Callable[[], bytes]) -> None:
    try:
        write_whole(path, content())
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be written: {reason}") from error


class RoundLog:
    """A line of JSON for each closed round, in a file; if it cannot be written, that is said once.

    What another run has left there is replaced with the first line, unless `go_back` says that this one goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._broken = False
        self._mode: Literal["w", "a"] = "w"  # not before a round: a server that cannot start must cost nobody a log

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; it is in the file after the next `flush`."""
        if self._broken:
            return
        try:
            if self._file is None:
                self._file = self._path.open(self._mode, encoding="utf-8")
                self._mode = "a"
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)

    def go_back(self, step: int) -> None:
        """Drop the lines of rounds from `step` on, which a server has written that was killed: each comes again.

        Lines that are torn are dropped too, and of a step that is there twice the earlier ones. The file is
        replaced as a whole.
        """
        self.close()
        self._mode = "a"
        try:
            if self._path.exists():
                starts = _lines_before(self._path, step)
                with self._path.open("rb") as old:
                    write_all(self._path, (_line_at(old, start) for start in starts))
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Hand what was written to the system."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        self._broken, file, self._file = True, self._file, None
        logger.warning("%s cannot be written (%s): the run goes on without it", self._path, error.strerror)
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _lines_before(path: Path, step: int) -> "array[int]":
    """Return where the lines of rounds before `step` begin, ascending in steps: the last line of each."""
    steps, starts = array("q"), array("q")
    start = 0
    with path.open("rb") as file:
        for line in file:
            number = _step_of(line)
            if number is not None:
                while steps and steps[-1] >= number:
                    steps.pop()
                    starts.pop()
                if number < step:
                    steps.append(number)
                    starts.append(start)
            start += len(line)
    return starts


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _line_at(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    return file.readline().rstrip(b"\n") + b"\n"


def load_initial_values(path: Path) -> dict[str, NDArray[Any]]:
    """Read initial values by name.

    Raises:
        ConfigurationError: the file is missing or damaged, or has a tensor of a dtype that no variable can have.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ConfigurationError(f"--init {path} is no plain file: name a file of safetensors")
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                dtype = file.get_slice(name).get_dtype()
                if dtype not in INITIAL_DTYPES:
                    raise ConfigurationError(
                        f"--init {path}: tensor {name!r} is {dtype}, and the server computes in float32 and "
                        "float64 only: convert it"
                    )
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigurationError(f"--init {path} cannot be read as safetensors: {error}") from error
