"""The network and its optimizer compute what TensorFlow computes."""

import numpy as np
import pytest

from ps.rules.network import Activation, Adam, TwoLayerNetwork

SIZES = [(8, 16, 1, Activation.TANH, False), (30, 64, 3, Activation.RELU, True)]


def filled(inputs, hidden, outputs, activation, bias):
    generator = np.random.default_rng(5)
    network = TwoLayerNetwork(inputs, hidden, outputs, activation=activation, output_bias=bias)
    network.parameters[:] = generator.normal(size=network.parameters.size) / 4
    return network, generator.normal(size=(7, inputs)), generator.normal(size=(7, outputs))


@pytest.mark.parametrize("sizes", SIZES)
def test_the_named_arrays_are_views_of_one_vector(sizes):
    network, x, _ = filled(*sizes)
    before = network.forward(x)[1]
    parts = (network.hidden_kernel, network.hidden_bias, network.output_kernel, network.output_bias)
    assert np.concatenate([part.ravel() for part in parts]).tolist() == network.parameters.tolist()
    network.parameters *= 2
    assert not np.allclose(network.forward(x)[1], before)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_gradient_is_the_slope_of_the_loss(sizes):
    network, x, target = filled(*sizes)

    def loss():
        return 0.5 * np.sum((network.forward(x)[1] - target) ** 2)

    activations, output = network.forward(x)
    gradient = network.backward(x, activations, output - target)
    for place in np.linspace(0, network.parameters.size - 1, 40).astype(int):
        kept = network.parameters[place]
        network.parameters[place] = kept + 1e-6
        above = loss()
        network.parameters[place] = kept - 1e-6
        below = loss()
        network.parameters[place] = kept
        assert gradient[place] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_backward_and_adam_equal_a_tensorflow_graph(sizes):
    tf = pytest.importorskip("tensorflow").compat.v1
    network, x, target = filled(*sizes)
    adam = Adam(network.parameters.size, 5e-3, 0.9, 0.99, 1e-4)
    graph = tf.Graph()
    with graph.as_default():
        parts = [network.hidden_kernel, network.hidden_bias, network.output_kernel]
        variables = [tf.Variable(part.copy(), use_resource=False) for part in parts]
        squash = tf.nn.tanh if network.activation is Activation.TANH else tf.nn.relu
        output = tf.matmul(squash(tf.matmul(tf.constant(x), variables[0]) + variables[1]), variables[2])
        if network.output_bias.size:
            variables.append(tf.Variable(network.output_bias.copy(), use_resource=False))
            output += variables[3]
        loss = 0.5 * tf.reduce_sum((output - target) ** 2)
        gradients = tf.gradients(loss, variables)
        # NumPy's numbers, or TensorFlow rounds these constants to float32.
        constants = [np.float64(constant) for constant in (5e-3, 0.9, 0.99, 1e-4)]
        train = tf.train.AdamOptimizer(*constants).minimize(loss)
        start = tf.global_variables_initializer()
    with tf.Session(graph=graph) as session:
        session.run(start)
        for _ in range(20):
            activations, mine = network.forward(x)
            gradient = network.backward(x, activations, mine - target)
            theirs, their_gradients = session.run([output, gradients])
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
            flat = np.concatenate([part.ravel() for part in their_gradients])
            np.testing.assert_allclose(gradient, flat, rtol=0, atol=1e-11)
            adam.step(network.parameters, gradient)
            session.run(train)
        values = np.concatenate([value.ravel() for value in session.run(variables)])
    np.testing.assert_allclose(network.parameters, values, rtol=0, atol=1e-11)
