"""The models that ship: their variables, that they learn, that their random numbers replay; users' files."""

import numpy as np
import pytest
import tensorflow as tf

from protocol.arena import Arena
from protocol.errors import ConfigurationError
from protocol.tensors import Layout
from worker import Model
from worker.graph import Evaluator, InputSpec, Trainer, describe, draw_key
from worker.models import CROP, MODELS, _central_crop, _distorted, load_build

DIGITS = InputSpec((8, 8), "float32")
CIFAR = InputSpec((32, 32, 3), "uint8")


def shapes(name, inputs):
    return {s.name: s.shape for s in describe(MODELS[name](10), inputs).manifest.variables}


def test_mlp_has_three_layers_of_the_given_sizes():
    assert shapes("mlp", DIGITS) == {
        "hidden1/kernel": (64, 256),
        "hidden1/bias": (256,),
        "hidden2/kernel": (256, 128),
        "hidden2/bias": (128,),
        "logits/kernel": (128, 10),
        "logits/bias": (10,),
    }


def test_cifar10_cnn_is_the_tutorials_network():
    assert shapes("cifar10_cnn", CIFAR) == {
        "conv1/kernel": (5, 5, 3, 64),
        "conv1/bias": (64,),
        "conv2/kernel": (5, 5, 64, 64),
        "conv2/bias": (64,),
        "local3/kernel": (2304, 384),
        "local3/bias": (384,),
        "local4/kernel": (384, 192),
        "local4/bias": (192,),
        "softmax_linear/kernel": (192, 10),
        "softmax_linear/bias": (10,),
    }


@pytest.mark.parametrize(("name", "inputs"), [("mlp", DIGITS), ("cifar10_cnn", CIFAR)])
def test_models_that_ship_are_replayable_without_remarks(name, inputs):
    description = describe(MODELS[name](10), inputs)
    assert description.replayable, description.replayable_reason
    assert not description.remarks


def bound(name, inputs):
    build = MODELS[name](10)
    layout = Layout.of(describe(build, inputs).manifest)
    trainer = Trainer(build, inputs, layout, 3, threads=1)
    arena = Arena.zeros(layout)
    arena.fill(trainer.initial_values())
    return trainer, layout, arena


def test_mlp_learns_a_batch_by_plain_gradient_descent():
    trainer, _, arena = bound("mlp", DIGITS)
    source = np.random.default_rng(0)
    features, labels = source.random((32, 8, 8), np.float32), source.integers(0, 10, 32).astype(np.int32)
    values = arena.buffer.view(np.float32)
    first = trainer.compute(arena.buffer, features, labels, (3, 0, 0))
    for step in range(60):
        got = trainer.compute(arena.buffer, features, labels, (3, 0, step))
        values -= 0.2 * np.frombuffer(b"".join(got.buffers), np.float32)
    last = trainer.compute(arena.buffer, features, labels, (3, 0, 60))
    trainer.close()
    assert last.loss < 0.6 * first.loss
    assert last.accuracy is not None
    assert first.accuracy is not None
    assert last.accuracy > first.accuracy


def test_bytes_are_scaled_to_the_unit_interval():
    """A model on bytes and a model on the same numbers over 255 are one."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 8), np.uint8)
    labels = np.arange(8, dtype=np.int32)
    losses = []
    for inputs, features in ((InputSpec((8, 8), "uint8"), pixels), (DIGITS, pixels.astype(np.float32) / 255)):
        trainer, _, arena = bound("mlp", inputs)
        losses.append(trainer.compute(arena.buffer, features, labels, (0, 0, 0)).loss)
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # TensorFlow multiplies by 1/255


def test_cifar10_cnn_distorts_by_step_in_training_and_not_at_all_in_evaluation():
    trainer, layout, arena = bound("cifar10_cnn", CIFAR)
    source = np.random.default_rng(0)
    features = source.integers(0, 256, (4, 32, 32, 3), np.uint8)
    labels = source.integers(0, 10, 4).astype(np.int32)

    def loss(*draw):
        return trainer.compute(arena.buffer, features, labels, draw).loss

    first = loss(3, 0, 0)
    assert loss(3, 0, 1) != first
    assert loss(3, 1, 0) != first
    assert loss(3, 0, 0) == first
    trainer.close()
    evaluator = Evaluator(MODELS["cifar10_cnn"](10), CIFAR, layout, 3, threads=1)
    once = evaluator.evaluate(arena.buffer, features, labels, 4)
    assert evaluator.evaluate(arena.buffer, features, labels, 4) == once
    evaluator.close()


def test_weight_decay_is_in_the_loss_of_cifar10_cnn():
    trainer, _, arena = bound("cifar10_cnn", CIFAR)
    values = arena.views(writeable=True)
    features, labels = np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.int32)
    decay = sum(0.004 * 0.5 * np.square(values[f"local{i}/kernel"].astype(np.float64)).sum() for i in (3, 4))
    values["softmax_linear/kernel"][:] = 0  # so that the cross-entropy is log 10
    got = trainer.compute(arena.buffer, features, labels, (0, 0, 0)).loss
    trainer.close()
    assert got == pytest.approx(np.log(10) + decay, rel=1e-5)


def distorted(images, step=0):
    """The distortion alone, of float images, as a session computes it for a step."""
    seen = []

    def build(features, labels, training):
        seen.append(_distorted(features) if training else _central_crop(features))
        weights = tf.compat.v1.get_variable("weights", [])
        return Model(loss=weights * tf.reduce_mean(seen[-1]))

    inputs = InputSpec(images.shape[1:], "float32")
    trainer = Trainer(build, inputs, Layout.of(describe(build, inputs).manifest), 0, threads=1)
    feeds = {"features:0": images, "draw:0": draw_key((0, 0, step))}
    result = trainer._session.run(seen[-1], feeds)
    trainer.close()
    return result


def test_distortion_crops_and_flips_each_image_on_its_own():
    """Pixels hold their own position; brightness and contrast are affine, so differences tell the rest."""
    rows, columns = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    one = np.stack([rows, columns, np.zeros_like(rows)], -1).astype(np.float32) / 32
    result = distorted(np.repeat(one[None], 16, 0))
    assert result.shape == (16, CROP, CROP, 3)
    down = np.diff(result[..., 0], axis=1)
    across = np.diff(result[..., 1], axis=2)
    contrast = down.mean((1, 2)) * 32
    assert contrast.min() >= 0.2 - 1e-3
    assert contrast.max() <= 1.8 + 1e-3
    assert np.ptp(contrast) > 0.3  # not one factor for the batch
    np.testing.assert_allclose(down, np.broadcast_to(contrast[:, None, None] / 32, down.shape), atol=1e-5)
    flips = np.sign(across.mean((1, 2)))
    assert set(flips.tolist()) == {-1.0, 1.0}
    np.testing.assert_allclose(
        np.abs(across), np.broadcast_to(contrast[:, None, None] / 32, across.shape), atol=1e-5
    )
    # A crop's mean is its brightness and where it was taken; the third channel, all zero, is brightness alone.
    brightness = result[..., 2].mean((1, 2))
    assert np.abs(brightness).max() <= 63 / 255 + 1e-5
    tops = (result[..., 0].mean((1, 2)) - brightness) * 32 - (CROP - 1) / 2
    np.testing.assert_allclose(tops, np.round(tops), atol=1e-3)
    assert set(np.round(tops).astype(int).tolist()) <= set(range(9))
    assert len(set(np.round(tops).astype(int).tolist())) > 3


def test_images_below_the_crop_are_refused():
    with pytest.raises(ConfigurationError, match="at least 24 x 24"):
        describe(MODELS["cifar10_cnn"](10), InputSpec((8, 8, 1), "float32"))
    with pytest.raises(ConfigurationError, match=r"not features of shape \[64\]"):
        describe(MODELS["cifar10_cnn"](10), InputSpec((64,), "float32"))


# ---- names and files -----------------------------------------------------------------------------------


def test_a_name_gives_a_model_and_an_unknown_one_the_list():
    assert "logits/bias" in {s.name for s in describe(load_build("mlp", 7), DIGITS).manifest.variables}
    with pytest.raises(ConfigurationError, match=r"no model 'mpl': choose cifar10_cnn or mlp"):
        load_build("mpl", 10)


def test_a_users_function_is_returned_as_it_is(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def build(features, labels, training):\n    return 'untouched'\n")
    assert load_build(f"{file}:build", 10)(None, None, True) == "untouched"


@pytest.mark.parametrize(
    ("text", "function", "says"),
    [
        (None, "build", "no file .*mine.py"),
        ("x = 1\n", "build", "no function 'build'"),
        ("\nimport nothing_of_that_name\n", "build", "mine.py failed with ModuleNotFoundError at line 2"),
        ("def build(:\n", "build", "mine.py failed with SyntaxError at line 1"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_said_by_name(tmp_path, text, function, says):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        load_build(f"{file}:{function}", 10)
