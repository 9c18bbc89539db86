"""Carry values into a graph and gradients out of it, both as the bytes of an arena.

Feeding costs about 20 microseconds for each array, so the small variables of a run go in as one flat placeholder
that the graph slices, and their gradients come out as one concatenation. Large variables go on their own: a
slice whose end is no multiple of 64 bytes would copy them.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from protocol.errors import ConfigurationError, LocalProtocolError
from protocol.tensors import ALIGNMENT, FLOATING, ITEM_BYTES, SMALL_BYTES, Layout, Run, Slot, numpy_dtype

BUFFERS_REMEMBERED = 4
"""Value buffers whose views are kept; a worker has two, and a spare for each costs nothing."""


class EachItsOwn:
    """A placeholder for each floating variable: enough to build, where no layout is known yet."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Return the fed tensor; integers stay local, since only the finished graph tells which are state."""
        return tf.compat.v1.placeholder(dtype, shape, f"{name}/value") if dtype in FLOATING else None


@dataclass(frozen=True)
class _Feed:
    """Bytes `[start, end)` of the arena, which go to placeholder `tensor_name` as `dtype` and `shape`."""

    tensor_name: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


class ArenaSource:
    """Slices of one flat placeholder for the small variables of a run, a placeholder for each large one."""

    def __init__(self, layout: Layout) -> None:
        self.feeds: list[_Feed] = []
        self._layout = layout
        self._runs = {slot.spec.name: run for run in layout.runs for slot in run.slots}
        self._flat: dict[int, Any] = {}
        self._views: OrderedDict[int, tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]] = OrderedDict()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Return the fed tensor of a variable, or None for an integer that the layout does not hold."""
        slot = self._layout.by_name.get(name)
        if slot is None:
            if dtype in FLOATING:
                raise ConfigurationError(f"the build function made a variable {name!r} that it did not make before")
            return None
        if (slot.spec.shape, slot.spec.dtype) != (shape, dtype):
            raise ConfigurationError(
                f"the build function made variable {name!r} as {dtype} {list(shape)}, and before as "
                f"{slot.spec.dtype} {list(slot.spec.shape)}"
            )
        if slot.size_bytes >= SMALL_BYTES:
            placeholder = tf.compat.v1.placeholder(dtype, shape, f"{name}/value")
            self.feeds.append(_Feed(placeholder.name, slot.offset, slot.end, dtype, shape))
            return placeholder
        if not slot.size_bytes:
            return tf.zeros(shape, dtype)
        run = self._runs[name]
        start = (slot.offset - run.start) // ITEM_BYTES[dtype]
        return tf.reshape(tf.slice(self._flat_of(run), [start], [math.prod(shape)]), shape)

    def _flat_of(self, run: Run) -> Any:
        if run.start not in self._flat:
            shape = ((run.small_end - run.start) // ITEM_BYTES[run.dtype],)
            placeholder = tf.compat.v1.placeholder(run.dtype, shape, f"weighmaster/run_{run.start}")
            self.feeds.append(_Feed(placeholder.name, run.start, run.small_end, run.dtype, shape))
            self._flat[run.start] = placeholder
        return self._flat[run.start]

    def views(self, values: NDArray[np.uint8]) -> Mapping[str, NDArray[Any]]:
        """Return the arrays to feed by tensor name; they share the memory of `values`, which is checked once.

        Raises:
            LocalProtocolError: the buffer is not a contiguous, 64-byte-aligned uint8 array of enough bytes.
        """
        address = values.__array_interface__["data"][0]
        known = self._views.get(address)
        if known is not None and known[0].nbytes == values.nbytes:
            return known[1]
        if values.dtype != np.uint8 or values.ndim != 1 or not values.flags.c_contiguous or address % ALIGNMENT:
            raise LocalProtocolError("values must be a flat contiguous uint8 buffer at a multiple of 64 bytes")
        if values.nbytes < self._layout.values_bytes:
            raise LocalProtocolError(f"values of {values.nbytes} bytes, but the layout needs more")
        views = {
            feed.tensor_name: values[feed.start : feed.end].view(numpy_dtype(feed.dtype)).reshape(feed.shape)
            for feed in self.feeds
        }
        self._views[address] = (values, views)  # holding the buffer keeps its address its own
        while len(self._views) > BUFFERS_REMEMBERED:
            self._views.popitem(last=False)
        return views

    def forget(self, values: NDArray[np.uint8]) -> None:
        """Let go of a buffer that will not come again."""
        self._views.pop(values.__array_interface__["data"][0], None)


class Outputs:
    """Fetches of one step, and how their bytes follow each other in the payload of a push."""

    def __init__(self, layout: Layout, found: Mapping[str, Any]) -> None:
        """Concatenate and pad in the default graph.

        Args:
            layout: of the values.
            found: tensor to push by variable name; zeros are pushed for a name that is absent.
        """
        self.tensors: list[Any] = []
        self._pieces: list[int | memoryview] = []  # a position in `tensors`, or bytes that are always the same
        for run in layout.runs:
            small = [slot for slot in run.slots if 0 < slot.size_bytes < SMALL_BYTES]
            if small:
                self._fetch(self._concatenated(small, found))
            for slot in run.slots:
                if slot.size_bytes >= SMALL_BYTES:
                    self._large(slot, found.get(slot.spec.name))

    def _concatenated(self, slots: list[Slot], found: Mapping[str, Any]) -> Any:
        parts: list[Any] = []
        for slot in slots:
            size, gap = math.prod(slot.spec.shape), (-slot.end % ALIGNMENT) // ITEM_BYTES[slot.spec.dtype]
            tensor = found.get(slot.spec.name)
            if tensor is None:
                size, gap = 0, size + gap
            else:
                parts.append(tf.reshape(tensor, [size]))
            if gap:
                parts.append(tf.zeros([gap], slot.spec.dtype))
        return tf.concat(parts, 0)

    def _large(self, slot: Slot, tensor: Any) -> None:
        gap = -slot.end % ALIGNMENT
        if tensor is None:
            self._pieces.append(memoryview(bytes(slot.size_bytes + gap)))
            return
        # The identity makes a fetch of a fed tensor a copy; without, it would be the fed array itself.
        self._fetch(tf.identity(tensor))
        if gap:
            self._pieces.append(memoryview(bytes(gap)))

    def _fetch(self, tensor: Any) -> None:
        self._pieces.append(len(self.tensors))
        self.tensors.append(tensor)

    def buffers(self, fetched: list[NDArray[Any]]) -> list[memoryview]:
        """Return the payload in order, without copying."""
        return [fetched[piece].data.cast("B") if isinstance(piece, int) else piece for piece in self._pieces]
