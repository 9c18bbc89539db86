"""A user's master function as a TensorFlow graph of its own: built, checked, run and trained, on one thread.

The only module of the server that imports TensorFlow, and only when it is called. The graph is finalised, its
session sees no GPU, and its random numbers come from the run's seed, so that equal inputs give equal weights.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import CheckpointError, ConfigurationError
from protocol.extras import installing
from protocol.user_function import UserFunction, load_user_function, locate, shortened

Array = NDArray[np.float64]

OPTION = "--master"
"""The option that names the function."""

SUM_TOLERANCE = 1e-3
"""How far a sum of weights may be from 1: float32 sums over a thousand workers stay within 1e-4."""


class UnusableWeights(Exception):
    """The function's weights cannot be used; the text says what came back."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Made-up features to try a function with.

    Attributes:
        features: float64, of the shape that the function gets.
        what: what they stand for, for messages.
    """

    features: Array
    what: str


def import_tensorflow(spec: str) -> Any:
    """Import TensorFlow, for the sake of a user's master.

    Raises:
        ConfigurationError: it is not installed, or does not load.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "tensorflow"
        why = "which is not installed" if missing else f"which does not load ({shortened(str(error))})"
        raise ConfigurationError(
            f"{OPTION} {spec} needs TensorFlow, {why}: "
            f"{installing('tensorflow')}; [tensorflow-cpu] is the CPU build"
        ) from error
    return tensorflow


def load_user_master(spec: str) -> UserFunction:
    """Find a user's master and import its file, with TensorFlow.

    Args:
        spec: `file.py:function`.

    Raises:
        ConfigurationError: no such file or function, TensorFlow is not installed, or the file raised.
    """
    locate(spec, OPTION)  # a wrong path is told before seconds go by for TensorFlow
    import_tensorflow(spec)
    return load_user_function(spec, OPTION)


@dataclass(frozen=True)
class UserNetworkConfig:
    """What a user's function gets and returns, and how it is trained.

    Attributes:
        columns: F features per worker in shared mode, N x C logits per example in ensemble mode.
        num_workers: N, at least 1.
        per_example: False: features [N, F] give weights [N] (shared mode); True: features [B, columns] give weights
            [B, N] (ensemble mode).
        seed: of all random numbers.
        beta1, beta2, epsilon: of Adam.
    """

    columns: int
    num_workers: int
    per_example: bool
    seed: int
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


class UserNetwork:
    """What a user's function computes, and Adam for its trainable variables.

    The function is called once, inside a fresh graph, with a float32 placeholder and the number of workers N (a
    Python int). It gets all N rows or columns in every round; those of absent workers are 0.

    Args:
        function: the user's.
        config: what it gets and returns, and how it is trained.
        samples: what it is tried with; weights must be right for all of them.

    Raises:
        ConfigurationError: TensorFlow is not installed, the function raised, or its weights cannot be used.

    Attributes:
        normalised: whether the weights of all samples sum to 1 (in ensemble mode: of each example).
        variables: number of variables that training changes; 0 when there are none.
    """

    def __init__(self, function: UserFunction, config: UserNetworkConfig, samples: Sequence[Sample]) -> None:
        tf = self._tf = import_tensorflow(function.spec)
        self._who = function.who
        self._workers = num_workers = config.num_workers
        self._per_example = config.per_example
        self._variables: list[Any] = []
        self._graph = tf.Graph()
        self._features: Any
        self._weights: Any
        with self._building(config.seed):
            shape = [None if config.per_example else num_workers, config.columns]
            self._features = tf.compat.v1.placeholder(tf.float32, shape, "features")
            self._weights = self._as_weights(function(self._features, num_workers))
        self._session = tf.compat.v1.Session(
            graph=self._graph,
            config=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=1, inter_op_parallelism_threads=1, device_count={"GPU": 0}
            ),
        )
        try:
            self._initialise(0)
            self.normalised = self._check(samples)
            of_user = len(self._variables)
            with self._building(config.seed):
                self._add_training(config)
                self._reads = {variable.op.name: tf.identity(variable) for variable in self._variables}
            self._initialise(of_user)
            self._graph.finalize()
        except BaseException:
            self.close()
            raise

    # ---- building ----------------------------------------------------------------------------------------

    @contextmanager
    def _building(self, seed: int) -> Iterator[None]:
        """Enter the graph, with every source of random numbers seeded, and note the variables that are made."""

        def creator(make: Any, **arguments: Any) -> Any:
            variable = make(**arguments)
            self._variables.append(variable)
            return variable

        tf = self._tf
        states = random.getstate(), np.random.get_state()
        random.seed(seed)  # Keras takes the seeds of its initialisers from here
        np.random.seed(seed % 2**32)
        try:
            with self._graph.as_default(), tf.variable_creator_scope(creator):
                tf.compat.v1.set_random_seed(seed)
                yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def _as_weights(self, returned: Any) -> Any:
        tf = self._tf
        if not tf.is_tensor(returned):
            raise ConfigurationError(
                f"{self._who} returned {_kind(returned)}; it must return a tensor: weights {self._expected()}"
            )
        if tf.executing_eagerly() or getattr(returned, "graph", None) is not self._graph:
            raise ConfigurationError(
                f"{self._who} returned a tensor that is not part of the graph it was called in; "
                "compute the weights from the features, with TensorFlow operations, inside the function"
            )
        if not returned.dtype.base_dtype.is_floating:
            raise ConfigurationError(
                f"{self._who} returned weights of dtype {returned.dtype.base_dtype.name}; they must be floating"
            )
        return tf.cast(returned, tf.float64)

    def _expected(self) -> str:
        return f"[examples, {self._workers}]" if self._per_example else f"[{self._workers}]"

    def _initialise(self, start: int) -> None:
        with self._graph.as_default():
            ready = self._tf.compat.v1.variables_initializer(self._variables[start:])
        try:
            self._run(ready, {})
        except UnusableWeights as error:
            raise ConfigurationError(f"{self._who} cannot be used: its variables {error}") from error

    def _check(self, samples: Sequence[Sample]) -> bool:
        normalised = True
        for sample in samples:
            try:
                weights = self.weights(sample.features)
                again = self.weights(sample.features)
            except UnusableWeights as error:
                raise ConfigurationError(f"{self._who} {error}, for {sample.what}") from error
            if not np.array_equal(weights, again):
                raise ConfigurationError(
                    f"{self._who} returned other weights when it was asked again, for {sample.what}; "
                    "they must follow from the features and the variables alone, without random numbers"
                )
            normalised &= bool((np.abs(weights.sum(axis=-1) - 1.0) <= SUM_TOLERANCE).all())
        return normalised

    def _add_training(self, config: UserNetworkConfig) -> None:
        """Add the loss of `train`, and what lessens it."""
        tf = self._tf
        self._target = tf.compat.v1.placeholder(tf.float64, [None] * (1 + self._per_example), "target")
        self._present = tf.compat.v1.placeholder(tf.float64, [self._workers], "present")
        self._rate = tf.compat.v1.placeholder(tf.float64, [], "rate")
        weights = self._weights * self._present
        if self.normalised:
            weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights, -1, keepdims=True))
        distance = tf.reduce_sum((weights - self._target) ** 2, -1)
        if self._per_example:
            distance = tf.reduce_mean(distance) / self._workers
        trainable = [one for one in self._variables if one.trainable and one.dtype.is_floating]
        slopes = tf.gradients(distance, trainable) if trainable else []
        pairs = [
            (tf.convert_to_tensor(slope), one)
            for slope, one in zip(slopes, trainable, strict=True)
            if slope is not None
        ]
        self.variables = len(pairs)
        self._train = tf.no_op()
        if pairs:
            # One slope that is not finite would spoil the variable and Adam's moments for good.
            good = tf.reduce_all([tf.reduce_all(tf.math.is_finite(slope)) for slope, _ in pairs])
            safe = [(tf.where(good, slope, tf.zeros_like(slope)), one) for slope, one in pairs]
            # As tensors, since plain numbers become float32, also for float64 variables.
            constants = [tf.constant(one, tf.float64) for one in (config.beta1, config.beta2, config.epsilon)]
            adam = tf.compat.v1.train.AdamOptimizer(self._rate, *constants)
            self._train = adam.apply_gradients(safe)
        self._distance = tf.identity(distance)

    # ---- running -----------------------------------------------------------------------------------------

    def weights(self, features: Array) -> Array:
        """Return the function's weights, as checked as at the start.

        Args:
            features: [N, F], or [B, columns] in ensemble mode, float64.

        Returns:
            [N] with sum 1 (exactly as far as float64 goes), or [B, N]; at least 0.

        Raises:
            UnusableWeights: the function failed, or the weights are wrong.
        """
        weights = np.asarray(self._run(self._weights, {self._features: features}), np.float64)
        rows = (features.shape[0],) if self._per_example else ()
        fault = fault_of(weights, (*rows, self._workers), sums_to_one=not self._per_example)
        if fault:
            raise UnusableWeights(f"returned {fault}")
        return weights if self._per_example else weights / weights.sum()

    def train(self, features: Array, target: Array, present: Array, rate: float) -> float:
        """Take one step of Adam towards a target and return the loss before it.

        The loss is `sum_i (w_i - target_i)^2` over those present in shared mode, w divided by its sum over them,
        and in ensemble mode `mean((w - target)^2)` over examples and workers, of which the absent add 0. A loss
        whose gradient is not finite changes nothing.

        Args:
            features: as for `weights`.
            target: [N], or [B, N] in ensemble mode; 0 where absent.
            present: [N], 1.0 or 0.0.
            rate: learning rate of this step.

        Raises:
            UnusableWeights: TensorFlow failed.
        """
        feeds = {self._features: features, self._target: target, self._present: present, self._rate: rate}
        return float(self._run([self._distance, self._train], feeds)[0])

    def _run(self, fetches: Any, feeds: Mapping[Any, Any]) -> Any:
        try:
            return self._session.run(fetches, feeds)
        except self._tf.errors.OpError as error:
            where = f" in operation {error.op.name}" if error.op is not None else ""
            raise UnusableWeights(f"failed{where}: {shortened(error.message)}") from error
        except (ValueError, TypeError) as error:  # an array of another shape than its placeholder
            raise UnusableWeights(f"failed: {shortened(str(error))}") from error

    # ---- keeping -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the values of all variables by name, Adam's included."""
        values: dict[str, Any] = self._session.run(self._reads)
        # Copies: of a variable of the old kind the fetched array may be its own memory, which training changes.
        return {name: np.array(value) for name, value in values.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned.

        Raises:
            CheckpointError: the function has other variables now, naming the first that differs.
        """
        by_name = {variable.op.name: variable for variable in self._variables}
        for name in sorted(by_name.keys() | state.keys()):
            here = tuple(by_name[name].shape.as_list()) if name in by_name else None
            there = np.shape(state[name]) if name in state else None
            if here != there:
                raise CheckpointError(
                    f"the checkpoint does not fit {self._who}: variable {name} is {_shape(there)} in the "
                    f"checkpoint and {_shape(here)} in the function"
                )
        feeds = {variable.initializer.inputs[1]: state[name] for name, variable in by_name.items()}
        self._session.run([variable.initializer for variable in self._variables], feeds)

    def close(self) -> None:
        """End the session."""
        self._session.close()


def fault_of(weights: Array, shape: tuple[int, ...], *, sums_to_one: bool) -> str:
    """Say what is wrong with weights, in words that follow "returned"; empty if nothing is.

    Args:
        weights: what came back.
        shape: what it should be.
        sums_to_one: whether their sum must be 1.
    """
    if weights.shape != shape:
        return f"weights of shape {list(weights.shape)} instead of {list(shape)}"
    if not np.isfinite(weights).all():
        return f"a weight of {weights[~np.isfinite(weights)][0]}; all must be finite"
    if (weights < 0.0).any():
        return f"a weight of {weights.min():.3g}; all must be at least 0"
    if sums_to_one and abs(weights.sum() - 1.0) > SUM_TOLERANCE:
        return f"weights with sum {weights.sum():.4g} instead of 1"
    return ""


def _kind(value: object) -> str:
    return "nothing" if value is None else f"something of type {type(value).__name__}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"
