"""A perceptron with one hidden layer in plain NumPy: values, gradients, accuracy. No framework, no state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN = 64
CLASSES = 10

EVALUATION_CHUNK = 1000
"""Examples that are measured at a time, so that bytes become floats in the processor's cache."""

Values = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Computed:
    """What one batch gives: gradients by name, with mean loss and accuracy at the same values."""

    gradients: dict[str, NDArray[np.float32]]
    loss: float
    accuracy: float


def initial_values(inputs: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Draw initial values: normal, with He's deviation sqrt(2 / fan-in) (arXiv:1502.01852); biases are 0.

    Args:
        inputs: features per example.
        seed: of the draw.

    Returns:
        float32: `hidden/kernel` [inputs, 64], `hidden/bias` [64], `logits/kernel` [64, 10], `logits/bias` [10].
    """
    generator = np.random.default_rng([seed, 0x4D4C50])
    values: dict[str, NDArray[np.float32]] = {}
    for name, rows, columns in (("hidden", inputs, HIDDEN), ("logits", HIDDEN, CLASSES)):
        kernel = generator.normal(0.0, (2.0 / rows) ** 0.5, (rows, columns))
        values[f"{name}/kernel"] = kernel.astype(np.float32)
        values[f"{name}/bias"] = np.zeros(columns, np.float32)
    return values


def as_inputs(features: NDArray[Any]) -> NDArray[np.float32]:
    """Flatten examples to float32 [B, inputs]; bytes become 0..1, floats stay as they are."""
    flat = features.reshape(len(features), -1)
    return np.asarray(flat / np.float32(255) if flat.dtype == np.uint8 else flat, np.float32)


def compute(values: Values, inputs: NDArray[np.float32], labels: NDArray[np.int32]) -> Computed:
    """Compute the gradient of the mean softmax cross-entropy over a batch.

    Args:
        values: as `initial_values` returns them.
        inputs: float32 [B, inputs].
        labels: int32 [B], 0 to 9.
    """
    hidden, logits = _forward(values, inputs)
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(np.mean(np.log(sums[:, 0]) - shifted[rows, labels]))
    slope = exponentials / sums
    slope[rows, labels] -= 1
    slope /= np.float32(len(labels))
    hidden_slope = (slope @ values["logits/kernel"].T) * (hidden > 0)
    gradients = {
        "hidden/kernel": inputs.T @ hidden_slope,
        "hidden/bias": hidden_slope.sum(axis=0),
        "logits/kernel": hidden.T @ slope,
        "logits/bias": slope.sum(axis=0),
    }
    return Computed(gradients, loss, float(np.mean(logits.argmax(axis=1) == labels)))


def accuracy(values: Values, features: NDArray[Any], labels: NDArray[np.int32]) -> float:
    """Return the share of right answers on examples [N, ...] with labels int32 [N]."""
    right = 0
    for start in range(0, len(labels), EVALUATION_CHUNK):
        chunk = slice(start, start + EVALUATION_CHUNK)
        logits = _forward(values, as_inputs(features[chunk]))[1]
        right += int(np.count_nonzero(logits.argmax(axis=1) == labels[chunk]))
    return right / len(labels)


def _forward(values: Values, inputs: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the hidden layer [B, 64] after its ReLU, and the logits [B, 10]."""
    hidden = np.maximum(inputs @ values["hidden/kernel"] + values["hidden/bias"], np.float32(0))
    return hidden, hidden @ values["logits/kernel"] + values["logits/bias"]
