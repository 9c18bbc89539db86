"""The ensemble's master against the same thing in TensorFlow, what it does without a member, and the votes."""

import numpy as np
import pytest

from protocol.errors import ConfigurationError, LocalProtocolError
from ps.rules.ensemble import ActsOn, EnsembleMaster, Head, MasterConfig, correct_answers, member_factors, vote

MEMBERS, CLASSES, BATCH, STEPS = 3, 4, 16, 50
ALL = np.ones(MEMBERS, bool)


def master_of(head="softmax", seed=3, members=MEMBERS):
    return EnsembleMaster(MasterConfig(members, CLASSES, Head(head), seed))


def batch(step, scale=3.0):
    """Logits that know the label to some degree, member 0 best, and the labels."""
    random = np.random.default_rng(step)
    labels = random.integers(0, CLASSES, BATCH).astype(np.int32)
    logits = random.normal(size=(BATCH, MEMBERS, CLASSES)) * scale
    logits[np.arange(BATCH), 0, labels] += scale
    return logits, labels


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_fifty_steps_equal_tensorflow(head):
    """The members' logits are fixed inputs here; the weights are 1e-12 apart at most, and so are the values."""
    from tests.integration.ensemble_graph import MASTER, EnsembleGraph

    def given(features, own, shared):
        own("unused", ())  # every member needs one variable of its own; its gradient is zero
        index = given.calls = given.calls + 1
        part = features[:, (index - 1) * CLASSES : index * CLASSES]
        return part + 0.0 * own("unused", ())

    given.calls = 0
    graph = EnsembleGraph(given, MEMBERS, MEMBERS * CLASSES, CLASSES, head=head, learning_rate=0.01)
    master = master_of(head)
    network = master.network
    ours = (network.hidden_kernel, network.hidden_bias, network.output_kernel, network.output_bias)
    start = {name: array.copy() for name, array in zip(MASTER, ours, strict=True)}
    graph.load(start)
    for step in range(STEPS):
        logits, labels = batch(step)
        told = graph.step(logits.reshape(BATCH, -1), labels)
        np.testing.assert_allclose(master.weights(logits, ALL), told["weights"], rtol=0, atol=1e-12)
        loss = master.learn(logits, labels, ALL, 0.01)
        np.testing.assert_allclose(loss, told["master_loss"], rtol=0, atol=1e-12)
    values = graph.values()
    for name, array in zip(MASTER, ours, strict=True):
        np.testing.assert_allclose(array, values[name], rtol=0, atol=1e-12)
        assert not np.allclose(array, start[name], rtol=0, atol=1e-3), "nothing was learned"
    graph.close()


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_the_master_learns_who_is_right(head):
    master = master_of(head)
    for step in range(300):
        master.learn(*batch(step), ALL, 0.01)
    weights = master.weights(batch(1000)[0], ALL).mean(0)
    assert weights[0] == weights.max() and weights[0] > 1.5 * weights[1]


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_a_missing_member_weighs_nothing_and_teaches_nothing(head):
    """Whatever stands in its place, NaN too: the others see zeros, and its score moves by no gradient."""
    logits, labels = batch(0)
    present = np.array([True, False, True])
    one, other = master_of(head), master_of(head)
    broken = logits.copy()
    broken[:, 1] = np.nan
    zeros = logits.copy()
    zeros[:, 1] = 0.0
    weights = one.weights(broken, present)
    assert (weights[:, 1] == 0).all() and np.isfinite(weights).all()
    np.testing.assert_array_equal(weights, other.weights(zeros, present))
    if head == "softmax":
        np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-15)
    else:
        np.testing.assert_array_equal(weights[:, [0, 2]], other.weights(zeros, ALL)[:, [0, 2]])
    before = one.network.output_kernel.copy()
    one.learn(broken, labels, present, 0.01)
    np.testing.assert_array_equal(one.network.output_kernel[:, 1], before[:, 1])
    assert not np.array_equal(one.network.output_kernel[:, 0], before[:, 0])
    np.testing.assert_array_equal(one.network.hidden_kernel[CLASSES : 2 * CLASSES].any(), True)


def test_right_answers_of_a_missing_member_are_none():
    """Its logits of 0 would point at class 0."""
    logits = np.zeros((2, 2, CLASSES))
    labels = np.zeros(2, np.int32)
    np.testing.assert_array_equal(
        correct_answers(logits, labels, np.array([True, False])), [[1.0, 0.0], [1.0, 0.0]]
    )


def test_huge_scores_do_not_overflow():
    logits, _ = batch(0, scale=1e6)
    for head in Head:
        weights = master_of(head).weights(logits, ALL)
        assert np.isfinite(weights).all() and (weights >= 0).all() and (weights <= 1).all()


def test_the_same_seed_gives_the_same_master_and_another_does_not():
    assert np.array_equal(master_of().network.parameters, master_of().network.parameters)
    assert not np.array_equal(master_of().network.parameters, master_of(seed=4).network.parameters)
    limit = np.sqrt(6 / (MEMBERS * CLASSES + 64))
    kernel = master_of().network.hidden_kernel
    assert 0.9 * limit < np.abs(kernel).max() <= limit
    assert abs(kernel.mean()) < 0.1 * limit


def test_a_restored_master_goes_on_to_the_bit():
    one, other = master_of(), master_of(seed=9)
    one.learn(*batch(0), ALL, 0.01)
    other.restore(one.state())
    for master in (one, other):
        master.learn(*batch(1), ALL, 0.01)
    np.testing.assert_array_equal(one.network.parameters, other.network.parameters)


def test_weights_act_on_gradients_or_on_steps():
    weights = np.array([0.5, 0.3, 0.2])
    gradient, step = member_factors(weights, ActsOn.GRADIENT)
    np.testing.assert_array_equal(gradient, weights)
    np.testing.assert_array_equal(step, [1, 1, 1])
    gradient, step = member_factors(weights, ActsOn.UPDATE)
    np.testing.assert_array_equal(gradient, [1, 1, 1])
    np.testing.assert_allclose(step, [1.5, 0.9, 0.6])


def test_votes():
    """Five examples, all of class 1; member 1 is missing."""
    answers = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 1, 2], [2, 1, 1]])
    logits = np.eye(3)[answers]
    labels = np.ones(5, np.int32)
    present = np.array([True, False, True])
    weights = np.array([[0.9, 0, 0.1], [0.4, 0, 0.6], [0.4, 0, 0.6], [0.4, 0, 0.6], [0.4, 0, 0.6]])
    result = vote(logits, labels, present, weights)
    assert result.weighted == pytest.approx(3 / 5)  # examples 0, 2 and 4
    assert result.plain == pytest.approx(1 / 5)  # ties go to the first class; of 1 and 2 that is class 1
    np.testing.assert_allclose(result.alone, [2 / 5, np.nan, 2 / 5])


def test_what_cannot_be_an_ensemble_is_refused():
    with pytest.raises(ConfigurationError):
        MasterConfig(0, 10)
    with pytest.raises(ConfigurationError):
        MasterConfig(3, 1)
    master = master_of()
    with pytest.raises(LocalProtocolError):
        master.weights(np.zeros((BATCH, MEMBERS, CLASSES + 1)), ALL)
    with pytest.raises(LocalProtocolError):
        master.weights(batch(0)[0], ~ALL)
