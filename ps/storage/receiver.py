"""The slab's rows as gradients arrive in them: gaps zeroed, values checked and measured block by block."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from protocol.tensors import FLOATING, Kind, Layout
from ps.storage import kernels

RECEIVE_BLOCK_BYTES = 1 << 20
"""A gradient is checked in blocks of this size as it arrives, while they are in the cache."""

COMPUTED = ("float32", "float64")
"""Floating dtypes that the server computes in."""


@dataclass(frozen=True)
class PushCheck:
    """What was seen while a gradient arrived.

    Attributes:
        finite: whether all floating values, of trainable and state variables, are neither NaN nor infinite.
        bad_variable: the first variable (in layout order) with one that is not.
        gradient_norm: Euclidean norm over the trainable variables; infinite when not finite.
        state_norm: the same over the floating state variables.
    """

    finite: bool
    bad_variable: str | None
    gradient_norm: float
    state_norm: float


@dataclass(frozen=True, eq=False)
class Block:
    """Part of a payload: its end, its gaps in bytes, its floating stretches in elements of their dtype."""

    end: int
    gap_starts: NDArray[np.int64]
    gap_ends: NDArray[np.int64]
    stretches: tuple[tuple[Kind, str, int, int], ...]


def plan_blocks(layout: Layout) -> tuple[Block, ...]:
    """Divide a layout's payload into blocks; done once, for all receivers."""
    tensors = (*layout.slots, *layout.sides)
    starts = np.array([slot.end for slot in tensors], np.int64)
    ends = np.array([*(slot.offset for slot in tensors[1:]), layout.payload_bytes][: len(tensors)], np.int64)
    starts, ends = starts[ends > starts], ends[ends > starts]
    blocks: list[Block] = []
    for begin in range(0, layout.payload_bytes, RECEIVE_BLOCK_BYTES):
        end = min(begin + RECEIVE_BLOCK_BYTES, layout.payload_bytes)
        # Blocks end at multiples of the alignment and gaps are shorter than it, so none is cut in two.
        inside = slice(*np.searchsorted(starts, (begin, end)))
        stretches = []
        for run in layout.runs:
            first, last = max(run.start, begin), min(run.end, end)
            if first < last and run.dtype in FLOATING:
                size = np.dtype(run.dtype).itemsize
                stretches.append((run.kind, run.dtype, first // size, last // size))
        blocks.append(Block(end, starts[inside], ends[inside], tuple(stretches)))
    return tuple(blocks)


class Receiver:
    """Takes one gradient into one slot, block by block; used by one thread at a time."""

    def __init__(self, row: NDArray[np.uint8], layout: Layout, blocks: tuple[Block, ...]) -> None:
        self.buffer = row.data
        """The row to receive into, `payload_bytes` long."""
        self.block_ends = tuple(block.end for block in blocks)
        """Where blocks end: multiples of 64, the same for all receivers of a store."""
        self._row = row
        self._typed = {dtype: row.view(dtype) for dtype in COMPUTED}
        self._layout = layout
        self._blocks = blocks
        self.restart()

    def restart(self) -> None:
        """Forget what has arrived: the next block is the first."""
        self._done = 0
        self._squares = {Kind.TRAINABLE: 0.0, Kind.STATE: 0.0}

    def received(self, end: int) -> None:
        """Take note that all bytes up to `end` have arrived; to be called once for each of `block_ends`.

        Raises:
            LocalProtocolError: `end` is not the end of the next block.
        """
        if self._done == len(self._blocks) or self._blocks[self._done].end != end:
            raise LocalProtocolError(f"byte {end} is not where block {self._done} of a push ends")
        block = self._blocks[self._done]
        if block.gap_starts.size:
            kernels.zero_ranges(self._row, block.gap_starts, block.gap_ends)
        for kind, dtype, first, last in block.stretches:
            self._squares[kind] += kernels.sum_of_squares(self._typed[dtype][first:last])
        self._done += 1

    def finish(self) -> PushCheck:
        """Return the verdict on a gradient that has arrived whole.

        Raises:
            LocalProtocolError: blocks are missing.
        """
        if self._done != len(self._blocks):
            raise LocalProtocolError(f"{len(self._blocks) - self._done} blocks of a push have not arrived")
        if math.isfinite(sum(self._squares.values())):
            return PushCheck(True, None, *(math.sqrt(self._squares[kind]) for kind in (Kind.TRAINABLE, Kind.STATE)))
        return PushCheck(False, first_not_finite(self._row, self._layout), math.inf, math.inf)


def first_not_finite(buffer: NDArray[np.uint8], layout: Layout) -> str | None:
    """Return the first floating variable, in layout order, that has a NaN or infinite value, or None."""
    total = 0.0
    for slot in layout.slots:
        if slot.spec.dtype not in FLOATING:
            continue
        values = buffer[slot.offset : slot.end].view(slot.spec.dtype)
        for first in range(0, values.size, RECEIVE_BLOCK_BYTES):
            total += kernels.sum_of_squares(values[first : first + RECEIVE_BLOCK_BYTES])
        if not math.isfinite(total):
            return slot.spec.name
    return None
