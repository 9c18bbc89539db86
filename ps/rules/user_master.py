"""A master of the user's own in place of the built-in network: `--master file.py:function`.

In shared mode everything but the step from trust to weights stays as in `ps.rules.master`: the same evidence, the
same features, the same bound of norms. A round that the function cannot judge is judged by the evidence rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protocol.user_function import UserFunction
from ps.rules.evidence import SHARE_CUT, TRUST_GAIN, Standing
from ps.rules.ledger import Matrix, Rows, Vector
from ps.rules.master import BETA1, BETA2, EPSILON, FEATURES, LEARNING_RATE, Master
from ps.rules.rule import Decision, RoundView
from ps.rules.user_network import Sample, UnusableWeights, UserNetwork, UserNetworkConfig

SHARED_FEATURES = (*FEATURES, "the evidence: how far it is trusted, 0 to 1")
"""What a user's function sees of each worker in shared mode, by column; `features[:, -1]` is the evidence."""

DRAWN_PER_ROUND = 3
"""Remembered rounds that are learned after each round, beside the newest; each costs one run of the graph."""
LEAST_PRESENT = 1e-6
"""Weight that those present must hold together, else the function has judged only workers that are not there."""

_SAMPLE_SEED = 1


class UserMaster(Master):
    """The rule `master` with the user's function as its network.

    The function gets float32 features [N, 9] (see `SHARED_FEATURES`), row i for rank i, and N, the number of
    workers that were asked for. It returns N weights, at least 0, with sum 1. Rows of workers that are absent or
    were refused are 0; their weights are set to 0 and the others divided by their sum.

    The validated rounds of late are remembered by name, and after each round the function's variables are trained
    by Adam on a few of them. With beta_i in [-1, 1] how loudly the validator spoke for worker i, e_i its trust by
    evidence and s_i = sigmoid(8 (e_i - 1/2)), the built-in network's loss `beta_i^2 BCE(p_i, [beta_i > 0]) +
    BCE(p_i, s_i)` is least at `p_i = (beta_i^2 [beta_i > 0] + s_i) / (beta_i^2 + 1)`. These shares, without those
    under a tenth of the largest, divided by their sum, are the target t; the loss is `sum_i (w_i - t_i)^2`. Where
    the validator is silent, t is what the evidence rule decides, but that copies do not share one weight here: how
    many push the same is for the function to see (sixth feature).

    Cost of a round beside `Master`'s: five runs of the graph, some tenths of a millisecond each.

    Args:
        function: from `load_user_master`.
        num_workers: N.
        validated: whether validators are expected, see `Evidence`.
        seed: of initial values and draws.

    Raises:
        ConfigurationError: the function fails, or returns what are no weights, for features that were made up.
    """

    def __init__(self, function: UserFunction, num_workers: int, *, validated: bool, seed: int) -> None:
        super().__init__(validated, seed)
        config = UserNetworkConfig(
            len(SHARED_FEATURES),
            num_workers,
            per_example=False,
            seed=seed,
            beta1=BETA1,
            beta2=BETA2,
            epsilon=EPSILON,
        )
        self.graph = UserNetwork(function, config, shared_samples(num_workers))
        self._who = function.who
        self._workers = num_workers
        self._rank_of: dict[int, int] = {}  # by serial, of the last round
        self._weights: tuple[RoundView, Vector] | None = None

    def _judge(self, standing: Standing, view: RoundView, features: Matrix, anchors: Vector) -> Decision:
        """Decide by the function, or by the evidence where it cannot."""
        evidence = self.evidence
        if not standing.judged:
            return evidence.weigh(standing, view, anchors)
        ranks = np.array(view.ranks, np.intp)[standing.positions]
        serials = evidence.ledger.serials[standing.rows]
        self._rank_of = dict(zip(serials.tolist(), ranks.tolist(), strict=True))
        try:
            weights = self._weigh(features, evidence.ledger["trust"][standing.rows], ranks)
        except UnusableWeights as error:
            judged = evidence.weigh(standing, view, anchors)
            return replace(judged, fallback=f"{self._who} {error}: the evidence rule judged the round")
        decision = evidence.settle(standing, view, weights, weights * (weights >= 0.5 * weights.max()))
        self._weights = (view, decision.weights)
        return decision

    def _weigh(self, features: Matrix, trust: Vector, ranks: Rows) -> Vector:
        weights = self.graph.weights(self._by_rank(features, trust, ranks))[ranks]
        total = float(weights.sum())
        if total < LEAST_PRESENT:
            raise UnusableWeights("gave all weight to workers that are absent from this round")
        present: Vector = weights / total
        return present

    def _by_rank(self, features: Matrix, trust: Vector, ranks: Rows) -> Matrix:
        rows = np.zeros((self._workers, len(SHARED_FEATURES)))
        rows[ranks, :-1] = features
        rows[ranks, -1] = trust
        return rows

    def learn(self) -> None:
        """Train on the newest remembered round and a few others, if the last round was not learned yet."""
        if self._to_learn is None:
            return
        self._to_learn = None
        draws = self._draw()[:1, :DRAWN_PER_ROUND]
        self._learned += 1
        if not (self._memory.count and self.graph.variables):
            return
        places = self._memory.entries(draws)[0].tolist()
        for entry in (places[0], *places[-DRAWN_PER_ROUND:]):
            self._learn_round(entry)

    def _learn_round(self, entry: int) -> None:
        """Take one step on a remembered round, each name in the row of the rank that it has now."""
        memory = self._memory
        ranks = np.array([self._rank_of.get(serial, -1) for serial in memory.serials[entry].tolist()], np.intp)
        known = np.flatnonzero(ranks >= 0)
        if known.size < 2:
            return
        ranks, anchors = ranks[known], memory.anchors[entry, known]
        target, present = np.zeros(self._workers), np.zeros(self._workers)
        target[ranks] = target_weights(memory.loudness[entry, known], anchors)
        present[ranks] = 1.0
        features = self._by_rank(memory.features[entry, known], anchors / TRUST_GAIN + 0.5, ranks)
        self.graph.train(features, target, present, LEARNING_RATE)

    # ---- for people and checkpoints ----------------------------------------------------------------------

    def reasons(self, view: RoundView, name: str) -> str:
        """Return, in a few words, what the trust in a worker of the last judged round rests on."""
        said = self.evidence.reasons(view, name)
        row = self.evidence.ledger.row(name)
        if self._weights is None or self._weights[0] is not view or row is None:
            return said
        weights = self._weights[1]
        weight = float(weights[view.names.index(name)])
        trusted = bool(self.evidence.ledger["trust"][row] >= 0.5)
        if trusted == (weight >= 0.5 / max(sum(view.usable), 1)):
            return said
        return f"{self._who} gives it a weight of {weight:.2f}, although {said}"

    def state(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as arrays and plain numbers."""
        self.learn()
        return {
            "evidence": self.evidence.state(),
            "variables": self.graph.state(),
            "learned": self._learned,
            "memory": self._memory.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned.

        Raises:
            CheckpointError: the function has other variables now.
        """
        self.graph.restore(state["variables"])
        self.evidence.restore(state["evidence"])
        self._learned = int(state["learned"])
        self._memory.restore(state["memory"])
        self._to_learn = self._weights = None

    def close(self) -> None:
        """End TensorFlow's session; a server leaves that to the end of its process, tests make many in one."""
        self.graph.close()


def target_weights(loudness: Vector, anchors: Vector) -> Vector:
    """Return the weights [U], with sum 1, at which the built-in network's loss is least; see `UserMaster`.

    Args:
        loudness: beta, [U], -1 to 1.
        anchors: [U], logits of the trust by evidence.
    """
    silence = 1.0 / (1.0 + np.exp(-anchors))
    squares = loudness * loudness
    shares = (squares * (loudness > 0.0) + silence) / (squares + 1.0)
    kept = shares * (shares >= SHARE_CUT * shares.max())
    weights: Vector = kept / kept.sum()
    return weights


def shared_samples(num_workers: int) -> Sequence[Sample]:
    """Return made-up features [N, 9] of rounds: all present, one absent, one alone, nothing known."""
    generator = np.random.default_rng(_SAMPLE_SEED)
    low = np.array([-1.0, 0.0, -2.0, -4.0, -2.0, 0.0, -1.0, -2.0, 0.0])
    high = np.array([1.0, 1.0, 2.0, 4.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    samples = []
    for present in dict.fromkeys((num_workers, num_workers - 1, 1)):
        features = np.zeros((num_workers, low.size))
        features[:present] = generator.uniform(low, high, (present, low.size))
        if present:
            who = f"{present} of {num_workers} workers present"
            samples.append(Sample(features, f"made-up features of shape {list(features.shape)}, {who}"))
    zeros = np.zeros((num_workers, low.size))
    return [
        *samples,
        Sample(zeros, f"features of shape {list(zeros.shape)} that are all 0, as in a first round"),
    ]
