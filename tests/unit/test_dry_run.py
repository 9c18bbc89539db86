"""What is tried out before a worker joins: one batch of the model, as its role would compute it."""

import numpy as np
import pytest

from protocol.errors import ConfigurationError
from worker import Dataset
from worker.config import WorkerConfig
from worker.job import load_data, prepare, print_plan, try_out

MODEL = """
import tensorflow as tf
import worker


def _loss(features, labels, classes):
    weights = tf.compat.v1.get_variable("weights", [2, classes])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=features @ weights)


def good(features, labels, training):
    return worker.Model(loss=_loss(features, labels, 3))


def two_classes(features, labels, training):
    return worker.Model(loss=_loss(features, labels, 2))


def fails_in_evaluation(features, labels, training):
    features = features if training else tf.ensure_shape(features, [7, 2])
    return worker.Model(loss=_loss(features, labels, 3))


def of_four(features, labels, training):
    return worker.Model(loss=_loss(tf.ensure_shape(features, [4, 2]), labels, 3))


def infinite_loss(features, labels, training):
    return worker.Model(loss=_loss(features, labels, 3) - tf.math.log(tf.zeros([])))


def infinite_gradient(features, labels, training):
    bias = tf.compat.v1.get_variable("bias", [2], initializer=tf.compat.v1.zeros_initializer())
    return worker.Model(loss=_loss(features, labels, 3) + tf.reduce_sum(tf.sqrt(bias)))


def no_start(features, labels, training):
    def start(shape, dtype=None, partition_info=None):
        return tf.debugging.check_numerics(tf.fill(shape, float("nan")), "start")

    bias = tf.compat.v1.get_variable("bias", [3], initializer=start)
    return worker.Model(loss=_loss(features, labels, 3) + tf.reduce_sum(bias))
"""


@pytest.fixture
def job_of(tmp_path):
    """Return a function that prepares a job on 40 examples of three classes."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    labels = (np.arange(40) % 3).astype(np.int32)
    features = np.ones((40, 2), np.float32)

    def make(function, labels=labels, **options):
        config = WorkerConfig(**{"model": f"{path}:{function}", "threads": 1, "trusted_examples": 8} | options)
        return prepare(config, Dataset(features, labels, features, labels))

    return make


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "a batch of 32 was computed at the initial values: loss "),
        ({"batch_size": 5, "rank": 7}, "a batch of 5 was computed"),
        ({"own_data": True, "trusted_examples": 0, "batch_size": 40}, "a batch of 40 was computed"),
        ({"role": "validator"}, "a batch of 8 was computed"),
        ({"role": "evaluator"}, "a batch of 40 test examples was evaluated, with every variable 0"),
    ],
)
def test_each_role_computes_a_batch_of_its_own(job_of, options, says, capsys):
    assert print_plan(job_of("good", **options)) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        ("two_classes", {}, "TensorFlow failed while computing step 0 .*: Received a label value of 2"),
        ("fails_in_evaluation", {"role": "evaluator"}, "TensorFlow failed while evaluating .*40,2"),
        ("of_four", {}, "TensorFlow failed while computing step 0"),
        ("no_start", {}, "TensorFlow failed while initialising"),
        ("infinite_loss", {}, "the first batch has loss inf at the initial values, which is not finite"),
        (
            "infinite_gradient",
            {"role": "validator"},
            r"loss \d.*, but the gradient of variable 'bias' holds NaN or",
        ),
        ("good", {"batch_size": 33}, "a batch of 33 is larger than"),
        ("good", {"role": "validator", "batch_size": 9}, "a validator's batch cannot have 9 examples"),
    ],
)
def test_what_would_fail_in_the_first_step_is_one_sentence(job_of, function, options, says):
    job = job_of(function, **options)
    with pytest.raises(ConfigurationError, match=says) as caught:
        try_out(job)
    assert "\n" not in str(caught.value)


def test_a_model_of_the_users_may_have_any_labels(job_of):
    """What they mean is its business; a model that ships, or a fault, counts classes."""
    labels = np.full(40, 3_000_000, np.int32)
    job_of("good", labels)
    for counts in ({"model": "mlp"}, {"fault": "zero"}):
        with pytest.raises(ConfigurationError, match="label 3,000,000 is too large to be a class"):
            job_of("good", labels, **counts)


def test_an_option_of_evaluators_is_refused_to_a_worker_that_can_be_no_member(job_of):
    """Before it joins; whether one that gives logits is a member only the server knows."""
    with pytest.raises(ConfigurationError, match="--evaluate-every works only with --role evaluator"):
        job_of("good", evaluate_every=5)
    job_of("good", evaluate_every=5, role="evaluator")


def test_a_model_whose_file_is_missing_is_refused_before_data_and_tensorflow_are_loaded(tmp_path):
    config = WorkerConfig(model=f"{tmp_path}/none.py:build", dataset=f"npz:{tmp_path}/none.npz")
    with pytest.raises(ConfigurationError, match=r"--model .* because there is no file .*none\.py"):
        load_data(config)


def test_a_build_function_that_cannot_be_called_is_told_how_it_would_be(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def build(): pass\n\ndef inside(features, labels, training): return len()\n")
    features, labels = np.ones((40, 2), np.float32), np.zeros(40, np.int32)
    for function, is_told in (("build", True), ("inside", False)):
        config = WorkerConfig(model=f"{path}:{function}", threads=1)
        with pytest.raises(ConfigurationError, match="raised TypeError") as caught:
            prepare(config, Dataset(features, labels, features, labels))
        assert ("it must be `build(features, labels, training)`" in str(caught.value)) is is_told
