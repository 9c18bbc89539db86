"""Models that ship, and build functions from users' files.

The models are plain TensorFlow, without Keras, so their graphs build fast and their variables keep their names.
Their random numbers come from `draw_seed`: a step that is computed again draws the same ones.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from protocol.errors import ConfigurationError
from protocol.user_function import load_user_function
from worker.binding import BuildFunction, draw_seed
from worker.definitions import Model

__all__ = ["MODELS", "cifar10_cnn", "draw_seed", "load_build", "mlp"]

CROP = 24
"""Height and width of the images that `cifar10_cnn` sees."""


def load_build(spec: str, num_classes: int) -> BuildFunction:
    """Return the build function that `spec` names.

    Args:
        spec: a key of `MODELS`, or `file.py:function`; a user's function is returned as it is.
        num_classes: classes of the data set, for the models that ship.

    Raises:
        ConfigurationError: no such model, file or function, or the file raised when it was imported.
    """
    if ":" in spec:
        return load_user_function(spec, "--model").function
    if spec not in MODELS:
        raise ConfigurationError(
            f"there is no model {spec!r}: choose {' or '.join(sorted(MODELS))}, or write file.py:function"
        )
    return MODELS[spec](num_classes)


def mlp(num_classes: int) -> BuildFunction:
    """Return a perceptron with layers of 256, 128 and `num_classes`.

    Its features are [B, ...] of any shape: uint8 (scaled from 0..255 to 0..1) or floating (taken as they are).
    """

    def build(features: Any, labels: Any, training: bool) -> Model:
        hidden = _unit_interval(features)
        hidden = tf.reshape(hidden, [-1, _flat_size(hidden)])
        hidden = tf.nn.relu(_dense("hidden1", hidden, 256))
        hidden = tf.nn.relu(_dense("hidden2", hidden, 128))
        logits = _dense("logits", hidden, num_classes)
        return Model(loss=_cross_entropy(labels, logits), logits=logits)

    return build


def cifar10_cnn(num_classes: int) -> BuildFunction:
    """Return the convolutional network of TensorFlow's classic CIFAR-10 tutorial.

    Two convolutions of 64 filters with local response normalisation and pooling, dense 384 and 192 with weight
    decay 0.004. It sees a random crop of 24 x 24 pixels, flipped, brightened and contrasted at random, in
    training, and the central crop in evaluation. Features are [B, H, W, C], uint8 or floating in 0..1, at least
    24 x 24.

    Source: Krizhevsky's cuda-convnet, by way of the tutorial "Convolutional Neural Networks" of TensorFlow 1.
    """

    def build(features: Any, labels: Any, training: bool) -> Model:
        images = _unit_interval(features)
        if images.shape.rank != 4 or min(images.shape[1:3]) < CROP:
            raise ConfigurationError(
                f"cifar10_cnn needs images of at least {CROP} x {CROP} pixels as [B, H, W, C], "
                f"not features of shape {list(images.shape)[1:]}"
            )
        images = _distorted(images) if training else _central_crop(images)
        hidden = tf.image.per_image_standardization(images)
        hidden = tf.nn.relu(_convolution("conv1", hidden, 64, bias=0.0))
        hidden = tf.nn.max_pool2d(hidden, 3, 2, "SAME")
        hidden = tf.nn.local_response_normalization(hidden, 4, bias=1.0, alpha=0.001 / 9, beta=0.75)
        hidden = tf.nn.relu(_convolution("conv2", hidden, 64, bias=0.1))
        hidden = tf.nn.local_response_normalization(hidden, 4, bias=1.0, alpha=0.001 / 9, beta=0.75)
        hidden = tf.nn.max_pool2d(hidden, 3, 2, "SAME")
        hidden = tf.reshape(hidden, [-1, _flat_size(hidden)])
        decayed: list[Any] = []
        hidden = tf.nn.relu(_dense("local3", hidden, 384, stddev=0.04, bias=0.1, kernels=decayed))
        hidden = tf.nn.relu(_dense("local4", hidden, 192, stddev=0.04, bias=0.1, kernels=decayed))
        logits = _dense("softmax_linear", hidden, num_classes, stddev=1 / 192)
        decay = tf.add_n([0.004 * tf.nn.l2_loss(kernel) for kernel in decayed])
        return Model(loss=_cross_entropy(labels, logits), logits=logits, regularization=decay)

    return build


MODELS: Mapping[str, Callable[[int], BuildFunction]] = {"mlp": mlp, "cifar10_cnn": cifar10_cnn}
"""Models that ship: name -> factory(num_classes) -> build function."""


# ---- layers --------------------------------------------------------------------------------------------


def _unit_interval(features: Any) -> Any:
    if features.dtype == tf.uint8:
        return tf.cast(features, tf.float32) / 255.0
    return tf.cast(features, tf.float32)


def _flat_size(tensor: Any) -> int:
    return int(tf.TensorShape(tensor.shape[1:]).num_elements())


def _cross_entropy(labels: Any, logits: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _variables(name: str, kernel_shape: list[int], stddev: float, bias: float) -> tuple[Any, Any]:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable(
            "kernel", kernel_shape, tf.float32, tf.compat.v1.truncated_normal_initializer(stddev=stddev)
        )
        return kernel, tf.compat.v1.get_variable(
            "bias", kernel_shape[-1:], tf.float32, tf.compat.v1.constant_initializer(bias)
        )


def _dense(
    name: str,
    inputs: Any,
    units: int,
    *,
    stddev: float | None = None,
    bias: float = 0.0,
    kernels: list[Any] | None = None,
) -> Any:
    fan_in = int(inputs.shape[1])
    # He's standard deviation for layers before a ReLU (arXiv:1502.01852), where none is given.
    deviation = (2.0 / fan_in) ** 0.5 if stddev is None else stddev
    kernel, bias_vector = _variables(name, [fan_in, units], deviation, bias)
    if kernels is not None:
        kernels.append(kernel)
    return tf.matmul(inputs, kernel) + bias_vector


def _convolution(name: str, images: Any, filters: int, *, bias: float) -> Any:
    kernel, bias_vector = _variables(name, [5, 5, int(images.shape[3]), filters], 0.05, bias)
    return tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME"), bias_vector)


# ---- images --------------------------------------------------------------------------------------------


def _central_crop(images: Any) -> Any:
    top, left = (int(images.shape[axis]) - CROP for axis in (1, 2))
    return images[:, top // 2 : top // 2 + CROP, left // 2 : left // 2 + CROP]


def _distorted(images: Any) -> Any:
    """Crop, flip, brighten and contrast each image of [B, H, W, C] on its own, values in 0..1."""
    batch = tf.shape(images)[0]

    def uniform(low: float, high: float) -> Any:
        return tf.random.stateless_uniform([batch, 1, 1, 1], draw_seed(), low, high)

    for axis in (1, 2):
        positions = int(images.shape[axis]) - CROP + 1
        first = tf.random.stateless_uniform([batch, 1], draw_seed(), 0, positions, tf.int32)
        images = tf.gather(images, first + tf.range(CROP), axis=axis, batch_dims=1)
        images = tf.ensure_shape(images, [None, *[CROP] * axis, *images.shape[axis + 1 :]])
    images = tf.where(uniform(0, 1) < 0.5, tf.reverse(images, [2]), images)
    images = images + uniform(-63 / 255, 63 / 255)
    mean = tf.reduce_mean(images, [1, 2], keepdims=True)
    return (images - mean) * uniform(0.2, 1.8) + mean
