"""Optimizers as pure descriptions: which kernel, which moments, which numbers at a given update."""

import math
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import ConfigurationError
from ps.settings.combinations import SMALLEST_NORMAL


class Optimizer(Protocol):
    """What a store needs to know of an optimizer; instances are frozen and hold no state of a run."""

    @property
    def kernel(self) -> str:
        """Key of `ps.storage.kernels.UPDATES`."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the arrays that are kept for each trainable variable, in the order the kernel expects."""

    def scalars(self, update: int, learning_rate: float) -> tuple[float, ...]:
        """Return the kernel's numbers for the `update`-th applied update, counted from 1."""


@dataclass(frozen=True)
class Adam:
    """Adam as TensorFlow formulates it: epsilon outside the square root, and not bias-corrected.

    With t counting applied updates from 1:

        m <- m + (g - m) (1 - beta1)
        v <- v + (g^2 - v) (1 - beta2)
        lr_t = lr sqrt(1 - beta2^t) / (1 - beta1^t)
        value <- value - lr_t m / (sqrt(v) + epsilon)

    Source: Kingma and Ba, "Adam", 2015, the form before section 2.1; `tf.compat.v1.train.AdamOptimizer`.

    Raises:
        ConfigurationError: a number is out of range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_range("beta1", self.beta1, 0.0, 1.0)
        _check_range("beta2", self.beta2, 0.0, 1.0)
        if not SMALLEST_NORMAL <= self.epsilon < math.inf:  # zero would make 0 / 0 of a gradient that is zero
            raise ConfigurationError(
                f"epsilon must be finite and at least {SMALLEST_NORMAL:.2g}, not {self.epsilon}"
            )

    @property
    def kernel(self) -> str:
        """Key of `ps.storage.kernels.UPDATES`."""
        return "adam"

    @property
    def moments(self) -> tuple[str, ...]:
        """The running means of the gradient and of its square."""
        return ("m", "v")

    def scalars(self, update: int, learning_rate: float) -> tuple[float, ...]:
        """Return lr_t, 1 - beta1, 1 - beta2, epsilon and the share of a value that is kept."""
        step_size = learning_rate * math.sqrt(1 - self.beta2**update) / (1 - self.beta1**update)
        return (step_size, 1 - self.beta1, 1 - self.beta2, self.epsilon, 1.0)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: each update also takes `lr weight_decay value` off the value.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2, with the learning
    rate of the schedule as its eta (as PyTorch and Keras have it).

    Raises:
        ConfigurationError: a number is out of range.
    """

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range("weight decay", self.weight_decay, 0.0, math.inf)

    def scalars(self, update: int, learning_rate: float) -> tuple[float, ...]:
        """Return Adam's numbers, with the share of a value that decay leaves."""
        return (*super().scalars(update, learning_rate)[:-1], 1 - learning_rate * self.weight_decay)


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with momentum as TensorFlow formulates it.

        a <- momentum a + g
        value <- value - lr a                      plain
        value <- value - lr (g + momentum a)       Nesterov

    Without momentum: value <- value - lr g, and no moment is kept.
    Source: `tf.compat.v1.train.MomentumOptimizer`; Sutskever et al., "On the importance of initialization and
    momentum in deep learning", 2013.

    Raises:
        ConfigurationError: the momentum is out of range, or missing for Nesterov.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_range("momentum", self.momentum, 0.0, 1.0)
        if self.nesterov and not self.momentum:
            raise ConfigurationError("Nesterov's rule needs a momentum above 0")

    @property
    def kernel(self) -> str:
        """Key of `ps.storage.kernels.UPDATES`."""
        return "momentum" if self.momentum else "sgd"

    @property
    def moments(self) -> tuple[str, ...]:
        """The accumulated gradient, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    def scalars(self, update: int, learning_rate: float) -> tuple[float, ...]:
        """Return the learning rate; with momentum: it, and what gradient and moment count."""
        if not self.momentum:
            return (learning_rate,)
        if self.nesterov:
            return (self.momentum, learning_rate, learning_rate * self.momentum)
        return (self.momentum, 0.0, learning_rate)


def _check_range(what: str, number: float, least: float, below: float) -> None:
    if not least <= number < below:
        raise ConfigurationError(f"the {what} must be at least {least:g} and below {below:g}, not {number}")
