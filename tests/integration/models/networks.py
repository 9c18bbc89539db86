"""Models and data of a user's, for tests: called by name, as `networks.py:slow_mlp`."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import worker
from worker.models import mlp

SLOWEST_S = 0.05

_calls = 0


def _dawdle(features):
    """Return the features after 0 to 50 ms, drawn anew at every start; kill the process where it is told to."""
    global _calls
    _calls += 1
    if _calls == int(os.environ.get("KILLED_AT_CALL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SLOWEST_S * int.from_bytes(os.urandom(2), "little") / 0xFFFF)
    return features


def slow_mlp(features, labels, training):
    """Be `mlp`, and slow at random; the features come out as they went in."""
    slowed = tf.numpy_function(_dawdle, [features], features.dtype)
    slowed.set_shape(features.shape)
    return mlp(10)(slowed, labels, training)


def normalised(features, labels, training):
    """Be a Keras network with state (batch statistics) and randomness (dropout)."""
    layers = tf.keras.layers
    hidden = layers.Dense(32, "relu", name="hidden")(features)
    hidden = layers.BatchNormalization(name="norm", momentum=0.8)(hidden, training=training)
    hidden = layers.Dropout(0.2)(hidden, training=training)
    logits = layers.Dense(3, name="out")(hidden)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return worker.Model(loss=loss, logits=logits)


def blobs(data_dir):
    """Return three clouds of points in the plane, each around a centre of its own."""
    assert data_dir is None or isinstance(data_dir, Path)
    draw = np.random.RandomState(5)
    labels = np.arange(300, dtype=np.int32) % 3
    centres = np.array([[0, 4], [4, -2], [-4, -2]], np.float32)
    features = (centres[labels] + draw.normal(size=(300, 2))).astype(np.float32)
    return worker.Dataset(features[:240], labels[:240], features[240:], labels[240:])


def infinite_loss(features, labels, training):
    """Be a model whose loss is infinite at all values."""
    model = mlp(10)(features, labels, training)
    return worker.Model(loss=model.loss / 0.0, logits=model.logits)


def raising(features, labels, training):
    """Be a mistake: a name that is not there."""
    return {}["no such layer"]


def returning_a_number(features, labels, training):
    """Be a mistake: a loss that is no tensor."""
    return worker.Model(loss=1.0)
