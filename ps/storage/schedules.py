"""Learning-rate schedules: pure functions of the step of a round, void rounds included."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import ConfigurationError

Schedule = Callable[[int], float]
"""From the step of a round, counted from 0, to its learning rate."""


@dataclass(frozen=True)
class Constant:
    """The same rate at every step.

    Raises:
        ConfigurationError: the rate is not a finite number above 0.
    """

    learning_rate: float

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)

    def __call__(self, step: int) -> float:
        """Return the rate at `step`."""
        return self.learning_rate


@dataclass(frozen=True)
class ExponentialDecay:
    """`learning_rate * decay_rate ** (step / decay_steps)`; a staircase rounds the exponent down.

    Source: `tf.compat.v1.train.exponential_decay`.

    Raises:
        ConfigurationError: a number is out of range.
    """

    learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)
        _check_steps("decay steps", self.decay_steps)
        if not 0 < self.decay_rate <= 1:
            raise ConfigurationError(f"the decay rate must be above 0 and at most 1, not {self.decay_rate}")

    def __call__(self, step: int) -> float:
        """Return the rate at `step`."""
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.learning_rate * math.pow(self.decay_rate, exponent)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `learning_rate` down to `final_share` of it, reached at `decay_steps` and kept.

        learning_rate * (final_share + (1 - final_share) * (1 + cos(pi * min(step / decay_steps, 1))) / 2)

    Source: Loshchilov and Hutter, "SGDR", 2017, equation 5, without restarts; `tf.compat.v1.train.cosine_decay`.

    Raises:
        ConfigurationError: a number is out of range.
    """

    learning_rate: float
    decay_steps: int
    final_share: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)
        _check_steps("decay steps", self.decay_steps)
        if not 0 <= self.final_share <= 1:
            raise ConfigurationError(
                f"the final share of the learning rate must be from 0 to 1, not {self.final_share}"
            )

    def __call__(self, step: int) -> float:
        """Return the rate at `step`."""
        progress = min(step / self.decay_steps, 1.0)
        share = self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * share


@dataclass(frozen=True)
class WarmUp:
    """A linear ramp in front of another schedule, which then starts from its own step 0.

    Below `steps` the rate is `after(0) * (step + 1) / (steps + 1)`: never 0, and `after(0)` at step `steps`.
    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2 (gradual warm-up).

    Raises:
        ConfigurationError: `steps` is below 1.
    """

    after: Schedule
    steps: int

    def __post_init__(self) -> None:
        _check_steps("warm-up steps", self.steps)

    def __call__(self, step: int) -> float:
        """Return the rate at `step`."""
        if step >= self.steps:
            return self.after(step - self.steps)
        return self.after(0) * (step + 1) / (self.steps + 1)


def _check_rate(learning_rate: float) -> None:
    if not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"the learning rate must be finite and above 0, not {learning_rate}")


def _check_steps(what: str, steps: int) -> None:
    if steps < 1:
        raise ConfigurationError(f"the number of {what} must be at least 1, not {steps}")
