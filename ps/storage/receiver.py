"""The slab's rows as gradients arrive in them: gaps zeroed, values checked and measured block by block."""

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from protocol.tensors import FLOATING, Kind, Layout
from ps.storage import kernels

BLOCK_BYTES = 1 << 18
"""A gradient is checked in blocks of this size as it arrives: small enough for the cache of one core."""

COMPUTED = ("float32", "float64")
"""Floating dtypes that the server computes in."""

_KINDS = (Kind.TRAINABLE, Kind.STATE)
"""Norms are taken of the variables of each kind."""


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
class Blocks:
    """A payload divided into blocks, each judged while it is in the cache; made once for a layout.

    Attributes:
        ends: of the blocks in bytes: multiples of 64.
        plan: what `kernels.judge` needs to know of them: gaps of each, and floating stretches.
    """

    ends: tuple[int, ...]
    plan: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """First byte of each gap, and the one after it."""
        return [(int(first), int(stop)) for first, stop in self.plan[1]]

    @classmethod
    def of(cls, layout: Layout) -> "Blocks":
        """Divide a layout's payload."""
        tensors = (*layout.slots, *layout.sides)
        starts = np.array([slot.end for slot in tensors], np.int64)
        stops = np.array([*(slot.offset for slot in tensors[1:]), layout.payload_bytes][: len(tensors)], np.int64)
        gaps = np.stack([starts, stops], axis=1)[stops > starts]
        ends = [
            min(begin + BLOCK_BYTES, layout.payload_bytes) for begin in range(0, layout.payload_bytes, BLOCK_BYTES)
        ]
        # Blocks end at multiples of the alignment and gaps are shorter than it, so none is cut in two.
        gap_of = np.searchsorted(gaps[:, 0], [0, *ends]).astype(np.int64)
        stretches: list[tuple[int, int, int, int]] = []
        stretch_of = [0]
        for begin, end in zip([0, *ends], ends, strict=False):
            for run in layout.runs:
                first, last = max(run.start, begin), min(run.end, end)
                if first < last and run.dtype in COMPUTED:
                    size = np.dtype(run.dtype).itemsize
                    stretches.append((_KINDS.index(run.kind), size, first // size, last // size))
            stretch_of.append(len(stretches))
        table = np.array(stretches, np.int64).reshape(-1, 4)
        return cls(tuple(ends), (gap_of, gaps, np.array(stretch_of, np.int64), table))


class Receiver:
    """Takes one gradient into one slot, block by block; used by one thread at a time."""

    def __init__(self, row: NDArray[np.uint8], layout: Layout, blocks: Blocks) -> None:
        self.buffer = row.data
        """The row to receive into, `payload_bytes` long."""
        self.block_ends = blocks.ends
        """Where blocks end: multiples of 64, the same for all receivers of a store."""
        self._row = row
        self._layout = layout
        self._squares = np.zeros(len(_KINDS))
        self._judging = (*blocks.plan, self._squares)
        self._draining = (np.array(blocks.ends, np.int64), *self._judging)
        self.restart()

    def restart(self) -> None:
        """Forget what has arrived: the next block is the first."""
        self._done = 0
        self._squares[:] = 0.0

    def received(self, end: int) -> None:
        """Take note that all bytes up to `end` have arrived; to be called once for each block not yet drained.

        Raises:
            LocalProtocolError: `end` is not the end of the next block.
        """
        if self._done == len(self.block_ends) or self.block_ends[self._done] != end:
            raise LocalProtocolError(f"byte {end} is not where block {self._done} of a push ends")
        kernels.judge(self._row, self._done, *self._judging)
        self._done += 1

    def drain(self, descriptor: int, start: int) -> int:
        """Receive from a socket that blocks, as long as whole blocks come; return the byte that is due next.

        Args:
            descriptor: of the socket.
            start: the byte that is due; blocks before the one that it is in have been received.
        """
        start = kernels.drain(descriptor, self._row, start, self._done, *self._draining)
        self._done = bisect_right(self.block_ends, start)
        return start

    def finish(self) -> PushCheck:
        """Return the verdict on a gradient that has arrived whole.

        Raises:
            LocalProtocolError: blocks are missing.
        """
        if self._done != len(self.block_ends):
            raise LocalProtocolError(f"{len(self.block_ends) - self._done} blocks of a push have not arrived")
        trainable, state = self._squares.tolist()
        if math.isfinite(trainable + state):
            return PushCheck(True, None, math.sqrt(trainable), math.sqrt(state))
        return PushCheck(False, first_not_finite(self._row, self._layout), math.inf, math.inf)


def first_not_finite(buffer: NDArray[np.uint8], layout: Layout) -> str | None:
    """Return the first floating variable, in layout order, that has a NaN or infinite value, or None."""
    total = 0.0
    for slot in layout.slots:
        if slot.spec.dtype not in FLOATING:
            continue
        values = buffer[slot.offset : slot.end].view(slot.spec.dtype)
        for first in range(0, values.size, BLOCK_BYTES):
            total += kernels.sum_of_squares(values[first : first + BLOCK_BYTES])
        if not math.isfinite(total):
            return slot.spec.name
    return None
