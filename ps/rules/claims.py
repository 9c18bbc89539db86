"""Trust by what workers claim of themselves: all there is where no validator takes part.

It helps against honest faults, such as labels that are wrong; whoever lies is believed.
"""

import math

import numpy as np

from ps.rules.ledger import Rows, Vector
from ps.rules.rule import RoundView

CLAIM_RATE = 0.05
"""Rate of the running mean of claimed accuracies."""
CLAIM_FLOOR = 0.3
"""Part of the best claimed accuracy at which trust is 0; full trust begins at twice that."""
CLAIM_WARM_UP = 40
"""Rounds without a validator in which everybody is trusted: rare classes take that long to be learned."""


def claimed_accuracies(view: RoundView, positions: Rows) -> Vector:
    """Return what the ranks at `positions` claim, [U] in [0, 1], NaN where nothing is known.

    That is their accuracies, or exp(-loss) for all of them if one has no accuracy.
    """
    claims = np.array(view.accuracies, np.float64)[positions]
    if not all(map(math.isfinite, claims.tolist())):
        losses = np.array(view.losses, np.float64)[positions]
        claims = np.exp(-np.maximum(losses, 0.0))  # an infinite loss is an accuracy of 0
    return np.minimum(np.maximum(claims, 0.0), 1.0)


def trust_by_claims(claims: Vector) -> Vector:
    """Return the trust [n] in [0, 1] that claimed accuracies [n] earn, each against the best; NaN earns all."""
    best = np.nanmax(claims, initial=0.0)
    if best == 0.0:
        return np.ones(claims.size)
    trust: Vector = np.nan_to_num(np.clip((claims / best - CLAIM_FLOOR) / CLAIM_FLOOR, 0.0, 1.0), nan=1.0)
    return trust
