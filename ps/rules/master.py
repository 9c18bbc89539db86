"""The master network: a small network that corrects the evidence rule by what it has learned of the workers.

One network is shared by all workers. It sees eight features of each, none of which is this round's agreement with
the validator: that is what it learns to predict, from the rounds that were validated, in a memory of the last 64.
Its output and a learned reputation, one number per name, are added to the logit of the evidence. Its output layer
and all reputations start at 0, so the untrained master *is* the evidence rule, to the bit, and can mute nobody
before it has learned.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.rules.claims import claimed_accuracies
from ps.rules.compiling import compiled, load
from ps.rules.evidence import NEEDS, TRUST_GAIN, Evidence, Standing
from ps.rules.ledger import Matrix, Rows, Vector
from ps.rules.network import Activation, Adam, TwoLayerNetwork
from ps.rules.rule import Decision, Need, RoundView

Serials = NDArray[np.int64]
"""Numbers of names in the ledger, never used twice."""

FEATURES = (
    "the length of its gradient",
    "the shortness of its gradient",
    "how far it agrees with the trusted others",
    "the change in how far it agrees with the trusted others",
    "how far it goes along with the optimizer's momentum",
    "how much its gradient resembles another's",
    "its claimed loss",
    "its claimed accuracy",
)
"""What the network sees of a worker, in order, for people."""

HIDDEN = 16
"""Units of the hidden layer."""
LEARNING_RATE = 5e-3
BETA1, BETA2 = 0.9, 0.99
EPSILON = 1e-4
"""Of Adam; large on purpose: where next to nothing is to be learned, next to nothing moves."""
STEPS_PER_ROUND = 2
"""Adam steps after every round, validated or not."""
MEMORY = 64
"""Validated rounds that are remembered for training."""
NEWEST, DRAWN = 4, 12
"""Rounds in a batch: the newest, and others drawn from the memory."""
OUTPUT_KEPT = 0.99
"""What the output layer and the reputations keep per step: what is not confirmed fades."""
PENALTY = 1e-3
"""Weight of the squared parameters in the loss."""
REPUTATION_KEPT = 0.99
"""What reputations keep per round, besides."""
HABIT_RATE = 0.1
"""Rate of the running mean of a worker's agreement with the others."""
DRAWS_AHEAD = 64
"""Rounds whose draws are made at once: to set up a generator takes longer than a training step."""

FIELDS: Mapping[str, float] = {"habit": np.nan, "reputation": 0.0, "first": 0.0, "second": 0.0}
"""Remembered by name beside the evidence: running mean of the agreement, reputation, its two Adam moments."""


_SHORTEST = math.exp(-3.0)
"""Length in units of tau from which on a gradient is as short as can be told."""
_NO_LENGTH = 1e-150
"""Below this length in units of tau a gradient has no direction."""


class Master:
    """The rule `master`: evidence, corrected by a network that learns while the run goes on.

    `decide` judges a round and remembers it; `learn` then trains. The server may call `learn` after it has sent its
    replies; what was not learned is learned at the next `decide`, so the results are the same.

    Args:
        validated: whether validators are expected, see `Evidence`.
        seed: of the initial network and of the draws from the memory.
    """

    def __init__(self, validated: bool, seed: int) -> None:
        self.evidence = Evidence(validated, FIELDS)
        self.network = TwoLayerNetwork(len(FEATURES), HIDDEN, 1, activation=Activation.TANH, output_bias=False)
        start = np.random.Generator(np.random.Philox(key=[seed, 0]))
        self.network.hidden_kernel[:] = start.normal(0.0, len(FEATURES) ** -0.5, self.network.hidden_kernel.shape)
        # These hold moments and sizes of steps; the steps themselves are those of `_adam_step`.
        self._adam = Adam(self.network.parameters.size, LEARNING_RATE, BETA1, BETA2, EPSILON)
        self._all_parameters = np.arange(self.network.parameters.size)
        self._memory = _Memory(MEMORY)
        self._seed = seed
        self._draws: tuple[int, Vector] = (-1, np.empty(0))
        self._learned = 0  # rounds
        self._to_learn: Standing | None = None
        self._explained: tuple[RoundView, Standing, Matrix] | None = None
        _warm_up()

    @property
    def needs(self) -> frozenset[Need]:
        """Inner products among the gradients, with the validator's and with the optimizer's first moment."""
        return NEEDS | {Need.MOMENTUM}

    @property
    def wants_validation(self) -> bool:
        """Whether the next round should be validated more likely than usual, see `Evidence.wants_validation`."""
        return self.evidence.wants_validation

    def coefficients(self, view: RoundView) -> Vector:
        """Return the coefficients [W] of the total to measure where W is large, see `Evidence.coefficients`."""
        return self.evidence.coefficients(view)

    def decide(self, view: RoundView) -> Decision:
        """Judge a round."""
        self.learn()
        evidence = self.evidence
        standing = evidence.measure(view)
        # A lone gradient has nothing to be compared with.
        features = self._features(standing, view) if standing.rows.size > 1 else None
        evidence.absorb(standing, view)
        trust = evidence.ledger["trust"][standing.rows]
        anchors = TRUST_GAIN * (trust - 0.5)
        if features is None:
            return evidence.weigh(standing, view, anchors)
        decision = self._judge(standing, view, features, anchors)
        serials = evidence.ledger.serials[standing.rows]
        if not evidence.validated:
            self._memory.add(standing.rows, serials, features, anchors, 2.0 * trust - 1.0)
        elif standing.agreement is not None and evidence.loudest > 0.0:
            self._memory.add(standing.rows, serials, features, anchors, standing.agreement / evidence.loudest)
        self._to_learn = standing
        return decision

    def _judge(self, standing: Standing, view: RoundView, features: Matrix, anchors: Vector) -> Decision:
        """Decide on two gradients or more, by features [U, 8] and the logits of the trust by evidence [U]."""
        self._explained = (view, standing, features)
        correction = self.network.forward(features)[1][:, 0]
        reputation = self.evidence.ledger["reputation"][standing.rows]
        return self.evidence.weigh(standing, view, anchors + correction + reputation)

    def _features(self, standing: Standing, view: RoundView) -> Matrix:
        """Return the features [U, 8] of the usable gradients, and follow each worker's habit."""
        ledger, at = self.evidence.ledger, standing.positions
        weight = ledger["weight"][standing.rows]
        agreement = leave_one_out(standing.gram, weight) * (1.0 - weight)
        geometry = view.measured()
        features = np.zeros((at.size, len(FEATURES)))
        habits = (agreement, ledger["habit"], standing.rows)
        _describe(features, standing.norms, standing.unit, standing.gram, standing.exact, *habits)
        features[:, 1] = np.log(features[:, 1]) / math.log(_SHORTEST)
        if geometry.with_momentum is not None and geometry.momentum_norm:
            lengths = np.maximum(standing.norms, _NO_LENGTH * standing.unit)
            features[:, 4] = 2.0 * geometry.with_momentum[at] / (lengths * geometry.momentum_norm)
        features[:, 6] = np.tanh(_above_median(np.array(view.losses)[at]))
        features[:, 7] = 2.0 * _above_median(claimed_accuracies(view, at))
        return features

    # ---- training ----------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Train on what is remembered, if the last round was not learned yet.

        The loss of a worker in a remembered round, with p its share, beta in [-1, 1] how loudly the validator spoke
        for it, and e its trust by evidence: `beta^2 BCE(p, [beta > 0]) + BCE(p, sigmoid(8 (e - 1/2)))`.
        """
        if self._to_learn is None:
            return
        ledger, rows = self.evidence.ledger, self._to_learn.rows
        self._to_learn = None
        draws = self._draw()
        self._learned += 1
        memory = self._memory
        if memory.count:
            entries = memory.entries(draws)
            members = memory.rows[entries].reshape(STEPS_PER_ROUND, -1)
            serials = memory.serials[entries].reshape(members.shape)
            loudness = memory.loudness[entries].reshape(members.shape)
            anchors = memory.anchors[entries].reshape(members.shape)
            believed = 1.0 / (1.0 + np.exp(-anchors))
            factors, targets = _aims(members, serials, ledger.serials, loudness, believed)
            features = memory.features[entries].reshape(*members.shape, -1)
            for batch in zip(features, members, anchors, factors, targets, strict=True):
                self._train(*batch, rows)
        ledger["reputation"][rows] *= REPUTATION_KEPT

    def _train(
        self, x: Matrix, members: Rows, anchors: Vector, factors: Vector, targets: Vector, present: Rows
    ) -> None:
        """Take one step of Adam; reputations of those who are not `present` stay as they are.

        The slope of a worker's loss by its logit is `factor * share - target`.
        """
        network, adam, ledger = self.network, self._adam, self.evidence.ledger
        reputation = ledger["reputation"]
        activations, output = network.forward(x)
        share = 1.0 / (1.0 + np.exp(-(anchors + output[:, 0] + reputation[members])))
        slope = factors * share - targets
        gradient = network.backward(x, activations, slope[:, None])
        size = adam.next_size()
        _adam_step(network.parameters, gradient, adam.first, adam.second, self._all_parameters, size)
        network.output_kernel *= OUTPUT_KEPT
        _reputation_step(reputation, ledger["first"], ledger["second"], members, slope, present, size)

    def _draw(self) -> Matrix:
        """Return numbers in [0, 1), [STEPS_PER_ROUND, DRAWN]: a pure function of the seed and the round."""
        block, place = divmod(self._learned, DRAWS_AHEAD)
        if self._draws[0] != block:
            generator = np.random.Generator(np.random.Philox(key=[self._seed, block + 1]))
            self._draws = (block, generator.random((DRAWS_AHEAD, STEPS_PER_ROUND, DRAWN)))
        draws: Matrix = self._draws[1][place]
        return draws

    # ---- for people and checkpoints ----------------------------------------------------------------------

    def reasons(self, view: RoundView, name: str) -> str:
        """Return, in a few words, what the trust in a worker of the last judged round rests on.

        Where the network overrules the evidence, that is the feature, or the reputation, that counts most.
        """
        said = self.evidence.reasons(view, name)
        row = self.evidence.ledger.row(name)
        if self._explained is None or self._explained[0] is not view or row is None:
            return said
        _, standing, features = self._explained
        places = np.flatnonzero(standing.rows == row)
        if not places.size:
            return said
        trust = float(self.evidence.ledger["trust"][row])
        own = features[places[0]]
        correction = float(self.network.forward(own[None])[1][0, 0])
        reputation = float(self.evidence.ledger["reputation"][row])
        logit = TRUST_GAIN * (trust - 0.5)
        if (logit >= 0.0) == (logit + correction + reputation >= 0.0):
            return said
        if abs(reputation) > abs(correction):
            return f"its reputation, learned over past rounds, is {reputation:+.1f}, although {said}"
        without = np.repeat(own[None], len(FEATURES), axis=0)
        np.fill_diagonal(without, features.mean(axis=0))
        effects = correction - self.network.forward(without)[1][:, 0]
        most = int(np.argmax(effects if correction > 0.0 else -effects))
        return f"the network judges it by {FEATURES[most]}, although {said}"

    def state(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as arrays and plain numbers."""
        self.learn()
        return {
            "evidence": self.evidence.state(),
            "parameters": self.network.parameters.copy(),
            "first": self._adam.first.copy(),
            "second": self._adam.second.copy(),
            "steps": self._adam.steps,
            "learned": self._learned,
            "memory": self._memory.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.evidence.restore(state["evidence"])
        self.network.parameters[:] = state["parameters"]
        self._adam.first[:] = state["first"]
        self._adam.second[:] = state["second"]
        self._adam.steps = int(state["steps"])
        self._learned = int(state["learned"])
        self._memory.restore(state["memory"])
        self._to_learn = self._explained = None


def _warm_up() -> None:
    """Load or compile all that a round needs, so that none waits for it."""
    rows, serials = np.zeros(1, np.intp), np.zeros(1, np.int64)
    numbers, table = np.zeros(1), np.zeros((1, len(FEATURES)))
    load(_leave_one_out, table, numbers, numbers, 0.0)
    load(_describe, table, numbers, 1.0, table, True, numbers, numbers, rows)
    load(_aims, rows[None], serials[None], serials, numbers[None], numbers[None])
    load(_adam_step, numbers, numbers, numbers, numbers, rows, 0.0)
    load(_reputation_step, numbers, numbers, numbers, rows, numbers, rows, 0.0)


class _Memory:
    """A ring of remembered rounds, each of up to `width` workers; places that are not used have serial -2.

    Attributes:
        count: rounds in the ring.
        rows: [size, width], rows of the ledger.
        serials: [size, width], serials of those rows at that time: a row that is another's now does not count.
        features: [size, width, 8].
        anchors: [size, width], logits of the evidence.
        loudness: [size, width], how loudly the validator spoke for a worker, -1 to 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 0
        self.count = 0
        self.rows = np.zeros((size, 0), np.intp)
        self.serials = np.zeros((size, 0), np.int64)
        self.features = np.zeros((size, 0, len(FEATURES)))
        self.anchors = np.zeros((size, 0))
        self.loudness = np.zeros((size, 0))

    def add(
        self,
        rows: Rows,
        serials: NDArray[np.int64],
        features: Matrix,
        anchors: Vector,
        loudness: Vector,
    ) -> None:
        """Remember a round in place of the oldest."""
        width = rows.size
        self._widen(width - self.rows.shape[1])
        at = self._next
        self.serials[at] = -2
        self.rows[at, :width] = rows
        self.serials[at, :width] = serials
        self.features[at, :width] = features
        self.anchors[at, :width] = anchors
        self.loudness[at, :width] = np.minimum(np.maximum(loudness, -1.0), 1.0)
        self._next = (at + 1) % self._size
        self.count = min(self.count + 1, self._size)

    def _widen(self, more: int) -> None:
        if more <= 0:
            return
        pad = ((0, 0), (0, more))
        self.rows = np.pad(self.rows, pad)
        self.serials = np.pad(self.serials, pad, constant_values=-2)
        self.features = np.pad(self.features, (*pad, (0, 0)))
        self.anchors = np.pad(self.anchors, pad)
        self.loudness = np.pad(self.loudness, pad)

    def entries(self, draws: Matrix) -> Rows:
        """Return the places of some batches, [steps, entries]: the newest rounds, and others drawn.

        Args:
            draws: [steps, DRAWN], numbers in [0, 1).
        """
        newest = min(NEWEST, self.count)
        back = np.empty((len(draws), newest + draws.shape[1]), np.intp)
        back[:, :newest] = np.arange(newest)
        back[:, newest:] = draws * self.count
        places: Rows = (self._next - 1 - back) % self._size
        return places

    def state(self) -> dict[str, Any]:
        """Return the ring as arrays and plain numbers."""
        names = ("rows", "serials", "features", "anchors", "loudness")
        arrays = {name: getattr(self, name).copy() for name in names}
        return {"next": self._next, "count": self.count, **arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._next, self.count = int(state["next"]), int(state["count"])
        self.rows = np.array(state["rows"], np.intp)
        self.serials = np.array(state["serials"], np.int64)
        self.features = np.array(state["features"], np.float64)
        self.anchors = np.array(state["anchors"], np.float64)
        self.loudness = np.array(state["loudness"], np.float64)


@compiled
def _aims(
    members: Rows, serials: Serials, serials_now: Serials, loudness: Matrix, believed: Matrix
) -> tuple[Matrix, Matrix]:
    """Return factors and targets, see `_train`, of the remembered workers of some batches [steps, workers].

    Those whose row is another's now count nothing; the others of a batch, the same together in each.
    """
    factors, targets = np.zeros(members.shape), np.zeros(members.shape)
    steps, workers = members.shape
    for step in range(steps):
        known = 0
        for i in range(workers):
            known += serials_now[members[step, i]] == serials[step, i]
        for i in range(workers):
            if serials_now[members[step, i]] == serials[step, i]:
                square, part = loudness[step, i] * loudness[step, i], 1.0 / known
                factors[step, i] = (square + 1.0) * part
                targets[step, i] = (square * (loudness[step, i] > 0.0) + believed[step, i]) * part
    return factors, targets


@compiled
def _adam_step(
    parameters: Vector, gradient: Vector, first: Vector, second: Vector, rows: Rows, step_size: float
) -> None:
    """Take a step of Adam, with the penalty, for the elements in `rows`: what `ps.rules.network.Adam` does to all.

    All but `rows` are [n].
    """
    for row in rows:
        slope = gradient[row] + PENALTY * parameters[row]
        first[row] += (1.0 - BETA1) * (slope - first[row])
        second[row] += (1.0 - BETA2) * (slope * slope - second[row])
        parameters[row] -= step_size * first[row] / (math.sqrt(second[row]) + EPSILON)


@compiled
def _reputation_step(
    reputation: Vector, first: Vector, second: Vector, members: Rows, slope: Vector, present: Rows, step_size: float
) -> None:
    """Take the same step for the reputations of those `present`, by the slope of each member of a batch."""
    gradient = np.zeros(reputation.size)
    for i, member in enumerate(members):
        gradient[member] += slope[i]
    _adam_step(reputation, gradient, first, second, present, step_size)
    for row in present:
        reputation[row] *= OUTPUT_KEPT


def leave_one_out(gram: Matrix, weights: Vector) -> Vector:
    """Return the cosine [n] of each clipped gradient to the weighted sum of the others; 0 where one has no length.

    Args:
        gram: [n, n], inner products of the clipped gradients.
        weights: [n].
    """
    sums = gram @ weights
    return _leave_one_out(gram, weights, sums, float(weights @ sums))


@compiled
def _leave_one_out(gram: Matrix, weights: Vector, sums: Vector, square: float) -> Vector:
    """Do so where `sums` [n] are the products with the weighted sum of all, and `square` is that of its length."""
    cosines = np.zeros(weights.size)
    for i, weight in enumerate(weights):
        own = gram[i, i]
        with_rest = sums[i] - own * weight
        rest = square - 2.0 * weight * sums[i] + weight * weight * own
        if rest * own > 1e-24:  # below, rounding is all that is left
            cosines[i] = min(max(with_rest / math.sqrt(rest * own), -1.0), 1.0)
    return cosines


@compiled
def _describe(
    features: Matrix,
    norms: Vector,
    unit: float,
    gram: Matrix,
    exact: bool,
    agreement: Vector,
    habits: Vector,
    rows: Rows,
) -> None:
    """Write features 0 to 3 and 5, of the second what its logarithm is taken of, and follow the habits."""
    clipped = np.empty(norms.size)
    for i, row in enumerate(rows):
        ratio = norms[i] / unit
        habit = agreement[i] if np.isnan(habits[row]) else habits[row]
        features[i, 0] = (ratio - 1.0) / (ratio + 1.0)  # tanh(ln(ratio) / 2)
        features[i, 1] = max(min(ratio, 1.0), _SHORTEST)
        features[i, 2] = 2.0 * agreement[i]
        features[i, 3] = 2.0 * (agreement[i] - habit)
        habits[row] = habit + HABIT_RATE * (agreement[i] - habit)
        length = max(norms[i], _NO_LENGTH * unit)
        clipped[i] = length / max(length, unit)
    for i in range(norms.size):
        for j in range(norms.size):
            if exact and i != j:
                features[i, 5] = max(features[i, 5], gram[i, j] / (clipped[j] * clipped[i]))  # a cosine


def _above_median(values: Vector) -> Vector:
    """Return by how much each value is above the median; 0 where one is unknown."""
    numbers: list[float] = values.tolist()  # for a few, NumPy takes several times as long
    ordered = sorted(filter(math.isfinite, numbers))
    if not ordered:
        return np.zeros(values.size)
    middle = 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
    return np.array([number - middle if math.isfinite(number) else 0.0 for number in numbers])
