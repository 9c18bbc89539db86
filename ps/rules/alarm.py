"""Notice sudden changes of a worker, whose record then counts little, and of the run, which a validator should see.

Trust that was earned may be spent: if most of the trusted weight turns bad at once, the model can be ruined before
the next validated round. What shows it without a validator is that the trusted workers' claimed loss rises, or that
their gradients grow. Honest runs, with like and unlike data, raised no alarm in our simulations. Attackers who hold
most of the trust can keep it silent, with lies about the loss and gradients of the usual length.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.rules.compiling import compiled, load
from ps.rules.ledger import Ledger, Rows, Vector

FIRST_ROUNDS = 10
"""Rounds in which the usual values are learned, and no alarm is raised."""
USUAL_RATE = 0.05
"""Rate at which the usual values follow."""
RECENT_RATE = 0.3
"""Rate at which the recent loss follows: single batches are no reason."""
LOSS_RISE = 0.5
"""Rise of the recent loss over the usual one, as a part of it, that is alarming."""
LOSS_NOISE = 0.02
"""Part of the largest usual loss by which a loss may always rise: near 0, ratios mean nothing."""
LENGTH_RISE = 2.0
"""Growth of the gradients over their usual length that is alarming."""
LASTS = 10
"""Rounds that an alarm lasts after its last reason, unless a validation finds none."""
ODD_ROUNDS = 3
"""Rounds in a row of unusual length after which a worker counts as changed."""

FIELDS: Mapping[str, float] = {"length": math.nan, "odd_rounds": 0.0}
"""Remembered by name: running mean of the logarithm of its length in units of tau; odd rounds in a row."""

_LOG_RISE = math.log(LENGTH_RISE)


def changed(ledger: Ledger, rows: Rows, lengths: Vector) -> NDArray[np.bool_]:
    """Return who pushes, for some rounds now, gradients `LENGTH_RISE` times as long as it used to, [rows].

    Args:
        ledger: with `FIELDS`, which follow.
        rows: of those present.
        lengths: [rows], norms in units of the validator's.
    """
    return _changed(ledger["length"], ledger["odd_rounds"], rows, np.log(np.maximum(lengths, 1e-12)))


@compiled
def _changed(usual: Vector, odd_rounds: Vector, rows: Rows, logarithms: Vector) -> NDArray[np.bool_]:
    change = np.zeros(rows.size, np.bool_)
    for i, row in enumerate(rows):
        if np.isnan(usual[row]):
            usual[row] = logarithms[i]
        rise = logarithms[i] - usual[row]
        odd_rounds[row] = odd_rounds[row] + 1.0 if rise > _LOG_RISE else 0.0
        usual[row] += USUAL_RATE * min(rise, _LOG_RISE)
        if odd_rounds[row] >= ODD_ROUNDS:
            change[i], usual[row], odd_rounds[row] = True, logarithms[i], 0.0
    return change


def warm_up() -> None:
    """Load or compile what is compiled here, so that no round waits for it."""
    load(_changed, np.zeros(1), np.zeros(1), np.zeros(1, np.intp), np.zeros(1))


class Alarm:
    """Compares the trusted workers' loss and length of gradients with what was usual; call `observe` once a round.

    Attributes:
        raised: whether the last rounds gave reason for concern.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._left = 0
        self._recent_loss = self._usual_loss = self._largest_loss = 0.0
        self._log_length = 0.0

    @property
    def raised(self) -> bool:
        """Whether a validator should be asked soon."""
        return self._left > 0

    def ring(self) -> None:
        """Raise the alarm for a reason of the caller's."""
        self._left = LASTS

    def observe(self, loss: float, log_length: float, validated: bool) -> None:
        """Take note of a round.

        Args:
            loss: mean claimed loss by the weights of the round; a round in which it is not finite is no reason for
                an alarm, and teaches nothing of what is usual.
            log_length: mean logarithm of the norms of the gradients, likewise.
            validated: the weights of this round rest on a fresh validator gradient.
        """
        if not (math.isfinite(loss) and math.isfinite(log_length)):
            self._count_down(validated)
            return
        self._rounds += 1
        if self._rounds == 1:
            self._recent_loss = self._usual_loss = loss
            self._log_length = log_length
        self._recent_loss += RECENT_RATE * (loss - self._recent_loss)
        noise = LOSS_NOISE * self._largest_loss
        worse = self._recent_loss - self._usual_loss > LOSS_RISE * abs(self._usual_loss) + noise
        longer = log_length - self._log_length > _LOG_RISE
        if self._rounds > FIRST_ROUNDS and (worse or longer):
            self._left = LASTS
        else:
            self._count_down(validated)
        # What is alarming becomes usual only slowly.
        believed = min(loss, self._usual_loss + 0.2 * abs(self._usual_loss) + noise)
        self._usual_loss += USUAL_RATE * (believed - self._usual_loss)
        self._largest_loss = max(self._largest_loss, abs(self._usual_loss))
        self._log_length += USUAL_RATE * (min(log_length - self._log_length, math.log(1.5)))

    def _count_down(self, validated: bool) -> None:
        self._left = 0 if validated else max(0, self._left - 1)

    def state(self) -> dict[str, Any]:
        """Return everything as plain numbers."""
        return {name.removeprefix("_"): value for name, value in vars(self).items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        for name in vars(self):
            setattr(self, name, state[name.removeprefix("_")])
