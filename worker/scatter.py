"""Gradients by name as the buffers of one payload, in the order of a layout, gaps included. Nothing is copied."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import check_array
from protocol.errors import ManifestMismatch
from protocol.tensors import Layout, SideSpec, VariableSpec

Buffers = Sequence[memoryview | bytes]

_PLAIN = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
"""Dtypes whose arrays can be handed on as they are: native, and known to the buffer protocol."""

_CASTABLE = ("float16", "float32", "float64")
"""Floating dtypes that NumPy has by itself."""


class Scatter:
    """Knows where each gradient goes, and the zeros that follow it."""

    def __init__(self, layout: Layout) -> None:
        slots = layout.slots
        starts = [*(slot.offset for slot in slots[1:]), layout.values_bytes]
        self._layout = layout
        self._parts = [
            (
                slot.spec.name,
                slot.spec,
                _PLAIN.get(slot.spec.dtype) if math.prod(slot.spec.shape) and slot.spec.shape else None,
                bytes(start - slot.end),
            )
            for slot, start in zip(slots, starts, strict=True)
        ]

    def buffers(self, gradients: Mapping[str, NDArray[Any]]) -> Buffers:
        """Return views of the gradients; one that is not contiguous, or not native, is copied.

        Raises:
            ManifestMismatch: a gradient is missing, unknown, or of another shape or dtype.
        """
        if len(gradients) > len(self._parts):
            unknown = next(name for name in gradients if name not in self._layout.by_name)
            raise ManifestMismatch(f"variable {unknown!r} is not in the manifest")
        buffers: list[memoryview | bytes] = []
        for name, spec, plain, gap in self._parts:
            gradient = gradients.get(name)
            if (
                plain is not None
                and type(gradient) is np.ndarray
                and gradient.dtype is plain
                and gradient.shape == spec.shape
                and gradient.flags.c_contiguous
            ):
                buffers.append(gradient.data.cast("B"))  # nearly always, and a step waits for it
            else:
                buffers += _looked_at(spec, gradient)
            if gap:
                buffers.append(gap)
        return buffers


def _looked_at(spec: VariableSpec | SideSpec, gradient: NDArray[Any] | None) -> list[memoryview]:
    """Return a gradient as a buffer, or nothing if it has no elements, once it is what its spec says."""
    if gradient is None:
        raise ManifestMismatch(f"the gradient of variable {spec.name!r} is missing")
    gradient = np.asarray(gradient)
    _check(spec, gradient)
    if not gradient.size:
        return []
    if not gradient.dtype.isnative:
        gradient = gradient.astype(gradient.dtype.newbyteorder())
    return [np.ascontiguousarray(gradient).reshape(-1).view(np.uint8).data]


def _check(spec: VariableSpec | SideSpec, gradient: NDArray[Any]) -> None:
    try:
        check_array(spec, gradient)
    except ManifestMismatch as error:
        # NumPy computes in float64 unless it is told otherwise, so this is what goes wrong first.
        is_other = spec.dtype in _CASTABLE and gradient.dtype.kind == "f" and gradient.dtype.name != spec.dtype
        hint = f"; `.astype(numpy.{spec.dtype})` converts it" if is_other else ""
        raise ManifestMismatch(f"{error}{hint}") from error
