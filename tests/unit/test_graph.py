"""Binding proved against the ordinary thing: the same model in a session whose variables hold the same values."""

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from protocol.arena import Arena
from protocol.errors import ConfigurationError, LocalProtocolError
from protocol.tensors import Kind, Layout, SideSpec
from worker import Model, binding
from worker.binding import user_complaint
from worker.graph import Evaluator, InputSpec, Trainer, describe, draw_key
from worker.models import MODELS, draw_seed

v1 = tf.compat.v1
SEED = 11


def softmax_loss(labels, logits):
    return Model(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), logits=logits)


def conv_bn_dropout(features, labels, training):
    import keras

    hidden = keras.layers.Conv2D(4, 3, activation="relu")(features)
    hidden = keras.layers.BatchNormalization()(hidden, training=training)
    hidden = keras.layers.Dropout(0.5)(hidden, training=training)
    return softmax_loss(labels, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))


def embedding_lstm(features, labels, training):
    import keras

    hidden = keras.layers.Embedding(20, 5)(features)
    return softmax_loss(labels, keras.layers.Dense(3)(keras.layers.LSTM(6)(hidden)))


def mixed_precision(features, labels, training):
    import keras

    hidden = keras.layers.Dense(8, activation="relu", dtype="mixed_bfloat16")(features)
    return softmax_loss(labels, keras.layers.Dense(3, dtype="float32")(hidden))


def lookup(use_resource):
    def build(features, labels, training):
        table = v1.get_variable("table", [20, 5], use_resource=use_resource)
        with v1.variable_scope("top", use_resource=use_resource):
            weights = v1.get_variable("weights", [5, 3])
        with v1.variable_scope("top", reuse=True, use_resource=use_resource):
            again = v1.get_variable("weights", [5, 3])
        mean = tf.reduce_mean(tf.nn.embedding_lookup(table, features), 1)
        return softmax_loss(labels, mean @ weights + tf.tanh(mean @ again))

    return build


def partitioned_lookup(features, labels, training):
    table = v1.get_variable("table", [20, 3], partitioner=v1.fixed_size_partitioner(2))
    return softmax_loss(labels, tf.reduce_mean(tf.nn.embedding_lookup(table, features), 1))


def loop_and_condition(features, labels, training):
    weights = tf.Variable(tf.random.normal([4, 4], stddev=0.4), name="weights")
    gate = v1.get_variable("gate", [])
    _, hidden = tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weights)), [tf.constant(0), features]
    )
    hidden = tf.cond(tf.reduce_sum(gate) > 100, lambda: hidden, lambda: hidden * (1 + gate))
    return softmax_loss(labels, hidden)


def old_loop(features, labels, training):
    v1.disable_control_flow_v2()
    try:
        return loop_and_condition(features, labels, training)
    finally:
        v1.enable_control_flow_v2()


def function(features, labels, training):
    weights = tf.Variable(tf.random.normal([4, 3]), name="weights")

    @tf.function(autograph=False)
    def inner(x):
        return tf.matmul(x, weights) + tf.reduce_sum(weights)

    return softmax_loss(labels, inner(features))


def recomputed(features, labels, training):
    weights = tf.Variable(tf.random.normal([4, 3]), name="weights")
    return softmax_loss(labels, tf.recompute_grad(lambda x: tf.tanh(x @ weights))(features))


def large_and_small(features, labels, training):
    table = v1.get_variable("table", [300_001, 1])  # 1.2 MB, and its end is not at a multiple of 64
    weights = v1.get_variable("weights", [4, 3])
    second = v1.get_variable("second", [3, 1001, 99])
    empty = v1.get_variable("empty", [0, 3])
    double = v1.get_variable("double", [3], tf.float64, v1.ones_initializer())
    picked = tf.reduce_sum(tf.gather(table, [0, 5, 5, 300_000]))
    scale = picked + tf.reduce_mean(second) + tf.reduce_sum(empty)
    return softmax_loss(labels, features @ weights * scale + tf.cast(double, tf.float32))


def counters(features, labels, training):
    weights = v1.get_variable("weights", [4, 3])
    steps = v1.get_variable("steps", [], tf.int64, v1.constant_initializer(5), trainable=False)
    table = v1.get_variable("offsets", [3], tf.int32, v1.constant_initializer([1, 2, 3]), trainable=False)
    steps.assign_add(2)
    mean = v1.get_variable("mean", [3], trainable=False)
    logits = features @ weights + tf.cast(table, tf.float32) * tf.cast(steps, tf.float32) - mean
    mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(logits, 0))
    return Model(loss=tf.reduce_mean(softmax_loss(labels, logits).loss), regularization=tf.nn.l2_loss(weights))


IDS = InputSpec((7,), "int32")
VECTOR = InputSpec((4,), "float32")
TABLE: dict[str, tuple[Callable, InputSpec]] = {
    "mlp": (MODELS["mlp"](3), InputSpec((5, 5), "uint8")),
    "conv_bn_dropout": (conv_bn_dropout, InputSpec((6, 6, 1), "float32")),
    "embedding_lstm": (embedding_lstm, IDS),
    "mixed_precision": (mixed_precision, VECTOR),
    "reference_variables": (lookup(False), IDS),
    "resource_variables": (lookup(True), IDS),
    "partitioned": (partitioned_lookup, IDS),
    "loop_and_condition": (loop_and_condition, VECTOR),
    "old_loop": (old_loop, VECTOR),
    "function": (function, VECTOR),
    "recomputed": (recomputed, VECTOR),
    "large_and_small": (large_and_small, VECTOR),
    "counters": (counters, VECTOR),
}


def batch(inputs, size=8):
    source = np.random.default_rng(5)
    shape = (size, *inputs.feature_shape)
    features = source.normal(size=shape) if "float" in inputs.feature_dtype else source.integers(0, 20, shape)
    return features.astype(inputs.feature_dtype), source.integers(0, 3, size).astype(np.int32)


def bound(build, inputs, seed=SEED):
    """A trainer, its layout and an arena of initial values."""
    layout = Layout.of(describe(build, inputs).manifest)
    trainer = Trainer(build, inputs, layout, seed, threads=1)
    arena = Arena.zeros(layout)
    arena.fill(trainer.initial_values())
    return trainer, layout, arena


def pushed(layout, gradients):
    """The payload of a push, as arrays by name, after checking that it is a payload: all of it, gaps zero."""
    payload = np.frombuffer(b"".join(gradients.buffers), np.uint8)
    assert payload.nbytes == layout.payload_bytes
    assert not payload[layout.gap_bytes].any()
    arena = Arena.zeros(layout)
    arena.buffer[:] = payload
    return {name: array.copy() for name, array in arena.views().items()}


def ordinary(build, inputs, values, features, labels, draw):
    """Loss, gradients, and state before and after, of an ordinary session that holds `values` in its variables."""
    binding._reset_keras_names()
    key = draw_key(draw)
    with tf.Graph().as_default() as graph, binding._seeded(0):
        x = v1.placeholder(inputs.feature_dtype, (None, *inputs.feature_shape))
        y = v1.placeholder(tf.int32, (None,))
        model = build(x, y, True)
        loss = tf.reduce_mean(model.loss)
        if model.regularization is not None:
            loss = loss + model.regularization
        variables = {variable.op.name: variable for variable in v1.global_variables()}
        trained = {
            variable.op.name: variable for variable in v1.trainable_variables() if variable.dtype.is_floating
        }
        gradients = dict(zip(trained, tf.gradients(loss, list(trained.values())), strict=True))
        gradients = {k: tf.convert_to_tensor(g) for k, g in gradients.items() if g is not None}
        updates = [
            op
            for op in graph.get_operations()
            if op.type in ("AssignVariableOp", "AssignAddVariableOp")
            and op.inputs[0].op.name in values
            and op.name != variables[op.inputs[0].op.name].initializer.name
        ]
        seeds = [v for name, v in variables.items() if name.endswith("seed_generator_state")]
        config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            for name, value in values.items():
                variables[name].load(value, session)
            for index, variable in enumerate(seeds):
                variable.load((key ^ np.array([0, index + 1], np.int32)).astype(np.int64), session)
            feeds = {x: features, y: labels}
            loss_value, gradient_values = session.run([loss, gradients], feeds)
            session.run(updates, feeds)
            after = {name: session.run(variables[name]) for name in values}
        return loss_value, gradient_values, after


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:Converting sparse IndexedSlices")
def test_a_step_is_bit_equal_to_an_ordinary_session(name):
    build, inputs = TABLE[name]
    trainer, layout, arena = bound(build, inputs)
    features, labels = batch(inputs)
    draw = (SEED, 0, 4)
    got = trainer.compute(arena.buffer, features, labels, draw)
    trainer.close()
    values = arena.views()
    loss, gradients, after = ordinary(build, inputs, values, features, labels, draw)
    assert got.loss == float(loss)
    assert got.examples == len(labels)
    for variable, array in pushed(layout, got).items():
        spec = layout.by_name[variable].spec
        if spec.kind is Kind.TRAINABLE:
            want = gradients[variable]
        elif np.issubdtype(array.dtype, np.floating):
            want = after[variable] - values[variable]
        else:
            want = after[variable]
        assert array.tobytes() == np.asarray(want).tobytes(), variable
    assert any(np.any(gradient) for gradient in gradients.values())


def test_the_table_has_all_kinds_of_state():
    """Guards the comparison above: it would pass if no state were found."""
    specs = {s.name: s for s in describe(*TABLE["conv_bn_dropout"]).manifest.variables}
    assert specs["batch_normalization/moving_mean"].kind is Kind.STATE
    assert not [name for name in specs if "seed" in name]
    counting = {s.name: (s.kind, s.dtype) for s in describe(*TABLE["counters"]).manifest.variables}
    assert counting == {
        "weights": (Kind.TRAINABLE, "float32"),
        "steps": (Kind.STATE, "int64"),
        "mean": (Kind.STATE, "float32"),
    }


def test_fed_values_are_what_the_step_sees():
    """The trap itself: other values in the arena give another loss, for resource variables under Keras layers."""
    trainer, _, arena = bound(embedding_lstm, IDS)
    data = batch(IDS)
    first = trainer.compute(arena.buffer, *data, (0, 0, 0)).loss
    for view in arena.views(writeable=True).values():
        view *= 1.5
    assert trainer.compute(arena.buffer, *data, (0, 0, 0)).loss != first
    trainer.close()


def test_a_bound_variable_holds_nothing_in_the_workers_session():
    trainer, _, _ = bound(*TABLE["conv_bn_dropout"])
    for name, read in trainer._reads.items():
        with pytest.raises(tf.errors.OpError, match=name):
            trainer._session.run(read)
    trainer.close()


def test_equal_draws_give_equal_bits_and_another_step_another_dropout_mask():
    trainer, _, arena = bound(conv_bn_dropout, TABLE["conv_bn_dropout"][1])
    data = batch(TABLE["conv_bn_dropout"][1])

    def step(*draw):
        return b"".join(trainer.compute(arena.buffer, *data, draw).buffers)

    first = step(1, 0, 7)
    assert step(1, 0, 8) != first
    assert step(1, 1, 7) != first
    assert step(2, 0, 7) != first
    assert step(1, 0, 7) == first
    trainer.close()


def test_draw_seed_differs_at_every_call_and_step():
    def build(features, labels, training):
        weights = v1.get_variable("weights", [4, 3])
        first, second = (tf.random.stateless_uniform([3], draw_seed()) for _ in range(2))
        return Model(loss=tf.reduce_sum(features @ weights * 0 + first * 1000 - second * 1000, 1))

    assert describe(build, VECTOR).replayable
    trainer, _, arena = bound(build, VECTOR)
    losses = [trainer.compute(arena.buffer, *batch(VECTOR), (0, 0, step)).loss for step in (0, 1, 0)]
    trainer.close()
    assert losses[0] == losses[2] != losses[1]
    assert losses[0] != 0


def test_draw_seed_outside_a_build_function_is_refused():
    with pytest.raises(ConfigurationError, match="inside a build function"):
        draw_seed()


def test_initial_values_are_a_function_of_the_seed_alone():
    build, inputs = TABLE["conv_bn_dropout"]
    before = random.getstate()

    def initial(seed):
        trainer, _, arena = bound(build, inputs, seed)
        trainer.close()
        return arena.buffer.tobytes()

    assert initial(3) == initial(3)
    assert initial(3) != initial(4)
    assert random.getstate() == before


def test_an_initialiser_may_read_other_variables():
    def build(features, labels, training):
        weights = v1.get_variable("weights", [4, 3])
        double = tf.Variable(weights * 2, name="double")
        quadruple = tf.Variable(double * 2, name="quadruple")
        return softmax_loss(labels, features @ (weights + double + quadruple))

    trainer, _, _ = bound(build, VECTOR)
    values = trainer.initial_values()
    trainer.close()
    np.testing.assert_array_equal(values["double"], 2 * values["weights"])
    np.testing.assert_array_equal(values["quadruple"], 4 * values["weights"])
    assert values["weights"].any()


def test_the_graph_does_not_grow_and_is_final():
    trainer, _, arena = bound(*TABLE["mlp"])
    data = batch(TABLE["mlp"][1])
    graph = trainer._built.graph
    before = len(graph.get_operations())
    for step in range(3):
        trainer.compute(arena.buffer, *data, (0, 0, step))
    assert len(graph.get_operations()) == before
    assert graph.finalized
    trainer.close()


def test_buffers_outlive_later_steps_and_the_session():
    trainer, _, arena = bound(*TABLE["large_and_small"])
    data = batch(VECTOR)
    first = trainer.compute(arena.buffer, *data, (0, 0, 0)).buffers
    copy = b"".join(first)
    arena.buffer[:] = 0
    trainer.compute(arena.buffer, *data, (0, 0, 1))
    trainer.close()
    del trainer
    gc.collect()
    assert b"".join(first) == copy


def test_a_frozen_layer_is_not_trained():
    def build(features, labels, training):
        import keras

        frozen = keras.layers.Dense(5)
        hidden = frozen(features)
        frozen.trainable = False
        return softmax_loss(labels, keras.layers.Dense(3)(hidden))

    kinds = {s.shape: s.kind for s in describe(build, VECTOR).manifest.variables}
    assert kinds == {
        (4, 5): Kind.STATE,
        (5,): Kind.STATE,
        (5, 3): Kind.TRAINABLE,
        (3,): Kind.TRAINABLE,
    }


def test_mixed_precision_set_when_a_file_was_imported_stays():
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        describe(embedding_lstm, IDS)
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


# ---- remarks and refusals ------------------------------------------------------------------------------


def test_no_path_and_no_gradient_are_two_remarks_and_push_zeros():
    def build(features, labels, training):
        weights = v1.get_variable("weights", [4, 3])
        v1.get_variable("lonely", [2])
        stopped = v1.get_variable("stopped", [3])
        return softmax_loss(labels, features @ weights + tf.stop_gradient(stopped))

    description = describe(build, VECTOR)
    assert [remark for remark in description.remarks if "no path" in remark and "'lonely'" in remark]
    assert [remark for remark in description.remarks if "no gradient" in remark and "'stopped'" in remark]
    assert len(description.remarks) == 2
    trainer, layout, arena = bound(build, VECTOR)
    got = pushed(layout, trainer.compute(arena.buffer, *batch(VECTOR), (0, 0, 0)))
    trainer.close()
    assert got["weights"].any()
    assert not got["lonely"].any()
    assert not got["stopped"].any()


@pytest.mark.parametrize("within", ["graph", "function", "generator"])
def test_random_ops_with_a_memory_are_named(within):
    def build(features, labels, training):
        weights = v1.get_variable("weights", [4, 3])
        if within == "generator":
            noise = tf.random.Generator.from_seed(1).normal([3])
        else:
            draw = (lambda: tf.nn.dropout(tf.ones([3]), 0.5)) if within == "graph" else None
            noise = draw() if draw else tf.function(lambda: tf.random.uniform([3]), autograph=False)()
        return softmax_loss(labels, features @ weights + noise)

    description = describe(build, VECTOR)
    assert not description.replayable
    assert description.replayable_reason is not None
    assert ("RngReadAndSkip" if within == "generator" else "RandomUniform") in description.replayable_reason
    trainer, _, arena = bound(build, VECTOR)  # it runs all the same
    assert np.isfinite(trainer.compute(arena.buffer, *batch(VECTOR), (0, 0, 0)).loss)
    trainer.close()


def test_random_initialisers_do_not_spoil_replay():
    assert describe(*TABLE["loop_and_condition"]).replayable


def weights_and(extra):
    def build(features, labels, training):
        weights = v1.get_variable("weights", [4, 3])
        return extra(features, labels, weights)

    return build


def assign_on_path(features, labels, weights):
    count = v1.get_variable("count", [], trainable=False)
    with tf.control_dependencies([count.assign_add(1.0)]):
        return softmax_loss(labels, features @ weights)


def assign_in_function(features, labels, weights):
    count = v1.get_variable("count", [], trainable=False)

    @tf.function(autograph=False)
    def inner():
        count.assign_add(1.0)
        return tf.constant(1.0)

    return softmax_loss(labels, features @ weights * inner())


def count_in_function(features, labels, weights):
    count = v1.get_variable("count", [], tf.int32, v1.zeros_initializer(), trainable=False)

    @tf.function(autograph=False)
    def inner():
        return count.assign_add(1)

    inner()
    return softmax_loss(labels, features @ weights)


def assign_in_condition(features, labels, weights):
    mean = v1.get_variable("mean", [], trainable=False)
    tf.cond(tf.reduce_sum(features) > 0, lambda: mean.assign(1.0), lambda: mean.assign(2.0))
    return softmax_loss(labels, features @ weights)


def assign_trainable(features, labels, weights):
    weights.assign(tf.clip_by_value(weights, -1, 1))
    return softmax_loss(labels, features @ weights)


def read_by_handle(features, labels, weights):
    return softmax_loss(labels, features @ tf.raw_ops.ReadVariableOp(resource=weights.handle, dtype=tf.float32))


def raw_variable(features, labels, weights):
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3], shared_name="mine", name="mine")
    return softmax_loss(labels, features @ weights + tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))


def raw_reference(features, labels, weights):
    mine = tf.raw_ops.VariableV2(shape=[3], dtype=tf.float32, name="mine")
    return softmax_loss(labels, features @ weights + tf.identity(mine))


def half(features, labels, weights):
    return softmax_loss(labels, features @ weights + tf.cast(v1.get_variable("half", [3], tf.float16), tf.float32))


def raises(features, labels, weights):
    raise KeyError("the thing")


def optimizes(features, labels, weights):
    model = softmax_loss(labels, features @ weights)
    v1.train.AdamOptimizer().minimize(tf.reduce_mean(model.loss))
    return model


def of_another_graph():
    with tf.Graph().as_default():
        return tf.constant(1.0)


def no_gradient(features, labels, weights):
    images = tf.reshape(features @ weights, [-1, 1, 3, 1])
    return Model(loss=tf.reduce_mean(tf.image.resize(images, [1, 2], method="area")))


def gradient_that(error):
    @tf.custom_gradient
    def identity(values):
        def gradient(upstream):
            raise error

        return values, gradient

    return identity


def gradient_fails(features, labels, weights):
    return Model(loss=tf.reduce_mean(gradient_that(ValueError("mine"))(features @ weights)))


def gradient_exits(features, labels, weights):
    return Model(loss=tf.reduce_mean(gradient_that(SystemExit())(features @ weights)))


OUTSIDE = EAGER = None


def eager(features, labels, weights):
    return softmax_loss(labels, features @ weights + OUTSIDE)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (weights_and(assign_on_path), "changes variable 'count' itself"),
        (weights_and(assign_in_function), "variable 'count' cannot be fetched"),
        (weights_and(count_in_function), "variable 'count' cannot be fetched"),
        (weights_and(assign_in_condition), "variable 'mean' cannot be fetched"),
        (weights_and(assign_trainable), "assigns to trainable variable 'weights'"),
        (weights_and(read_by_handle), "variable 'weights' is read past its feed"),
        (weights_and(raw_variable), "variable 'mine' was made where it cannot be fed"),
        (weights_and(raw_reference), "variable 'mine' was not made with"),
        (weights_and(half), "variable 'half' is float16"),
        (weights_and(raises), r"'build' raised KeyError: 'the thing'"),
        (weights_and(optimizes), "the server applies the optimizer"),
        (weights_and(eager), "made outside it"),
        (weights_and(lambda f, y, w: Model(loss=EAGER)), "loss was made outside the build function"),
        (
            weights_and(lambda f, y, w: Model(loss=tf.reduce_sum(w), regularization=EAGER)),
            "regularization was made outside the build function",
        ),
        (
            weights_and(lambda f, y, w: Model(loss=tf.reduce_sum(w), logits=EAGER)),
            "logits was made outside the build function",
        ),
        (weights_and(lambda f, y, w: Model(loss=of_another_graph())), r"loss \(.*\) belongs to another graph"),
        (weights_and(no_gradient), "gradient of the loss cannot be computed: .*ResizeArea"),
        (weights_and(gradient_fails), "gradient of the loss cannot be computed: mine"),
        (weights_and(gradient_exits), "gradient of the loss cannot be computed: SystemExit"),
        (weights_and(lambda f, y, w: tf.reduce_sum(w)), r"must return worker.Model\(loss=...\), not"),
        (weights_and(lambda f, y, w: Model(loss=3.0)), "loss must be a tensor, not float"),
        (weights_and(lambda f, y, w: Model(loss=f @ w)), r"loss must be float \[B\] per example or a scalar"),
        (weights_and(lambda f, y, w: Model(loss=tf.argmax(f @ w, 1))), "loss must be float"),
        (weights_and(lambda f, y, w: Model(loss=tf.reduce_sum(f))), "no path from the loss to 'weights'"),
        (
            weights_and(lambda f, y, w: Model(loss=tf.reduce_sum(w), logits=tf.reduce_sum(f @ w, 1))),
            r"logits must be float \[B, C\]",
        ),
        (
            weights_and(lambda f, y, w: Model(loss=tf.reduce_sum(w), regularization=tf.reduce_sum(w, 1))),
            "regularization must be float scalar",
        ),
        (lambda f, y, training: Model(loss=tf.reduce_sum(f)), "no trainable variable"),
    ],
)
def test_refusals_name_the_thing(build, says, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "OUTSIDE", tf.Variable(1.0))
    monkeypatch.setattr(sys.modules[__name__], "EAGER", tf.constant(1.0))
    with pytest.raises(ConfigurationError, match=says):
        describe(build, VECTOR)


def multiplying_layer():
    import keras

    class Multiplies(keras.layers.Layer):
        def call(self, inputs):
            return tf.matmul(inputs, tf.zeros([7, 3]))

    return Multiplies()


def multiplies_in_keras(features, labels, weights):
    return softmax_loss(labels, multiplying_layer()(features))


def multiplies_in_a_function(features, labels, weights):
    @tf.function
    def product(inputs):
        return tf.matmul(inputs, tf.zeros([7, 3]))

    return softmax_loss(labels, product(features))


def multiplies_in_keras_in_a_function(features, labels, weights):
    layer = multiplying_layer()
    return softmax_loss(labels, tf.function(lambda inputs: layer(inputs))(features))


def raises_in_a_function(features, labels, weights):
    @tf.function
    def fails(inputs):
        raise KeyError("two\n\nparagraphs")

    return fails(features)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (multiplies_in_keras, "raised ValueError: Dimensions must be equal, but are 4 and 7 for "),
        (multiplies_in_a_function, "raised ValueError: Dimensions must be equal, but are 4 and 7 for "),
        (multiplies_in_keras_in_a_function, "raised ValueError: Dimensions must be equal, but are 4 and 7 for "),
        (raises_in_a_function, "raised KeyError: 'two"),
    ],
)
def test_a_reason_is_told_whatever_keras_and_autograph_wrap_round_it(build, says):
    with pytest.raises(ConfigurationError) as caught:
        describe(weights_and(build), VECTOR)
    sentence = str(caught.value)
    assert says in sentence
    assert sentence.isprintable(), "one line without colours"
    assert "Arguments received" not in sentence and "user code" not in sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain", "plain"),
        ("two\nlines  of it", "two lines of it"),
        ("", ""),
        ("in user code:", "in user code:"),
        ("Exception encountered when calling L.call().", "Exception encountered when calling L.call()."),
        (
            'Exception encountered when calling layer "l" (type L).\n\nWrong\nshape.\n\n'
            'Call arguments received by layer "l" (type L):\n  x',
            "Wrong shape.",
        ),
        ("Exception encountered when calling L.call().\n\n\x1b[1mWrong.\x1b[0m", "Wrong."),
        ("x" * 2000, "x" * 500),
    ],
)
def test_what_is_wrapped_in_another_way_is_told_as_it_is(text, said):
    assert user_complaint(ValueError(text)) == said


def test_a_build_function_that_makes_other_variables_the_second_time_is_refused():
    calls = []

    def build(features, labels, training):
        calls.append(training)
        weights = v1.get_variable(f"weights{len(calls)}", [4, 3])
        return softmax_loss(labels, features @ weights)

    layout = Layout.of(describe(build, VECTOR).manifest)
    with pytest.raises(ConfigurationError, match="'weights2'"):
        Trainer(build, VECTOR, layout, 0, threads=1)


def test_a_failing_op_or_a_wrong_input_gives_one_sentence():
    trainer, _, arena = bound(*TABLE["mlp"])
    features, labels = batch(TABLE["mlp"][1])
    with pytest.raises(
        ConfigurationError, match=r"computing step 3 in op .*: Received a label value of 99"
    ) as caught:
        trainer.compute(arena.buffer, features, np.full(8, 99, np.int32), (0, 0, 3))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"shape \(8, 5, 4\)"):
        trainer.compute(arena.buffer, features[:, :, :4], labels, (0, 0, 3))
    with pytest.raises(ConfigurationError, match=r"features are float32, .* built for uint8"):
        trainer.compute(arena.buffer, features.astype(np.float32), labels, (0, 0, 3))
    trainer.close()


def test_buffers_that_tensorflow_would_copy_are_refused():
    trainer, layout, arena = bound(*TABLE["mlp"])
    data = batch(TABLE["mlp"][1])
    shifted = np.zeros(layout.values_bytes + 128, np.uint8)
    shifted = shifted[-shifted.ctypes.data % 64 + 4 :]
    for wrong in (shifted, arena.buffer[:-64], arena.buffer.view(np.float32)):
        with pytest.raises(LocalProtocolError):
            trainer.compute(wrong, *data, (0, 0, 0))
    trainer.close()
    with pytest.raises(LocalProtocolError, match="side arrays"):
        sides = Layout.of(layout.manifest, [SideSpec("logits", (8, 3), "float32")])
        Trainer(*TABLE["mlp"], sides, 0, threads=1)


# ---- evaluation ----------------------------------------------------------------------------------------


def test_evaluation_in_batches_equals_one_batch_and_leaves_training_ops_out():
    build, inputs = TABLE["conv_bn_dropout"]
    trainer, layout, arena = bound(build, inputs)
    trainer.close()
    features, labels = batch(inputs, 20)
    evaluator = Evaluator(build, inputs, layout, SEED, threads=1)
    whole = evaluator.evaluate(arena.buffer, features, labels, 20)
    parts = evaluator.evaluate(arena.buffer, features, labels, 7)  # 7, 7, 6: with dropout they would differ
    evaluator.close()
    assert whole.loss == pytest.approx(parts.loss, rel=1e-5)
    assert whole.accuracy == pytest.approx(parts.accuracy)
    assert (whole.examples, parts.examples) == (20, 20)


def test_without_logits_there_is_no_accuracy():
    trainer, layout, arena = bound(*TABLE["counters"])
    assert trainer.compute(arena.buffer, *batch(VECTOR), (0, 0, 0)).accuracy is None
    trainer.close()
    evaluator = Evaluator(*TABLE["counters"], layout, SEED, threads=1)
    assert evaluator.evaluate(arena.buffer, *batch(VECTOR), 4).accuracy is None
    evaluator.close()


# ---- Keras 2 -------------------------------------------------------------------------------------------

LEGACY = """
import sys
import numpy as np
import tensorflow as tf
from protocol.arena import Arena
from protocol.tensors import Kind, Layout
from worker import Model
from worker.graph import InputSpec, Trainer, describe

def build(features, labels, training):
    layers = tf.compat.v1.layers
    hidden = layers.conv2d(features, 4, 3, activation=tf.nn.relu)
    hidden = layers.batch_normalization(hidden, training=training)
    hidden = tf.keras.layers.BatchNormalization()(hidden, training=training)
    hidden = tf.keras.layers.Reshape((16, 4))(hidden)
    hidden = tf.keras.layers.LSTM(5)(hidden)
    logits = layers.dense(layers.flatten(hidden), 3)
    return Model(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), logits=logits)

inputs = InputSpec((6, 6, 1), "float32")
description = describe(build, inputs, legacy_keras=True)
state = sorted(s.name for s in description.manifest.variables if s.kind is Kind.STATE)
assert len(state) == 4, state
layout = Layout.of(description.manifest)
trainer = Trainer(build, inputs, layout, 3, threads=1)
arena = Arena.zeros(layout)
arena.fill(trainer.initial_values())
features = np.random.default_rng(0).normal(size=(8, 6, 6, 1)).astype(np.float32) + 3
labels = np.arange(8, dtype=np.int32) % 3
got = trainer.compute(arena.buffer, features, labels, (0, 0, 0))
arena_out = Arena.zeros(layout)
arena_out.buffer[:] = np.frombuffer(b"".join(got.buffers), np.uint8)

with tf.Graph().as_default() as graph:
    x = tf.compat.v1.placeholder(tf.float32, (None, 6, 6, 1))
    y = tf.compat.v1.placeholder(tf.int32, (None,))
    loss = tf.reduce_mean(build(x, y, True).loss)
    variables = {v.op.name: v for v in tf.compat.v1.global_variables()}
    names = [s.name for s in description.manifest.variables if s.kind is Kind.TRAINABLE]
    gradients = dict(zip(names, tf.gradients(loss, [variables[n] for n in names])))
    updates = [op for op in graph.get_operations() if op.type == "AssignSubVariableOp"]
    assert len(updates) == 4, updates
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.compat.v1.Session(config=config) as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for name, value in arena.views().items():
            variables[name].load(value, session)
        want_loss, want = session.run([loss, gradients], {x: features, y: labels})
        session.run(updates, {x: features, y: labels})
        after = {name: session.run(variables[name]) for name in state}
assert got.loss == float(want_loss), (got.loss, want_loss)
for name, value in arena_out.views().items():
    if name in state:
        np.testing.assert_allclose(arena.views()[name] + value, after[name], rtol=1e-6)
        assert value.any(), name
    else:
        assert value.tobytes() == want[name].tobytes(), name
print("legacy equal")
"""


def test_keras_2_and_the_old_layers_equal_an_ordinary_session():
    """In a process of its own: the choice of Keras is made when TensorFlow is imported."""
    done = subprocess.run(
        [sys.executable, "-c", LEGACY],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "legacy equal" in done.stdout


def test_asking_for_keras_2_too_late_is_refused(monkeypatch):
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    with pytest.raises(ConfigurationError, match="TF_USE_LEGACY_KERAS=1"):
        describe(*TABLE["mlp"], legacy_keras=True)
