"""Build a user's graph so that every variable in it takes its value from a feed.

TensorFlow accepts a feed for a resource variable and ignores it, because layers read the variable through ops
of their own. So the variables are caught at birth: a creator makes the ordinary resource variable and routes
all its reads to a tensor that comes from a placeholder. The variable itself is never initialised, and a read
that escaped would raise in every step.
"""

import gc
import os
import random
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

# Private, and without a public equal: they keep gradient tapes and recompute_grad working over a routed read.
from tensorflow.python.eager import record
from tensorflow.python.ops.resource_variable_ops import variable_accessed

from protocol.errors import ConfigurationError, WeighmasterError
from protocol.tensors import FLOATING
from protocol.user_function import shortened, signature_hint
from worker.definitions import Model

BuildFunction = Callable[[Any, Any, bool], Model]
"""`build(features, labels, training) -> Model`, as a user writes it."""

_ARGUMENTS = re.compile(r"\n\s*(?:Call arguments|Arguments) received by ")
"""Before the list of a layer's arguments, with which Keras ends a message."""

SEED_STATE = "seed_generator_state"
"""How Keras 3 names the int [2] variable behind every dropout and random layer."""


@dataclass(frozen=True)
class InputSpec:
    """What the placeholders of a build function look like; labels are int32 [B].

    Attributes:
        feature_shape: shape of one example, without the batch axis.
        feature_dtype: name of the NumPy dtype.
    """

    feature_shape: tuple[int, ...]
    feature_dtype: str


class ValueSource(Protocol):
    """Where the values of variables come from."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Return the fed tensor of a variable (called in the outermost graph), or None to leave it local."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A variable whose reads all come from `snapshot`.

    Attributes:
        name: its name in the graph.
        variable: the resource variable, never initialised on a worker.
        snapshot: what every read returns; gradients are taken with respect to it.
        is_seed: the state of a Keras seed generator, fed from the step's draw and not in the manifest.
    """

    name: str
    variable: Any
    snapshot: Any
    is_seed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Static shape."""
        return tuple(self.variable.shape.as_list())

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return str(self.variable.dtype.base_dtype.name)


@dataclass(frozen=True, eq=False)
class BuiltGraph:
    """A user's model in a graph of its own.

    Attributes:
        graph: not yet finalized.
        features, labels, draw: placeholders; `draw` is int32 [2], the key of the step's random numbers.
        loss: float scalar, mean loss plus regularization.
        objective: what gradients are taken of: the loss, or with `weights` the mean of weight times loss, plus
            regularization.
        weights: placeholder, a float for each example [B], or None.
        logits: float32 or float64 [B, C], or None.
        accuracy: float32 scalar, or None without logits.
        bound: variables with routed reads by graph name.
        local: variables left to the worker's own session by graph name.
        order: names of all of them, in order of creation.
        frozen: names that Keras holds as not trainable although TensorFlow says they are.
    """

    graph: Any
    features: Any
    labels: Any
    draw: Any
    loss: Any
    accuracy: Any
    bound: dict[str, Bound]
    local: dict[str, Any]
    order: tuple[str, ...]
    frozen: frozenset[str]
    objective: Any
    weights: Any
    logits: Any


# ---- random numbers of a step --------------------------------------------------------------------------


@dataclass
class _Drawer:
    key: Any
    count: int = 0

    def seed(self) -> Any:
        self.count += 1
        return tf.bitwise.bitwise_xor(self.key, tf.constant([0, self.count], tf.int32))


_drawer: ContextVar[_Drawer | None] = ContextVar("weighmaster_drawer", default=None)


def draw_seed() -> Any:
    """Return a seed for one `tf.random.stateless_*` op: int32 [2], other at every call and every step.

    It is a pure function of (seed, rank, step) and of how many calls came before it in the build function, so
    a step that is computed again draws the same numbers. Inside a loop of the graph all turns get the same.

    Raises:
        ConfigurationError: called outside a build function.
    """
    drawer = _drawer.get()
    if drawer is None:
        raise ConfigurationError("draw_seed() works inside a build function only; call it there")
    return drawer.seed()


# ---- routing of reads ----------------------------------------------------------------------------------


@contextmanager
def outermost(graph: Any) -> Iterator[None]:
    """Make ops at the top level of `graph`, wherever the caller is: no scope, device, loop or dependency."""
    # One `with` each: what is reset must be the state of `graph`, so it has to be the default one by then.
    with graph.as_default(), tf.control_dependencies(None), tf.compat.v1.name_scope(None), tf.device(None):
        yield


def _route_reads(variable: Any, snapshot: Any, graph: Any) -> None:
    def read(*_args: Any, **_kwargs: Any) -> Any:
        variable_accessed(variable)
        result = tf.identity(snapshot)
        if tf.compat.v1.get_default_graph() is graph:  # in a function it would capture the handle for nothing
            record.record_operation(
                "ReadVariableOp", [result], [variable.handle], backward_function=lambda gradient: [gradient]
            )
        return result

    def sparse_read(indices: Any, name: str | None = None) -> Any:
        return tf.gather(read(), indices, name=name)

    def gather_nd(indices: Any, name: str | None = None) -> Any:
        return tf.gather_nd(read(), indices, name=name)

    variable.value = variable.read_value = variable._read_variable_op = read
    variable.sparse_read = sparse_read
    variable.gather_nd = gather_nd


@dataclass
class _Binder:
    graph: Any
    source: ValueSource
    bound: dict[str, Bound] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Make one variable; a `tf.variable_creator_scope` calls this for every one."""
        kwargs["use_resource"] = True  # reference variables too: one kind, one path
        variable = next_creator(**kwargs)
        name = str(variable.handle.op.name)  # Keras calls all its variables "kernel"; this one is unique
        self.order.append(name)
        dtype = str(variable.dtype.base_dtype.name)
        if tf.compat.v1.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ()):
            self.local[name] = variable
            return variable
        if dtype in ("float16", "bfloat16") or variable.dtype.is_complex:
            raise ConfigurationError(
                f"variable {name!r} is {dtype}, which cannot be trained yet; make it float32 "
                "(mixed precision, which keeps float32 variables, works)"
            )
        if not variable.shape.is_fully_defined():
            raise ConfigurationError(f"variable {name!r} has no fixed shape ({variable.shape}); give it one")
        shape = tuple(variable.shape.as_list())
        is_seed = name.endswith(SEED_STATE) and shape == (2,) and dtype not in FLOATING
        with outermost(self.graph):
            fed = self._seed(dtype) if is_seed else self.source.tensor(name, shape, dtype)
            if fed is None:
                self.local[name] = variable
                return variable
            snapshot = tf.identity(fed, name=f"{name}/fed")
        _route_reads(variable, snapshot, self.graph)
        self.bound[name] = Bound(name, variable, snapshot, is_seed)
        return variable

    def _seed(self, dtype: str) -> Any:
        return tf.cast(draw_seed(), dtype)


# ---- building ------------------------------------------------------------------------------------------


def build_graph(
    build: BuildFunction,
    inputs: InputSpec,
    source: ValueSource,
    *,
    training: bool,
    seed: int,
    weighted: bool = False,
) -> BuiltGraph:
    """Call a build function in a fresh graph with all its variables bound to `source`.

    Args:
        build: the user's function.
        inputs: shape and dtype of the features.
        source: gives the fed tensor of each variable.
        training: passed on to `build`.
        seed: graph seed, and seed of Python's and NumPy's generators while `build` runs (Keras 3 draws the
            seeds of its initialisers from Python's), so that initial values are a function of it.
        weighted: multiply the loss of each example by a weight that is fed.

    Raises:
        ConfigurationError: `build` raised, or returned something else than a usable `Model`.
    """
    _reset_keras_names()
    graph = tf.Graph()
    binder = _Binder(graph, source)
    with graph.as_default(), _seeded(seed), tf.variable_creator_scope(binder.create):
        placeholder = tf.compat.v1.placeholder
        features = placeholder(inputs.feature_dtype, (None, *inputs.feature_shape), "features")
        labels = placeholder(tf.int32, (None,), "labels")
        draw = placeholder(tf.int32, (2,), "draw")
        token = _drawer.set(_Drawer(draw))
        try:
            model = _call(build, features, labels, training)
        finally:
            _drawer.reset(token)
        with tf.name_scope("weighmaster"):
            loss = _total_loss(model, graph)
            accuracy = _accuracy(model.logits, labels, graph)
            weights = placeholder(loss.dtype, (None,), "weights") if weighted else None
            objective = _weighted_loss(model, weights) if weighted else loss
            logits = _logits(model.logits)
    frozen = _frozen_by_keras(binder.bound)
    order = tuple(binder.order)
    return BuiltGraph(
        graph=graph,
        features=features,
        labels=labels,
        draw=draw,
        loss=loss,
        accuracy=accuracy,
        bound=binder.bound,
        local=binder.local,
        order=order,
        frozen=frozen,
        objective=objective,
        weights=weights,
        logits=logits,
    )


def _reset_keras_names() -> None:
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        policy = keras.config.dtype_policy()  # a file may have set mixed precision when it was imported
        keras.backend.clear_session(free_memory=False)
        keras.config.set_dtype_policy(policy)
    legacy = sys.modules.get("tf_keras")
    if legacy is not None:
        legacy.backend.reset_uids()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    tf.compat.v1.set_random_seed(seed)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _name_of(build: BuildFunction) -> str:
    return str(getattr(build, "__name__", build))


def _call(build: BuildFunction, features: Any, labels: Any, training: bool) -> Model:
    name = _name_of(build)
    try:
        model = build(features, labels, training)
    except WeighmasterError:
        raise
    except (Exception, SystemExit) as error:
        text = user_complaint(error) or "no message"
        signature = signature_hint(build, name, (features, labels, training), "features, labels, training")
        raise ConfigurationError(
            f"the build function {name!r} raised {type(error).__name__}: {text}{_where(build, error)}"
            f"{_hint(text)}{signature}"
        ) from error
    if not isinstance(model, Model):
        raise ConfigurationError(
            f"the build function {name!r} must return worker.Model(loss=...), not {type(model).__name__}"
        )
    return model


def user_complaint(error: BaseException) -> str:
    """Return what an error complains about, without what Keras and AutoGraph wrap round it."""
    text = str(error).strip()
    if text.startswith("in user code:"):
        # Then, indented, and each after an empty line: the frames, and the error as Python would print it.
        frames = textwrap.dedent(text.removeprefix("in user code:")).strip()
        text = (frames.partition("\n\n")[2] or text).strip().removeprefix(f"{type(error).__name__}: ")
    if text.startswith("Exception encountered when calling "):
        text = _ARGUMENTS.split(text.partition("\n\n")[2] or text)[0]
    return shortened(text)


def _where(build: BuildFunction, error: BaseException) -> str:
    file = getattr(getattr(build, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}, line {lines[-1]})" if lines else ""


def _hint(text: str) -> str:
    outside = ("Attempting to capture an EagerTensor", "same graph", "out of scope", "different graph")
    if any(sign in text for sign in outside):
        return "; a variable, layer or tensor that it uses was made outside it: make it inside"
    if "No gradients provided" in text:
        return "; the server applies the optimizer: return the loss and leave minimize() out"
    return ""


def _check_tensor(value: Any, what: str, graph: Any, ranks: Sequence[int], shape_text: str) -> None:
    if not isinstance(value, tf.Tensor):
        raise ConfigurationError(
            f"the model's {what} must be a tensor, not {type(value).__name__}; "
            "compute it from the features that the build function is given"
        )
    made_in = getattr(value, "graph", None)  # an eager tensor has none, and raises AttributeError
    if made_in is not graph:
        where = (
            "was made outside the build function" if made_in is None else f"({value.name}) belongs to another graph"
        )
        raise ConfigurationError(f"the model's {what} {where}; make it inside, from the features that it is given")
    if not value.dtype.is_floating or (value.shape.rank is not None and value.shape.rank not in ranks):
        raise ConfigurationError(
            f"the model's {what} must be float {shape_text}, not {value.dtype.name} {value.shape}"
        )


def _total_loss(model: Model, graph: Any) -> Any:
    _check_tensor(model.loss, "loss", graph, (0, 1), "[B] per example or a scalar")
    loss = tf.reduce_mean(model.loss)
    if model.regularization is None:
        return loss
    _check_tensor(model.regularization, "regularization", graph, (0,), "scalar")
    return loss + tf.cast(model.regularization, loss.dtype)


def _weighted_loss(model: Model, weights: Any) -> Any:
    if model.loss.shape.rank == 0:
        raise ConfigurationError(
            "weights of single examples need the loss of each, [B], and the model's loss is a scalar: "
            "return it before it is averaged"
        )
    loss = tf.reduce_mean(weights * model.loss)
    return loss if model.regularization is None else loss + tf.cast(model.regularization, loss.dtype)


def _logits(logits: Any) -> Any:
    if logits is None:
        return None
    return tf.identity(logits) if logits.dtype in (tf.float32, tf.float64) else tf.cast(logits, tf.float32)


def _accuracy(logits: Any, labels: Any, graph: Any) -> Any:
    if logits is None:
        return None
    _check_tensor(logits, "logits", graph, (2,), "[B, C]")
    hits = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels)
    return tf.reduce_mean(tf.cast(hits, tf.float32))


def _frozen_by_keras(bound: dict[str, Bound]) -> frozenset[str]:
    """Find variables of layers with `trainable = False`: Keras 3 notes it in its own wrapper only."""
    keras = sys.modules.get("keras")
    wrapper = getattr(keras, "Variable", None)
    if wrapper is None or not bound:
        return frozenset()
    names = {id(item.variable): item.name for item in bound.values()}
    found = (
        names.get(id(thing._value))
        for thing in gc.get_objects()
        if issubclass(type(thing), wrapper) and not thing.trainable
    )
    return frozenset(name for name in found if name is not None)
