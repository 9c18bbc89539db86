"""Run a user's model: describe its variables, compute gradients at given values, evaluate.

Values come in one arena and go into the graph by `feed_dict`: small variables of a run as one flat placeholder
that is sliced in the graph, large ones each on their own. Gradients come back the same way.
"""

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from protocol.arena import Arena
from protocol.ensemble import Weighting
from protocol.errors import ConfigurationError, LocalProtocolError
from protocol.tensors import Layout, Manifest
from worker.binding import BuildFunction, BuiltGraph, InputSpec, build_graph
from worker.feeding import ArenaSource, EachItsOwn, Outputs
from worker.proof import Analysis, analyse, ancestors, prove_evaluation

__all__ = [
    "Description",
    "Evaluation",
    "Evaluator",
    "Gradients",
    "InputSpec",
    "Trainer",
    "describe",
]

TENSORFLOW = tf.__version__

TF1_LAYERS_MISSING = "module 'tensorflow' has no attribute 'layers'"
KERAS_3_HAS_NO_LAYERS = ("is not available with Keras 3", "module 'tensorflow.compat.v1.layers' has no attribute")
"""What TensorFlow says to code that was written for `tf.layers`."""


@dataclass(frozen=True)
class Description:
    """What a build function makes.

    Attributes:
        manifest: trainable and state variables by graph name, in order of creation.
        remarks: sentences for the user; nothing that stops a run.
        replayable: whether a step computed again at equal values gives equal bits.
        replayable_reason: why not, naming the op; None when replayable.
        ops: number of ops in the training graph.
        logits: classes and dtype (float32 or float64) of the logits; None without, or when the classes vary.
    """

    manifest: Manifest
    remarks: tuple[str, ...]
    replayable: bool
    replayable_reason: str | None
    ops: int
    logits: tuple[int, str] | None = None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Result of one training step, at the values that were given.

    Attributes:
        loss: mean loss of the batch plus regularization.
        accuracy: share of the batch whose largest logit is its label; None without logits.
        examples: size of the batch.
        buffers: flat byte views that together are the payload of a push, gaps zero: gradients of trainable
            variables, new minus old of floating state, new values of other state. They stay valid after
            later steps.
        logits: float [B, C] of the batch, if the trainer is a member's and weighs whole batches; else None.
    """

    loss: float
    accuracy: float | None
    examples: int
    buffers: list[memoryview]
    logits: NDArray[Any] | None = None


@dataclass(frozen=True)
class Evaluation:
    """Loss (with regularization) and accuracy (None without logits) over `examples` examples."""

    loss: float
    accuracy: float | None
    examples: int


def describe(build: BuildFunction, inputs: InputSpec, *, legacy_keras: bool = False) -> Description:
    """Build a model once in a graph that is thrown away, prove its binding and list its variables.

    Args:
        build: the user's function; called with training=True.
        inputs: shape and dtype of the features.
        legacy_keras: the user asked for Keras 2 behind `tf.keras` and `tf.compat.v1.layers`.

    Raises:
        ConfigurationError: the model cannot be built or bound; the text names the variable or op.
    """
    if legacy_keras:
        _check_legacy_keras()
    try:
        built = build_graph(build, inputs, EachItsOwn(), training=True, seed=0)
    except ConfigurationError as error:
        advice = _about_layers(str(error.__cause__), legacy_keras)
        if not advice:
            raise
        raise ConfigurationError(f"{error}; {advice}") from error.__cause__
    analysis = analyse(built)
    return Description(
        Manifest(analysis.specs),
        analysis.remarks,
        analysis.not_replayable is None,
        analysis.not_replayable,
        len(built.graph.get_operations()),
        _sizes_of(built.logits),
    )


def _sizes_of(logits: Any) -> tuple[int, str] | None:
    classes = None if logits is None or logits.shape.rank is None else logits.shape[1]
    return None if classes is None else (int(classes), str(logits.dtype.name))


def _about_layers(problem: str, legacy_keras: bool) -> str:
    """Say how to get the layers of TensorFlow 1, if it is them that a build function missed; else nothing."""
    where = "in TensorFlow 2 they are tf.compat.v1.layers" if TF1_LAYERS_MISSING in problem else ""
    missing = where or any(sign in problem for sign in KERAS_3_HAS_NO_LAYERS)
    cure = "" if legacy_keras or not missing else "tf.compat.v1.layers need --legacy-keras and the tf-keras package"
    return "; ".join(part for part in (where, cure) if part)


def _check_legacy_keras() -> None:
    advice = "set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
    if os.environ.get("TF_USE_LEGACY_KERAS") not in ("1", "true", "True"):
        raise ConfigurationError(f"legacy Keras was asked for, but TensorFlow came up without it: {advice}")
    try:
        loaded = str(tf.keras.layers.Layer.__module__).partition(".")[0]
    except (ImportError, AttributeError) as error:
        raise ConfigurationError("legacy Keras needs the tf-keras package: install it") from error
    if loaded != "tf_keras":
        raise ConfigurationError(f"legacy Keras was asked for, but Keras 3 is loaded: {advice}")


# ---- sessions ------------------------------------------------------------------------------------------


def _session(graph: Any, threads: int) -> Any:
    # Convolution gradients depend on the number of threads, so it is never left to the machine.
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads)
    return tf.compat.v1.Session(graph=graph, config=config)


def _run(session: Any, fetches: Any, feeds: Mapping[str, Any], doing: str) -> Any:
    try:
        return session.run(fetches, feeds)
    except tf.errors.OpError as error:
        where = f" in op {error.op.name}" if error.op is not None else ""
        raise ConfigurationError(f"TensorFlow failed while {doing}{where}: {_reason(error.message)}") from error
    except (ValueError, TypeError) as error:  # an array of another shape than its placeholder
        raise ConfigurationError(f"TensorFlow refused an input while {doing}: {error}") from error


def _reason(message: str) -> str:
    """Return the line that says what happened; a list of the source lines that made the op comes before it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    after_node = [index + 1 for index, line in enumerate(lines) if line.startswith("Node: ")]
    return lines[after_node[-1] if after_node and after_node[-1] < len(lines) else 0] if lines else "no message"


def _start_local_variables(session: Any, built: BuiltGraph, operations: list[Any], draw: NDArray[np.int32]) -> None:
    _run(session, operations, {built.draw.name: draw}, "initialising the worker's own variables")


def _local_initializers(built: BuiltGraph) -> list[Any]:
    tables = built.graph.get_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)
    return [*(variable.initializer for variable in built.local.values()), *tables]


def draw_key(draw: tuple[int, int, int]) -> NDArray[np.int32]:
    """Return the key of a step's random numbers, int32 [2]: a hash of (seed, rank, step)."""
    digest = hashlib.blake2b(struct.pack("<3Q", *(number % 2**64 for number in draw)), digest_size=8).digest()
    return np.frombuffer(digest, "<i4")


class Trainer:
    """Computes gradients of a model at values that come in an arena.

    Args:
        build: the user's function; built again here, now with the offsets of `layout` as constants.
        inputs: shape and dtype of the features.
        layout: of the manifest that `describe` returned, without side arrays.
        seed: of the run; the initial values are a function of it.
        threads: of the session, both pools. The first session of a process fixes them for all.
        weighting: of a member of an ensemble, whose logits are wanted too; None in mode shared.

    Raises:
        ConfigurationError: the build function makes other variables than before, or cannot be bound.
    """

    def __init__(
        self,
        build: BuildFunction,
        inputs: InputSpec,
        layout: Layout,
        seed: int,
        *,
        threads: int,
        weighting: Weighting | None = None,
    ) -> None:
        if layout.sides:
            raise LocalProtocolError("a layout with side arrays needs buffers that a trainer does not make")
        self._layout = layout
        self._threads = threads
        self._source = ArenaSource(layout)
        weighted = weighting is Weighting.SAMPLE
        self._built = built = build_graph(build, inputs, self._source, training=True, seed=seed, weighted=weighted)
        if weighting is not None and built.logits is None:
            raise ConfigurationError(
                "a member of an ensemble needs logits: return worker.Model(loss=..., logits=...)"
            )
        analysis = analyse(built)
        _check_same(layout, analysis)
        with built.graph.as_default(), tf.name_scope("weighmaster"):
            self._outputs = Outputs(layout, {**analysis.gradients, **analysis.updates})
            self._reads = {
                item.name: tf.raw_ops.ReadVariableOp(resource=item.variable.handle, dtype=item.dtype)
                for item in built.bound.values()
                if not item.is_seed
            }
        self._with_logits = weighting is Weighting.BATCH
        self._fetches = [
            built.loss,
            *([] if built.accuracy is None else [built.accuracy]),
            *([built.logits] if self._with_logits else []),
            *self._outputs.tensors,
        ]
        local = _local_initializers(built)
        built.graph.finalize()
        self._session = _session(built.graph, threads)
        _start_local_variables(self._session, built, local, draw_key((seed, 0, 0)))

    def initial_values(self) -> dict[str, NDArray[Any]]:
        """Run the initialisers in a session of their own and return all values by name.

        An initialiser that reads other variables runs after them, in order of creation, at their values.

        Raises:
            ConfigurationError: an initialiser failed.
        """
        built = self._built
        arena = Arena.zeros(self._layout)
        places = arena.views(writeable=True)
        feeds = {**self._source.views(arena.buffer), built.draw.name: draw_key((0, 0, 0))}
        initializers = {
            name: (built.bound[name].variable if name in built.bound else built.local[name]).initializer
            for name in built.order
            if name not in built.bound or not built.bound[name].is_seed
        }
        fed = {name.partition(":")[0] for name in feeds}
        dependent = [name for name, op in initializers.items() if _reads_others(name, op, fed)]
        together = [name for name in initializers if name not in dependent]
        session = _session(built.graph, self._threads)
        try:
            for names in [together, *([name] for name in dependent)]:
                doing = f"initialising {', '.join(names[:3])}"
                _run(session, [initializers[name] for name in names], feeds, doing)
                reads = {name: self._reads[name] for name in names if name in self._reads}
                for name, value in _run(session, reads, {}, doing).items():
                    places[name][...] = value
        finally:
            session.close()
        self._source.forget(arena.buffer)
        return places

    def compute(
        self,
        values: NDArray[np.uint8],
        features: NDArray[Any],
        labels: NDArray[np.int32],
        draw: tuple[int, int, int],
        weights: NDArray[Any] | None = None,
    ) -> Gradients:
        """Compute one step, in one `session.run`.

        Args:
            values: arena buffer of the layout, at a multiple of 64 bytes; not written to until this returns.
            features: [B, ...] in the dtype of the inputs.
            labels: int32 [B].
            draw: (seed, rank, step), of which all random numbers of the step are a function.
            weights: float [B], where single examples are weighted: gradients are of the mean of weight times loss.

        Raises:
            ConfigurationError: an op failed (such as for a label outside the classes), or the inputs do not fit.
            LocalProtocolError: `values` is not such a buffer.
        """
        built = self._built
        feeds = self._feeds(values, features, labels, draw)
        if weights is not None:
            feeds[built.weights.name] = weights
        fetched = _run(self._session, self._fetches, feeds, f"computing step {draw[2]}")
        loss, *rest = fetched
        accuracy = None if built.accuracy is None else float(rest.pop(0))
        logits = rest.pop(0) if self._with_logits else None
        return Gradients(float(loss), accuracy, len(labels), self._outputs.buffers(rest), logits)

    def answer(
        self,
        values: NDArray[np.uint8],
        features: NDArray[Any],
        labels: NDArray[np.int32],
        draw: tuple[int, int, int],
    ) -> NDArray[Any]:
        """Return the logits [B, C] alone, which come before the weights of the same step; arguments as `compute`.

        `compute` runs the same forward pass again: at equal arguments it sees equal logits.
        """
        feeds = self._feeds(values, features, labels, draw)
        logits: NDArray[Any] = _run(self._session, self._built.logits, feeds, f"answering step {draw[2]}")
        return logits

    def _feeds(
        self,
        values: NDArray[np.uint8],
        features: NDArray[Any],
        labels: NDArray[np.int32],
        draw: tuple[int, int, int],
    ) -> dict[str, Any]:
        built = self._built
        _check_inputs(built, features)
        return {
            **self._source.views(values),
            built.features.name: features,
            built.labels.name: labels,
            built.draw.name: draw_key(draw),
        }

    def close(self) -> None:
        """Close the session; buffers that were returned stay valid."""
        self._session.close()


class Evaluator:
    """Measures a model, built with training=False, at values that come in an arena; arguments as `Trainer`."""

    def __init__(self, build: BuildFunction, inputs: InputSpec, layout: Layout, seed: int, *, threads: int) -> None:
        self._source = ArenaSource(layout)
        self._built = built = build_graph(build, inputs, self._source, training=False, seed=seed)
        prove_evaluation(built)
        self._draw = draw_key((seed, 0, 0))
        local = _local_initializers(built)
        built.graph.finalize()
        self._session = _session(built.graph, threads)
        _start_local_variables(self._session, built, local, self._draw)

    def evaluate(
        self, values: NDArray[np.uint8], features: NDArray[Any], labels: NDArray[np.int32], batch_size: int
    ) -> Evaluation:
        """Measure loss and accuracy over all examples, `batch_size` at a time.

        Args:
            values: arena buffer of the layout, at a multiple of 64 bytes.
            features: [N, ...], N at least 1.
            labels: int32 [N].
            batch_size: examples per `session.run`; the last batch may be smaller.

        Raises:
            ConfigurationError: an op failed, or the inputs do not fit.
            LocalProtocolError: `values` is not such a buffer.
        """
        built = self._built
        _check_inputs(built, features)
        fetches = [built.loss] if built.accuracy is None else [built.loss, built.accuracy]
        fixed = {**self._source.views(values), built.draw.name: self._draw}
        total = np.zeros(len(fetches))
        for start in range(0, len(labels), batch_size):
            batch = slice(start, start + batch_size)
            feeds = {**fixed, built.features.name: features[batch], built.labels.name: labels[batch]}
            total += np.multiply(_run(self._session, fetches, feeds, "evaluating"), len(labels[batch]))
        loss, *rest = (total / len(labels)).tolist()
        return Evaluation(loss, rest[0] if rest else None, len(labels))

    def logits(
        self, values: NDArray[np.uint8], features: NDArray[Any], labels: NDArray[np.int32], batch_size: int
    ) -> NDArray[Any]:
        """Return the logits [N, C] of all examples; arguments as `evaluate`, of a model that has logits."""
        built = self._built
        _check_inputs(built, features)
        fixed = {**self._source.views(values), built.draw.name: self._draw}
        parts = []
        for start in range(0, len(labels), batch_size):
            batch = slice(start, start + batch_size)
            feeds = {**fixed, built.features.name: features[batch], built.labels.name: labels[batch]}
            parts.append(_run(self._session, built.logits, feeds, "evaluating"))
        return np.concatenate(parts)

    def close(self) -> None:
        """Close the session."""
        self._session.close()


def _check_inputs(built: BuiltGraph, features: NDArray[Any]) -> None:
    if features.dtype.name != built.features.dtype.name:  # it would be converted at every step, without a word
        raise ConfigurationError(
            f"features are {features.dtype.name}, but the model was built for {built.features.dtype.name}"
        )


def _check_same(layout: Layout, analysis: Analysis) -> None:
    made = {spec.name: spec for spec in analysis.specs}
    kinds = {slot.spec.name: run.kind for run in layout.runs for slot in run.slots}
    for name in {**kinds, **made}:
        if name not in made or kinds.get(name) is not made[name].kind:
            raise ConfigurationError(f"the build function makes variable {name!r} at one call and not at another")


def _reads_others(name: str, initializer: Any, fed: set[str]) -> bool:
    return any(op.name in fed or (op.type == "VarHandleOp" and op.name != name) for op in ancestors([initializer]))
