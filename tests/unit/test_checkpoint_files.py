"""Files written straight to the disk hold what was given, whatever its size, and however the system takes it."""

import errno
import os

import numpy as np
import pytest

from ps.checkpoints import files as checkpoint_files
from ps.checkpoints.files import DIRECT_BYTES, PAGE_BYTES, SLICE_BYTES, checksum_of, create_file, write_buffers

SIZES = [DIRECT_BYTES, DIRECT_BYTES + 1, SLICE_BYTES, SLICE_BYTES + PAGE_BYTES, 2 * SLICE_BYTES + 12345]


def parts_of(data):
    """Cut bytes into parts of very different lengths, the first ones at odd places."""
    view, parts, start, length = memoryview(data), [], 0, 1
    while start < len(view):
        parts.append(view[start : start + length])
        start, length = start + length, length * 3 % (SLICE_BYTES + 7) + 1
    return parts


def written(path, data):
    descriptor = create_file(path, len(data))
    try:
        return write_buffers(descriptor, parts_of(data))
    finally:
        os.close(descriptor)


def some_bytes(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_a_large_file_holds_what_was_given(tmp_path, size):
    data = some_bytes(size)
    content = written(tmp_path / "file", data)
    assert (content.size_bytes, content.checksum) == (size, checksum_of(data))
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_system_without_the_straight_way_gets_the_same(tmp_path, monkeypatch):
    opened = os.open

    def refuses(path, flags, mode=0o777, **rest):
        if flags & os.O_DIRECT:
            os.close(opened(path, flags & ~os.O_DIRECT, mode))  # as the system does: made, and then refused
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refuses)
    data = some_bytes(SIZES[-1])
    written(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("piece", [PAGE_BYTES, PAGE_BYTES * 3, 1000])
def test_what_the_system_takes_in_pieces_arrives_whole(tmp_path, monkeypatch, piece):
    """Pieces that are no whole pages cannot go on straight to the disk."""
    writev, calls = os.writev, []

    def takes_little(descriptor, buffers):
        calls.append(len(buffers[0]))
        return writev(descriptor, [buffers[0][: piece if len(calls) % 2 else None]])

    monkeypatch.setattr(checkpoint_files.os, "writev", takes_little)
    data = some_bytes(SIZES[-1])
    # A thousand bytes at the start of the file are no whole page: only what is not written straight takes them.
    if piece % PAGE_BYTES:
        monkeypatch.setattr(checkpoint_files, "_DIRECT", 0)
    written(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data and len(calls) > 2


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def is_full(descriptor, buffers):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_files.os, "writev", is_full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", some_bytes(DIRECT_BYTES))
