"""The perceptron of `numpy_mlp` as a TensorFlow graph, for `--model benchmarks/robustness_model.py:build`.

Its initial values do not matter: the server is given those of `numpy_mlp` with `--init`.
"""

from typing import Any

import tensorflow as tf

import worker
from benchmarks.numpy_mlp import CLASSES, HIDDEN


def build(features: Any, labels: Any, training: bool) -> worker.Model:
    """Build 64 rectified units and 10 logits, with variables named as in `numpy_mlp`."""
    inputs = tf.cast(features, tf.float32)
    if features.dtype == tf.uint8:
        inputs = inputs / 255.0
    size = int(tf.TensorShape(features.shape[1:]).num_elements())
    hidden = tf.nn.relu(_dense("hidden", tf.reshape(inputs, [-1, size]), HIDDEN))
    logits = _dense("logits", hidden, CLASSES)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return worker.Model(loss=loss, logits=logits)


def _dense(name: str, inputs: Any, units: int) -> Any:
    with tf.compat.v1.variable_scope(name):
        shape = [int(inputs.shape[1]), units]
        kernel = tf.compat.v1.get_variable("kernel", shape, tf.float32, tf.compat.v1.zeros_initializer())
        bias = tf.compat.v1.get_variable("bias", [units], tf.float32, tf.compat.v1.zeros_initializer())
    return tf.matmul(inputs, kernel) + bias
