"""The files of a checkpoint on the disk: written in slices with a checksum, read with a check of it.

The checksum is XXH3 of 128 bits (https://github.com/Cyan4973/xxHash): it costs less than the writing and finds
damage. It does not guard against somebody who edits a file on purpose.
"""

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.arena import aligned_empty

SLICE_BYTES = 16 << 20
"""Written or read by one call. Each call waits for the interpreter lock, which sessions hold: with few calls a
checkpoint is written sooner, and the larger caches still have what the checksum has seen."""

MAX_BUFFERS = 512
"""Given to one call; the system takes 1024."""

DIRECT_BYTES = 1 << 20
"""Files from this size on go straight to the disk where it can be: through the page cache they cost fresh pages
each time, 130 to 970 ms of CPU per 300 MB as measured, against 70, and nobody reads them again."""

PAGE_BYTES = 4096
"""What is written straight to a disk begins and ends at multiples of this."""

_DIRECT = getattr(os, "O_DIRECT", 0)

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


def create_file(path: Path, size_bytes: int = 0) -> int:
    """Make a file that only the owner may read, and return its descriptor; one that is there is an error.

    Args:
        path: of the file.
        size_bytes: that will be written to it.
    """
    if size_bytes >= DIRECT_BYTES and _DIRECT:
        try:
            return os.open(path, _NEW_FILE | _DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no such way
                raise
            path.unlink(missing_ok=True)
    return os.open(path, _NEW_FILE, 0o600)


def write_buffers(descriptor: int, buffers: Iterable[memoryview]) -> Content:
    """Write buffers of bytes one after another. The file is not synced.

    Raises:
        OSError: the system refuses.
    """
    checksum = xxhash.xxh3_128()
    size_bytes = 0
    stage = _Stage(descriptor) if fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT else None
    for batch in _batches(buffers):
        for part in batch:
            checksum.update(part)
            size_bytes += len(part)
        if stage is None:
            _write_all(descriptor, batch)
        else:
            stage.add(batch)
    if stage is not None:
        stage.finish()
    return Content(size_bytes, checksum.hexdigest())


class _Stage:
    """Memory at a page's start, in which the bytes of a file are gathered that go straight to the disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(-1, SLICE_BYTES)
        self._array = np.frombuffer(self._memory, np.uint8)
        self._filled = 0
        self._written = 0

    def add(self, parts: list[memoryview]) -> None:
        """Gather some parts, and write when the memory is full."""
        for part in parts:
            source, start = np.frombuffer(part, np.uint8), 0
            while start < source.size:
                count = min(source.size - start, SLICE_BYTES - self._filled)
                np.copyto(self._array[self._filled : self._filled + count], source[start : start + count])
                self._filled += count
                start += count
                if self._filled == SLICE_BYTES:
                    self._write(SLICE_BYTES)

    def finish(self) -> None:
        """Write what is left: whole pages, and then the file is cut to its length."""
        if self._filled:
            end = self._written + self._filled
            padded = -(-self._filled // PAGE_BYTES) * PAGE_BYTES
            self._array[self._filled : padded] = 0
            self._write(padded)
            os.ftruncate(self._descriptor, end)

    def _write(self, count: int) -> None:
        done = 0
        while done < count:
            written = os.writev(self._descriptor, [self._array.data[done:count]])
            done += written
            if (
                done < count and done % PAGE_BYTES
            ):  # the disk is nearly full: the rest may fit another way, or fails
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._written += count
        self._filled = 0


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
