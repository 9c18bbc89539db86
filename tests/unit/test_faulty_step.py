"""A fault in a worker that pushes arenas: batches of ranks, arenas there and back, and the delay."""

from dataclasses import dataclass

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from worker.batches import Shard, gather
from worker.definitions import Dataset
from worker.faults import FAULTS, parse_fault
from worker.faulty_step import FaultySteps, from_bfloat16, to_bfloat16

SEED, WORKERS, BATCH = 5, 3, 4
LAYOUT = Layout.of(
    Manifest(
        (
            VariableSpec("b", (3,), "float64"),
            VariableSpec("w", (2, 3), "float32"),
            VariableSpec("h", (5,), "bfloat16"),
            VariableSpec("seen", (), "int64", Kind.STATE),
            VariableSpec("mean", (3,), "float32", Kind.STATE),
        )
    )
)
DATASET = Dataset(
    np.arange(120, dtype=np.float32).reshape(60, 2),
    (np.arange(60, dtype=np.int32) % 3).astype(np.int32),
    np.zeros((1, 2), np.float32),
    np.zeros(1, np.int32),
)
VALUES = np.zeros(LAYOUT.values_bytes, np.uint8)


@dataclass
class Result:
    loss: float
    accuracy: float | None
    examples: int
    buffers: list[memoryview]


class Trainer:
    """Makes gradients out of the batch, and keeps what it returned, as TensorFlow does with its own buffers."""

    def __init__(self):
        self.returned = []
        self.draws = []

    def compute(self, values, features, labels, draw):
        arena = Arena.zeros(LAYOUT)
        arena.slot_view(LAYOUT.by_name["w"])[...] = features.sum(axis=0)[:, None] + labels.sum()
        arena.slot_view(LAYOUT.by_name["b"])[...] = labels.sum()
        arena.slot_view(LAYOUT.by_name["h"])[...] = to_bfloat16(np.full(5, labels.sum(), np.float32))
        arena.slot_view(LAYOUT.by_name["seen"])[...] = len(labels)
        arena.slot_view(LAYOUT.by_name["mean"])[...] = 1
        whole = arena.buffer
        whole.flags.writeable = False
        self.returned.append((whole, whole.tobytes()))
        self.draws.append(draw)
        return Result(1.5, 0.5, len(labels), [whole[:64].data, whole[64:].data])


def steps_of(text, rank=1, sleep=None, shard=None):
    return FaultySteps(
        fault=parse_fault(text),
        trainer=Trainer(),
        layout=LAYOUT,
        dataset=DATASET,
        shard=shard or Shard.of(60, rank, WORKERS, SEED, 6),
        batch_size=BATCH,
        workers=WORKERS,
        steps=10,
        classes=3,
        sleep=sleep or (lambda seconds: None),
    )


def pushed_by(steps, step=2):
    """Return what is pushed, as arrays by name, and the rest of it."""
    computed = steps(VALUES, step)
    payload = b"".join(bytes(buffer) for buffer in computed.buffers)
    assert len(payload) == LAYOUT.payload_bytes
    raw = np.frombuffer(payload, np.uint8)
    assert not raw[LAYOUT.gap_bytes].any(), "gaps are zero on the wire"
    arena = Arena.zeros(LAYOUT)
    arena.buffer[:] = raw
    return {**arena.views(), "h": from_bfloat16(arena.slot_view(LAYOUT.by_name["h"]))}, computed


def honest(rank, step=2):
    features, labels = gather(DATASET, Shard.of(60, rank, WORKERS, SEED, 6).batch_ids(step, BATCH))
    return features.sum(axis=0)[:, None] + labels.sum() * np.ones((2, 3)), labels.sum()


def test_the_slow_push_the_honest_gradient_of_their_shard_after_their_delay():
    """All arrays arrive as they were computed, also bfloat16 and integers, and the delay comes before the push."""
    waited = []
    steps = steps_of("slow:0.5", sleep=waited.append)
    arrays, computed = pushed_by(steps)
    weights, labels = honest(rank=1)
    assert waited == [0.5]
    assert np.array_equal(arrays["w"], weights)
    assert arrays["b"].tolist() == [labels] * 3
    assert arrays["h"].tolist() == [labels] * 5
    assert arrays["seen"] == BATCH
    assert arrays["mean"].tolist() == [1] * 3
    assert (computed.loss, computed.accuracy, computed.examples) == (1.5, 0.5, BATCH)
    assert steps.trainer.draws == [(SEED, 1, 2)]


def test_no_other_fault_waits():
    waited = []
    pushed_by(steps_of("scale", sleep=waited.append))
    assert waited == []


def test_a_scaled_gradient_in_every_floating_dtype():
    """float32, float64, bfloat16 and floating state are changed; the integer is pushed as it was."""
    arrays, _ = pushed_by(steps_of("scale:-2"))
    weights, labels = honest(rank=1)
    assert np.array_equal(arrays["w"], -2 * weights)
    assert arrays["b"].tolist() == [-2 * labels] * 3
    assert arrays["h"].tolist() == [-2 * labels] * 5
    assert arrays["mean"].tolist() == [-2] * 3
    assert arrays["seen"] == BATCH


def test_faults_about_others_use_the_batches_of_their_ranks():
    """Little is enough computes every rank's gradient, with that rank's random numbers."""
    steps = steps_of("little_is_enough:2")
    arrays, _ = pushed_by(steps)
    everyone = np.stack([honest(rank)[0] for rank in range(WORKERS)])
    assert arrays["w"] == pytest.approx(everyone.mean(axis=0) - 2 * everyone.std(axis=0), rel=1e-6)
    assert steps.trainer.draws == [(SEED, rank, 2) for rank in range(WORKERS)]


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_works_on_data_of_its_own(name):
    """Batches of others, which it does not have, are what those ranks would take of this data."""
    steps = steps_of(name, rank=2, shard=Shard.own(60, 2, SEED))
    pushed_by(steps)
    assert {draw[0] for draw in steps.trainer.draws} == {SEED}


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_trainer_returned_is_never_written_to(name):
    """It may be memory of TensorFlow's; here it is read-only as well, and its bytes are compared."""
    steps = steps_of(name)
    for step in range(8):
        pushed_by(steps, step)
    assert steps.trainer.returned
    assert all(whole.tobytes() == before for whole, before in steps.trainer.returned)


def test_bfloat16_rounds_to_even_and_back():
    """Against a table: exact values, halves to even, beyond the largest, and what is no number."""
    exact = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, 3.3895314e38], np.float32)
    assert from_bfloat16(to_bfloat16(exact)).tolist() == exact.tolist()
    step = 2.0**-7  # of bfloat16 at 1
    halves = np.array([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, 3.4e38], np.float32)
    assert from_bfloat16(to_bfloat16(halves)).tolist() == [1.0, 1 + 2 * step, 1 + step, np.inf]
    nans = np.array([0x7FC00000, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(nans))).all()
