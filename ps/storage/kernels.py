"""Fused loops over one run of an arena: weighted sum, update and moving average in a single pass.

Updates are compiled without `fastmath`, so their bits equal NumPy's and depend neither on the CPU nor on how a
run is divided among threads. Reductions accumulate in float64 over fixed ranges and may be reassociated.
All kernels release the GIL. The first use of a kernel in a process loads it from numba's cache or compiles it
(seconds): call `warm_up` before anybody waits.

`drain` takes a payload off its socket and measures it in one such loop, so that many sessions receive at once. It
takes only what needs no judgement: whatever else happens on a socket (an end, an error, silence) its caller meets
when it receives the next byte itself. It stands beside the sum that it needs: numba finds a kernel that it kept
stale only when the kernel's own file changes.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from protocol.transport import WAIT_FOR_ALL

_Function = TypeVar("_Function", bound=Callable[..., Any])

MOST_NESTED = 8
"""Kernels that one may contain, itself included: each that cannot be kept on disk costs another attempt."""

BLOCK_BYTES = 1 << 14
"""Bytes summed over all gradients before they are applied: they stay in the L1 cache."""

BLOCKS_AT_ONCE = 4
"""Most blocks that `drain` receives before the interpreter has a look, and notes that the peer is alive: each may
take as long as the time-out of the socket."""

_receive = types.ExternalFunction("recv", types.intp(types.int32, types.uintp, types.uintp, types.int32))
"""The C library's `recv`."""

UpdateKernel = Callable[
    [
        NDArray[Any],  # rows [slots, row elements]: the gradient slab in the dtype of the run
        int,  # column: first element of the run within a row
        NDArray[np.int64],  # slots [k]: the rows to sum, in rank order
        NDArray[Any],  # weights [k]
        NDArray[Any],  # old [n]: the values of the run, read
        NDArray[Any],  # new [n]: the values of the run, written
        NDArray[Any],  # moments [m, n]: changed in place
        NDArray[Any],  # average [n], changed in place, or [0] for none
        NDArray[Any],  # scalars: first the weight of `new` in the average, then the optimizer's own
        int,  # start: first element of the range
        int,  # stop: first element after it
    ],
    None,
]
"""Signature of all updates: every array has the dtype of the run and is C contiguous and writeable."""


def compiled(*fastmath: str, cached: bool = True) -> Callable[[_Function], _Function]:
    """Compile lazily, for each dtype; fall back to no cache on disk where none can be written.

    What only other kernels call is not `cached`: their entries contain it.
    """

    def decorate(function: _Function) -> _Function:
        options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
        try:
            return cast(_Function, numba.njit(cache=cached, **options)(function))
        except RuntimeError:  # numba found no writeable folder for its cache
            return cast(_Function, numba.njit(**options)(function))

    return decorate


@compiled(cached=False)
def _sum_block(
    rows: NDArray[Any],
    first: int,
    slots: NDArray[np.int64],
    weights: NDArray[Any],
    total: NDArray[Any],
) -> None:
    """Write the weighted sum of the rows' elements from `first` into `total`, one slot after the other.

    Four rows are read at once: 1.15 times faster than row by row, and the same bits.
    """
    count = total.size
    last = first + count
    done = 0
    if slots.size >= 4:
        g0, g1 = rows[slots[0]][first:last], rows[slots[1]][first:last]
        g2, g3 = rows[slots[2]][first:last], rows[slots[3]][first:last]
        w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
        for i in range(count):
            total[i] = w0 * g0[i] + w1 * g1[i] + w2 * g2[i] + w3 * g3[i]
        done = 4
    elif slots.size >= 2:
        g0, g1 = rows[slots[0]][first:last], rows[slots[1]][first:last]
        w0, w1 = weights[0], weights[1]
        for i in range(count):
            total[i] = w0 * g0[i] + w1 * g1[i]
        done = 2
    elif slots.size == 1:
        g0, w0 = rows[slots[0]][first:last], weights[0]
        for i in range(count):
            total[i] = w0 * g0[i]
        done = 1
    else:
        for i in range(count):
            total[i] = 0
    while done + 4 <= slots.size:
        g0, g1 = rows[slots[done]][first:last], rows[slots[done + 1]][first:last]
        g2, g3 = rows[slots[done + 2]][first:last], rows[slots[done + 3]][first:last]
        w0, w1, w2, w3 = weights[done], weights[done + 1], weights[done + 2], weights[done + 3]
        for i in range(count):
            total[i] = total[i] + w0 * g0[i] + w1 * g1[i] + w2 * g2[i] + w3 * g3[i]
        done += 4
    while done < slots.size:
        g0, w0 = rows[slots[done]][first:last], weights[done]
        for i in range(count):
            total[i] += w0 * g0[i]
        done += 1


@compiled(cached=False)
def _average_block(average: NDArray[Any], new: NDArray[Any], rate: Any) -> None:
    """Move `average` towards `new` by `rate`."""
    for i in range(new.size):
        average[i] += rate * (new[i] - average[i])


@compiled()
def _adam(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    weights: NDArray[Any],
    old: NDArray[Any],
    new: NDArray[Any],
    moments: NDArray[Any],
    average: NDArray[Any],
    scalars: NDArray[Any],
    start: int,
    stop: int,
) -> None:
    """Apply Adam or AdamW; scalars: average rate, step size, 1 - beta1, 1 - beta2, epsilon, kept share."""
    step_size, rate1, rate2, epsilon, keep = scalars[1], scalars[2], scalars[3], scalars[4], scalars[5]
    block = BLOCK_BYTES // rows.itemsize
    buffer = np.empty(block, rows.dtype)
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        gradient = buffer[: end - begin]
        _sum_block(rows, column + begin, slots, weights, gradient)
        before, after = old[begin:end], new[begin:end]
        first, second = moments[0][begin:end], moments[1][begin:end]
        for i in range(end - begin):
            g = gradient[i]
            m = first[i] + (g - first[i]) * rate1
            v = second[i] + (g * g - second[i]) * rate2
            first[i] = m
            second[i] = v
            after[i] = before[i] * keep - (m * step_size) / (np.sqrt(v) + epsilon)
        if average.size:
            _average_block(average[begin:end], after, scalars[0])


@compiled()
def _sgd(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    weights: NDArray[Any],
    old: NDArray[Any],
    new: NDArray[Any],
    moments: NDArray[Any],
    average: NDArray[Any],
    scalars: NDArray[Any],
    start: int,
    stop: int,
) -> None:
    """Apply plain gradient descent; scalars: average rate, learning rate."""
    learning_rate = scalars[1]
    block = BLOCK_BYTES // rows.itemsize
    buffer = np.empty(block, rows.dtype)
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        gradient = buffer[: end - begin]
        _sum_block(rows, column + begin, slots, weights, gradient)
        before, after = old[begin:end], new[begin:end]
        for i in range(end - begin):
            after[i] = before[i] - learning_rate * gradient[i]
        if average.size:
            _average_block(average[begin:end], after, scalars[0])


@compiled()
def _momentum(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    weights: NDArray[Any],
    old: NDArray[Any],
    new: NDArray[Any],
    moments: NDArray[Any],
    average: NDArray[Any],
    scalars: NDArray[Any],
    start: int,
    stop: int,
) -> None:
    """Apply momentum; scalars: average rate, momentum, then what the gradient and the new moment count."""
    momentum, gradient_rate, moment_rate = scalars[1], scalars[2], scalars[3]
    block = BLOCK_BYTES // rows.itemsize
    buffer = np.empty(block, rows.dtype)
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        gradient = buffer[: end - begin]
        _sum_block(rows, column + begin, slots, weights, gradient)
        before, after = old[begin:end], new[begin:end]
        accumulated = moments[0][begin:end]
        for i in range(end - begin):
            g = gradient[i]
            a = accumulated[i] * momentum + g
            accumulated[i] = a
            after[i] = before[i] - (g * gradient_rate + a * moment_rate)
        if average.size:
            _average_block(average[begin:end], after, scalars[0])


UPDATES: Mapping[str, UpdateKernel] = {"adam": _adam, "sgd": _sgd, "momentum": _momentum}
"""The kernels by the names that `ps.storage.optimizers` gives them."""


@compiled()
def add_weighted(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    weights: NDArray[Any],
    old: NDArray[Any],
    new: NDArray[Any],
    start: int,
    stop: int,
) -> None:
    """Write `old` plus the weighted sum of the rows into `new`; arguments as those of `UpdateKernel`."""
    block = BLOCK_BYTES // rows.itemsize
    buffer = np.empty(block, rows.dtype)
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        total = buffer[: end - begin]
        _sum_block(rows, column + begin, slots, weights, total)
        before, after = old[begin:end], new[begin:end]
        for i in range(end - begin):
            after[i] = before[i] + total[i]


@compiled("reassoc", "contract")
def sum_of_squares(values: NDArray[Any]) -> float:
    """Return the float64 sum of squares of float32 or float64 `values` [n], contiguous.

    It is finite exactly when all values are (and, in float64, below about 1e154 in size).
    """
    total = np.float64(0)
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total


@compiled()
def weighted_sum_of_squares(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    weights: NDArray[Any],
    start: int,
    stop: int,
) -> float:
    """Return the float64 sum of squares of the weighted sum of the rows, without storing that sum.

    Arguments as those of `UpdateKernel`. The sum that is squared has the very bits that an update applies.
    """
    squares = np.float64(0)
    block = BLOCK_BYTES // rows.itemsize
    buffer = np.empty(block, rows.dtype)
    for begin in range(start, stop, block):
        total = buffer[: min(begin + block, stop) - begin]
        _sum_block(rows, column + begin, slots, weights, total)
        squares += sum_of_squares(total)
    return squares


@compiled()
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
            squares[stretches[k, 0]] += sum_of_squares(singles[first:last])
        else:
            squares[stretches[k, 0]] += sum_of_squares(doubles[first:last])


@compiled()
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


def warm_up(update: str, dtypes: Iterable[str] = ("float32",)) -> None:
    """Load or compile everything that a store with this update needs, so that no round waits for it.

    Args:
        update: a key of `UPDATES`.
        dtypes: "float32", "float64" or both: the dtypes of the floating variables.
    """
    none, bounds, nothing = np.empty(0, np.int64), np.zeros(2, np.int64), np.empty(0, np.uint8)
    plan = (bounds, np.empty((0, 2), np.int64), bounds, np.empty((0, 4), np.int64), np.zeros(2))
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (judge, (nothing, 0, *plan)),
        (drain, (-1, nothing, 0, 0, none, *plan)),
    ]
    for dtype in dtypes:
        flat, rows = np.empty(0, dtype), np.empty((1, 0), dtype)
        summands = (rows, 0, none, flat)
        calls += [
            (sum_of_squares, (flat,)),
            (weighted_sum_of_squares, (*summands, 0, 0)),
            (add_weighted, (*summands, flat, flat, 0, 0)),
            (UPDATES[update], (*summands, flat, flat, np.empty((2, 0), dtype), flat, np.zeros(8, dtype), 0, 0)),
        ]
    load(calls)


def load(calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Make each call, so that its kernel is loaded from numba's cache, or compiled and kept there if possible.

    (`ps.rules.compiling` has the same for the loops of rules: of the two packages neither imports the other.)
    """
    for kernel, arguments in calls:
        for _ in range(MOST_NESTED):
            with contextlib.suppress(OSError):  # compiled, but numba's cache on disk is full or not ours to write
                kernel(*arguments)
                break
        else:
            kernel(*arguments)
