import importlib.util
import math
import subprocess
import sys

import numpy as np
import pytest

from protocol.errors import ConfigurationError
from ps.storage.kernels import UPDATES
from ps.storage.optimizers import SGD, Adam, AdamW

STEPS = 100
LEARNING_RATE = 0.01


def run(optimizer, dtype, start, gradients):
    """Apply a list of gradients with the optimizer's kernel; return the values after each."""
    old, new = start.astype(dtype), np.empty(start.size, dtype)
    moments = np.zeros((len(optimizer.moments), start.size), dtype)
    one = np.array([0])
    for update, gradient in enumerate(gradients, 1):
        scalars = np.array([0.0, *optimizer.scalars(update, LEARNING_RATE)], dtype)
        UPDATES[optimizer.kernel](
            gradient.astype(dtype)[None],
            0,
            one,
            np.ones(1, dtype),
            old,
            new,
            moments,
            old[:0],
            scalars,
            0,
            old.size,
        )
        old, new = new, old
        yield old.copy()


def adam_by_definition(start, gradients, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0):
    value = start.astype(np.float64)
    m, v = np.zeros_like(value), np.zeros_like(value)
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        rate = LEARNING_RATE * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        value = value - LEARNING_RATE * weight_decay * value - rate * m / (np.sqrt(v) + epsilon)
        yield value


def momentum_by_definition(start, gradients, momentum, nesterov):
    value, a = start.astype(np.float64), np.zeros(start.size)
    for g in gradients:
        a = momentum * a + g
        value = value - LEARNING_RATE * (g + momentum * a if nesterov else a)
        yield value


@pytest.fixture
def problem():
    random = np.random.default_rng(5)
    sizes = 10.0 ** random.uniform(-6, 2, 257)
    return random.standard_normal(257), [random.standard_normal(257) * sizes for _ in range(STEPS)]


CASES = {
    "adam": (Adam(), adam_by_definition, {}),
    "adam with other numbers": (
        Adam(0.5, 0.9, 0.1),
        adam_by_definition,
        {"beta1": 0.5, "beta2": 0.9, "epsilon": 0.1},
    ),
    "adamw": (AdamW(weight_decay=0.3), adam_by_definition, {"weight_decay": 0.3}),
    "sgd": (SGD(), momentum_by_definition, {"momentum": 0.0, "nesterov": False}),
    "momentum": (SGD(0.9), momentum_by_definition, {"momentum": 0.9, "nesterov": False}),
    "nesterov": (SGD(0.9, nesterov=True), momentum_by_definition, {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 3e-5)])
@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_equals_its_definition_over_100_updates(case, dtype, tolerance, problem):
    optimizer, definition, numbers = CASES[case]
    start, gradients = problem
    ours, expected = run(optimizer, dtype, start, gradients), definition(start, gradients, **numbers)
    for value, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance)


def test_weight_decay_acts_without_a_gradient_and_leaves_the_moments_alone():
    (value,) = run(AdamW(weight_decay=0.5), np.float64, np.full(3, 4.0), [np.zeros(3)])
    np.testing.assert_array_equal(value, 4.0 * (1 - LEARNING_RATE * 0.5))


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [(Adam(), ("m", "v")), (AdamW(), ("m", "v")), (SGD(), ()), (SGD(0.5), ("momentum",))],
)
def test_an_optimizer_names_the_moments_it_keeps(optimizer, moments):
    assert optimizer.moments == moments


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Adam(beta1=1.0), "beta1"),
        (lambda: Adam(beta1=-0.1), "beta1"),
        (lambda: Adam(beta2=1.0), "beta2"),
        (lambda: Adam(beta2=math.nan), "beta2"),
        (lambda: Adam(epsilon=0.0), "epsilon"),
        (lambda: Adam(epsilon=1e-40), "epsilon"),
        (lambda: Adam(epsilon=math.inf), "epsilon"),
        (lambda: AdamW(weight_decay=-1.0), "weight decay"),
        (lambda: AdamW(beta1=2.0), "beta1"),
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(nesterov=True), "Nesterov"),
    ],
)
def test_a_number_out_of_range_is_refused_and_named(make, names):
    with pytest.raises(ConfigurationError, match=names):
        make()


TENSORFLOW = """
import sys
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_eager_execution()
problem = np.load(sys.argv[1])
optimizers = {
    "adam": tf1.train.AdamOptimizer(0.01),
    "momentum": tf1.train.MomentumOptimizer(0.01, 0.9),
    "nesterov": tf1.train.MomentumOptimizer(0.01, 0.9, use_nesterov=True),
    "sgd": tf1.train.GradientDescentOptimizer(0.01),
}
fed = tf1.placeholder(tf.float32, [problem["start"].size])
values, steps = {}, []
for name, optimizer in optimizers.items():
    values[name] = tf1.get_variable(name, initializer=problem["start"])
    steps.append(optimizer.apply_gradients([(fed, values[name])]))
history = {name: [] for name in values}
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    for gradient in problem["gradients"]:
        session.run(steps, {fed: gradient})
        for name, value in session.run(values).items():
            history[name].append(value)
np.savez(sys.argv[2], **history)
"""


def test_optimizers_equal_tensorflow_over_100_updates_to_float32_rounding(problem, tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    start, gradients = problem
    gradients = [gradient.astype(np.float32) for gradient in gradients]
    np.savez(tmp_path / "in.npz", start=start.astype(np.float32), gradients=np.stack(gradients))
    command = [sys.executable, "-c", TENSORFLOW, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    theirs = np.load(tmp_path / "out.npz")
    # How many float32 roundings apart after 100 updates; Adam's more because TensorFlow rounds its powers of beta.
    cases = {
        "adam": (Adam(), 32),
        "momentum": (SGD(0.9), 4),
        "nesterov": (SGD(0.9, nesterov=True), 4),
        "sgd": (SGD(), 4),
    }
    for name, (optimizer, roundings) in cases.items():
        values = np.stack(list(run(optimizer, np.float32, start, gradients)))
        assert np.abs(theirs[name] - start).max() > 0.1  # it did move
        scale = np.abs(values).max(axis=0) + np.abs(start)
        error = np.abs(values - theirs[name]) / scale
        assert error.max() < roundings * np.finfo(np.float32).eps, (name, error.max())
