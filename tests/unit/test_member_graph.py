"""What a member of an ensemble computes beyond a worker: its logits, and gradients of weighted examples."""

import numpy as np
import pytest
import tensorflow as tf

from protocol.arena import Arena
from protocol.ensemble import Weighting
from protocol.errors import ConfigurationError
from protocol.tensors import Layout
from worker import Model
from worker.ensemble import member_seed
from worker.graph import Evaluator, InputSpec, Trainer, describe

VECTOR = InputSpec((4,), "float32")
DRAW = (1, 0, 0)


def network(features, labels, training):
    kernel = tf.compat.v1.get_variable("kernel", [4, 3])
    mean = tf.compat.v1.get_variable("mean", [3], trainable=False)
    logits = features @ kernel
    mean.assign(0.5 * mean + tf.reduce_mean(logits, 0))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return Model(loss=loss, logits=logits, regularization=0.1 * tf.nn.l2_loss(kernel))


def scalar_loss(features, labels, training):
    model = network(features, labels, training)
    return Model(loss=tf.reduce_mean(model.loss), logits=model.logits)


def without_logits(features, labels, training):
    return Model(loss=network(features, labels, training).loss)


def half_logits(features, labels, training):
    model = network(features, labels, training)
    return Model(loss=model.loss, logits=tf.cast(model.logits, tf.float16))


def member(weighting, build=network):
    layout = Layout.of(describe(build, VECTOR).manifest)
    trainer = Trainer(build, VECTOR, layout, 3, threads=1, weighting=weighting)
    arena = Arena.zeros(layout)
    arena.fill(trainer.initial_values())
    random = np.random.default_rng(0)
    features = random.normal(size=(6, 4)).astype(np.float32)
    return trainer, arena, features, np.arange(6, dtype=np.int32) % 3


def pushed(arena, gradients):
    copy = Arena.zeros(arena.layout)
    copy.buffer[:] = np.frombuffer(b"".join(gradients.buffers), np.uint8)
    return copy.views()


def test_logits_come_with_the_gradient_and_change_nothing_of_it():
    trainer, arena, features, labels = member(Weighting.BATCH)
    gradients = trainer.compute(arena.buffer, features, labels, DRAW)
    np.testing.assert_allclose(gradients.logits, features @ arena.views()["kernel"], rtol=1e-5, atol=1e-6)
    plain, _, _, _ = member(None)
    same = plain.compute(arena.buffer, features, labels, DRAW)
    assert same.logits is None
    assert b"".join(same.buffers) == b"".join(gradients.buffers)
    assert (same.loss, same.accuracy) == (gradients.loss, gradients.accuracy)


def test_the_gradient_is_of_the_mean_of_weight_times_loss_and_the_rest_is_as_without():
    """Regularization is not weighted; loss, accuracy and state are those of the batch."""
    trainer, arena, features, labels = member(Weighting.SAMPLE)
    kernel = arena.views()["kernel"]
    logits = trainer.answer(arena.buffer, features, labels, DRAW)
    np.testing.assert_allclose(logits, features @ kernel, rtol=1e-5, atol=1e-6)
    weights = np.array([0.5, 0.0, 1.0, 0.25, 0.1, 0.9], np.float32)
    gradients = trainer.compute(arena.buffer, features, labels, DRAW, weights)
    error = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error[np.arange(6), labels] -= 1
    expected = features.T @ (error * weights[:, None] / 6) + 0.1 * kernel
    np.testing.assert_allclose(pushed(arena, gradients)["kernel"], expected, rtol=1e-4, atol=1e-6)
    plain, _, _, _ = member(None)
    same = plain.compute(arena.buffer, features, labels, DRAW)
    assert (same.loss, same.accuracy) == (gradients.loss, gradients.accuracy)
    np.testing.assert_array_equal(pushed(arena, same)["mean"], pushed(arena, gradients)["mean"])


def test_what_cannot_be_a_member_is_one_sentence():
    with pytest.raises(ConfigurationError, match=r"need the loss of each, \[B\], and the model's loss is a scalar"):
        member(Weighting.SAMPLE, scalar_loss)
    member(Weighting.BATCH, scalar_loss)
    with pytest.raises(ConfigurationError, match="needs logits"):
        member(Weighting.BATCH, without_logits)


def test_what_a_model_answers_with():
    assert describe(network, VECTOR).logits == (3, "float32")
    assert describe(half_logits, VECTOR).logits == (3, "float32")
    assert describe(without_logits, VECTOR).logits is None


def test_answers_to_the_test_set_do_not_depend_on_how_it_is_divided():
    _, arena, features, labels = member(Weighting.BATCH)
    tester = Evaluator(network, VECTOR, arena.layout, 3, threads=1)
    whole = tester.logits(arena.buffer, features, labels, 6)
    np.testing.assert_allclose(tester.logits(arena.buffer, features, labels, 4), whole, rtol=1e-6)
    np.testing.assert_allclose(whole, features @ arena.views()["kernel"], rtol=1e-5, atol=1e-6)


def test_members_start_differently():
    seeds = {member_seed(0, rank) for rank in range(20)} | {member_seed(1, 0)}
    assert len(seeds) == 21
    assert all(0 <= seed < 2**63 for seed in seeds)
