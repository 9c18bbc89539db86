"""Loops that compare the gradients of a round: inner products, and the trimmed mean of each coordinate.

Inner products are sums in float64 over blocks of a fixed size, whatever the dtype of the run, and may be
reassociated within a block (`fastmath`); the trimmed mean is compiled without. All release the GIL. Before anybody
waits for them, call `warm_up`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from ps.storage.kernels import compiled, load

BLOCK_BYTES = 1 << 13
"""Bytes of each row that are compared with the others at once: a few rows of this size stay in the cache."""

SORT_BYTES = 3 << 13
"""Bytes of all rows together that are sorted at once: they stay in the L1 cache."""

LEAST_SORTED = 128
"""Elements of each row that are sorted at once at least, however many rows there are."""

Flat = NDArray[Any]


@compiled("reassoc", "contract", cached=False)
def _dot(x: Flat, y: Flat, out: NDArray[np.float64], i: int, j: int) -> None:
    """Add the inner product of two vectors of one length to `out[i, j]`."""
    total = np.float64(0)
    for k in range(x.size):
        total += np.float64(x[k]) * np.float64(y[k])
    out[i, j] += total


@compiled("reassoc", "contract", cached=False)
def _strip(x0: Flat, x1: Flat, x2: Flat, y: Flat, out: NDArray[np.float64], i: int, j: int) -> None:
    """Add the inner products of three vectors with one to `out[i : i + 3, j]`."""
    a = b = c = np.float64(0)
    for k in range(y.size):
        p = np.float64(y[k])
        a += np.float64(x0[k]) * p
        b += np.float64(x1[k]) * p
        c += np.float64(x2[k]) * p
    out[i, j] += a
    out[i + 1, j] += b
    out[i + 2, j] += c


@compiled("reassoc", "contract", cached=False)
def _tile(
    x0: Flat, x1: Flat, x2: Flat, y0: Flat, y1: Flat, y2: Flat, out: NDArray[np.float64], i: int, j: int
) -> None:
    """Add the inner products of three vectors with three to `out[i : i + 3, j : j + 3]`.

    Nine sums and six vectors are what fits into the registers. The elements are converted on the way, three times
    each: 1.6 times faster than once into a buffer, as the arithmetic hides behind the memory.
    """
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = np.float64(0)
    for k in range(x0.size):
        a, b, c = np.float64(x0[k]), np.float64(x1[k]), np.float64(x2[k])
        p, q, r = np.float64(y0[k]), np.float64(y1[k]), np.float64(y2[k])
        a0 += a * p
        a1 += a * q
        a2 += a * r
        b0 += b * p
        b1 += b * q
        b2 += b * r
        c0 += c * p
        c1 += c * q
        c2 += c * r
    out[i, j] += a0
    out[i, j + 1] += a1
    out[i, j + 2] += a2
    out[i + 1, j] += b0
    out[i + 1, j + 1] += b1
    out[i + 1, j + 2] += b2
    out[i + 2, j] += c0
    out[i + 2, j + 1] += c1
    out[i + 2, j + 2] += c2


@compiled("reassoc", "contract", cached=False)
def _corner(x0: Flat, x1: Flat, x2: Flat, out: NDArray[np.float64], i: int) -> None:
    """Add the inner products of three vectors among themselves to the upper half of `out[i : i + 3, i : i + 3]`."""
    aa = ab = ac = bb = bc = cc = np.float64(0)
    for k in range(x0.size):
        a, b, c = np.float64(x0[k]), np.float64(x1[k]), np.float64(x2[k])
        aa += a * a
        ab += a * b
        ac += a * c
        bb += b * b
        bc += b * c
        cc += c * c
    out[i, i] += aa
    out[i, i + 1] += ab
    out[i, i + 2] += ac
    out[i + 1, i + 1] += bb
    out[i + 1, i + 2] += bc
    out[i + 2, i + 2] += cc


@compiled(cached=False)
def _part(
    rows: NDArray[Any], column: int, slots: NDArray[np.int64], moment: NDArray[Any], k: int, first: int, last: int
) -> NDArray[Any]:
    """Return the elements [first, last) of the k-th vector: a row of the slab, or after them the moment's."""
    part: NDArray[Any]
    part = rows[slots[k]][column + first : column + last] if k < slots.size else moment[k - slots.size][first:last]
    return part


@compiled()
def gram(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    moment: NDArray[Any],
    start: int,
    stop: int,
    out: NDArray[np.float64],
) -> None:
    """Add the inner products of all pairs of vectors over a range of a run to the upper half of `out`.

    Args:
        rows: [slots, row elements], the gradient slab in the dtype of the run.
        column: first element of the run within a row.
        slots: [k], the rows to compare.
        moment: [0 or more, n], vectors of the run that follow after the rows.
        start: first element of the range.
        stop: first element after it.
        out: [m, m], m vectors in all; below the diagonal it is left as it is.
    """
    count = slots.size + moment.shape[0]
    whole = count - count % 3
    block = BLOCK_BYTES // rows.itemsize
    for first in range(start, stop, block):
        last = min(first + block, stop)
        for j in range(0, whole, 3):
            y0 = _part(rows, column, slots, moment, j, first, last)
            y1 = _part(rows, column, slots, moment, j + 1, first, last)
            y2 = _part(rows, column, slots, moment, j + 2, first, last)
            _corner(y0, y1, y2, out, j)
            for i in range(0, j, 3):
                x0 = _part(rows, column, slots, moment, i, first, last)
                x1 = _part(rows, column, slots, moment, i + 1, first, last)
                x2 = _part(rows, column, slots, moment, i + 2, first, last)
                _tile(x0, x1, x2, y0, y1, y2, out, i, j)
        for j in range(whole, count):
            y = _part(rows, column, slots, moment, j, first, last)
            for i in range(0, whole, 3):
                x0 = _part(rows, column, slots, moment, i, first, last)
                x1 = _part(rows, column, slots, moment, i + 1, first, last)
                x2 = _part(rows, column, slots, moment, i + 2, first, last)
                _strip(x0, x1, x2, y, out, i, j)
            for i in range(whole, j + 1):
                _dot(_part(rows, column, slots, moment, i, first, last), y, out, i, j)


@compiled("contract", cached=False)
def _add_scaled(total: NDArray[np.float64], coefficient: float, x: Flat) -> None:
    for k in range(x.size):
        total[k] += coefficient * np.float64(x[k])


@compiled("contract", cached=False)
def _add_scaled_4(
    total: NDArray[np.float64],
    coefficients: NDArray[np.float64],
    x0: Flat,
    x1: Flat,
    x2: Flat,
    x3: Flat,
) -> None:
    c0, c1, c2, c3 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    for k in range(x0.size):
        total[k] += (c0 * np.float64(x0[k]) + c1 * np.float64(x1[k])) + (
            c2 * np.float64(x2[k]) + c3 * np.float64(x3[k])
        )


@compiled()
def project(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    moment: NDArray[Any],
    coefficients: NDArray[np.float64],
    start: int,
    stop: int,
    out: NDArray[np.float64],
) -> None:
    """Add the inner products of all vectors with the last few, and with a total, over a range of a run to `out`.

    The vectors are the rows, then the moment's, then the total: the sum of `coefficients` times the first rows,
    formed block by block in float64. What this costs is linear in the number of rows.

    Args:
        rows: as for `gram`, like `column`, `slots`, `moment`, `start` and `stop`.
        column: as for `gram`.
        slots: [k], first the rows that make the total, then the others to compare with.
        moment: as for `gram`.
        coefficients: [c], of the first c rows; c is at most k.
        start: as for `gram`.
        stop: as for `gram`.
        out: [m + 1, m - c + 1], m vectors and the total (rows) by all but the first c of these (columns).
    """
    count = slots.size + moment.shape[0]
    summands = coefficients.size
    partners = count - summands + 1
    block = BLOCK_BYTES // rows.itemsize
    columns = np.empty((partners, block))
    for first in range(start, stop, block):
        last = min(first + block, stop)
        size = last - first
        for j in range(partners):
            columns[j][:size] = 0.0
        total = columns[partners - 1][:size]
        whole = summands - summands % 4
        for i in range(0, whole, 4):
            x0 = _part(rows, column, slots, moment, i, first, last)
            x1 = _part(rows, column, slots, moment, i + 1, first, last)
            x2 = _part(rows, column, slots, moment, i + 2, first, last)
            x3 = _part(rows, column, slots, moment, i + 3, first, last)
            _add_scaled_4(total, coefficients[i : i + 4], x0, x1, x2, x3)
        for i in range(whole, summands):
            _add_scaled(total, coefficients[i], _part(rows, column, slots, moment, i, first, last))
        for j in range(partners - 1):
            _add_scaled(columns[j][:size], 1.0, _part(rows, column, slots, moment, summands + j, first, last))
        whole = count - count % 3
        tiled = partners - partners % 3
        for i in range(0, whole, 3):
            x0 = _part(rows, column, slots, moment, i, first, last)
            x1 = _part(rows, column, slots, moment, i + 1, first, last)
            x2 = _part(rows, column, slots, moment, i + 2, first, last)
            for j in range(0, tiled, 3):
                y0, y1, y2 = columns[j][:size], columns[j + 1][:size], columns[j + 2][:size]
                _tile(x0, x1, x2, y0, y1, y2, out, i, j)
            for j in range(tiled, partners):
                _strip(x0, x1, x2, columns[j][:size], out, i, j)
        for i in range(whole, count):
            x0 = _part(rows, column, slots, moment, i, first, last)
            for j in range(partners):
                _dot(x0, columns[j][:size], out, i, j)
        for j in range(partners):
            _dot(total, columns[j][:size], out, count, j)


@compiled(cached=False)
def _compare(low: Flat, high: Flat) -> None:
    """Put the smaller of each two elements into `low` and the larger into `high`.

    Two conditional expressions say the same and are not vectorised: five times slower.
    """
    for k in range(low.size):
        a, b = low[k], high[k]
        smaller = np.minimum(a, b)
        low[k] = smaller
        high[k] = a if smaller == b else b


@compiled(cached=False)
def _copy(source: Flat, target: Flat) -> None:
    for k in range(source.size):
        target[k] = source[k]


@compiled(cached=False)
def _scale(source: Flat, factor: Any, target: Flat) -> None:
    for k in range(source.size):
        target[k] = factor * source[k]


@compiled(cached=False)
def _add(source: Flat, factor: Any, target: Flat) -> None:
    for k in range(source.size):
        target[k] += factor * source[k]


@compiled()
def trimmed_mean(
    rows: NDArray[Any],
    column: int,
    slots: NDArray[np.int64],
    network: NDArray[np.int64],
    trim: int,
    weight: NDArray[Any],
    start: int,
    stop: int,
) -> None:
    """Write the trimmed mean of each coordinate over a range of a run into the first of the rows, in place.

    Args:
        rows: [slots, row elements], the gradient slab in the dtype of the run; no value is NaN.
        column: first element of the run within a row.
        slots: [k], the rows to combine, in any order.
        network: [comparisons, 2], what `selection_network(k, trim)` returns.
        trim: how many of the smallest, and how many of the largest values are dropped; 2 trim < k.
        weight: [1], `1 / (k - 2 trim)`, by which each value is multiplied before they are summed.
        start: first element of the range.
        stop: first element after it.
    """
    count = slots.size
    share = weight[0]
    block = max(LEAST_SORTED, SORT_BYTES // (rows.itemsize * count) // LEAST_SORTED * LEAST_SORTED)
    lines = np.empty((count, block), rows.dtype)
    for first in range(column + start, column + stop, block):
        last = min(first + block, column + stop)
        size = last - first
        for i in range(count):
            _copy(rows[slots[i]][first:last], lines[i][:size])
        for c in range(network.shape[0]):
            _compare(lines[network[c, 0]][:size], lines[network[c, 1]][:size])
        result = rows[slots[0]][first:last]
        _scale(lines[trim][:size], share, result)
        for i in range(trim + 1, count - trim):
            _add(lines[i][:size], share, result)


@cache
def selection_network(count: int, trim: int) -> NDArray[np.int64]:
    """Return the comparisons that leave everything but the `trim` smallest and largest of `count` values sorted.

    Each is a pair (i, j), i < j: put the smaller of values i and j at i and the larger at j. Done in order, values
    `trim` to `count - trim - 1` are where they belong. There are about `count (log2 count)^2 / 4`.

    Source: Batcher's merge exchange, Knuth, "The Art of Computer Programming", volume 3, 5.2.2, algorithm M; less
    the comparisons that no wanted value depends on.

    Returns:
        Read-only int64 [comparisons, 2].

    Raises:
        LocalProtocolError: the trim leaves no value.
    """
    if not 0 <= 2 * trim < count:
        raise LocalProtocolError(f"{trim} values cannot be trimmed at each end of {count}")
    wanted = set(range(trim, count - trim))
    kept: list[tuple[int, int]] = []
    for low, high in reversed(list(_merge_exchange(count))):
        if low in wanted or high in wanted:
            wanted |= {low, high}
            kept.append((low, high))
    network = np.array(kept[::-1], np.int64).reshape(-1, 2)
    network.flags.writeable = False
    return network


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (count - 1).bit_length() - 1)
    stride = top
    while stride:
        reach, residue, distance = top, 0, stride
        while True:
            for i in range(count - distance):
                if i & stride == residue:
                    yield i, i + distance
            if reach == stride:
                break
            distance, reach, residue = reach - stride, reach // 2, stride
        stride //= 2


def warm_up(dtypes: Iterable[str] = ("float32",)) -> None:
    """Load or compile everything here, so that no round waits for it.

    Args:
        dtypes: "float32", "float64" or both: the dtypes of the trainable variables.
    """
    none, network = np.empty(0, np.int64), selection_network(1, 0)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for dtype in dtypes:
        rows, moment, out = np.empty((1, 0), dtype), np.empty((1, 0), dtype), np.zeros((2, 2))
        calls += [
            (gram, (rows, 0, none, moment, 0, 0, out)),
            (project, (rows, 0, none, moment, np.empty(0), 0, 0, out)),
            (trimmed_mean, (rows, 0, np.zeros(1, np.int64), network, 0, np.ones(1, dtype), 0, 0)),
        ]
    load(calls)
