"""Ensemble mode as ONE single-process TensorFlow graph: the definition that the distributed run is compared with.

Every `compute_gradients` names its `var_list`, so that the master's loss moves the master alone and a member's loss
that member (and what is shared); all gradients are there before anything is applied.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

MASTER = ("master/hidden_kernel", "master/hidden_bias", "master/output_kernel", "master/output_bias")


class EnsembleGraph:
    """N members, the master and Adam in one graph; variables are called as the server calls them."""

    def __init__(
        self,
        member: Callable[..., Any],
        members: int,
        features: int,
        classes: int,
        *,
        dtype: str = "float64",
        head: str = "softmax",
        weighting: str = "batch",
        acts_on: str = "gradient",
        learning_rate: float = 0.001,
        hidden: int = 64,
    ) -> None:
        """Build it.

        Args:
            member: `member(features, own, shared) -> logits`; `own` and `shared` make a variable of name and shape.
            members: N.
            features: length of an example.
            classes: C.
            dtype: of everything.
            head: softmax or sigmoid.
            weighting: batch or sample.
            acts_on: gradient or update.
            learning_rate: of Adam, for all.
            hidden: width of the master's hidden layer.
        """
        self.variables: dict[str, Any] = {}
        self._dtype = dtype
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._features = tf1.placeholder(dtype, (None, features))
            self._labels = tf1.placeholder(tf.int32, (None,))
            prefixes = [f"member_{i}/" for i in range(members)]
            logits = [member(self._features, self._maker(prefix), self._maker("shared/")) for prefix in prefixes]
            losses = [
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self._labels, logits=each) for each in logits
            ]
            inputs = tf.stop_gradient(tf.concat(logits, 1))
            weights = self._master(inputs, members, classes, hidden, head)
            fixed = tf.stop_gradient(weights)
            mean_weights = tf.reduce_mean(fixed, 0)
            right = [tf.equal(tf.argmax(each, 1, output_type=tf.int32), self._labels) for each in logits]
            correct = tf.cast(tf.stack(right, 1), dtype)
            master_loss = tf.reduce_mean(tf.square(weights - correct))
            optimizer = self._adam(learning_rate)
            optimizers = {"": optimizer}
            pairs = optimizer.compute_gradients(master_loss, [self.variables[name] for name in MASTER])
            apart: list[tuple[Any, list[Any]]] = []
            for i, prefix in enumerate(prefixes):
                by_example = fixed[:, i] * losses[i] if weighting == "sample" else losses[i]
                scale = mean_weights[i] if (weighting, acts_on) == ("batch", "gradient") else 1.0
                own = optimizer.compute_gradients(tf.reduce_mean(by_example), self._of(prefix))
                own = [(gradient * scale, variable) for gradient, variable in own]
                if acts_on == "update":
                    apart.append((learning_rate * members * mean_weights[i], own))
                else:
                    pairs += own
            for variable in self._of("shared/"):
                total = 0.0
                for i in range(members):
                    by_example = fixed[:, i] * losses[i] if weighting == "sample" else losses[i]
                    scale = 1.0 if weighting == "sample" else mean_weights[i]
                    ((gradient, _),) = optimizer.compute_gradients(tf.reduce_mean(by_example), [variable])
                    total += gradient * scale
                pairs.append((total, variable))
            # Made out here: what an optimizer starts from must not wait for the batch.
            optimizers |= {prefixes[i]: self._adam(rate) for i, (rate, _) in enumerate(apart)}
            everything = [gradient for gradient, _ in pairs + [pair for _, own in apart for pair in own]]
            with tf.control_dependencies([*everything, mean_weights]):
                pairs = [(tf.identity(gradient), variable) for gradient, variable in pairs]
                updates = [optimizer.apply_gradients(pairs)]
                for i, (_, own) in enumerate(apart):
                    own = [(tf.identity(gradient), variable) for gradient, variable in own]
                    updates.append(optimizers[prefixes[i]].apply_gradients(own))
            self._step = {
                "weights": weights,
                "mean_weights": mean_weights,
                "master_loss": master_loss,
                "losses": tf.stack([tf.reduce_mean(loss) for loss in losses]),
                "updates": tf.group(updates),
            }
            self._weights, self._logits = weights, tf.stack(logits, 1)
            self._values = {
                name: tf1.placeholder(dtype, variable.shape) for name, variable in self.variables.items()
            }
            self._moments: dict[str, tuple[Any, Any]] = {}
            for name, variable in self.variables.items():
                own = optimizers.get(name.partition("/")[0] + "/", optimizer)
                self._moments[name] = (own.get_slot(variable, "m"), own.get_slot(variable, "v"))
            self._powers = [own._get_beta_accumulators() for own in optimizers.values()]
            self._assign = [variable.assign(self._values[name]) for name, variable in self.variables.items()]
            self._start = tf1.global_variables_initializer()
        config = tf1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        self._session = tf1.Session(graph=self._graph, config=config)
        self._session.run(self._start)

    def _maker(self, prefix: str) -> Callable[[str, tuple[int, ...]], Any]:
        def make(name: str, shape: tuple[int, ...]) -> Any:
            full = prefix + name
            if full not in self.variables:
                self.variables[full] = tf1.get_variable(full, shape, self._dtype, use_resource=True)
            return self.variables[full]

        return make

    def _adam(self, rate: Any) -> Any:
        # Plain numbers would become float32 constants, whose rounding shows in float64.
        numbers = [tf.cast(tf.constant(number, tf.float64), self._dtype) for number in (0.9, 0.999, 1e-8)]
        if not tf.is_tensor(rate):
            rate = tf.cast(tf.constant(rate, tf.float64), self._dtype)
        return tf1.train.AdamOptimizer(rate, *numbers)

    def _of(self, prefix: str) -> list[Any]:
        return [variable for name, variable in self.variables.items() if name.startswith(prefix)]

    def _master(self, inputs: Any, members: int, classes: int, hidden: int, head: str) -> Any:
        make = self._maker("master/")
        kernel, bias = make("hidden_kernel", (members * classes, hidden)), make("hidden_bias", (hidden,))
        layer = tf.nn.relu(inputs @ kernel + bias)
        scores = layer @ make("output_kernel", (hidden, members)) + make("output_bias", (members,))
        return tf.nn.softmax(scores) if head == "softmax" else tf.nn.sigmoid(scores)

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Set values by name; the others, and Adam's moments, stay."""
        full = self.values() | values
        self._session.run(self._assign, {self._values[name]: full[name] for name in self.variables})

    def load_optimizer(self, moments: dict[str, tuple[np.ndarray, np.ndarray]], updates: int) -> None:
        """Set Adam's moments of all variables by name, and the number of updates behind them."""
        pairs = [pair for name, places in self._moments.items() for pair in zip(places, moments[name], strict=True)]
        betas = [np.asarray(beta ** (updates + 1)) for beta in (0.9, 0.999)]
        pairs += [pair for powers in self._powers for pair in zip(powers, betas, strict=True)]
        for variable, value in pairs:
            start = variable.initializer
            self._session.run(start, {start.inputs[1]: value.astype(self._dtype)})

    def values(self) -> dict[str, np.ndarray]:
        """Return all values by name, the master's too."""
        return self._session.run(self.variables)

    def step(self, features: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Update everything once; return weights, mean weights, master loss and losses before the update."""
        return self._session.run(self._step, {self._features: features, self._labels: labels})

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Return the members' logits [B, N, C]."""
        return self._session.run(self._logits, {self._features: features})

    def close(self) -> None:
        self._session.close()
