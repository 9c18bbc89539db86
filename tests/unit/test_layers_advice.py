"""What a user of TensorFlow 1's layers is told under TensorFlow 2 and Keras 3."""

import pytest
import tensorflow as tf

from protocol.errors import ConfigurationError
from worker.graph import InputSpec, _about_layers, describe

INPUTS = InputSpec((4,), "float32")
CURE = "tf.compat.v1.layers need --legacy-keras and the tf-keras package"


def old_layers(features, labels, training):
    return tf.layers.dense(features, 3)


def layers_of_v1(features, labels, training):
    return tf.compat.v1.layers.dense(features, 3)


def layer_class_of_v1(features, labels, training):
    from tensorflow.compat.v1 import layers

    return layers.Dense(3)(features)


def layers_as_a_module(features, labels, training):
    import tensorflow.compat.v1.layers as layers

    return layers.dense(features, 3)


@pytest.mark.parametrize("build", [old_layers, layers_of_v1, layer_class_of_v1, layers_as_a_module])
def test_missing_layers_are_told_with_the_option_that_brings_them(build):
    """Whatever words this TensorFlow finds for it: the advice must not depend on a guess about them."""
    with pytest.raises(ConfigurationError) as caught:
        describe(build, INPUTS)
    sentence = str(caught.value)
    assert sentence.startswith(f"the build function {build.__name__!r} raised AttributeError: ")
    assert sentence.endswith(f"; {CURE}")
    assert ("in TensorFlow 2 they are tf.compat.v1.layers" in sentence) == (build is old_layers)


def test_another_fault_of_a_build_function_gets_no_such_advice():
    def build(features, labels, training):
        raise AttributeError("module 'mine' has no attribute 'layers'")

    with pytest.raises(ConfigurationError, match=r"has no attribute 'layers' \(.*line \d+\)$"):
        describe(build, INPUTS)


def test_who_has_given_the_option_is_not_told_to():
    missing = "module 'tensorflow' has no attribute 'layers'"
    assert _about_layers(missing, True) == "in TensorFlow 2 they are tf.compat.v1.layers"
    assert _about_layers("`dense` is not available with Keras 3.", True) == ""
