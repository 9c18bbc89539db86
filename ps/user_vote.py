"""A master of the user's own in ensemble mode: weights for each example from the logits of all workers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ps.ledger import Matrix, Vector
from ps.user_function import UserFunction, named
from ps.user_network import Sample, UnusableWeights, UserNetwork

LEARNING_RATE = 1e-3
"""Of Adam, unless another is asked for."""

_SAMPLE_SEED = 1


class UserVote:
    """A user's function as the master of ensemble mode.

    The function gets float32 features [B, N * C], the logits of worker 0, then 1, and so on, and N. It returns
    weights [B, N], at least 0. Logits of absent workers are 0, and their weights are set to 0; if the weights of
    all made-up batches had sum 1 for each example (a softmax), those of the others are divided by their sum.
    The function's variables are trained by Adam on `mean((weights - correct)^2)`, one step per round.

    Args:
        function: from `load_user_master`.
        num_workers: N.
        classes: C, at least 1.
        seed: of initial values.
        learning_rate: of Adam.

    Raises:
        ConfigurationError: the function fails, or returns what are no weights, for logits that were made up.

    Attributes:
        complaint: why the last round got equal weights, or empty.
    """

    def __init__(
        self,
        function: UserFunction,
        num_workers: int,
        classes: int,
        *,
        seed: int,
        learning_rate: float = LEARNING_RATE,
    ) -> None:
        self.graph = UserNetwork(
            function,
            num_workers * classes,
            num_workers,
            per_example=True,
            samples=ensemble_samples(num_workers, classes),
            seed=seed,
            learning_rate=learning_rate,
        )
        self._who = named(function.spec)
        self.complaint = ""

    def weigh(self, logits: Matrix, present: Vector) -> Matrix:
        """Return the weight of each worker for each example, [B, N] float64, at least 0.

        If the function fails, those present weigh the same, with sum 1.

        Args:
            logits: [B, N * C], 0 where absent.
            present: [N], 1.0 or 0.0, of which one at least is 1.0.
        """
        self.complaint = ""
        try:
            weights = self.graph.weights(logits) * present
        except UnusableWeights as error:
            self.complaint = f"{self._who} {error}: all workers weigh the same in this round"
            weights = np.tile(present / present.sum(), (logits.shape[0], 1))
        if self.graph.normalised:
            total = weights.sum(axis=1, keepdims=True)
            weights = np.where(total > 0.0, weights / np.where(total > 0.0, total, 1.0), present / present.sum())
        return weights

    def learn(self, logits: Matrix, correct: Matrix, present: Vector) -> float:
        """Take one step of Adam and return the loss before it.

        Args:
            logits: [B, N * C], 0 where absent.
            correct: [B, N], 1.0 where a worker's prediction is right, else 0.0.
            present: [N], 1.0 or 0.0.
        """
        return self.graph.train(logits, correct, present)

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
        """End TensorFlow's session."""
        self.graph.close()


def ensemble_samples(num_workers: int, classes: int) -> Sequence[Sample]:
    """Return made-up logits [B, N * C] for batches of 1, 3 and 8, one worker absent, and all of them 0."""
    generator = np.random.default_rng(_SAMPLE_SEED)
    samples = []
    for batch in (1, 3, 8):
        logits = 3.0 * generator.standard_normal((batch, num_workers * classes))
        samples.append(Sample(logits, f"made-up logits of shape {list(logits.shape)}"))
    absent = logits.copy()
    absent[:, -classes:] = 0.0
    what = f"logits of shape {list(logits.shape)}"
    return [
        *samples,
        Sample(absent, f"made-up {what} in which those of an absent worker are 0"),
        Sample(np.zeros_like(logits), f"{what} that are all 0"),
    ]
