"""Runs as kernels see them: where they lie, and the calls over their pieces that a round consists of.

Nothing is computed here: the calls are independent of each other and may be run by several threads in any order.
What a call finds goes into a place of its own, so that sums over the pieces do not depend on that order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.tensors import Run
from ps.storage import kernels, reductions
from ps.storage.receiver import COMPUTED

Calls = list[Callable[[], None]]

Weighted = tuple[Sequence[int], Sequence[float]]
"""Slots, and what each of them weighs."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a kernel finds a run, made once: a round that many wait for should not build views.

    Attributes:
        run: the run.
        rows: the slab in the dtype of the run, [slots, payload elements].
        column: of the slab, where the run begins.
        values: the run in each of the version buffers, [n] each.
        pieces: element ranges that threads may share.
    """

    run: Run
    rows: NDArray[Any]
    column: int
    values: tuple[NDArray[Any], ...]
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class TrainableRun(Place):
    """A run with what the optimizer keeps for it: moments [m, n], and the moving average [n], or [0]."""

    moments: NDArray[Any]
    average: NDArray[Any]


def piece_count(places: Sequence[Place]) -> int:
    """Return the number of pieces of all places."""
    return sum(len(place.pieces) for place in places)


def update_calls(
    kernel: str,
    places: Sequence[TrainableRun],
    gradients: Weighted,
    scalars: Sequence[float],
    buffers: tuple[int, int],
) -> Calls:
    """Return the calls that make new values of old ones by an optimizer.

    Args:
        kernel: key of `kernels.UPDATES`.
        places: what is updated.
        gradients: the summands, in rank order.
        scalars: numbers for the kernel.
        buffers: which of the version buffers is read, and which is written.
    """
    old, new = buffers
    calls: Calls = []
    for place in places:
        arguments = (
            *_summands(place, gradients),
            place.values[old],
            place.values[new],
            place.moments,
            place.average,
            np.array(scalars, place.run.dtype),
        )
        calls += [partial(kernels.UPDATES[kernel], *arguments, start, stop) for start, stop in place.pieces]
    return calls


def delta_calls(places: Sequence[Place], deltas: Weighted, buffers: tuple[int, int]) -> Calls:
    """Return the calls that add deltas to floating state, and copy other state from the first slot.

    Args:
        places: what is updated.
        deltas: the summands, in rank order.
        buffers: which of the version buffers is read, and which is written.
    """
    old, new = buffers
    calls: Calls = []
    for place in places:
        if place.run.dtype in COMPUTED:
            arguments = (*_summands(place, deltas), place.values[old], place.values[new])
            calls += [partial(kernels.add_weighted, *arguments, start, stop) for start, stop in place.pieces]
        else:
            source = place.rows[deltas[0][0], place.column : place.column + place.values[new].size]
            calls.append(partial(np.copyto, place.values[new], source))
    return calls


def square_calls(places: Sequence[Place], gradients: Weighted, out: NDArray[np.float64]) -> Calls:
    """Return the calls that write the sum of squares of the weighted sum, of each piece, into `out` [pieces]."""

    def measure(index: int, *arguments: Any) -> None:
        out[index] = kernels.weighted_sum_of_squares(*arguments)

    calls: Calls = []
    for place in places:
        summands = _summands(place, gradients)
        calls += [partial(measure, len(calls) + i, *summands, *piece) for i, piece in enumerate(place.pieces)]
    return calls


def gram_calls(
    places: Sequence[TrainableRun], rows: NDArray[np.int64], with_momentum: bool, out: NDArray[np.float64]
) -> Calls:
    """Return the calls that add inner products, of each piece, to the upper halves of `out` [pieces, n, n].

    Args:
        places: what is measured.
        rows: of the slab, [k].
        with_momentum: whether the first moment follows after them.
        out: zeros; n is k, or k + 1 with the moment.
    """
    calls: Calls = []
    for place in places:
        arguments = (place.rows, place.column, rows, place.moments[: int(with_momentum)])
        for start, stop in place.pieces:
            calls.append(partial(reductions.gram, *arguments, start, stop, out[len(calls)]))
    return calls


def projection_calls(
    places: Sequence[TrainableRun],
    rows: NDArray[np.int64],
    with_momentum: bool,
    coefficients: NDArray[np.float64],
    out: NDArray[np.float64],
) -> Calls:
    """Return the calls that add inner products with the last few vectors and a total to `out`.

    Args:
        places: what is measured.
        rows: of the slab, [k]: first those that make the total.
        with_momentum: whether the first moment follows after them.
        coefficients: of the total, [c].
        out: zeros [pieces, m + 1, m - c + 1]; m is k, or k + 1 with the moment.
    """
    calls: Calls = []
    for place in places:
        arguments = (place.rows, place.column, rows, place.moments[: int(with_momentum)], coefficients)
        for start, stop in place.pieces:
            calls.append(partial(reductions.project, *arguments, start, stop, out[len(calls)]))
    return calls


def scale_calls(places: Sequence[Place], scaled: Weighted) -> Calls:
    """Return the calls that multiply what lies in each slot by its factor, in place."""
    calls: Calls = []
    for place in places:
        for slot, factor in zip(*scaled, strict=True):
            row = place.rows[slot, place.column : place.column + place.values[0].size]
            parts = [row[start:stop] for start, stop in place.pieces]
            calls += [partial(np.multiply, part, place.rows.dtype.type(factor), out=part) for part in parts]
    return calls


def trim_calls(places: Sequence[Place], rows: NDArray[np.int64], trim: int) -> Calls:
    """Return the calls that write the trimmed mean of the rows [k] into the first of them; 2 trim < k."""
    network = reductions.selection_network(rows.size, trim)
    calls: Calls = []
    for place in places:
        share = np.full(1, 1 / (rows.size - 2 * trim), place.run.dtype)
        arguments = (place.rows, place.column, rows, network, trim, share)
        calls += [partial(reductions.trimmed_mean, *arguments, start, stop) for start, stop in place.pieces]
    return calls


def _summands(place: Place, weighted: Weighted) -> tuple[NDArray[Any], int, NDArray[np.int64], NDArray[Any]]:
    """Return the first four arguments of a kernel over a run, without what weighs nothing."""
    counted = [(slot, weight) for slot, weight in zip(*weighted, strict=True) if weight]
    return (
        place.rows,
        place.column,
        np.array([slot for slot, _ in counted], np.int64),
        np.array([weight for _, weight in counted], place.run.dtype),
    )
