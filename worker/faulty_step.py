"""Carry a fault into a worker that pushes arenas: what `--fault` does around the trainer. Needs no TensorFlow."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import Arena
from protocol.tensors import Layout
from worker.batches import Shard, gather
from worker.corruption import Corrupt
from worker.definitions import Dataset
from worker.faults import Contribution, Fault, Situation
from worker.loop import Computed, Computes


@dataclass(frozen=True, eq=False)
class Spoilt:
    """What a fault pushes; the fields are those of `worker.loop.Computed`."""

    loss: float
    accuracy: float | None
    examples: int
    buffers: list[memoryview]


@dataclass(frozen=True, eq=False)
class FaultySteps:
    """Computes what a worker with a fault pushes; stands in for `worker.loop.on_batches`.

    Attributes:
        fault: how it misbehaves.
        trainer: computes one batch.
        layout: of values and pushes.
        dataset: of this worker; the batches of other ranks are drawn from it too.
        shard: of this worker.
        batch_size: of all ranks.
        workers: number of ranks.
        steps: of the whole run.
        classes: number of classes.
        sleep: waits for so many seconds.
    """

    fault: Fault
    trainer: Computes
    layout: Layout
    dataset: Dataset
    shard: Shard
    batch_size: int
    workers: int
    steps: int
    classes: int
    sleep: Callable[[float], None] = time.sleep
    _shards: dict[int, Shard] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, values: NDArray[np.uint8], step: int) -> Computed:
        """Return what is pushed for a step, after the fault's delay."""

        def gradient_at(rank: int, corrupt: Corrupt | None) -> Contribution:
            features, labels = gather(self.dataset, self._shard_of(rank).batch_ids(step, self.batch_size))
            if corrupt is not None:
                features, labels = corrupt(features, labels)
            computed = self.trainer.compute(values, features, labels, (self.shard.seed, rank, step))
            return Contribution(self._arrays(computed.buffers), computed.loss, computed.accuracy)

        shard = self.shard
        at = Situation(shard.seed, shard.rank, step, self.steps, self.workers, self.classes)
        pushed = self.fault.push(at, gradient_at)
        if self.fault.delay_s:
            self.sleep(self.fault.delay_s)
        return Spoilt(pushed.loss, pushed.accuracy, self.batch_size, [self._payload(pushed)])

    def _shard_of(self, rank: int) -> Shard:
        if rank not in self._shards:
            self._shards[rank] = self.shard.of_rank(rank)
        return self._shards[rank]

    def _arrays(self, buffers: list[memoryview]) -> list[NDArray[Any]]:
        """Copy a payload into arrays, one for each variable in the layout's order; bfloat16 becomes float32."""
        arena = Arena.zeros(self.layout)
        start = 0
        for buffer in buffers:
            arena.buffer[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
            start += buffer.nbytes
        return [
            from_bfloat16(arena.slot_view(slot)) if slot.spec.dtype == "bfloat16" else arena.slot_view(slot)
            for slot in self.layout.slots
        ]

    def _payload(self, pushed: Contribution) -> memoryview:
        arena = Arena.zeros(self.layout)
        for slot, array in zip(self.layout.slots, pushed.gradients, strict=True):
            arena.slot_view(slot)[...] = to_bfloat16(array) if slot.spec.dtype == "bfloat16" else array
        return arena.buffer.data


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen raw bfloat16, the upper half of a float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, and return its raw bits; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # a sum beyond 32 bits is a NaN, which the next line sets
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)
