"""What a user hands over: a model (tensors of a graph) and a data set (arrays)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Model:
    """What a build function returns; all are tensors of the graph in which it was called.

    Attributes:
        loss: float, [B] per example or a scalar; its mean over the batch is what is minimised.
        logits: float [B, C], for accuracy; None where the task has no classes.
        regularization: float scalar that is added to the mean loss (weight decay), or None.
    """

    loss: Any
    logits: Any = None
    regularization: Any = None


@dataclass(frozen=True)
class Dataset:
    """Arrays of a data set; the first axis counts examples.

    Attributes:
        train_features: [N, ...], any dtype that the model's placeholder takes.
        train_labels: int32 [N].
        test_features: [M, ...].
        test_labels: int32 [M].
    """

    train_features: NDArray[Any]
    train_labels: NDArray[np.int32]
    test_features: NDArray[Any]
    test_labels: NDArray[np.int32]
