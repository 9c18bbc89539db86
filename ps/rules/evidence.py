"""Evidence: trust in each worker, accumulated from what a validator's gradients say of its gradients.

With v the last validator gradient, n_i = |g_i| and tau = |v|, everything is said of gradients clipped to tau and
in units of tau: A_ij = <g_i, g_j> / (max(n_i, tau) max(n_j, tau)) and b_i = <g_i, v> / (max(n_i, tau) tau). Their
running means are fitted by non-negative least squares, "how much of each worker is needed to rebuild the
validator's gradient", and whoever is needed at least 30 % as much as the best is trusted fully. The fit, rather
than the cosine alone, lets workers with unlike data keep equal weights; the memory outlasts rounds in which the
validator's gradient is mostly noise. Copies of one gradient share one weight. Where no validator takes part, trust
follows the claimed accuracy: that helps against honest faults, never against liars.

A memory follows only as far as recent agreements stand out of their noise; that of a worker whose gradients
suddenly grow is cut short. Norms are clipped to a bound that follows validator's and trusted median norm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from protocol.errors import LocalProtocolError
from ps.rules import alarm, fitting
from ps.rules.alarm import FIELDS as ALARM_FIELDS
from ps.rules.alarm import Alarm, changed
from ps.rules.claims import CLAIM_RATE, CLAIM_WARM_UP, claimed_accuracies, trust_by_claims
from ps.rules.compiling import compiled, load
from ps.rules.fitting import copies_of, nonnegative_fit, off_diagonal_of_rank_one
from ps.rules.geometry import weighted_median
from ps.rules.ledger import Ledger, Matrix, Rows, Vector
from ps.rules.rule import Decision, Need, RoundView

MEMORY_RATE = 0.1
"""Most that one validated round counts in the running means: rounds apart from each other say more."""
MEMORY_KEPT = 0.97
"""What a running mean keeps per round since the last validation: it remembers about 30 rounds."""
YOUNG_VALIDATIONS = 34
"""Validations after which the mean of all has become the running mean (1 / 34 is about 1 - 0.97)."""
LOUDNESS_KEPT = 0.965
"""What the scale of the loudest agreement keeps per validation."""
RECENT_RATE = 0.2
"""Rate of the short running means whose size is held against their noise."""
NOISE_RATE = 0.03
"""Rate of the running variances."""
NOISE_COUNT = 3.0
"""How many times the variance of its noise a recent agreement must have to count. Late in a run the cosines are
mostly noise, and trust that follows noise mutes honest workers. Divided by the rounds since the last validation:
those who are seldom judged cannot wait for certainty."""
RIDGE = 0.1
"""Added to the diagonal in the fit: without it near twins would share their weight by chance."""
SATURATION = 0.3
"""Part of the best fit from which on a worker is trusted fully: fits of honest workers differ by 2 times."""
TRUST_GAIN = 8.0
"""Slope of the logit in the trust: no trust is a share of 2 %, full trust of 98 %."""
SHARE_CUT = 0.1
"""Shares under this part of the largest count nothing: a crowd of distrusted workers must not add up."""
HOPELESS_SHARE = 0.05
"""If no share reaches this, nobody is trusted, and the weights of the last round are kept."""
CARRIED_WEIGHT = 0.1
"""Weight of the last rounds that those present must hold together for it to be worth keeping."""
ALARMING_WEIGHT = 0.01
"""Weight from which on a sudden change of a worker is a reason for an alarm."""
WEIGHT_RATE = 0.5
"""How fast the remembered weights follow."""
SHORT = 1 / 3
"""Where the trusted gradients' median length is less than this part of the validator's, tau is that median divided
by this. Late in a run workers have fitted their own examples: who has fitted them a little better than the others
must not look as if it pushed nothing."""
SHORTEST_UNIT = 1e-6
"""Least tau, in units of the validator's norm: those who push zeros must not become the measure."""
BOUND_START = 1.5
"""Norm bound in units of tau, at the start and at least: honest norms differ that much."""
BOUND_MOST = 10.0
"""Norm bound in units of tau, at most."""
BOUND_GROWTH = 1.05
"""Growth of the bound per round: a wrongly trusted huge gradient must not pass before it is found out."""
TINY = 1e-300

NEEDS = frozenset({Need.GRAM, Need.REFERENCE})

FIELDS: Mapping[str, float] = {
    "trust": 0.0,  # e
    "validations": 0.0,  # k
    "agreement": 0.0,  # running mean of b
    "recent": 0.0,  # the same over a short time
    "recent_share": 1.0,  # variance of `recent` in units of that of b
    "noise": 0.0,  # variance of b
    "weight": 0.0,  # running mean of the weight
    "claim": math.nan,  # running mean of the claimed accuracy
    **ALARM_FIELDS,
}
"""Remembered by name, with start values; the pairs of the ledger hold the running mean of the Gram matrix."""


@dataclass(frozen=True, eq=False)
class Standing:
    """The usable gradients of a round, U of them, in units of tau.

    Attributes:
        positions: [U], their places in the view.
        rows: [U], their rows in the ledger.
        norms: [U], Euclidean norms.
        unit: tau, above 0: `whole`, or less where all are short.
        whole: the validator's norm, or the weighted median norm without one, above 0.
        gram: [U, U], inner products of the gradients clipped to tau, in units of tau squared.
        exact: False where `gram` is a guess from projections.
        agreement: [U], b_i; None in rounds without a fresh validator gradient.
        judged: whether anything can be said: False while a validator is awaited.
    """

    positions: Rows
    rows: Rows
    norms: Vector
    unit: float
    whole: float
    gram: Matrix
    exact: bool
    agreement: Vector | None
    judged: bool


class Evidence:
    """The rule `evidence`: weights from accumulated agreement with the validator.

    Costs one pass over the round's gradients for their inner products, and little else. W = 1 gives weight 1.

    Args:
        validated: whether validators are expected. If so, all weigh the same, clipped to the median norm, until the
            first validator gradient has come; if not, claimed accuracies count until one comes unexpectedly:
            from then on the rule is a validated one for good.
    """

    def __init__(self, validated: bool, more_fields: Mapping[str, float] | None = None) -> None:
        self.ledger = Ledger({**FIELDS, **(more_fields or {})})
        self.loudest = 0.0  # running scale of the agreements
        self._validated = validated
        self._unit: float | None = None  # norm of the last validator gradient
        self._silent_rounds = 0  # since the last validation
        self._rounds = 0
        self._bound = BOUND_START
        self._alarm = Alarm()
        _warm_up()

    @property
    def needs(self) -> frozenset[Need]:
        """Inner products among the gradients and with the validator's; projections do where W is large."""
        return NEEDS

    @property
    def validated(self) -> bool:
        """Whether a validator judges, or is awaited."""
        return self._validated

    @property
    def wants_validation(self) -> bool:
        """Whether the last rounds look so bad that the next should be validated more likely than usual.

        The server should then draw it with probability 1/2: certainty could be foreseen.
        """
        return self._validated and self._alarm.raised

    def coefficients(self, view: RoundView) -> Vector:
        """Return the c_j [W] of the total to measure where the whole Gram matrix is too dear: `sum_j c_j g_j`.

        It is the sum of the clipped gradients by the weights that they had lately; 0 for what is not usable.
        """
        usable = _usable(view)
        norms = np.array(view.norms)[usable]
        rows = [self.ledger.row(view.names[position]) for position in usable]
        weights = np.array([0.0 if row is None else self.ledger["weight"][row] for row in rows])
        if not weights.any():
            weights = np.full(usable.size, 1.0 / max(usable.size, 1))
        unit = self._unit or (weighted_median(norms, weights) if usable.size else 0.0) or 1.0
        coefficients = np.zeros(len(view.usable))
        coefficients[usable] = weights * unit / np.maximum(norms, unit)
        return coefficients

    def decide(self, view: RoundView) -> Decision:
        """Judge a round."""
        standing = self.measure(view)
        self.absorb(standing, view)
        return self.weigh(standing, view, TRUST_GAIN * (self.ledger["trust"][standing.rows] - 0.5))

    # ---- the parts of a decision, in their order ---------------------------------------------------------

    def measure(self, view: RoundView) -> Standing:
        """Bring a round's geometry to units of tau, and enter new names.

        Raises:
            LocalProtocolError: the round was not measured.
        """
        geometry = view.measured()
        positions = _usable(view)
        everybody = positions.size == len(view.usable)
        rows = self.ledger.rows(view.names if everybody else tuple(view.names[at] for at in positions.tolist()))
        norms = geometry.norms if everybody else geometry.norms[positions]
        agreement = None
        if geometry.reference_norm is not None:
            self._validated = True
            self._unit = geometry.reference_norm or self._unit
        median = weighted_median(norms, self.ledger["weight"][rows])
        whole = (self._unit if self._validated else None) or median or 1.0
        unit = min(whole, max(median / SHORT, SHORTEST_UNIT * whole))
        clipped = np.maximum(norms, unit)
        if geometry.fresh and geometry.reference_norm and geometry.with_reference is not None:
            products = geometry.with_reference if everybody else geometry.with_reference[positions]
            agreement = products / (clipped * geometry.reference_norm)
        if geometry.gram is not None:
            products = geometry.gram if everybody else geometry.gram[positions[:, None], positions]
            gram = products / (clipped[:, None] * clipped)
        elif geometry.with_total is not None and geometry.total_coefficients is not None:
            lengths = norms / clipped
            parts = geometry.total_coefficients[positions] * clipped / unit
            sums = geometry.with_total[positions] / (clipped * unit) - parts * lengths * lengths
            gram = off_diagonal_of_rank_one(sums, parts, lengths)
        else:
            raise LocalProtocolError(f"round {view.step} was measured without inner products among its gradients")
        judged = not self._validated or self._unit is not None
        return Standing(positions, rows, norms, unit, whole, gram, geometry.gram is not None, agreement, judged)

    def absorb(self, standing: Standing, view: RoundView) -> None:
        """Update the trust in those present, if the round says something of them."""
        self._rounds += 1
        self._silent_rounds += 1
        if not self._validated:
            self._absorb_claims(standing, view)
            return
        self._notice_changes(standing)
        if standing.agreement is not None:
            self._absorb_agreement(standing, standing.agreement)

    def _notice_changes(self, standing: Standing) -> None:
        """Let the record of a worker that has changed its ways count as little as one validation.

        Its trust holds until it is judged again, which is asked for soon.
        """
        rows, ledger = standing.rows, self.ledger
        rows = rows[changed(ledger, rows, np.maximum(standing.norms / standing.whole, 1.0))]
        if rows.size:
            ledger["validations"][rows] = np.minimum(ledger["validations"][rows], 1.0)
            ledger["recent_share"][rows] = 1.0
            if ledger["weight"][rows].max() > ALARMING_WEIGHT:
                self._alarm.ring()

    def _absorb_agreement(self, standing: Standing, agreement: Vector) -> None:
        loudest = float(np.abs(agreement).max(initial=0.0))
        self.loudest = max(loudest, LOUDNESS_KEPT * self.loudest)
        since, self._silent_rounds = self._silent_rounds, 0
        if self.loudest == 0.0:
            return  # nothing but zeros: nothing was said
        ledger, rows = self.ledger, standing.rows
        rate = min(MEMORY_RATE, 1.0 - MEMORY_KEPT**since) * self._clarity(rows, agreement, since)
        judged = (agreement, standing.gram, rate)
        mean, gram = _remember(ledger["agreement"], ledger.pairs, ledger["validations"], rows, *judged)
        self._trust_by_fit(rows, nonnegative_fit(gram, mean, RIDGE))

    def _clarity(self, rows: Rows, agreement: Vector, since: int) -> float:
        """Return how far recent agreements stand out of their noise, in [0, 1], after taking in this round's."""
        ledger = self.ledger
        columns = (ledger["recent"], ledger["recent_share"], ledger["noise"], ledger["validations"])
        recent, share, noise = _follow(*columns, rows, agreement)
        signal = float(recent @ recent)
        return max(0.0, 1.0 - NOISE_COUNT / since * float(noise @ share) / signal) if signal > 0.0 else 0.0

    def _trust_by_fit(self, rows: Rows, fit: Vector) -> None:
        best = fit.max(initial=0.0)
        if best > 0.0:  # else nobody helps, which says nothing of one against another: trust stays as it was
            self.ledger["trust"][rows] = np.minimum(fit / (SATURATION * best), 1.0)

    def _absorb_claims(self, standing: Standing, view: RoundView) -> None:
        claims = claimed_accuracies(view, standing.positions)
        mean = self.ledger["claim"][standing.rows]
        new = np.isnan(mean)
        known = np.isfinite(claims)
        if new.any():  # newcomers start where the others are, or together
            start = mean[~new] if not new.all() else claims[known]
            mean[new] = start.mean() if start.size else math.nan
        mean[known] += CLAIM_RATE * (claims[known] - mean[known])
        self.ledger["claim"][standing.rows] = mean
        self.ledger["trust"][standing.rows] = 1.0 if self._rounds <= CLAIM_WARM_UP else trust_by_claims(mean)

    def weigh(self, standing: Standing, view: RoundView, logits: Vector) -> Decision:
        """Turn the logits of trust [U] into the decision.

        Weights are the sigmoids, without those under `SHARE_CUT` of the largest, divided by their sum; where a
        validator judges and all inner products are known, copies of one gradient share the weight of one. If nobody
        is trusted, those present keep the weights that they had; if these are next to nothing, those who were
        never judged share equally; if there are none either, the round is void, unless nobody else was ever known.
        """
        if not standing.rows.size:
            return Decision(np.zeros(len(view.usable)), np.ones(len(view.usable)))
        shares = 1.0 / (1.0 + np.exp(-logits)) if standing.judged else np.ones(standing.rows.size)
        largest = float(shares.max())
        counted, foremost = shares >= SHARE_CUT * largest, shares >= 0.5 * largest
        if standing.exact and standing.judged and self._validated:
            shares = shares / copies_of(standing.gram, counted)
        kept = shares * counted if largest >= HOPELESS_SHARE else self._kept(standing.rows)
        total = float(kept.sum())
        if total > 0.0:
            kept /= total
        decision = self.settle(standing, view, kept, shares * foremost)
        if standing.judged:
            return decision
        return replace(decision, fallback="no validator has sent a gradient yet: the clipped mean was applied")

    def settle(self, standing: Standing, view: RoundView, kept: Vector, bound_by: Vector) -> Decision:
        """Bound the norms for weights that are decided, remember these, and hear the alarm.

        Args:
            standing: of the round, U gradients.
            view: of the round.
            kept: [U], the weights, with sum 1, or all 0.
            bound_by: [U], what each counts in the median that bounds the norms, at least 0.
        """
        size = len(view.usable)
        lengths = np.maximum(standing.norms, TINY)
        factors = np.maximum(np.minimum(1.0, self._norm_bound(standing, bound_by) / lengths), TINY)
        rate = WEIGHT_RATE if self._rounds > 1 else 1.0
        remembered = self.ledger["weight"]
        remembered[standing.rows] += rate * (kept - remembered[standing.rows])
        (on,) = (kept > 0.0).nonzero()
        if self._validated and on.size:  # what the others claim, NaN perhaps, must not matter
            loss = float(kept[on] @ np.array(view.losses)[standing.positions[on]])
            log_length = float(kept @ np.log(lengths))
            self._alarm.observe(loss, log_length, standing.agreement is not None)
        if standing.positions.size == size:  # everybody is usable, as good as always
            return Decision(kept, factors, yardstick=bound_by)
        everybody = np.array([np.zeros(size), np.ones(size), np.zeros(size)])
        everybody[:, standing.positions] = kept, factors, bound_by
        return Decision(everybody[0], everybody[1], yardstick=everybody[2])

    def _kept(self, rows: Rows) -> Vector:
        carried: Vector = self.ledger["weight"][rows]
        if carried.sum() >= CARRIED_WEIGHT:
            return carried
        unjudged = self.ledger["validations"][rows] == 0.0
        if self._validated and unjudged.any():
            return np.where(unjudged, 1.0, 0.0)
        return np.full(rows.size, float(len(self.ledger) == 1))

    def _norm_bound(self, standing: Standing, shares: Vector) -> float:
        median = weighted_median(standing.norms, shares)
        if not standing.judged:
            return median
        if not self._validated:
            return BOUND_START * median
        bound = min(BOUND_START * max(1.0, median / standing.whole), BOUND_MOST, BOUND_GROWTH * self._bound)
        self._bound = max(bound, BOUND_START)
        return bound * standing.whole

    # ---- for people and checkpoints ----------------------------------------------------------------------

    def reasons(self, view: RoundView, name: str) -> str:
        """Return, in a few words, what the trust in a worker of this round rests on."""
        position = view.names.index(name)
        if not view.usable[position]:
            return "its gradient was refused"
        row = self.ledger.row(name)
        if row is None:
            return "nothing is known of it yet"
        trust = float(self.ledger["trust"][row])
        claim = float(self.ledger["claim"][row])
        if not self._validated:
            best = float(np.nanmax(self.ledger["claim"], initial=0.0))
            how = "far below the best" if trust < 0.5 else "close to the best"
            return f"its claimed accuracy is {how} ({claim:.2f} against {best:.2f})"
        validations = int(self.ledger["validations"][row])
        if validations == 0:
            return "no validator has judged it yet"
        agreement = float(self.ledger["agreement"][row])
        said = f"{agreement:+.2f} over its last {min(validations, YOUNG_VALIDATIONS)} validations"
        ratio = view.norms[position] / self._unit if self._unit else 1.0
        if trust >= 0.5:
            return f"its gradients help to rebuild the validator's (agreement {said})"
        if agreement <= 0.0 and ratio < BOUND_MOST:
            return f"its gradients point away from the validator's (agreement {said})"
        if ratio >= BOUND_MOST:
            return f"its gradient is {ratio:.0f} times as long as the validator's (agreement {said})"
        if ratio <= 1.0 / BOUND_MOST:
            return f"its gradient is next to nothing, {ratio:.2g} of the validator's length"
        return f"the validator's gradient can be rebuilt without its gradients (agreement {said})"

    def state(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as arrays and plain numbers."""
        return {
            "ledger": self.ledger.state(),
            "loudest": self.loudest,
            "validated": self._validated,
            "unit": self._unit,
            "silent_rounds": self._silent_rounds,
            "rounds": self._rounds,
            "bound": self._bound,
            "alarm": self._alarm.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.ledger.restore(state["ledger"])
        self.loudest = float(state["loudest"])
        self._validated = bool(state["validated"]) or self._validated
        self._unit = None if state["unit"] is None else float(state["unit"])
        self._silent_rounds = int(state["silent_rounds"])
        self._rounds = int(state["rounds"])
        self._bound = float(state["bound"])
        self._alarm.restore(state["alarm"])


@compiled
def _follow(
    recent: Vector, recent_share: Vector, noise: Vector, validations: Vector, rows: Rows, agreement: Vector
) -> tuple[Vector, Vector, Vector]:
    """Take a round's agreement [U] into the first three columns; return what they hold for `rows`, [U] each."""
    now = np.empty((3, rows.size))
    for i, row in enumerate(rows):
        rate = max(RECENT_RATE, 1.0 / (validations[row] + 1.0))
        change = agreement[i] - recent[row]
        recent[row] += rate * change
        recent_share[row] = (1.0 - rate) * (1.0 - rate) * recent_share[row] + rate * rate
        if validations[row] > 0.0:
            noise_rate = max(NOISE_RATE, 1.0 / max(validations[row], 1.0))
            noise[row] += noise_rate * (change * change / (1.0 + recent_share[row]) - noise[row])
        now[0, i], now[1, i], now[2, i] = recent[row], recent_share[row], noise[row]
    return now[0], now[1], now[2]


@compiled
def _remember(
    mean: Vector, pairs: Matrix, validations: Vector, rows: Rows, agreement: Vector, gram: Matrix, rate: float
) -> tuple[Vector, Matrix]:
    """Take a round's agreement [U] and Gram matrix [U, U] into the memory; return what it holds for `rows`."""
    rates, mean_now, gram_now = np.empty(rows.size), np.empty(rows.size), np.empty(gram.shape)
    for i, row in enumerate(rows):
        young = validations[row] < YOUNG_VALIDATIONS
        rates[i] = max(rate, 1.0 / (validations[row] + 1.0)) if young else rate
        mean[row] += rates[i] * (agreement[i] - mean[row])
        mean_now[i] = mean[row]
    for i, row in enumerate(rows):
        for j, other in enumerate(rows):
            # Both memories must be of one age, or the fit takes a worker that has turned for a counterweight to
            # others.
            pairs[row, other] += min(rates[i], rates[j]) * (gram[i, j] - pairs[row, other])
            if validations[row] == 0.0 or validations[other] == 0.0:
                pairs[row, other] = gram[i, j]
            gram_now[i, j] = pairs[row, other]
    for row in rows:
        validations[row] += 1.0
    return mean_now, gram_now


def _warm_up() -> None:
    """Load or compile all that a round needs, so that none waits for it."""
    rows, numbers, table = np.zeros(1, np.intp), np.zeros(1), np.eye(1)
    load(_follow, numbers, numbers, numbers, numbers, rows, numbers)
    load(_remember, numbers, table, numbers, rows, numbers, table, 0.0)
    alarm.warm_up()
    fitting.warm_up()


def _usable(view: RoundView) -> Rows:
    if all(view.usable) and math.isfinite(sum(view.norms)):  # as good as always
        return np.arange(len(view.usable))
    return np.flatnonzero(np.array(view.usable) & np.isfinite(view.norms))
