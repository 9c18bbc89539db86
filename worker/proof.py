"""Read a built graph: prove that no bound variable is read past its feed, and find what a step must fetch.

A walk over the graph names what is wrong before there is a session. What it cannot see would still raise in the
session, because bound variables are never initialised there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from protocol.errors import ConfigurationError, Interrupted
from protocol.tensors import FLOATING, ITEM_BYTES, Kind, VariableSpec
from worker.binding import Bound, BuiltGraph, user_complaint

READS = frozenset({"ReadVariableOp", "VarIsInitializedOp", "VariableShape", "ResourceGather", "ResourceGatherNd"})
PASSES_HANDLE_ON = frozenset({"Identity", "Enter", "RefEnter", "Switch", "Merge", "Exit", "NextIteration"})
ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
MUTATES_BY_PREFIX = (
    *("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceStridedSliceAssign"),
    *("ResourceAccumulator", "ResourceCountUpTo", "Scatter", "Apply", "SparseApply"),
)
REFERENCE_VARIABLES = frozenset({"Variable", "VariableV2", "TemporaryVariable"})

# Ops whose result is no function of their inputs: they draw from a sequence, or run code that is opaque.
NOT_REPLAYABLE = frozenset(
    {
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"),
        *("ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial"),
        *("RandomCrop", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2", "FractionalMaxPool"),
        *("FractionalAvgPool", "RngReadAndSkip", "RngSkip", "StatefulStandardNormalV2", "StatefulUniform"),
        *("StatefulTruncatedNormal", "StatefulUniformInt", "StatefulUniformFullInt", "StatefulRandomBinomial"),
        *("UniformCandidateSampler", "LogUniformCandidateSampler", "LearnedUnigramCandidateSampler"),
        *("ThreadUnsafeUnigramCandidateSampler", "FixedUnigramCandidateSampler", "AllCandidateSampler"),
        *("PyFunc", "EagerPyFunc", "IteratorGetNext", "Timestamp"),
    }
)


@dataclass(frozen=True, eq=False)
class Analysis:
    """What one training step computes besides the loss.

    Attributes:
        specs: the manifest's variables, in order of creation.
        gradients: dense gradient by name, shaped like the variable; absent where there is none.
        updates: new value minus old by name of a floating state variable, new value of any other; absent
            where nothing updates it.
        remarks: sentences for the user; nothing that stops a run.
        not_replayable: why a step computed again may differ, or None.
    """

    specs: tuple[VariableSpec, ...]
    gradients: dict[str, Any]
    updates: dict[str, Any]
    remarks: tuple[str, ...]
    not_replayable: str | None


def analyse(built: BuiltGraph) -> Analysis:
    """Add gradients to the graph, prove the binding and list what to fetch.

    Raises:
        ConfigurationError: a variable is read where it cannot be fed, was made outside the build function, is
            changed by the step itself, or none can be trained.
    """
    functions = _Functions(built.graph)
    trainable = [item for item in built.bound.values() if _is_trainable(item, built)]
    if not trainable:
        raise ConfigurationError(
            "the model has no trainable variable: make its variables in the build function, with trainable=True"
        )
    assigns = {name: _assigns(name, built, functions) for name in built.order}
    for item in trainable:
        if assigns[item.name]:
            raise ConfigurationError(
                f"the build function assigns to trainable variable {item.name!r} "
                f"(op {assigns[item.name][0].name}); only the server updates it: leave the assignment out"
            )
    influences = ancestors([built.objective.op])
    prove(built, influences, functions)
    remarks: list[str] = []
    with built.graph.as_default(), tf.name_scope("weighmaster"):
        gradients = _gradients(built.objective, trainable)
        updates = {name: _update(name, ops, built, remarks) for name, ops in assigns.items() if ops}
    for item in trainable:
        if item.name not in gradients:
            remarks.append(
                f"{item.name!r} influences the loss but has no gradient: it stays as it is"
                if item.snapshot.op in influences
                else f"no path from the loss to {item.name!r}: it stays as it is"
            )
    if not gradients:
        raise ConfigurationError("no variable can be trained: " + "; ".join(remarks))
    fetched = [built.loss, *gradients.values(), *updates.values()]
    if built.accuracy is not None:
        fetched.append(built.accuracy)
    path = ancestors([tensor.op for tensor in fetched])
    prove(built, path, functions)
    kinds = {item.name: Kind.TRAINABLE for item in trainable}
    specs = tuple(
        _spec(name, built, kinds.get(name, Kind.STATE))
        for name in built.order
        if name in updates or (name in built.bound and not built.bound[name].is_seed)
    )
    return Analysis(specs, gradients, updates, tuple(remarks), _why_not_replayable(path, functions))


def prove_evaluation(built: BuiltGraph) -> None:
    """Prove the binding of loss and accuracy alone, for a graph that is built to evaluate.

    Raises:
        ConfigurationError: as `analyse`.
    """
    tensors = [built.loss] if built.accuracy is None else [built.loss, built.accuracy]
    prove(built, ancestors([tensor.op for tensor in tensors]), _Functions(built.graph))


def prove(built: BuiltGraph, path: set[Any], functions: "_Functions") -> None:
    """Check that no op on the path changes a variable or reads one that is neither fed nor local.

    Args:
        built: the graph.
        path: all ops that a step runs.
        functions: the graph's functions.

    Raises:
        ConfigurationError: naming the variable and the op.
    """
    for op in sorted(path, key=lambda each: str(each.name)):
        for name, inner in _changes(op, functions):
            raise ConfigurationError(
                f"the step changes variable {name!r} itself ({inner} in op {op.name}); only the server updates "
                "variables: take the assignment off the path to the loss, and out of any tf.function"
            )
    for op in path:
        if op.type in REFERENCE_VARIABLES:
            raise ConfigurationError(
                f"variable {op.name!r} was not made with tf.Variable or get_variable inside the build function: "
                "make it there"
            )
        if op.type != "VarHandleOp" or op.name in built.local:
            continue
        if op.name not in built.bound:
            raise ConfigurationError(
                f"variable {op.name!r} was made where it cannot be fed: make it with tf.Variable or get_variable "
                "inside the build function"
            )
        readers = [reader for reader in op.outputs[0].consumers() if reader in path]
        where = f" (op {readers[0].name}, {readers[0].type})" if readers else ""
        raise ConfigurationError(
            f"variable {op.name!r} is read past its feed{where}: use the variable, not its handle"
        )


def ancestors(ops: Iterable[Any]) -> set[Any]:
    """Return all ops that must run before `ops`, and these, along data and control edges."""
    found: set[Any] = set()
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op in found:
            continue
        found.add(op)
        stack.extend(tensor.op for tensor in op.inputs)
        stack.extend(op.control_inputs)
    return found


# ---- gradients and updates -----------------------------------------------------------------------------


def _is_trainable(item: Bound, built: BuiltGraph) -> bool:
    return bool(item.variable.trainable) and item.dtype in FLOATING and item.name not in built.frozen


def _gradients(loss: Any, trainable: list[Bound]) -> dict[str, Any]:
    try:
        raw = tf.gradients(loss, [item.snapshot for item in trainable])
    except (Interrupted, ConfigurationError):
        raise
    except (Exception, SystemExit) as error:  # an op without one, or a custom gradient of the user's
        text = user_complaint(error) or type(error).__name__
        raise ConfigurationError(f"the gradient of the loss cannot be computed: {text}") from error
    return {
        item.name: _dense(gradient, item.shape)
        for item, gradient in zip(trainable, raw, strict=True)
        if gradient is not None
    }


def _dense(gradient: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):  # ids repeat: sum them here, once
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])
    return tf.reshape(gradient, shape)


def _assigns(name: str, built: BuiltGraph, functions: "_Functions") -> list[Any]:
    """List the top-level assignments to a state variable, its initialiser aside, in order of creation."""
    bound = built.bound.get(name)
    variable = bound.variable if bound else built.local[name]
    dtype = str(variable.dtype.base_dtype.name)
    if (bound and bound.is_seed) or (not bound and (dtype in FLOATING or dtype not in ITEM_BYTES)):
        return []
    initializer = variable.initializer.name
    found: list[Any] = []
    for op in _consumers(variable.handle):
        if op.type in READS or op.name == initializer:
            continue
        if op.type in ASSIGNS and built.graph.is_fetchable(op.inputs[1]):
            found.append(op)
            continue
        if op.type in NOT_REPLAYABLE:
            return []  # a tf.random.Generator: its state stays with the worker
        for _, inner in _changes(op, functions):
            raise ConfigurationError(
                f"the new value of variable {name!r} cannot be fetched ({inner} in op {op.name}): call that layer "
                "outside loops, conditions and tf.function, and give `training` as a Python bool"
            )
    return sorted(found, key=lambda op: int(op._id))


def _consumers(handle: Any) -> Iterator[Any]:
    for op in handle.consumers():
        if op.type in PASSES_HANDLE_ON:
            for output in op.outputs:
                yield from _consumers(output)
        else:
            yield op


def _update(name: str, ops: list[Any], built: BuiltGraph, remarks: list[str]) -> Any:
    bound = built.bound.get(name)
    floating = bound is not None and bound.dtype in FLOATING
    old = bound.snapshot if bound else built.local[name].read_value()
    if len(ops) > 1 and any(op.type == "AssignVariableOp" for op in ops):
        remarks.append(f"{name!r} is assigned {len(ops)} times in a step: the last one counts ({ops[-1].name})")
        ops = ops[-1:]
    if ops[0].type == "AssignVariableOp":
        new = ops[0].inputs[1]
        return tf.reshape(new - old if floating else tf.identity(new), old.shape)
    change = tf.add_n(
        [op.inputs[1] if op.type == "AssignAddVariableOp" else tf.negative(op.inputs[1]) for op in ops]
    )
    return tf.reshape(change if floating else old + change, old.shape)


def _spec(name: str, built: BuiltGraph, kind: Kind) -> VariableSpec:
    variable = built.bound[name].variable if name in built.bound else built.local[name]
    try:
        return VariableSpec(name, tuple(variable.shape.as_list()), str(variable.dtype.base_dtype.name), kind)
    except ValueError as error:
        raise ConfigurationError(f"the model cannot be trained over the network: {error}") from error


# ---- functions, loops and conditions -------------------------------------------------------------------


class _Functions:
    """Bodies of a graph's functions, loops and conditions; read only when something needs them."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    @cached_property
    def _bodies(self) -> dict[str, Any]:
        library = self._graph.as_graph_def().library
        return {str(body.signature.name): body for body in library.function}

    def called_by(self, node_def: Any) -> list[Any]:
        """Return the bodies that a node names in its attributes."""
        names: list[str] = []
        for value in node_def.attr.values():
            names.extend(function.name for function in (value.func, *value.list.func) if function.name)
        return [self._bodies[name] for name in names if name in self._bodies]

    def types_within(self, node_def: Any) -> Iterator[tuple[str, str]]:
        """Yield (name, type) of every op in the bodies below a node."""
        stack, seen = self.called_by(node_def), set()
        while stack:
            body = stack.pop()
            if body.signature.name in seen:
                continue
            seen.add(body.signature.name)
            for node in body.node_def:
                yield str(node.name), str(node.op)
                stack.extend(self.called_by(node))

    def change_within(self, node_def: Any, position: int) -> str | None:
        """Return the type of an op that changes the variable whose handle is input `position`, or None."""
        # If and Case take the condition first; their bodies do not see it.
        skip = 1 if node_def.op in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        for body in self.called_by(node_def):
            if not skip <= position < skip + len(body.signature.input_arg):
                continue
            aliases = {body.signature.input_arg[position - skip].name}
            for node in body.node_def:
                for index, source in enumerate(node.input):
                    if source.split(":")[0] not in aliases:
                        continue
                    if node.op in PASSES_HANDLE_ON:
                        aliases.add(node.name)
                    elif _is_change(node.op):
                        return str(node.op)
                    else:
                        inner = self.change_within(node, index)
                        if inner is not None:
                            return inner
        return None


def _is_change(op_type: str) -> bool:
    return op_type.startswith(MUTATES_BY_PREFIX)


def _changes(op: Any, functions: _Functions) -> Iterator[tuple[str, str]]:
    """Yield (variable, type of the changing op) for what `op` changes, in bodies too."""
    for position, tensor in enumerate(op.inputs):
        if tensor.dtype != tf.resource and not tensor.dtype._is_ref_dtype:
            continue
        if _is_change(op.type):
            if position == 0:
                yield _origin(tensor), str(op.type)
        elif op.type not in READS and op.type not in PASSES_HANDLE_ON:
            inner = functions.change_within(op.node_def, position)
            if inner is not None:
                yield _origin(tensor), inner


def _origin(tensor: Any) -> str:
    op = tensor.op
    while op.type in PASSES_HANDLE_ON:
        op = op.inputs[0].op
    return str(op.name)


def _why_not_replayable(path: set[Any], functions: _Functions) -> str | None:
    for op in sorted(path, key=lambda each: int(each._id)):
        inside = functions.types_within(op.node_def) if _has_function(op) else ()
        for name, op_type in ((str(op.name), str(op.type)), *inside):
            if op_type in NOT_REPLAYABLE:
                return (
                    f"op {name!r} ({op_type}) is no function of (seed, rank, step): "
                    "draw with tf.random.stateless_* and draw_seed() instead"
                )
    return None


def _has_function(op: Any) -> bool:
    return any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr)
