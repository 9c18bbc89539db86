"""Taking a payload off a socket: blocks are received, their gaps zeroed and their values measured in one loop.

The loop runs outside the interpreter and releases the GIL, so that many sessions receive at once, and between two
blocks nothing waits for another thread. It takes only what needs no judgement. Whatever else happens on a socket
(an end, an error, silence) is left to the caller, who meets it when it receives the next byte itself.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from protocol.transport import WAIT_FOR_ALL
from ps.storage import kernels

BLOCKS_AT_ONCE = 4
"""Most blocks that `drain` receives before the interpreter has a look, and notes that the peer is alive: each may
take as long as the time-out of the socket."""

_receive = types.ExternalFunction("recv", types.intp(types.int32, types.uintp, types.uintp, types.int32))
"""The C library's `recv`."""


@kernels.compiled()
def judge(
    row: NDArray[np.uint8],
    block: int,
    gap_of: NDArray[np.int64],
    gaps: NDArray[np.int64],
    stretch_of: NDArray[np.int64],
    stretches: NDArray[np.int64],
    squares: NDArray[np.float64],
) -> None:
    """Zero the gaps of a block that has arrived, and add up the squares of its values.

    Args:
        row: uint8 [payload bytes], contiguous and aligned.
        block: which one; there are B.
        gap_of: int64 [B + 1]; block b has the gaps from `gap_of[b]` to before `gap_of[b + 1]`.
        gaps: int64 [G, 2], first byte of each and the one after it.
        stretch_of: int64 [B + 1], as `gap_of`.
        stretches: int64 [S, 4]: place in `squares`, bytes of an element (4 or 8), first element, the one after.
        squares: float64, changed in place.
    """
    for k in range(gap_of[block], gap_of[block + 1]):
        for i in range(gaps[k, 0], gaps[k, 1]):
            row[i] = 0
    singles, doubles = row.view(np.float32), row.view(np.float64)
    for k in range(stretch_of[block], stretch_of[block + 1]):
        first, last = stretches[k, 2], stretches[k, 3]
        if stretches[k, 1] == 4:
            squares[stretches[k, 0]] += kernels.sum_of_squares(singles[first:last])
        else:
            squares[stretches[k, 0]] += kernels.sum_of_squares(doubles[first:last])


@kernels.compiled()
def drain(
    descriptor: int,
    row: NDArray[np.uint8],
    start: int,
    block: int,
    ends: NDArray[np.int64],
    gap_of: NDArray[np.int64],
    gaps: NDArray[np.int64],
    stretch_of: NDArray[np.int64],
    stretches: NDArray[np.int64],
    squares: NDArray[np.float64],
) -> int:
    """Receive whole blocks, up to `BLOCKS_AT_ONCE`, and judge each; return the byte that is due next.

    It ends early with the first `recv` that brings less than was asked for. What that brought lies in its place and
    is counted, but a block that is not whole is not judged.

    Args:
        descriptor: of a socket that blocks.
        row: where the payload goes, as in `judge`.
        start: the byte that is due, within `block`.
        block: the first to be received.
        ends: int64 [B], the byte after each block.
        gap_of: as in `judge`.
        gaps: likewise.
        stretch_of: likewise.
        stretches: likewise.
        squares: likewise.
    """
    for current in range(block, min(block + BLOCKS_AT_ONCE, ends.size)):
        size = ends[current] - start
        place = np.uintp(row.ctypes.data + start)
        got = _receive(np.int32(descriptor), place, np.uintp(size), np.int32(WAIT_FOR_ALL))
        if got != size:
            return int(start + max(got, 0))
        start = ends[current]
        judge(row, current, gap_of, gaps, stretch_of, stretches, squares)
    return start


def warm_up() -> None:
    """Load or compile the loops, so that no push waits for it."""
    none, nothing = np.zeros(2, np.int64), np.empty(0, np.uint8)
    plan = (none, np.empty((0, 2), np.int64), none, np.empty((0, 4), np.int64), np.zeros(2))
    kernels.load([(judge, (nothing, 0, *plan)), (drain, (-1, nothing, 0, 0, none[:0], *plan))])
