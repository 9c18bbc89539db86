"""Small exact pieces of the evidence rule: a non-negative fit, a guess at inner products, who copies whom."""

import math

import numpy as np
from numpy.typing import NDArray

from ps.rules.compiling import compiled, load
from ps.rules.ledger import Matrix, Vector

SWEEPS = 60
"""Passes over all workers in a fit; for the matrices at hand a few more change nothing that matters."""

COPY = 0.99
"""Cosine from which on one gradient is a copy of another. Different batches stay below it: on Fashion-MNIST honest
cosines are at most 0.80 with batches of 32, 0.94 with 256 and 0.988 with 1,024, all at the first step."""

_RANK_ONE_ROUNDS = 8


@compiled
def _coordinate_descent(gram: Matrix, target: Vector, ridge: float, sweeps: int) -> Vector:
    count = target.size
    weights = np.zeros(count)
    for _ in range(sweeps):
        for i in range(count):
            slope = target[i] - ridge * weights[i]
            for j in range(count):
                slope -= gram[i, j] * weights[j]
            weights[i] = max(0.0, weights[i] + slope / (gram[i, i] + ridge))
    return weights


def nonnegative_fit(gram: Matrix, target: Vector, ridge: float, sweeps: int = SWEEPS) -> Vector:
    """Minimise `w'(gram + ridge I)w / 2 - target'w` over w >= 0 by coordinate descent.

    Args:
        gram: [n, n] float64, symmetric, diagonal at least 0.
        target: [n] float64.
        ridge: added to the diagonal, above 0.
        sweeps: passes over all coordinates.

    Returns:
        w, [n].

    Source: Franc, Hlavac, Navara, "Sequential Coordinate-Wise Algorithm for the Non-negative Least Squares
    Problem", 2005, algorithm 1.
    """
    return _coordinate_descent(np.ascontiguousarray(gram), np.ascontiguousarray(target), ridge, sweeps)


def warm_up() -> None:
    """Load or compile the fit, so that no round waits for it."""
    load(_coordinate_descent, np.eye(1), np.ones(1), 1.0, 1)


def off_diagonal_of_rank_one(sums: Vector, parts: Vector, lengths: Vector) -> Matrix:
    """Guess the Gram matrix of clipped gradients of which only the products with a total are known.

    With the total `sum_j a_j h_j` of the clipped gradients h, the known numbers are `s_i = sum_{j != i} a_j
    <h_i, h_j>`. Off the diagonal the guess is r_i r_j, with r such that each s_i comes out: r_i (R - a_i r_i) =
    s_i, R = sum_j a_j r_j. So it knows who goes along with the trusted rest and how far, and nothing of twins and
    groups. A total that holds nothing in common (R^2 <= 0) leaves the diagonal alone.

    Args:
        sums: s, [n].
        parts: a, [n], at least 0.
        lengths: |h|, [n], the square root of the diagonal.

    Returns:
        [n, n], positive semi-definite.
    """
    gram = np.diag(lengths * lengths)
    common = float(parts @ sums)
    if common <= 0.0:
        return gram
    whole = math.sqrt(common)
    along = sums / whole
    for _ in range(_RANK_ONE_ROUNDS):
        along = np.clip(along, -lengths, lengths)  # a cosine is at most 1
        whole = math.sqrt(common + float((parts * parts) @ (along * along)))
        along = sums / np.maximum(whole - parts * along, 0.5 * whole)
    along = np.clip(along, -lengths, lengths)
    guess = np.outer(along, along)
    np.fill_diagonal(guess, lengths * lengths)
    return guess


def copies_of(gram: Matrix, counted: NDArray[np.bool_]) -> Vector:
    """Return how many of the counted gradients are the same as each but for their length, [n], at least 1.

    A gradient is its own copy; one of length 0 is nobody's.

    Args:
        gram: [n, n], inner products of the gradients; the diagonal is at least 0.
        counted: [n], whose copies count.
    """
    lengths = np.sqrt(np.diagonal(gram))
    limits = COPY * lengths * lengths[:, None]
    alike = (gram >= limits) & (limits > 0.0)
    return np.maximum(alike.astype(np.float64) @ counted, 1.0)
