"""The files of a checkpoint on the disk: written in slices with a checksum, read with a check of it.

The checksum is XXH3 of 128 bits (https://github.com/Cyan4973/xxHash): it costs less than the writing and finds
damage. It does not guard against somebody who edits a file on purpose.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.arena import aligned_empty

SLICE_BYTES = 4 << 20
"""Written or read by one call: still in the cache when the checksum has seen it, and soon over."""

MAX_BUFFERS = 512
"""Given to one call; the system takes 1024."""

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class Content:
    """What a file holds: its length in bytes, and XXH3 of 128 bits over it, in hex."""

    size_bytes: int
    checksum: str


def checksum_of(data: bytes) -> str:
    """Return XXH3 of 128 bits, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def create_file(path: Path) -> int:
    """Make a file that only the owner may read, and return its descriptor; one that is there is an error."""
    return os.open(path, _NEW_FILE, 0o600)


def write_buffers(descriptor: int, buffers: Iterable[memoryview]) -> Content:
    """Write buffers of bytes one after another, straight from their memory. The file is not synced.

    Raises:
        OSError: the system refuses.
    """
    checksum = xxhash.xxh3_128()
    size_bytes = 0
    for batch in _batches(buffers):
        for part in batch:
            checksum.update(part)
            size_bytes += len(part)
        _write_all(descriptor, batch)
    return Content(size_bytes, checksum.hexdigest())


def read_checked(path: Path, expected: Content) -> NDArray[np.uint8]:
    """Read a whole file into fresh memory at a multiple of 64, [bytes], and check it on the way.

    Raises:
        OSError: it cannot be read, or is a link.
        ValueError: it is not what was expected; the text says in what.
    """
    descriptor = os.open(path, _OLD_FILE)
    try:
        size_bytes = _plain_size(descriptor)
        if size_bytes != expected.size_bytes:
            raise ValueError(f"it is {size_bytes} bytes long instead of {expected.size_bytes}")
        buffer = aligned_empty(size_bytes)
        checksum = xxhash.xxh3_128()
        for part in _read_slices(descriptor, buffer.data):
            checksum.update(part)
    finally:
        os.close(descriptor)
    if checksum.hexdigest() != expected.checksum:
        raise ValueError("its checksum differs")
    return buffer


def read_small(path: Path, most_bytes: int) -> bytes:
    """Read a file of at most so many bytes.

    Raises:
        OSError: it cannot be read, or is a link.
        ValueError: it is longer, or not a plain file.
    """
    descriptor = os.open(path, _OLD_FILE)
    try:
        size_bytes = _plain_size(descriptor)
        if size_bytes > most_bytes:
            raise ValueError(f"it is longer than {most_bytes} bytes")
        buffer = bytearray(size_bytes)
        for _ in _read_slices(descriptor, memoryview(buffer)):
            pass
        return bytes(buffer)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make sure that the names in a directory survive a crash of the system."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def _batches(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    room = SLICE_BYTES
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + room]
            batch.append(part)
            start += len(part)
            room -= len(part)
            if not room or len(batch) == MAX_BUFFERS:
                yield batch
                batch, room = [], SLICE_BYTES
    if batch:
        yield batch


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(descriptor, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]


def _plain_size(descriptor: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a plain file")
    return status.st_size


def _read_slices(descriptor: int, buffer: memoryview) -> Iterator[memoryview]:
    start = 0
    while start < len(buffer):
        count = os.readv(descriptor, [buffer[start : start + SLICE_BYTES]])
        if not count:
            raise ValueError("it became shorter while it was read")
        yield buffer[start : start + count]
        start += count
