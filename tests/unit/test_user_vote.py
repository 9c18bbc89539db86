"""A user's own master in ensemble mode: weights per example, and the loss that trains it."""

import textwrap

import numpy as np
import pytest

from protocol.errors import ConfigurationError, LocalProtocolError
from ps.rules.ensemble import EnsembleMaster, Head, MasterConfig
from ps.rules.user_network import load_user_master
from ps.rules.user_vote import UserVote, ensemble_samples

WORKERS, CLASSES = 3, 4
EVERYBODY = np.ones(WORKERS, bool)
RATE = 0.01

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SOFTMAX = """
def master(features, num_workers):
    kernel = tf.Variable(tf.zeros([features.shape[1], num_workers]), name="kernel")
    bias = tf.Variable(tf.constant([0.1, 0.2, 0.3]), name="bias")
    return tf.nn.softmax(tf.matmul(features, kernel) + bias)
"""
SIGMOID = SOFTMAX.replace("softmax", "sigmoid")


@pytest.fixture
def made(tmp_path):
    """Return a function that makes a vote of a source text, closed in the end."""
    votes = []

    def make(source):
        path = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        path.write_text("import tensorflow as tf\n" + textwrap.dedent(source))
        votes.append(UserVote(load_user_master(f"{path}:master"), MasterConfig(WORKERS, CLASSES, seed=3)))
        return votes[-1]

    yield make
    for vote in votes:
        vote.close()


def a_batch(size=6, seed=0):
    """Return logits [B, N, C] that float32 can hold, of which member 0's are right, and labels [B]."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(size, WORKERS, CLASSES))
    labels = generator.integers(0, CLASSES, size, dtype=np.int32)
    logits[np.arange(size), 0, labels] += 9.0
    return logits.astype(np.float32).astype(np.float64), labels


def squashed(head):
    sums = np.array([0.1, 0.2, 0.3])
    return np.exp(sums) / np.exp(sums).sum() if head == "softmax" else 1 / (1 + np.exp(-sums))


@pytest.mark.parametrize(("source", "head"), [(SOFTMAX, "softmax"), (SIGMOID, "sigmoid")])
def test_weights_and_loss_are_the_definition(made, source, head):
    vote = made(source)
    logits, labels = a_batch()
    weights = vote.weights(logits, EVERYBODY)
    np.testing.assert_allclose(weights, np.tile(squashed(head), (6, 1)), rtol=1e-6)
    assert vote.graph.normalised == (head == "softmax")
    correct = logits.argmax(axis=2) == labels[:, None]
    loss = vote.learn(logits, labels, EVERYBODY, RATE)
    assert loss == pytest.approx(np.mean((weights - correct) ** 2), rel=1e-6)


@pytest.mark.parametrize(("source", "head"), [(SOFTMAX, "softmax"), (SIGMOID, "sigmoid")])
def test_a_missing_member_weighs_nothing_and_teaches_nothing(made, source, head):
    """Of a softmax the others share the rest; of sigmoids they keep what they had."""
    vote = made(source)
    logits, labels = a_batch()
    logits[:, 1] = np.nan  # whatever stands there
    present = np.array([True, False, True])
    expected = squashed(head) * present
    expected = expected / expected.sum() if head == "softmax" else expected
    weights = vote.weights(logits, present)
    np.testing.assert_allclose(weights, np.tile(expected, (6, 1)), rtol=1e-6)
    correct = (logits.argmax(axis=2) == labels[:, None]) & present
    loss = vote.learn(logits, labels, present, RATE)
    assert loss == pytest.approx(np.sum((weights - correct) ** 2) / correct.size, rel=1e-6)


@pytest.mark.parametrize("head", Head)
def test_it_does_what_the_built_in_master_does_when_it_is_the_same_network(made, head):
    """In float64, and for logits that float32 can hold, the two agree to rounding, a member missing at times."""
    builtin = EnsembleMaster(MasterConfig(WORKERS, CLASSES, head, hidden=5))
    vote = made(
        f"""
        def dense(x, count, name):
            kernel = tf.Variable(tf.zeros([x.shape[1], count], tf.float64), name=name)
            return tf.matmul(x, kernel) + tf.Variable(tf.zeros([count], tf.float64), name=name + "_bias")

        def master(features, num_workers):
            hidden = tf.nn.relu(dense(tf.cast(features, tf.float64), 5, "hidden"))
            return tf.nn.{head.value}(dense(hidden, num_workers, "top"))
        """
    )
    network = builtin.network
    start = {"hidden": network.hidden_kernel, "top": network.output_kernel}
    vote.restore({name: start.get(name, value) for name, value in vote.state().items()})
    for step in range(20):
        logits, labels = a_batch(8, step)
        present = np.array([True, step % 3 > 0, True])
        np.testing.assert_allclose(vote.weights(logits, present), builtin.weights(logits, present), atol=1e-10)
        mine = vote.learn(logits, labels, present, RATE)
        assert mine == pytest.approx(builtin.learn(logits, labels, present, RATE), abs=1e-10)
    np.testing.assert_allclose(vote.state()["hidden"], network.hidden_kernel, atol=1e-10)
    assert not np.allclose(network.hidden_kernel, start_of(head).hidden_kernel, atol=0.05)


def start_of(head):
    return EnsembleMaster(MasterConfig(WORKERS, CLASSES, head, hidden=5)).network


def test_it_learns_who_is_right(made):
    vote = made(SIGMOID)
    for step in range(120):
        vote.learn(*a_batch(16, step), EVERYBODY, 0.05)
    weights = vote.weights(a_batch(64, seed=999)[0], EVERYBODY).mean(axis=0)
    assert weights[0] > 0.9
    assert weights[1:].max() < 0.5


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 2, 4), (2, 12)])
def test_logits_of_another_shape_are_our_own_mistake(made, shape):
    with pytest.raises(LocalProtocolError, match="logits of"):
        made(SIGMOID).weights(np.zeros(shape), EVERYBODY)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("return tf.ones([num_workers])", "returned weights of shape [3] instead of [1, 3]"),
        ("return tf.ones([1, num_workers])", "returned weights of shape [1, 3] instead of [3, 3]"),
        ("return features[:, :num_workers]", "a weight of -"),
        ("return tf.math.log(tf.zeros_like(features[:, :3]))", "a weight of -inf; all must be finite"),
        ("return 1.0", "it must return a tensor: weights [examples, 3]"),
    ],
)
def test_what_are_no_weights_is_refused(made, source, complaint):
    with pytest.raises(ConfigurationError) as error:
        made(f"def master(features, num_workers):\n    {source}\n")
    assert complaint in str(error.value)


def test_samples_hold_batches_of_several_sizes_an_absent_worker_and_nothing():
    samples = ensemble_samples(WORKERS, CLASSES)
    assert {len(sample.features) for sample in samples} == {1, 3, 8}
    assert not samples[-1].features.any()
    assert not samples[-2].features[:, -CLASSES:].any()
    assert samples[-2].features[:, :-CLASSES].any()


def test_what_it_cannot_weigh_weighs_the_same(made):
    vote = made(
        """
        def master(features, num_workers):
            return tf.sigmoid(features[:, :3]) + tf.where(features[:, :3] > 1e6, float("nan"), 0.0)
        """
    )
    logits = np.zeros((2, WORKERS, CLASSES))
    vote.weights(logits, EVERYBODY)
    assert vote.complaint == ""
    logits[0, 0, 0] = 1e9
    present = np.array([True, True, False])
    assert vote.weights(logits, present).tolist() == [[0.5, 0.5, 0.0]] * 2
    assert vote.complaint.endswith(
        ":master returned a weight of nan; all must be finite: all members weigh the same in this round"
    )


def test_a_restored_vote_goes_on_to_the_bit(made):
    whole, first, second = made(SIGMOID), made(SIGMOID), made(SIGMOID)
    for step in range(6):
        assert whole.learn(*a_batch(4, step), EVERYBODY, RATE) == first.learn(*a_batch(4, step), EVERYBODY, RATE)
    second.restore(first.state())
    for step in range(6, 12):
        assert whole.learn(*a_batch(4, step), EVERYBODY, RATE) == second.learn(*a_batch(4, step), EVERYBODY, RATE)
    assert all(np.array_equal(value, second.state()[name]) for name, value in whole.state().items())
