"""The master of an ensemble: how much each member's answer to each example is worth. Pure NumPy, float64.

Every member trains a network of its own on the same batches and pushes its gradient and its logits. With N members,
C classes and a batch of B examples:

    features = all logits side by side                                   [B, N C]
    weights  = softmax(relu(features U + u) V + v)                       [B, N]   (or a sigmoid for each member)
    w_i      = mean over the batch of weights[:, i]
    loss     = mean((weights - correct)^2)                               correct [B, N]: 1 where the member is right

The weights are constants for the members: the loss moves the master's own variables only, by Adam, and every
gradient is taken at the values before the update. A member that is missing has logits 0 and a score of minus
infinity: it weighs 0, and its column adds nothing to the loss.

Source of weighting members by the input: Jacobs et al., "Adaptive Mixtures of Local Experts", 1991. The loss that
asks for right answers, and the weighting of gradients by it, are this project's definition.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigurationError, LocalProtocolError
from ps.rules.network import Activation, Adam, TwoLayerNetwork

HIDDEN = 64
"""Width of the hidden layer."""

_KEY = int.from_bytes(b"wm ensem", "little")
"""Half of the key of Philox, so that no other user of it with the same seed draws the same numbers."""

Floats = NDArray[np.float64]


class Head(StrEnum):
    """How scores become weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class ActsOn(StrEnum):
    """What a member's weight multiplies: its gradient, or (times N) the optimizer's step with it."""

    GRADIENT = "gradient"
    UPDATE = "update"


@dataclass(frozen=True)
class MasterConfig:
    """What a master is.

    Attributes:
        members: N, at least 1.
        classes: C, at least 2.
        head: how scores become weights.
        seed: of the initial values, 0 to 2**63 - 1.
        hidden: width of the hidden layer.
        beta1, beta2, epsilon: of its Adam.
    """

    members: int
    classes: int
    head: Head = Head.SOFTMAX
    seed: int = 0
    hidden: int = HIDDEN
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if self.members < 1 or self.classes < 2:
            raise ConfigurationError(
                f"an ensemble needs a member and two classes at least, not {self.members} and {self.classes}"
            )


class EnsembleMaster:
    """The network, its optimizer, and nothing else; used by one thread at a time.

    Time of a round: about 4 B N C hidden multiplications. Memory: three times the parameters.
    """

    def __init__(self, config: MasterConfig) -> None:
        """Start with kernels by Glorot and Bengio's uniform rule (as `tf.layers.dense`) and biases of 0."""
        self.config = config
        inputs = config.members * config.classes
        self.network = TwoLayerNetwork(inputs, config.hidden, config.members, activation=Activation.RELU)
        self.adam = Adam(self.network.parameters.size, 0.0, config.beta1, config.beta2, config.epsilon)
        numbers = np.random.Philox(key=np.array([config.seed, _KEY], np.uint64))
        for kernel in (self.network.hidden_kernel, self.network.output_kernel):
            limit = np.sqrt(6.0 / sum(kernel.shape))
            # Raw numbers, since NumPy promises to keep those and not what is drawn from them.
            uniform = (numbers.random_raw(kernel.size) >> np.uint64(11)) * 2.0**-53
            kernel[...] = limit * (2.0 * uniform.reshape(kernel.shape) - 1.0)

    def weights(self, logits: Floats, present: NDArray[np.bool_]) -> Floats:
        """Return the weight of each member for each example, at the present values.

        Args:
            logits: [B, N, C]; what stands there of a member that is missing is ignored.
            present: bool [N].

        Returns:
            [B, N], each from 0 to 1. Softmax: rows sum to 1. A missing member's column is 0.

        Raises:
            LocalProtocolError: the shapes are not those of this master, or nobody is present.
        """
        return self._weigh(self.network.forward(self._features(logits, present))[1], present)

    def learn(self, logits: Floats, labels: NDArray[np.int32], present: NDArray[np.bool_], rate: float) -> float:
        """Take one step of Adam down the loss on this batch.

        Args:
            logits: [B, N, C], as given to `weights`.
            labels: int32 [B].
            present: bool [N].
            rate: learning rate of this step.

        Returns:
            The loss before the step.
        """
        features = self._features(logits, present)
        activations, scores = self.network.forward(features)
        weights = self._weigh(scores, present)
        error = weights - correct_answers(logits, labels, present)
        gradient = 2.0 * error / error.size
        if self.config.head is Head.SOFTMAX:
            gradient = weights * (gradient - (gradient * weights).sum(axis=1, keepdims=True))
        else:
            gradient = gradient * weights * (1.0 - weights)
        self.adam.learning_rate = rate
        self.adam.step(self.network.parameters, self.network.backward(features, activations, gradient))
        return float(np.mean(error * error))

    def _features(self, logits: Floats, present: NDArray[np.bool_]) -> Floats:
        expected = (len(logits), self.config.members, self.config.classes)
        if logits.shape != expected or present.shape != expected[1:2] or not present.any():
            raise LocalProtocolError(f"logits of {logits.shape} for {present.sum()} members, not {expected}")
        known = np.where(present[:, None], np.asarray(logits, np.float64), 0.0)
        return known.reshape(len(logits), -1)

    def _weigh(self, scores: Floats, present: NDArray[np.bool_]) -> Floats:
        if self.config.head is Head.SOFTMAX:
            scores = np.where(present, scores, -np.inf)
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float64)
        # Two branches, so that no exponential can overflow.
        small = np.exp(-np.abs(scores))
        return np.where(present, np.where(scores >= 0, 1.0, small) / (1.0 + small), 0.0)

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs: arrays and plain numbers, copied."""
        return {
            "parameters": self.network.parameters.copy(),
            "first": self.adam.first.copy(),
            "second": self.adam.second.copy(),
            "steps": self.adam.steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned, of a master of the same members, classes and width."""
        self.network.parameters[...] = state["parameters"]
        self.adam.first[...] = state["first"]
        self.adam.second[...] = state["second"]
        self.adam.steps = int(state["steps"])


# ---- what follows from logits and weights --------------------------------------------------------------


def correct_answers(logits: Floats, labels: NDArray[np.int32], present: NDArray[np.bool_]) -> Floats:
    """Return [B, N]: 1 where a member's largest logit is the label, else 0; 0 for a member that is missing.

    Of equal logits the first counts.
    """
    right = np.argmax(logits, axis=2) == labels[:, None]
    return np.where(present, right, False).astype(np.float64)


def member_factors(weights: Floats, acts_on: ActsOn) -> tuple[Floats, Floats]:
    """Return what each member's own gradient, and its optimizer's step, are multiplied by.

    Args:
        weights: [N], the mean weight of each member over the batch.
        acts_on: the choice of `--weight-acts-on`.

    Returns:
        Factors of the gradient [N] and of the step [N]. A gradient of a shared variable always counts `weights`.
    """
    if acts_on is ActsOn.GRADIENT:
        return weights.copy(), np.ones(len(weights))
    return np.ones(len(weights)), len(weights) * weights


@dataclass(frozen=True, eq=False)
class Vote:
    """Share of right answers on a test set.

    Attributes:
        weighted: each member's answer counts its weight for that example.
        plain: each present member's answer counts 1.
        alone: of each member by itself [N]; NaN for one that is missing.
    """

    weighted: float
    plain: float
    alone: Floats


def vote(logits: Floats, labels: NDArray[np.int32], present: NDArray[np.bool_], weights: Floats) -> Vote:
    """Let the members vote on every example; of classes with equal votes the first wins.

    Args:
        logits: [M, N, C].
        labels: int32 [M].
        present: bool [N].
        weights: [M, N], as `EnsembleMaster.weights` gives them for these logits.
    """
    answers = np.argmax(logits, axis=2)
    ballots = (answers[:, :, None] == np.arange(logits.shape[2])).astype(np.float64)
    ballots *= present[:, None]
    alone = np.where(present, np.mean(answers == labels[:, None], axis=0), np.nan)
    weighted = np.argmax((ballots * weights[:, :, None]).sum(axis=1), axis=1)
    plain = np.argmax(ballots.sum(axis=1), axis=1)
    return Vote(float(np.mean(weighted == labels)), float(np.mean(plain == labels)), alone)
