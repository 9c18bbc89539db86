"""Receiving straight from a socket: the same bytes and the same judgement as block by block."""

import os
import socket
import struct
import threading

import numpy as np
import pytest

from protocol.arena import Arena, aligned_empty
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.storage.kernels import BLOCKS_AT_ONCE, drain, judge, warm_up
from ps.storage.receiver import BLOCK_BYTES, Blocks, Receiver

BIG = BLOCK_BYTES // 4 * (BLOCKS_AT_ONCE + 2) + 7

LAYOUT = Layout.of(
    Manifest(
        (
            VariableSpec("kernel", (BIG,), "float32"),
            VariableSpec("precise", (3, 5), "float64"),
            VariableSpec("mean", (1001,), "float32", Kind.STATE),
            VariableSpec("exact", (9,), "float64", Kind.STATE),
            VariableSpec("count", (), "int64", Kind.STATE),
        )
    )
)


@pytest.fixture
def pair():
    """Two ends of a connection on which a byte is waited for as long as it takes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def time_out_soon(ours):
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))


def payload(seed=0, gap=0xFF):
    """Random values, with gaps that are NaN in every floating dtype."""
    random = np.random.default_rng(seed)
    buffer = aligned_empty(LAYOUT.payload_bytes)
    buffer[:] = gap
    arrays = {}
    for slot in LAYOUT.slots:
        values = random.standard_normal(slot.spec.shape)
        arrays[slot.spec.name] = np.asarray(values).astype(slot.spec.dtype)
    Arena(LAYOUT, buffer).fill(arrays)
    return buffer


def receiver():
    row = aligned_empty(LAYOUT.payload_bytes)
    row[:] = 1
    return Receiver(row, LAYOUT, Blocks.of(LAYOUT)), row


def told(data):
    """What comes of a payload that is told block by block."""
    by_hand, row = receiver()
    row[:] = data
    for end in by_hand.block_ends:
        by_hand.received(end)
    return by_hand.finish(), row.tobytes()


def drained(ours, intake):
    """Drain until the payload is there; return how often that took."""
    start, calls = 0, 0
    while start < LAYOUT.payload_bytes:
        before, start, calls = start, intake.drain(ours.fileno(), start), calls + 1
        assert start > before
    return calls


def sending(theirs, data):
    thread = threading.Thread(target=theirs.sendall, args=(data,))
    thread.start()
    return thread


def test_what_is_drained_is_what_was_sent_and_is_judged_alike(pair):
    ours, theirs = pair
    data = payload()
    intake, row = receiver()
    thread = sending(theirs, data)
    calls = drained(ours, intake)
    thread.join()
    check, expected = told(data)
    assert intake.finish() == check
    assert check.finite
    assert row.tobytes() == expected
    assert calls >= 2  # never all at once: the interpreter is to have a look


def test_gaps_are_zero_afterwards(pair):
    ours, theirs = pair
    intake, row = receiver()
    thread = sending(theirs, payload())
    drained(ours, intake)
    thread.join()
    used = np.zeros(LAYOUT.payload_bytes, bool)
    for slot in LAYOUT.slots:
        used[slot.offset : slot.end] = True
    assert not row[~used].any()
    assert row[used].any()


@pytest.mark.parametrize("name", ["kernel", "precise", "mean", "exact"])
def test_what_is_not_finite_is_found_and_named(pair, name):
    ours, theirs = pair
    data = payload()
    slot = LAYOUT.by_name[name]
    data[slot.offset : slot.end].view(slot.spec.dtype)[-1] = np.nan
    intake, _ = receiver()
    thread = sending(theirs, data)
    drained(ours, intake)
    thread.join()
    assert intake.finish().bad_variable == name


def test_no_more_than_some_blocks_are_taken_at_once(pair):
    ours, theirs = pair
    intake, _ = receiver()
    thread = sending(theirs, payload())
    assert intake.drain(ours.fileno(), 0) == BLOCKS_AT_ONCE * BLOCK_BYTES
    drained_to = intake.drain(ours.fileno(), BLOCKS_AT_ONCE * BLOCK_BYTES)
    thread.join()
    assert drained_to == LAYOUT.payload_bytes


def test_a_block_that_is_not_whole_is_left_to_the_caller(pair):
    """What came of it lies in its place; the rest is received by hand, and told."""
    ours, theirs = pair
    data = payload()
    intake, row = receiver()
    thread = sending(theirs, data[:BLOCK_BYTES])
    row[:BLOCK_BYTES] = data[:BLOCK_BYTES]
    assert ours.recv_into(row[:BLOCK_BYTES], 0, socket.MSG_WAITALL) == BLOCK_BYTES
    intake.received(intake.block_ends[0])
    thread.join()
    theirs.sendall(data[BLOCK_BYTES : BLOCK_BYTES + 13])
    time_out_soon(ours)
    start = intake.drain(ours.fileno(), BLOCK_BYTES)
    assert start == BLOCK_BYTES + 13
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))
    end = intake.block_ends[1]
    row[start:end] = data[start:end]
    intake.received(end)
    thread = sending(theirs, data[end:])
    start = end
    while start < LAYOUT.payload_bytes:
        start = intake.drain(ours.fileno(), start)
    thread.join()
    assert (intake.finish(), row.tobytes()) == told(data)


def test_a_block_that_comes_in_two_parts_is_judged_once(pair):
    ours, theirs = pair
    data = payload()
    intake, row = receiver()
    theirs.sendall(data[:1000])
    time_out_soon(ours)
    start = intake.drain(ours.fileno(), 0)
    assert start == 1000
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))
    thread = sending(theirs, data[1000:])
    while start < LAYOUT.payload_bytes:
        start = intake.drain(ours.fileno(), start)
    thread.join()
    assert (intake.finish(), row.tobytes()) == told(data)


def test_after_a_restart_nothing_is_left_of_what_came_before(pair):
    ours, theirs = pair
    bad = payload()
    bad[: 4 * 10].view(np.float32)[:] = np.inf
    intake, row = receiver()
    thread = sending(theirs, bad[: BLOCKS_AT_ONCE * BLOCK_BYTES])
    assert intake.drain(ours.fileno(), 0) == BLOCKS_AT_ONCE * BLOCK_BYTES
    thread.join()
    intake.restart()
    data = payload(1)
    thread = sending(theirs, data)
    drained(ours, intake)
    thread.join()
    assert (intake.finish(), row.tobytes()) == told(data)


def test_nothing_is_compiled_once_pushes_come(pair):
    ours, theirs = pair
    warm_up("sgd")
    before = (len(drain.signatures), len(judge.signatures))
    data = payload()
    intake, _ = receiver()
    thread = sending(theirs, data)
    drained(ours, intake)
    thread.join()
    told(data)
    assert (len(drain.signatures), len(judge.signatures)) == before


@pytest.mark.parametrize("end", ["closed", "silent", "no socket"])
def test_where_nothing_comes_nothing_moves(pair, end):
    ours, theirs = pair
    intake, row = receiver()
    before = row.tobytes()
    time_out_soon(ours)
    descriptor = ours.fileno()
    if end == "closed":
        theirs.close()
    if end == "no socket":
        descriptor = os.open("/dev/null", os.O_RDONLY)
    assert intake.drain(descriptor, 0) == 0
    assert row.tobytes() == before
    if end == "no socket":
        os.close(descriptor)
