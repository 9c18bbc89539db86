"""Define the work that every contender does: the same tensors, initial values, gradients and Adam."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TENSORS = 20
LEARNING_RATE = 0.001
BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8
"""Adam as TensorFlow formulates it, the product's default."""

_SEED = 20


@dataclass(frozen=True)
class Workload:
    """One run: `steps` synchronous steps of `workers` workers over `parameters` float32.

    Attributes:
        parameters: elements of all variables together.
        workers: worker processes, each with a gradient of its own.
        steps: all steps of the run, those that are not timed included.
        warmup: first steps that are not timed.
    """

    parameters: int
    workers: int
    steps: int
    warmup: int

    def __post_init__(self) -> None:
        if self.parameters < TENSORS or self.workers < 1 or not 1 <= self.warmup < self.steps:
            raise ValueError(
                f"a run needs {TENSORS} parameters, 1 worker, 1 warm-up step and more steps than that: {self}"
            )

    @property
    def payload_bytes(self) -> int:
        """Bytes of one gradient, or of all values."""
        return 4 * self.parameters


def tensor_sizes(parameters: int) -> dict[str, int]:
    """Return the elements of each of the 20 tensors by name; uneven, the same in every process."""
    weights = np.random.default_rng(_SEED).lognormal(sigma=1.5, size=TENSORS)
    sizes = 1 + np.floor((parameters - TENSORS) * weights / weights.sum()).astype(np.int64)
    sizes[-1] += parameters - sizes.sum()
    return {f"layer{index}/kernel": int(size) for index, size in enumerate(sizes)}


def initial_values(parameters: int) -> dict[str, NDArray[np.float32]]:
    """Make the variables at step 0, float32 by name."""
    return _random(parameters, _SEED, 0.1)


def gradients_of(parameters: int, rank: int) -> dict[str, NDArray[np.float32]]:
    """Make the gradient that a rank pushes in every step, float32 by name."""
    return _random(parameters, _SEED + 1 + rank, 0.01)


def checksum(values: Mapping[str, NDArray[np.float32]]) -> float:
    """Return a float64 in which every element counts by its place, so that swapped tensors show."""
    total = 0.0
    for index, name in enumerate(sorted(values)):
        flat = values[name].reshape(-1).astype(np.float64)
        total += (index + 1) * float(np.dot(flat, np.linspace(1.0, 2.0, flat.size)))
    return total


def _random(parameters: int, seed: int, scale: float) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(seed)
    return {
        name: (generator.random(size, np.float32) - np.float32(0.5)) * np.float32(scale)
        for name, size in tensor_sizes(parameters).items()
    }
