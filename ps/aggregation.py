"""Aggregation rules: pure functions from what is known of a round's gradients to their weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError


class MeanOver(StrEnum):
    """What counts once in a mean."""

    WORKERS = "workers"
    EXAMPLES = "examples"


@dataclass(frozen=True)
class RoundView:
    """What a rule may look at; all tuples have one entry per rank present, in rank order.

    Attributes:
        step: the step of the round.
        ranks: who pushed, ascending.
        usable: False for a push that was refused: it is present and counts nothing.
        examples: size of the batch behind each gradient.
        norms: Euclidean norm of each gradient before clipping; not finite where it is not usable.
        losses: the loss that each rank reported.
    """

    step: int
    ranks: tuple[int, ...]
    usable: tuple[bool, ...]
    examples: tuple[int, ...]
    norms: tuple[float, ...]
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.ranks), len(self.usable), len(self.examples), len(self.norms), len(self.losses)}
        if len(lengths) != 1:
            raise LocalProtocolError("a round's view needs one entry per rank in every column")
        if any(a >= b for a, b in zip(self.ranks, self.ranks[1:], strict=False)):
            raise LocalProtocolError(f"a round's ranks must ascend, not {self.ranks}")


Rule = Callable[[RoundView], NDArray[np.float64]]
"""From a round to weights [ranks], float64, at least 0: their sum is 1, or 0 where nothing can be applied."""


@dataclass(frozen=True)
class Mean:
    """The mean over the usable gradients: of each worker, or of each example, alike."""

    over: MeanOver = MeanOver.WORKERS

    def __call__(self, view: RoundView) -> NDArray[np.float64]:
        """Return the weights [ranks]; all are 0 when no push is usable."""
        # Plain numbers: for a few ranks NumPy takes ten times as long, in every round.
        counts = [1] * len(view.ranks) if self.over is MeanOver.WORKERS else view.examples
        usable = [count if use else 0 for count, use in zip(counts, view.usable, strict=True)]
        total = sum(usable)
        return np.array([count / total if total else 0.0 for count in usable], np.float64)


def clip_factors(norms: Sequence[float], clip_norm: float) -> NDArray[np.float64]:
    """Return the factors that bring each gradient's norm down to `clip_norm`: `min(1, clip_norm / norm)`.

    Args:
        norms: Euclidean norms of the gradients, at least 0.
        clip_norm: the largest norm allowed, above 0.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
    """
    return np.array([min(1.0, clip_norm / norm) if norm else 1.0 for norm in norms], np.float64)
