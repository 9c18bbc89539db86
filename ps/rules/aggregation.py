"""Aggregation rules: from what is known of a round's gradients to what each of them counts.

What a rule is stands in `ps.rules.rule`. The rules here are pure and without state. All judge the usable gradients
only: a push that was refused counts nothing, in every rule. W is the number of usable gradients and P that of the
trainable parameters; each rule states its cost beyond the one pass over W x P elements that every update takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from protocol.errors import ConfigurationError
from ps.rules.geometry import Vector, weighted_median
from ps.rules.rule import Decision, Need, RoundView

LONGEST_RESCALE = 1e6
"""A gradient is lengthened this many times at most: the factor must be finite in float32 whatever is pushed."""


STATE_BOUND = 1.5
"""How many times the median norm of all changes of state one may have: honest ones differ that much."""


class MeanOver(StrEnum):
    """What counts once in a mean."""

    WORKERS = "workers"
    EXAMPLES = "examples"


NOTHING: frozenset[Need] = frozenset()


@dataclass(frozen=True)
class Mean:
    """The mean over the usable gradients: of each worker, or of each example, alike. Costs nothing extra."""

    over: MeanOver = MeanOver.WORKERS

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing is measured."""
        return NOTHING

    def decide(self, view: RoundView) -> Decision:
        """Weigh a round; all weights are 0 when no push is usable, or none has an example."""
        # Plain numbers: for a few ranks NumPy takes ten times as long, in every round.
        counts = [1] * len(view.ranks) if self.over is MeanOver.WORKERS else view.examples
        usable = [count if use else 0 for count, use in zip(counts, view.usable, strict=True)]
        total = sum(usable)
        weights = np.array([count / total if total else 0.0 for count in usable], np.float64)
        return Decision(weights, np.ones(weights.size))


@dataclass(frozen=True)
class ClippedMean:
    """The mean of the usable gradients, each brought down to their median norm.

    With an even number the lower of the two norms in the middle is taken, so that one of two cannot raise it. So
    no single gradient counts more than another, however long it is; its direction is not judged.
    A median norm of 0 clips all to nothing: then the gradients that are 0 have all the weight.

    Costs nothing extra: the norms are measured as the gradients arrive.
    Source: norm clipping as in Sun et al., "Can You Really Backdoor Federated Learning?", 2019, section 4, with
    the median of the round in place of a fixed bound.
    """

    over: MeanOver = MeanOver.WORKERS

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing beyond the norms, which every view has."""
        return NOTHING

    def decide(self, view: RoundView) -> Decision:
        """Weigh a round and clip its norms."""
        norms = [norm if use else 0.0 for norm, use in zip(view.norms, view.usable, strict=True)]
        known = sorted(norm for norm, use in zip(norms, view.usable, strict=True) if use)
        median = known[(len(known) - 1) // 2] if known else 0.0
        if median > 0.0:
            return Decision(Mean(self.over).decide(view).weights, clip_factors(norms, median))
        zero = tuple(use and norm == 0.0 for norm, use in zip(norms, view.usable, strict=True))
        return Mean(self.over).decide(replace(view, usable=zero))


@dataclass(frozen=True)
class Median:
    """The median of each coordinate; of an even number of values, the mean of the two in the middle.

    Tolerates fewer than half faulty workers of many with like data; it loses much where their data differ.
    A gradient row is reused for the result: no extra memory. Time: one more pass over W x P elements, and
    about W (log2 W)^2 / 4 comparisons of each coordinate, in the cache.
    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018,
    definition 1.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing is measured."""
        return NOTHING

    def decide(self, view: RoundView) -> Decision:
        """Ask for the largest trim that leaves something."""
        return _trimmed(view, max(0, (sum(view.usable) - 1) // 2))


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its `faulty` smallest and `faulty` largest values.

    Needs more than 2 x `faulty` usable gradients. Memory and time as `Median`.
    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018,
    definition 2.

    Attributes:
        faulty: how many workers may be bad, at least 0.
    """

    faulty: int

    def __post_init__(self) -> None:
        _check_faulty(self.faulty)

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing is measured."""
        return NOTHING

    def decide(self, view: RoundView) -> Decision:
        """Ask for the trim; judge a round that is too short by its clipped mean."""
        short = _too_short(view, "the trimmed mean", self.faulty, 2 * self.faulty + 1)
        return short or _trimmed(view, self.faulty)


@dataclass(frozen=True)
class Krum:
    """The one gradient that lies nearest to its W - f - 2 nearest others, f = `faulty`; the first of equals.

    Needs at least 2f + 3 usable gradients. Time: one more pass over W x P elements and W (W + 1) / 2 inner
    products, which outweigh the pass from about W = 8 on; memory W x W numbers.
    Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017,
    section 4.

    Attributes:
        faulty: f, how many workers may be bad, at least 0.
    """

    faulty: int

    def __post_init__(self) -> None:
        _check_faulty(self.faulty)

    @property
    def needs(self) -> frozenset[Need]:
        """All inner products, for the distances."""
        return frozenset({Need.GRAM})

    def decide(self, view: RoundView) -> Decision:
        """Choose; judge a round that is too short by its clipped mean."""
        return self._choose(view, "Krum", 1)

    def _choose(self, view: RoundView, rule: str, count: int) -> Decision:
        short = _too_short(view, rule, self.faulty, 2 * self.faulty + 3)
        return short or _chosen(view, self.faulty, count)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the W - f gradients that Krum scores best, f = `faulty`.

    Needs at least 2f + 3 usable gradients. Memory and time as `Krum`.
    Source: Blanchard et al. (see `Krum`), section 4 and its experiments, which average the best W - f; so does
    Allouah et al., "Fixing by Mixing", 2023. El-Mhamdi et al., "The Hidden Vulnerability of Distributed
    Learning in Byzantium", 2018, prove more for W - f - 2, which wastes two gradients of honest workers.
    """

    def decide(self, view: RoundView) -> Decision:
        """Choose; judge a round that is too short by its clipped mean."""
        return self._choose(view, "multi-Krum", sum(view.usable) - self.faulty)


@dataclass(frozen=True)
class CosineTrust:
    """The mean of the gradients by their cosine to the validator's, if positive, each brought to its norm.

    With v the validator's gradient and c_i = max(0, cos(g_i, v)): `sum_i c_i |v| / |g_i| g_i / sum_i c_i`. Short
    gradients are lengthened, so factors may be above 1, to `LONGEST_RESCALE` at most. A stale v is used as if it
    were fresh. Nobody with a positive cosine: nothing is applied. A single usable gradient is applied as it is.
    Before the first validator gradient a round is judged by its clipped mean.

    Time: one more pass over W x P elements; memory for one gradient more, v.
    Source: Cao et al., "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", 2021, equation 4.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """The inner products with the validator's gradient."""
        return frozenset({Need.REFERENCE})

    def coefficients(self, view: RoundView) -> Vector:
        """Return a total for many gradients to be measured against, rather than each other; any will do here."""
        return np.array(view.usable, np.float64)

    def decide(self, view: RoundView) -> Decision:
        """Weigh a round by its angles to the reference."""
        if sum(view.usable) <= 1:
            return Mean().decide(view)
        geometry = view.measured()
        if geometry.reference_norm is None or geometry.with_reference is None:
            return _fall_back(view, "cosine trust needs a validator's gradient, and there was none to compare with")
        trust = np.maximum(geometry.cosine_to_reference(), 0.0)
        total = trust.sum()
        factors = np.ones(trust.size)
        counted = trust > 0.0
        if total > 0.0:
            trust /= total
            factors[counted] = np.minimum(geometry.reference_norm / geometry.norms[counted], LONGEST_RESCALE)
        return Decision(trust, factors, yardstick=trust)


def clip_factors(norms: Sequence[float], clip_norm: float) -> Vector:
    """Return the factors that bring each gradient's norm down to `clip_norm`: `min(1, clip_norm / norm)`.

    Args:
        norms: Euclidean norms of the gradients, at least 0.
        clip_norm: the largest norm allowed, at least 0.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, algorithm 1.
    """
    return np.array([min(1.0, clip_norm / norm) if norm else 1.0 for norm in norms], np.float64)


def state_factors(norms: Sequence[float], usable: Sequence[bool], yardstick: Vector | None = None) -> Vector:
    """Return the factors that bring each rank's changes of state down to `STATE_BOUND` times their median norm.

    No rule looks at state, and a change of any length may come with an ordinary gradient. With an even number of
    ranks the median is the lower of the two in the middle. If it is 0, whatever is not 0 is brought to nothing.

    Args:
        norms: Euclidean norms over the floating state.
        usable: whose norms count; the factors of the others mean nothing.
        yardstick: what each norm counts in the median; None for all alike.
    """
    known = np.array(usable, np.bool_)
    lengths = np.where(known, norms, 0.0)
    weights = known.astype(np.float64) if yardstick is None else yardstick
    return clip_factors(lengths.tolist(), STATE_BOUND * weighted_median(lengths[known], weights[known]))


def _trimmed(view: RoundView, trim: int) -> Decision:
    mean = Mean().decide(view)
    return replace(mean, trim=trim) if trim else mean  # without a trim it is the mean, in one pass less


def _chosen(view: RoundView, faulty: int, count: int) -> Decision:
    """Return the mean of the `count` gradients with the best Krum scores; of equals the lower rank comes first."""
    distances = view.measured().distances_squared()
    usable = np.flatnonzero(view.usable)
    others = distances[np.ix_(usable, usable)]
    np.fill_diagonal(others, np.inf)
    scores = np.sort(others, axis=1)[:, : usable.size - faulty - 2].sum(axis=1)
    weights = np.zeros(len(view.usable))
    weights[usable[np.argsort(scores, kind="stable")[:count]]] = 1.0 / count
    return Decision(weights, np.ones(weights.size))


def _too_short(view: RoundView, rule: str, faulty: int, needed: int) -> Decision | None:
    """Return what is decided where too few gradients are usable for a rule, or None where they suffice."""
    usable = sum(view.usable)
    if usable >= needed:
        return None
    return _fall_back(view, f"{rule} with {faulty} faulty needs {needed} usable gradients, and there were {usable}")


def _fall_back(view: RoundView, why: str) -> Decision:
    return replace(ClippedMean().decide(view), fallback=f"{why}: the clipped mean was applied")


def _check_faulty(faulty: int) -> None:
    if faulty < 0:
        raise ConfigurationError(f"the number of faulty workers must be at least 0, not {faulty}")
