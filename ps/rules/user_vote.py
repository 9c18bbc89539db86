"""A master of the user's own in ensemble mode: weights for each example from the logits of all members."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from protocol.user_function import UserFunction
from ps.rules.ensemble import MasterConfig, correct_answers
from ps.rules.ledger import Matrix
from ps.rules.user_network import Sample, UnusableWeights, UserNetwork, UserNetworkConfig

_SAMPLE_SEED = 1


class UserVote:
    """A user's function in place of `ps.rules.ensemble.EnsembleMaster`, with the same methods.

    The function gets float32 features [B, N * C], the logits of member 0, then 1, and so on, and N. It returns
    weights [B, N], at least 0. Logits of missing members are 0, and their weights are set to 0; if the weights of
    all made-up batches had sum 1 for each example (a softmax), those of the others are divided by their sum.

    Args:
        function: from `load_user_master`.
        config: members, classes and Adam; `head` and `hidden` are the function's own affair.

    Raises:
        ConfigurationError: the function fails, or returns what are no weights, for logits that were made up.

    Attributes:
        complaint: why the last batch got equal weights, or empty.
    """

    def __init__(self, function: UserFunction, config: MasterConfig) -> None:
        self.config = config
        graph_config = UserNetworkConfig(
            config.members * config.classes,
            config.members,
            per_example=True,
            seed=config.seed,
            beta1=config.beta1,
            beta2=config.beta2,
            epsilon=config.epsilon,
        )
        self.graph = UserNetwork(function, graph_config, ensemble_samples(config.members, config.classes))
        self._who = function.who
        self.complaint = ""

    def weights(self, logits: Matrix, present: NDArray[np.bool_]) -> Matrix:
        """Return the weight of each member for each example, [B, N] float64, at least 0.

        If the function fails, those present weigh the same, with sum 1.

        Args:
            logits: [B, N, C]; what stands there of a member that is missing is ignored.
            present: bool [N].

        Raises:
            LocalProtocolError: the shapes are not those of this master, or nobody is present.
        """
        features = self._features(logits, present)
        equal = np.tile(present / present.sum(), (len(features), 1))
        self.complaint = ""
        try:
            weights = self.graph.weights(features) * present
        except UnusableWeights as error:
            self.complaint = f"{self._who} {error}: all members weigh the same in this round"
            return equal
        if self.graph.normalised:
            total = weights.sum(axis=1, keepdims=True)
            weights = np.where(total > 0.0, weights / np.where(total > 0.0, total, 1.0), equal)
        return weights

    def learn(self, logits: Matrix, labels: NDArray[np.int32], present: NDArray[np.bool_], rate: float) -> float:
        """Take one step of Adam down `mean((weights - correct)^2)`; missing members add nothing.

        Args:
            logits: [B, N, C], as given to `weights`.
            labels: int32 [B].
            present: bool [N].
            rate: learning rate of this step.

        Returns:
            The loss before the step.
        """
        correct = correct_answers(logits, labels, present)
        return self.graph.train(self._features(logits, present), correct, present.astype(np.float64), rate)

    def _features(self, logits: Matrix, present: NDArray[np.bool_]) -> Matrix:
        expected = (len(logits), self.config.members, self.config.classes)
        if logits.shape != expected or present.shape != expected[1:2] or not present.any():
            raise LocalProtocolError(f"logits of {logits.shape} for {present.sum()} members, not {expected}")
        return np.where(present[:, None], np.asarray(logits, np.float64), 0.0).reshape(len(logits), -1)

    def state(self) -> dict[str, Any]:
        """Return everything that later weights depend on, as arrays by name."""
        return self.graph.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned.

        Raises:
            CheckpointError: the function has other variables now.
        """
        self.graph.restore(state)

    def close(self) -> None:
        """End TensorFlow's session; a server leaves that to the end of its process, tests make many in one."""
        self.graph.close()


def ensemble_samples(members: int, classes: int) -> Sequence[Sample]:
    """Return made-up logits [B, N * C] for batches of 1, 3 and 8, one member missing, and all of them 0."""
    generator = np.random.default_rng(_SAMPLE_SEED)
    samples = []
    for batch in (1, 3, 8):
        logits = 3.0 * generator.standard_normal((batch, members * classes))
        samples.append(Sample(logits, f"made-up logits of shape {list(logits.shape)}"))
    absent = logits.copy()
    absent[:, -classes:] = 0.0
    what = f"logits of shape {list(logits.shape)}"
    return [
        *samples,
        Sample(absent, f"made-up {what} in which those of a missing member are 0"),
        Sample(np.zeros_like(logits), f"{what} that are all 0"),
    ]
