"""A member of an ensemble for tests, as its worker builds it and as the single graph does; and its data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from worker import Dataset, Model

FEATURES, HIDDEN, CLASSES = 6, 8, 3


def shapes(with_shared: bool) -> dict[str, tuple[int, ...]]:
    """The variables of a member by name."""
    own = {"kernel1": (FEATURES, HIDDEN), "bias1": (HIDDEN,), "kernel2": (HIDDEN, CLASSES), "bias2": (CLASSES,)}
    return own | ({"shared/kernel": (HIDDEN, HIDDEN)} if with_shared else {})


def without_shared(features: Any, own: Callable[..., Any], shared: Callable[..., Any]) -> Any:
    hidden = tf.tanh(features @ own("kernel1", (FEATURES, HIDDEN)) + own("bias1", (HIDDEN,)))
    return hidden @ own("kernel2", (HIDDEN, CLASSES)) + own("bias2", (CLASSES,))


def with_shared(features: Any, own: Callable[..., Any], shared: Callable[..., Any]) -> Any:
    hidden = tf.tanh(features @ own("kernel1", (FEATURES, HIDDEN)) + own("bias1", (HIDDEN,)))
    hidden = tf.tanh(hidden @ shared("kernel", (HIDDEN, HIDDEN)))
    return hidden @ own("kernel2", (HIDDEN, CLASSES)) + own("bias2", (CLASSES,))


def _build(member: Callable[..., Any], features: Any, labels: Any) -> Model:
    def own(name: str, shape: tuple[int, ...]) -> Any:
        return tf.compat.v1.get_variable(name, shape, features.dtype)

    def shared(name: str, shape: tuple[int, ...]) -> Any:
        return own(f"shared/{name}", shape)

    logits = member(features, own, shared)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return Model(loss=loss, logits=logits)


def build_without_shared(features: Any, labels: Any, training: bool) -> Model:
    return _build(without_shared, features, labels)


def build_with_shared(features: Any, labels: Any, training: bool) -> Model:
    return _build(with_shared, features, labels)


def _load(dtype: str) -> Dataset:
    random = np.random.default_rng(8)
    features = random.normal(size=(500, FEATURES)).astype(dtype)
    labels = np.argmax(np.tanh(features @ random.normal(size=(FEATURES, CLASSES))), 1).astype(np.int32)
    return Dataset(features[:400], labels[:400], features[400:], labels[400:])


def load_float64(data_dir: Any) -> Dataset:
    return _load("float64")


def load_float32(data_dir: Any) -> Dataset:
    return _load("float32")
