"""What the norms and inner products of a round's gradients say: angles, distances, lengths. Pure, in float64."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Geometry:
    """Lengths and angles of the W gradients present in a round, in rank order; all arrays are float64.

    Attributes:
        norms: [W], Euclidean norms; not finite where a push is not usable: everybody ignores such ranks.
        gram: [W, W], inner products of the gradients; rows and columns of what is not usable are 0. None when
            only projections were taken.
        with_total: [W], inner products with the total `sum_j c_j g_j`; None when there is a `gram`.
        total_norm: norm of that total, or None.
        total_coefficients: [W], the `c_j`, 0 for what is not usable; or None.
        reference_norm: norm of the last validator gradient (the mean of the validators'); None if there was none.
        with_reference: [W], inner products with it, or None. It may be stale, see `fresh`.
        fresh: the reference was computed at the values of this very step.
        momentum_norm: norm of the optimizer's first moment before this update; None if there is none.
        with_momentum: [W], inner products with it, or None.
    """

    norms: Vector
    gram: Matrix | None = None
    with_total: Vector | None = None
    total_norm: float | None = None
    total_coefficients: Vector | None = None
    reference_norm: float | None = None
    with_reference: Vector | None = None
    fresh: bool = False
    momentum_norm: float | None = None
    with_momentum: Vector | None = None

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Which gradients may be used, [W]."""
        return np.isfinite(self.norms)

    def distances_squared(self) -> Matrix:
        """Return squared Euclidean distances between gradients, [W, W], at least 0, with 0 on the diagonal.

        They are infinite to and from what is not usable.

        Raises:
            LocalProtocolError: only projections were taken.
        """
        gram = self._gram()
        squares = np.diagonal(gram)
        distances = np.maximum(squares + squares[:, None] - 2.0 * gram, 0.0)
        unusable = ~self.usable
        distances[unusable, :] = np.inf
        distances[:, unusable] = np.inf
        np.fill_diagonal(distances, 0.0)
        return distances

    def cosine_to_reference(self) -> Vector:
        """Return the cosine of each gradient to the reference, [W]; 0 where a length is 0 or there is none."""
        if self.with_reference is None or not self.reference_norm:
            return np.zeros(self.norms.size)
        return np.clip(self.with_reference * _inverse(self.norms) / self.reference_norm, -1.0, 1.0)

    def _gram(self) -> Matrix:
        if self.gram is None:
            raise LocalProtocolError("this round's gradients were measured against their total, not each other")
        return self.gram


def from_products(
    products: Matrix, usable: Sequence[bool], references: int = 0, with_momentum: bool = False, fresh: bool = False
) -> Geometry:
    """Build the geometry of a round from all inner products.

    Args:
        products: [n, n], of the usable gradients in rank order, then the `references` validator gradients, then
            the first moment if `with_momentum`: what `Comparison.inner_products` returns.
        usable: of each rank present, in rank order.
        references: number of validator gradients; the reference is their mean.
        with_momentum: whether the first moment is there.
        fresh: whether the validators' gradients are of this very step.

    Raises:
        LocalProtocolError: the shape of `products` is another.
    """
    present = _present(usable)
    count = len(usable) if present is None else int(present.sum())
    _check_shape(products, count + references + with_momentum, count + references + with_momentum)
    gram = products[:count, :count].copy()
    norms = np.sqrt(gram.diagonal())
    if present is not None:
        norms = _spread(norms, present, np.inf)
        among, gram = gram, np.zeros((present.size, present.size))
        gram[np.ix_(present, present)] = among
    return Geometry(norms, gram, **_ends(products[:, count:], present, references, with_momentum, fresh))


def from_projections(
    projections: Matrix,
    norms: Sequence[float],
    usable: Sequence[bool],
    coefficients: Sequence[float],
    references: int = 0,
    with_momentum: bool = False,
    fresh: bool = False,
) -> Geometry:
    """Build the geometry of a round from inner products with few vectors, when there are many gradients.

    Args:
        projections: [n + 1, references + with_momentum + 1]: inner products of the usable gradients in rank
            order, the validators' gradients, the first moment and the total (rows) with the last of these, the
            total included (columns): what `Comparison.projections` returns.
        norms: of each rank present, as measured when its push arrived.
        usable: of each rank present, in rank order.
        coefficients: of the total, one for each rank present; 0 for what is not usable.
        references: number of validator gradients; the reference is their mean.
        with_momentum: whether the first moment is there.
        fresh: whether the validators' gradients are of this very step.

    Raises:
        LocalProtocolError: the shape of `projections` is another.
    """
    present = _present(usable)
    count = len(usable) if present is None else int(present.sum())
    ends = references + with_momentum
    _check_shape(projections, count + ends + 1, ends + 1)
    return Geometry(
        np.where(usable, np.asarray(norms, np.float64), np.inf),
        with_total=_spread(projections[:count, ends], present),
        total_norm=_root(projections[count + ends, ends]),
        total_coefficients=np.where(usable, np.asarray(coefficients, np.float64), 0.0),
        **_ends(projections[: count + ends, :ends], present, references, with_momentum, fresh),
    )


class _Ends(TypedDict, total=False):
    fresh: bool
    reference_norm: float
    with_reference: Vector
    momentum_norm: float
    with_momentum: Vector


def _present(usable: Sequence[bool]) -> NDArray[np.bool_] | None:
    """Return who is usable, [W]; None for everybody, as nearly always: then nothing need be spread."""
    return None if all(usable) else np.array(usable, bool)


def _ends(
    columns: Matrix, present: NDArray[np.bool_] | None, references: int, with_momentum: bool, fresh: bool
) -> _Ends:
    """Return what the inner products with the references and the moment [n, references + moment] say of them."""
    count = columns.shape[0] - references - with_momentum
    ends: _Ends = {"fresh": fresh and references > 0}
    if references == 1:  # as nearly always: it is its own mean
        ends["reference_norm"] = _root(columns[count, 0])
        ends["with_reference"] = _spread(columns[:count, 0], present)
    elif references:
        among = columns[count : count + references, :references]
        ends["reference_norm"] = _root(among.mean())
        ends["with_reference"] = _spread(columns[:count, :references].mean(axis=1), present)
    if with_momentum:
        ends["momentum_norm"] = _root(columns[-1, -1])
        ends["with_momentum"] = _spread(columns[:count, -1], present)
    return ends


def _inverse(norms: Vector) -> Vector:
    """Return 1 / norms, and 0 where a norm is 0 or not finite."""
    good = np.isfinite(norms) & (norms > 0.0)
    return np.where(good, 1.0 / np.where(good, norms, 1.0), 0.0)


def _spread(of_usable: Vector, present: NDArray[np.bool_] | None, unusable: float = 0.0) -> Vector:
    if present is None:
        return of_usable
    spread = np.full(present.size, unusable)
    spread[present] = of_usable
    return spread


def _root(square: float) -> float:
    return math.sqrt(max(float(square), 0.0))  # a mean of inner products may round to just below 0


def _check_shape(products: Matrix, rows: int, columns: int) -> None:
    if products.shape != (rows, columns):
        raise LocalProtocolError(f"inner products of shape {products.shape} do not fit a round's {rows, columns}")


def weighted_median(values: Vector, weights: Vector) -> float:
    """Return the lower weighted median: the least value at which half of the weight is reached; 0 for none.

    Args:
        values: [n], finite.
        weights: [n], at least 0; if all are 0, all values count alike.
    """
    # Plain numbers: for a few NumPy takes several times as long.
    ordered = sorted(zip(values.tolist(), weights.tolist(), strict=True), key=itemgetter(0))
    reached = list(accumulate(weight for _, weight in ordered))
    if not reached:
        return 0.0
    middle = bisect_left(reached, 0.5 * reached[-1]) if reached[-1] else (len(reached) - 1) // 2
    median: float = ordered[middle][0]
    return median
