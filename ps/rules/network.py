"""A network of two dense layers: forward, backward and Adam in NumPy, float64, on one thread.

It is small on purpose: a server starts in a blink without TensorFlow, and replays to the bit.
"""

import math
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


class Activation(StrEnum):
    """What the hidden layer does to its sums."""

    TANH = "tanh"
    RELU = "relu"


class TwoLayerNetwork:
    """`output = activation(x hidden_kernel + hidden_bias) output_kernel + output_bias`.

    The named arrays are views of `parameters`, so an optimizer needs that one vector only. All start at 0.

    Attributes:
        parameters: [n] float64: all of the following, one after the other in C order.
        hidden_kernel: [inputs, hidden].
        hidden_bias: [hidden].
        output_kernel: [hidden, outputs].
        output_bias: [outputs], or [0] for none.
    """

    def __init__(
        self, inputs: int, hidden: int, outputs: int, *, activation: Activation, output_bias: bool = True
    ) -> None:
        self.activation = activation
        biases = outputs if output_bias else 0
        ends = np.cumsum([inputs * hidden, hidden, hidden * outputs, biases]).tolist()
        self._parts = tuple(slice(start, end) for start, end in zip([0, *ends], ends, strict=False))
        self._shapes = ((inputs, hidden), (hidden, outputs))
        self.parameters: Vector = np.zeros(ends[-1])
        self.hidden_kernel, self.hidden_bias, self.output_kernel, self.output_bias = self._views(self.parameters)
        self._gradient = np.zeros_like(self.parameters)
        self._parts_of_gradient = self._views(self._gradient)

    def _views(self, flat: Vector) -> tuple[Matrix, Vector, Matrix, Vector]:
        kernel, bias, output_kernel, output_bias = self._parts
        hidden, outputs = self._shapes
        return flat[kernel].reshape(hidden), flat[bias], flat[output_kernel].reshape(outputs), flat[output_bias]

    def forward(self, x: Matrix) -> tuple[Matrix, Matrix]:
        """Return the hidden layer's activations [rows, hidden], which `backward` needs, and the outputs.

        Args:
            x: [rows, inputs].

        Returns:
            The activations and the outputs [rows, outputs], before any softmax or sigmoid.
        """
        sums = x @ self.hidden_kernel
        sums += self.hidden_bias
        if self.activation is Activation.TANH:
            np.tanh(sums, out=sums)
        else:
            np.maximum(sums, 0.0, out=sums)
        output = sums @ self.output_kernel
        if self.output_bias.size:
            output += self.output_bias
        return sums, output

    def backward(self, x: Matrix, activations: Matrix, output_gradient: Matrix) -> Vector:
        """Return the gradient of a loss with respect to `parameters`, [n], which the next call overwrites.

        Args:
            x: [rows, inputs], as given to `forward`.
            activations: [rows, hidden], as returned by it.
            output_gradient: [rows, outputs], derivative of the loss by each output.
        """
        hidden_kernel, hidden_bias, output_kernel, output_bias = self._parts_of_gradient
        np.matmul(activations.T, output_gradient, out=output_kernel)
        if output_bias.size:
            output_gradient.sum(axis=0, out=output_bias)
        inner = output_gradient @ self.output_kernel.T
        if self.activation is Activation.TANH:
            inner *= 1.0 - activations * activations
        else:
            inner *= activations > 0.0
        np.matmul(x.T, inner, out=hidden_kernel)
        np.add.reduce(inner, axis=0, out=hidden_bias)
        return self._gradient


class Adam:
    """Adam for a vector, with TensorFlow's place for epsilon.

    `step_size = rate sqrt(1 - beta2^t) / (1 - beta1^t)`, `parameters -= step_size m / (sqrt(v) + epsilon)`: the
    epsilon here is "epsilon hat" of Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, section 2.

    Attributes:
        first: [n], the first moments.
        second: [n], the second moments.
        steps: t, the updates so far.
    """

    def __init__(
        self, size: int, learning_rate: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        self.learning_rate = learning_rate
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.first: Vector = np.zeros(size)
        self.second: Vector = np.zeros(size)
        self.steps = 0

    def next_size(self) -> float:
        """Count an update, and return its step size."""
        self.steps += 1
        return self.learning_rate * math.sqrt(1.0 - self.beta2**self.steps) / (1.0 - self.beta1**self.steps)

    def step(self, parameters: Vector, gradient: Vector) -> None:
        """Update `parameters` in place.

        Args:
            parameters: [n].
            gradient: [n].
        """
        size = self.next_size()
        self.first += (1.0 - self.beta1) * (gradient - self.first)
        self.second += (1.0 - self.beta2) * (gradient * gradient - self.second)
        parameters -= size * self.first / (np.sqrt(self.second) + self.epsilon)
