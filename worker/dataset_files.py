"""The file formats of data sets: IDX, CIFAR-10's binary records, and npz. Nothing is ever unpickled.

The readers are strict. A file is read only as far as its own header says, after that size has been checked,
and everything that is wrong with it becomes a `ConfigurationError` with the file's path.

Sources: http://yann.lecun.com/exdb/mnist (IDX), https://www.cs.toronto.edu/~kriz/cifar.html (records).
"""

import gzip
import lzma
import math
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigurationError
from protocol.user_paths import Entry, look

MAX_IDX_BYTES = 1 << 30
"""Values in one IDX file: 20 times MNIST's training images, and a damaged header cannot ask for more."""

MAX_CIFAR_FILE_BYTES = 1 << 29
"""One file of CIFAR-10 records: 17 times the real one's 30.7 MB."""

MAX_TAR_TAIL_BYTES = 1 << 20
"""What may follow the last member of an archive: tar pads to 10 KB."""

CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST_FILE = "test_batch.bin"
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32

Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Features and labels."""

_IDX_UBYTE = 0x08
_DAMAGED = (
    *(EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile),
    *(UnicodeDecodeError, tokenize.TokenError),  # of names in a directory of zip, and of the header of an array
    NotImplementedError,  # a version of zip, or a way to compress, that no file of NumPy's has
)


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn whatever the standard library says of a damaged or unreadable file into one sentence."""
    try:
        yield
    except _DAMAGED as error:
        raise _bad(path, f"is damaged or was not copied completely ({error})") from error
    except OSError as error:
        raise ConfigurationError(f"data file {path} cannot be read: {error.strerror or error}") from error


def is_data_file(path: Path) -> bool:
    """Tell whether there is such a file.

    Raises:
        ConfigurationError: it cannot be told, as in a folder that this user may not enter.
    """
    return look(path, "data file") is Entry.FILE


def _bad(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"data file {path} {what}: delete it and fetch it again")


# ---- IDX -----------------------------------------------------------------------------------------------


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, gzipped or plain (told apart by content, not by name).

    Args:
        path: the file.
        dimensions: how many it must have: 3 for images, 1 for labels.

    Returns:
        uint8 array of the shape in the file's header.

    Raises:
        ConfigurationError: the file cannot be read, is not such a file, or is shorter or longer than it says.
    """
    with _blaming(path), path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not packed:
            return _parse_idx(path, raw, dimensions)
        with gzip.GzipFile(fileobj=raw) as unpacked:
            return _parse_idx(path, unpacked, dimensions)


def _parse_idx(path: Path, stream: _Stream, dimensions: int) -> NDArray[np.uint8]:
    magic = _read_at_most(stream, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise _bad(path, f"is not an IDX file (it starts with {magic.hex(' ') or 'nothing'})")
    if magic[2] != _IDX_UBYTE:
        raise _bad(path, f"holds IDX values of type 0x{magic[2]:02x} instead of unsigned bytes (0x08)")
    if magic[3] != dimensions:
        raise _bad(path, f"has {magic[3]} dimensions instead of {dimensions} (images for labels?)")
    header = _read_at_most(stream, 4 * dimensions)
    if len(header) < 4 * dimensions:
        raise _bad(path, "ends within its header")
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
    size = math.prod(shape)
    if size > MAX_IDX_BYTES:
        raise _bad(path, f"claims {size:,} values, more than the {MAX_IDX_BYTES:,} allowed")
    values = np.empty(size, np.uint8)
    found = _fill(stream, values)
    if found < size:
        raise _bad(path, f"ends after {found:,} of the {size:,} values that its header promises")
    if stream.read(1):
        raise _bad(path, f"goes on after the {size:,} values that its header promises")
    return values.reshape(shape)


def _read_at_most(stream: _Stream, size: int) -> bytes:
    buffer = np.empty(size, np.uint8)
    return buffer[: _fill(stream, buffer)].tobytes()


def _fill(stream: _Stream, buffer: NDArray[np.uint8]) -> int:
    """Read into the buffer until it is full or the stream ends; return the bytes read."""
    view = buffer.data
    found = 0
    while found < len(view):
        block = stream.read(min(len(view) - found, 1 << 20))
        if not block:
            break
        view[found : found + len(block)] = block
        found += len(block)
    return found


# ---- CIFAR-10, binary version --------------------------------------------------------------------------


def read_cifar_folder(folder: Path) -> tuple[Arrays, Arrays]:
    """Read the six unpacked files of CIFAR-10's binary version, with any number of records each.

    Returns:
        (train, test), each features uint8 [N, 32, 32, 3] and labels uint8 [N].

    Raises:
        ConfigurationError: a file is missing, cannot be read, or does not consist of records.
    """
    records: dict[str, NDArray[np.uint8]] = {}
    for name in (*CIFAR_TRAIN_FILES, CIFAR_TEST_FILE):
        path = folder / name
        if not is_data_file(path):
            raise ConfigurationError(
                f"data file {path} is missing: unpack cifar-10-binary.tar.gz completely, or give its folder"
            )
        with _blaming(path), path.open("rb") as stream:
            records[name] = _read_records(path, "", stream, path.stat().st_size)
    return _arrays(folder, records)


def read_cifar_archive(path: Path) -> tuple[Arrays, Arrays]:
    """Read `cifar-10-binary.tar.gz` in one pass; the six members are known by exact name, all others skipped.

    Nothing is written to disk.

    Returns:
        (train, test), each features uint8 [N, 32, 32, 3] and labels uint8 [N].

    Raises:
        ConfigurationError: the archive is damaged, lacks a member, or a member does not consist of records.
    """
    wanted = {f"{CIFAR_FOLDER}/{name}": name for name in (*CIFAR_TRAIN_FILES, CIFAR_TEST_FILE)}
    records: dict[str, NDArray[np.uint8]] = {}
    with _blaming(path), gzip.open(path, "rb") as unpacked:
        with tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for member in archive:
                name = wanted.get(member.name)
                if name is None:
                    continue
                stream = archive.extractfile(member) if member.isreg() else None
                if stream is None or name in records:
                    raise _bad(path, f"holds {member.name!r} twice, or not as an ordinary file")
                with closing(stream):
                    records[name] = _read_records(path, f"member {member.name!r} of ", stream, member.size)
        # To the end of the gzip stream, because only there its checksum is compared.
        if len(_read_at_most(unpacked, MAX_TAR_TAIL_BYTES)) == MAX_TAR_TAIL_BYTES:
            raise _bad(path, "goes on long after its last member")
    missing = [member for member, name in wanted.items() if name not in records]
    if missing:
        raise _bad(path, f"has no member {missing[0]!r}; is it the binary version?")
    return _arrays(path, records)


def _read_records(path: Path, member: str, stream: _Stream, size: int) -> NDArray[np.uint8]:
    if size == 0 or size % CIFAR_RECORD_BYTES:
        raise ConfigurationError(
            f"{member}data file {path} has {size:,} bytes, which are not records of {CIFAR_RECORD_BYTES:,}: "
            f"fetch CIFAR-10's binary version again"
        )
    if size > MAX_CIFAR_FILE_BYTES:
        raise ConfigurationError(
            f"{member}data file {path} has {size:,} bytes, more than the {MAX_CIFAR_FILE_BYTES:,} allowed"
        )
    records = np.empty(size, np.uint8)
    if _fill(stream, records) < size:
        raise _bad(path, "ends too early")
    return records.reshape(-1, CIFAR_RECORD_BYTES)


def _arrays(path: Path, records: dict[str, NDArray[np.uint8]]) -> tuple[Arrays, Arrays]:
    train = _split_records(path, [records[name] for name in CIFAR_TRAIN_FILES])
    return train, _split_records(path, [records[CIFAR_TEST_FILE]])


def _split_records(path: Path, parts: Sequence[NDArray[np.uint8]]) -> Arrays:
    """Turn records (a label, then the image channel by channel) into images with the channel last."""
    labels = np.concatenate([part[:, 0] for part in parts])
    check_label_bytes(path, labels)
    features = np.empty((len(labels), 32, 32, 3), np.uint8)
    start = 0
    for part in parts:
        images = part[:, 1:].reshape(-1, 3, 32, 32)
        features[start : start + len(part)] = images.transpose(0, 2, 3, 1)
        start += len(part)
    return features, labels


def check_label_bytes(path: Path, labels: NDArray[np.uint8]) -> None:
    """Check that all labels are those of ten classes.

    Raises:
        ConfigurationError: naming the first example whose label is not 0 to 9.
    """
    if labels.size and labels.max() > 9:
        first = int(np.argmax(labels > 9))
        raise _bad(path, f"has label {labels[first]} at example {first:,}, where only 0 to 9 exist")


# ---- npz -----------------------------------------------------------------------------------------------


def read_npz(path: Path, keys: Sequence[str]) -> list[NDArray[Any]]:
    """Read named arrays of an npz file; what the headers claim is checked before anything is allocated.

    Args:
        path: a file of `numpy.savez` or `numpy.savez_compressed`.
        keys: the arrays to read; all must be there, others are ignored.

    Returns:
        The arrays in the order of `keys`.

    Raises:
        ConfigurationError: the file is missing or damaged, lacks a key, or has an array of Python objects.
    """
    if not is_data_file(path):
        raise ConfigurationError(f"data file {path} is missing: check the path after npz:")
    with _blaming(path), zipfile.ZipFile(path) as archive:
        present = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
        for key in keys:
            if key not in present:
                raise ConfigurationError(
                    f"data file {path} has no array {key!r}, only {_listed(present)}: save it with "
                    f"numpy.savez(file, {', '.join(f'{name}=...' for name in keys)})"
                )
        return [_read_npz_array(path, archive, key) for key in keys]


def _listed(names: set[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in sorted(names)[:8])
    return (shown + (", ..." if len(names) > 8 else "")) or "nothing"


def _read_npz_array(path: Path, archive: zipfile.ZipFile, key: str) -> NDArray[Any]:
    entry = archive.getinfo(f"{key}.npy")
    try:
        with archive.open(entry) as stream:
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
            header_bytes = stream.tell()
        if dtype.hasobject:
            raise ConfigurationError(
                f"array {key!r} of data file {path} holds Python objects, which are never loaded because that "
                f"could run code: save it as a numeric array"
            )
        claimed_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or claimed_bytes != entry.file_size - header_bytes:
            raise _bad(path, f"is damaged (the size of array {key!r} is not what its header says)")
        with archive.open(entry) as stream:
            array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise _bad(path, f"has an array {key!r} that cannot be read ({error})") from error
    except MemoryError as error:
        raise ConfigurationError(
            f"array {key!r} of data file {path} does not fit into memory: {entry.file_size:,} bytes"
        ) from error
    return array
