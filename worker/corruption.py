"""Spoil a batch, and draw what faults need: the same on every machine for the same (seed, rank, step).

Draws are raw Philox numbers under a key of their own, turned into values by integer arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Corrupt = Callable[[NDArray[Any], NDArray[np.int32]], tuple[NDArray[Any], NDArray[np.int32]]]
"""Features [B, ...] and labels int32 [B] to others of equal shapes and dtypes; the arguments stay as they are."""

UNIFORMS = 12
"""Uniform numbers in one normal number: their sum then has a variance of 1 in units of their range."""

_KEY = int.from_bytes(b"wm fault", "little")
"""Second half of the key of Philox, so that faults draw other numbers than the batches do."""


class Purpose(IntEnum):
    """What a draw is for; each has numbers of its own."""

    LABELS = 0
    FEATURES = 1
    GRADIENT = 2
    STRETCH = 3


@dataclass(frozen=True)
class Draw:
    """Names random numbers: of the run's seed (0 to 2**64 - 1), a rank, a step, and what they are for."""

    seed: int
    rank: int
    step: int
    purpose: Purpose

    def words(self) -> np.random.Philox:
        """Return a source of raw 64-bit numbers, at its beginning."""
        counter = np.array([0, self.step, self.rank, self.purpose], np.uint64)
        return np.random.Philox(counter=counter, key=np.array([self.seed, _KEY], np.uint64))


def flip_labels(classes: int) -> Corrupt:
    """Turn each label y into classes - 1 - y.

    Source: Fang et al., "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", 2020.
    """
    return lambda features, labels: (features, (classes - 1 - labels).astype(labels.dtype))


def randomise_labels(draw: Draw, classes: int) -> Corrupt:
    """Replace all labels by numbers drawn from 0 to classes - 1."""

    def corrupt(features: NDArray[Any], labels: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        drawn = draw.words().random_raw(labels.size) % max(classes, 1)
        return features, drawn.astype(labels.dtype).reshape(labels.shape)

    return corrupt


def add_noise(draw: Draw, deviations: float) -> Corrupt:
    """Add noise of so many standard deviations of the batch's own features.

    Features that are not floating are rounded and kept between the batch's smallest and largest.
    """

    def corrupt(features: NDArray[Any], labels: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        plain = features.astype(np.float64)
        noise = normal(draw.words(), plain.size).reshape(plain.shape)
        noisy = plain + deviations * float(plain.std()) * noise
        if features.dtype.kind != "f":
            noisy = np.clip(np.rint(noisy), plain.min(), plain.max())
        with np.errstate(over="ignore"):
            return noisy.astype(features.dtype), labels

    return corrupt


def normal(words: np.random.Philox, size: int) -> NDArray[np.float64]:
    """Draw numbers of mean 0, variance 1 and nearly normal shape, none beyond 6.

    Each is a sum of twelve uniform 16-bit integers (Irwin-Hall), which is exact: logarithm and cosine differ
    between machines.

    Args:
        words: from where three words are taken for each number.
        size: how many numbers.

    Returns:
        float64 [size].
    """
    total = np.zeros(size, np.int64)
    for _ in range(UNIFORMS // 4):
        total += words.random_raw(size).view(np.uint16).reshape(size, 4).sum(axis=1, dtype=np.int64)
    mean, variance = UNIFORMS * (2**16 - 1) / 2, UNIFORMS * (2**32 - 1) / 12
    return np.asarray((total - mean) / math.sqrt(variance), np.float64)
