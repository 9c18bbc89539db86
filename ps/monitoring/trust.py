"""Say in sentences whom the rule mutes and trusts again, and keep the history of weights. Pure bookkeeping."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MUTED_BELOW = 0.1
"""Part of a fair share (1 / workers present) under which a worker counts as muted."""
TRUSTED_ABOVE = 0.5
"""Part of a fair share from which on a muted worker counts as trusted again: far from the other, on purpose."""
PATIENCE = 3
"""Rounds in a row after which a change is believed."""
PATIENCE_MOST = 48
"""The patience with a worker doubles with each of its changes, up to this: one that flickers fills no log."""
MARKED = 0.5
"""Change of the smoothed standing, a worker's weight over the largest, that is worth a sentence."""
SMOOTHING = 0.1
"""Rate at which the smoothed standing follows."""
QUIET_ROUNDS = 50
"""Rounds after a sentence about a worker in which a change of its standing is not worth another."""
MOST_POINTS = 2000
"""Points of history per worker; twice the pixels that a plot has."""
MOST_NAMES = 256
"""Workers whose history is kept; beyond, the one that was away longest is dropped."""


class History:
    """The weights of one worker over the steps; memory is bounded by thinning out.

    A point is the mean over `stride` of the worker's rounds; when there are `MOST_POINTS`, each two become one and
    the stride doubles.
    """

    def __init__(self) -> None:
        self.stride = 1
        self._steps = array("q")
        self._weights = array("d")
        self._first = 0
        self._sum = 0.0
        self._count = 0

    def add(self, step: int, weight: float) -> None:
        """Add the weight of a round; steps ascend."""
        if not self._count:
            self._first = step
        self._sum += weight
        self._count += 1
        if self._count < self.stride:
            return
        self._steps.append(self._first)
        self._weights.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._steps) >= MOST_POINTS:
            pairs = zip(self._weights[::2], self._weights[1::2], strict=True)
            self._weights = array("d", [(one + other) / 2.0 for one, other in pairs])
            self._steps = self._steps[::2]
            self.stride *= 2

    def points(self) -> list[tuple[int, float]]:
        """Return (first step, mean weight) of each stride, ascending; the last may be of fewer rounds."""
        points = list(zip(self._steps, self._weights, strict=True))
        return [*points, (self._first, self._sum / self._count)] if self._count else points

    def state(self) -> dict[str, Any]:
        """Return everything as arrays and plain numbers."""
        return {
            "stride": self.stride,
            "steps": np.array(self._steps, np.int64),
            "weights": np.array(self._weights, np.float64),
            "first": self._first,
            "sum": self._sum,
            "count": self._count,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.stride = int(state["stride"])
        self._steps = array("q", np.asarray(state["steps"], np.int64).tolist())
        self._weights = array("d", np.asarray(state["weights"], np.float64).tolist())
        self._first, self._sum, self._count = int(state["first"]), float(state["sum"]), int(state["count"])


@dataclass
class _Standing:
    """What is known of a worker.

    Attributes:
        muted: as last said.
        streak: rounds in a row that speak for the opposite.
        patience: rounds that it takes to believe it.
        smoothed: its weight over the largest, smoothed; None before the first round.
        said: that number when it was last spoken of.
        quiet: rounds since then.
        muted_rounds: rounds in which its weight was that of a muted worker.
    """

    muted: bool = False
    streak: int = 0
    patience: int = PATIENCE
    smoothed: float | None = None
    said: float = 1.0
    quiet: int = 0
    muted_rounds: int = 0
    history: History = field(default_factory=History)

    def state(self) -> dict[str, Any]:
        """Return everything as arrays and plain values."""
        return {**vars(self), "history": self.history.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        for name in vars(self).keys() - {"history"}:
            setattr(self, name, state[name])
        self.history.restore(state["history"])


class TrustLog:
    """Follows the weights of all workers by name.

    `observe` is to be called once a round. A sentence is said when a worker has been muted for some rounds, when a
    muted one is trusted again, and when the weight of another changes markedly against the largest; all with the
    reason. So who merely gains what another lost is not spoken of, and rounds of different size compare.
    """

    def __init__(self) -> None:
        self._standings: dict[str, _Standing] = {}

    def observe(
        self, step: int, names: Sequence[str], weights: Sequence[float], reason: Callable[[str], str]
    ) -> list[str]:
        """Take note of a round, and return what is worth saying of it.

        Args:
            step: of the round; ascending.
            names: of the ranks present.
            weights: one for each; a refused push has 0. All 0: a void round, of which nothing is judged.
            reason: from a name to a few words why its weight is what it is; called only for what is said.
        """
        sentences: list[str] = []
        total, largest = float(sum(weights)), float(max(weights, default=0.0))
        for name, weight in zip(names, weights, strict=True):
            standing = self._standings.pop(name, None) or _Standing()
            self._standings[name] = standing  # the order of this dictionary is that of the last appearance
            standing.history.add(step, float(weight))
            if total > 0.0:
                change = _judge(standing, float(weight) * len(names) / total, float(weight) / largest)
                if change:
                    sentences.append(f"step {step}: worker {name!r} {change}: {reason(name)}")
        while len(self._standings) > len(names) + MOST_NAMES:
            del self._standings[next(iter(self._standings))]
        return sentences

    @property
    def muted(self) -> tuple[str, ...]:
        """The names of those who are muted now, as far as that was said, in alphabetical order."""
        return tuple(sorted(name for name, standing in self._standings.items() if standing.muted))

    def muted_rounds(self) -> dict[str, int]:
        """Return, by name, in how many rounds a worker had next to no weight."""
        return {name: standing.muted_rounds for name, standing in self._standings.items()}

    def history(self) -> dict[str, list[tuple[int, float]]]:
        """Return, by name, the points (first step, mean weight) of the history."""
        return {name: standing.history.points() for name, standing in self._standings.items()}

    def state(self) -> list[Any]:
        """Return name and state of each worker, in the order of the last appearance, as arrays and plain values."""
        return [[name, standing.state()] for name, standing in self._standings.items()]

    def restore(self, state: Sequence[Any]) -> None:
        """Take over what `state` returned."""
        self._standings = {}
        for name, standing in state:
            self._standings[name] = _Standing()
            self._standings[name].restore(standing)


def _judge(standing: _Standing, share: float, of_largest: float) -> str:
    """Follow a worker's weight, in fair shares and over the largest, and return what is to be said, or nothing."""
    if standing.smoothed is None:
        standing.smoothed = standing.said = of_largest
    standing.smoothed += SMOOTHING * (of_largest - standing.smoothed)
    standing.quiet += 1
    standing.muted_rounds += share < MUTED_BELOW
    turns = share >= TRUSTED_ABOVE if standing.muted else share < MUTED_BELOW
    standing.streak = standing.streak + 1 if turns else 0
    if standing.streak >= standing.patience:
        standing.muted = not standing.muted
        standing.streak = 0
        standing.patience = min(2 * standing.patience, PATIENCE_MOST)
        _spoken(standing, of_largest)
        return "is muted" if standing.muted else "is trusted again"
    unmoved = abs(standing.smoothed - standing.said) < MARKED
    if standing.muted or turns or unmoved or standing.quiet < QUIET_ROUNDS:
        return ""
    before = standing.said
    _spoken(standing, standing.smoothed)
    return f"now counts {standing.said:.1f} times as much as the most trusted, after {before:.1f} times"


def _spoken(standing: _Standing, of_largest: float) -> None:
    standing.said = standing.smoothed = of_largest
    standing.quiet = 0
