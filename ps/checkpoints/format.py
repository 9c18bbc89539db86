"""One checkpoint: a snapshot as the files of a directory, and back.

Tensors are in safetensors files, all else in `state.json`. `manifest.json`, written last, has the length and the
checksum of each file, and a checksum of its own. Nothing is ever unpickled.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from protocol.errors import CheckpointError, LocalProtocolError
from ps.checkpoints import tensor_files
from ps.checkpoints.files import (
    Content,
    checksum_of,
    create_file,
    read_checked,
    read_small,
    sync_directory,
    write_buffers,
)
from ps.checkpoints.state_codec import decode_state, encode_state

NAME = re.compile(r"step-([0-9]{10,})-([0-9a-f]{16})")
"""Name of a checkpoint's directory: its step, and the epoch in hex."""

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
"""A manifest has a few lines for each of a few files."""

STATE = "state"
_STEM = re.compile(r"[a-z]+")
_FILE = re.compile(r"[a-z]+\.(safetensors|json)")
_FORMAT, _VERSION = "weighmaster checkpoint", 1


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that a server needs to go on from a step. Nothing in it may change while it is being written.

    Attributes:
        step: number of the values.
        epoch: random number of the server's start, 64 bits.
        tensors: file ("values", "optimizer", "references": lower-case letters) to arrays by name; dtypes of
            `tensor_files.TAGS`. A file without tensors is not written, nor restored.
        state: everything else: what `state_codec.encode_state` takes. Tuples are restored as lists.
    """

    step: int
    epoch: int
    tensors: Mapping[str, Mapping[str, NDArray[Any]]]
    state: Mapping[str, Any]


class Faults(Protocol):
    """Faults on purpose."""

    def at(self, point: str, step: int) -> None:
        """Do harm, or nothing, at a point in the writing of checkpoint `step`.

        Points, in order: "file" (after the first file), "manifest" (before the manifest is written), "rename"
        (before the directory gets its name), "parent" (after that, before the name is synced).
        """


class NoFaults:
    """Does nothing at any point."""

    def at(self, point: str, step: int) -> None:
        """Do nothing."""


NO_FAULTS = NoFaults()


@dataclass(frozen=True)
class Listing:
    """What a checkpoint's manifest says: its step, its epoch, when it was written (UTC), what its files hold."""

    step: int
    epoch: int
    written: str
    files: Mapping[str, Content]

    def encode(self) -> bytes:
        """Return the manifest as JSON; the last entry is a checksum over the others."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "epoch": f"{self.epoch:016x}",
            "written": self.written,
            "files": {name: {"bytes": c.size_bytes, "xxh3_128": c.checksum} for name, c in self.files.items()},
        }
        body["xxh3_128"] = checksum_of(json.dumps(body).encode("ascii"))
        return json.dumps(body, indent=1).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> "Listing":
        """Rebuild what `encode` gave.

        Raises:
            ValueError: not a bit of it may differ; the text says what is wrong.
        """
        match json.loads(text):
            case {"format": "weighmaster checkpoint", "version": int(version)} if version != _VERSION:
                raise ValueError(f"it is of version {version}, and this program reads version {_VERSION}")
            case {"step": int(step), "epoch": str(epoch), "written": str(written), "files": dict(files)}:
                contents = {name: _content(name, entry) for name, entry in files.items()}
                listing = cls(step, int(epoch, 16), written, contents)
                if listing.encode() == text:
                    return listing
        raise ValueError("its checksum differs")


def directory_name(step: int, epoch: int) -> str:
    """Return the name of a checkpoint's directory."""
    name = f"step-{step:010d}-{epoch:016x}"
    if not NAME.fullmatch(name):
        raise LocalProtocolError(f"step {step} of epoch {epoch} cannot be the name of a checkpoint")
    return name


def write_into(
    directory: Path, snapshot: Snapshot, written: str, faults: Faults, copied: Callable[[], None]
) -> None:
    """Write a snapshot into an empty directory and sync all of it.

    Args:
        directory: made by the caller.
        snapshot: what to write; its arrays are not copied.
        written: the time, for people.
        faults: see `Faults`.
        copied: called once the snapshot is no longer read.

    Raises:
        OSError: the system refuses.
        LocalProtocolError: the snapshot holds what cannot be written.
    """
    state, arrays = encode_state(snapshot.state)
    tensors = {**snapshot.tensors, STATE: arrays}
    if STATE in snapshot.tensors or not all(_STEM.fullmatch(stem) for stem in tensors):
        raise LocalProtocolError(f"files of tensors cannot be named {sorted(snapshot.tensors)}")
    parts = {f"{stem}.safetensors": tensor_files.encode(named) for stem, named in tensors.items() if named}
    parts[f"{STATE}.json"] = [memoryview(state)]
    contents: dict[str, Content] = {}
    with contextlib.ExitStack() as files:
        descriptors = []
        for name, buffers in parts.items():
            descriptors.append(create_file(directory / name, sum(len(buffer) for buffer in buffers)))
            files.callback(os.close, descriptors[-1])
            contents[name] = write_buffers(descriptors[-1], buffers)
            if len(contents) == 1:
                faults.at("file", snapshot.step)
        copied()
        for descriptor in descriptors:
            os.fsync(descriptor)
        faults.at("manifest", snapshot.step)
        manifest = create_file(directory / MANIFEST)
        files.callback(os.close, manifest)
        write_buffers(manifest, [memoryview(Listing(snapshot.step, snapshot.epoch, written, contents).encode())])
        os.fsync(manifest)
    sync_directory(directory)


def load(path: Path) -> Snapshot:
    """Read a checkpoint and verify all of it; its arrays are fresh memory.

    Raises:
        CheckpointError: naming the file, and what is wrong with it.
    """
    listing = read_listing(path)
    files: dict[str, NDArray[Any]] = {}
    for name, content in listing.files.items():
        with _naming(path, name):
            files[name] = read_checked(path / name, content)
    tensors: dict[str, dict[str, NDArray[Any]]] = {}
    for name, file in files.items():
        if name.endswith(".safetensors"):
            with _naming(path, name):
                tensors[name.removesuffix(".safetensors")] = tensor_files.decode(file)
    with _naming(path, f"{STATE}.json"):
        if f"{STATE}.json" not in files:
            raise ValueError("the manifest does not list it")
        state = decode_state(files[f"{STATE}.json"].tobytes(), tensors.pop(STATE, {}))
    return Snapshot(listing.step, listing.epoch, tensors, state)


def read_listing(path: Path) -> Listing:
    """Read the manifest of a checkpoint and verify it, but not the files that it lists.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}: name a directory like {directory_name(100, 1)}")
    with _naming(path, MANIFEST):
        listing = Listing.decode(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))
        if NAME.fullmatch(path.name) and path.name != directory_name(listing.step, listing.epoch):
            raise ValueError(f"it is of step {listing.step} of epoch {listing.epoch:016x}, not of its directory's")
    return listing


def _content(name: str, entry: object) -> Content:
    match entry:
        case {"bytes": int(size_bytes), "xxh3_128": str(checksum)} if _FILE.fullmatch(name) and name != MANIFEST:
            return Content(size_bytes, checksum)
    raise ValueError(f"its entry {name!r} is not valid")


@contextlib.contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Say which file of which checkpoint it is that cannot be used."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} cannot be used: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: {name} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be used: {name} is damaged: {error}") from error
