"""Tensors as both sides see them: manifest (what there is) and layout (where it lies).

A layout is a pure function of the manifest, so both sides compute the same one and no offsets travel.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from protocol.errors import ManifestMismatch, RemoteProtocolError

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and what TensorFlow wants of a feed."""

SMALL_BYTES = 1 << 20
"""Variables below this lie together at the front of their run and travel into the graph as one flat feed."""

MAX_NAME_BYTES = 512
MAX_DIMENSIONS = 16
MAX_VARIABLES = 100_000
MAX_ROW_BYTES = 1024
"""One row of a manifest on the wire: the longest name, sixteen dimensions, and the rest."""

MAX_TENSOR_BYTES = 1 << 62
"""Product of all sizes but zeros, in bytes: beyond it NumPy cannot even shape an empty tensor."""

SHARED = -1
"""Owner of a variable that all ranks share."""

MAX_OWNER = 65_535

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes that may travel, in layout order. Nothing else is accepted, by name, ever."""

FLOATING = frozenset({"float32", "float64", "float16", "bfloat16"})


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype in which tensors of `name` are held (bfloat16: its raw bits)."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


class Kind(StrEnum):
    """What a variable is to the optimizer."""

    TRAINABLE = "trainable"
    STATE = "state"


@dataclass(frozen=True)
class VariableSpec:
    """One named tensor.

    Attributes:
        name: the graph name without `:0`; at most 512 bytes of UTF-8, printable.
        shape: sizes of the dimensions; `()` is a scalar.
        dtype: a key of `ITEM_BYTES`.
        kind: trainable (gradients are pushed) or state (deltas are pushed; integers: new values).
        owner: `SHARED` or the rank it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = Kind.TRAINABLE
    owner: int = SHARED

    def __post_init__(self) -> None:
        name_bytes = len(self.name.encode("utf-8", "replace"))
        if not 0 < name_bytes <= MAX_NAME_BYTES or not self.name.isprintable():
            raise ValueError(f"a variable's name must be 1 to {MAX_NAME_BYTES} printable bytes: {self.name[:80]!r}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"variable {self.name!r}: dtype {self.dtype!r} cannot travel")
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise ValueError(f"variable {self.name!r}: shape {self.shape} is not allowed")
        if math.prod(size or 1 for size in self.shape) * ITEM_BYTES[self.dtype] > MAX_TENSOR_BYTES:
            raise ValueError(f"variable {self.name!r}: shape {self.shape} is too large")
        if not SHARED <= self.owner <= MAX_OWNER:
            raise ValueError(f"variable {self.name!r}: {self.owner} is not a rank")
        if self.kind is Kind.TRAINABLE and self.dtype not in FLOATING:
            raise ValueError(f"variable {self.name!r}: a trainable variable cannot be {self.dtype}")

    @property
    def size(self) -> int:
        """Number of elements, as a Python integer that cannot overflow."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return self.size * ITEM_BYTES[self.dtype]

    def describe(self) -> str:
        """Return `float32 [64, 256] trainable`, for messages."""
        owner = "" if self.owner == SHARED else f" of rank {self.owner}"
        return f"{self.dtype} {list(self.shape)} {self.kind}{owner}"


@dataclass(frozen=True)
class Manifest:
    """The agreed list of variables; names are unique."""

    variables: tuple[VariableSpec, ...]

    def __post_init__(self) -> None:
        if len(self.variables) > MAX_VARIABLES:
            raise ValueError(f"{len(self.variables)} variables are more than the {MAX_VARIABLES} allowed")
        seen: set[str] = set()
        for spec in self.variables:
            if spec.name in seen:
                raise ValueError(f"variable {spec.name!r} is listed twice")
            seen.add(spec.name)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], state: Iterable[str] = ()) -> "Manifest":
        """Describe a dict of arrays; the names in `state` become state variables, all others trainable."""
        state_names = frozenset(state)
        unknown = state_names.difference(arrays)
        if unknown:
            raise ValueError(f"state variable {min(unknown)!r} is not among the variables")
        return cls(
            tuple(
                VariableSpec(
                    name,
                    tuple(int(size) for size in np.shape(array)),
                    np.asarray(array).dtype.name,
                    Kind.STATE if name in state_names else Kind.TRAINABLE,
                )
                for name, array in arrays.items()
            )
        )

    def to_wire(self) -> bytes:
        """Return msgpack rows `[name, shape, dtype, kind, owner]`, one after another."""
        return b"".join(
            msgpack.packb([v.name, list(v.shape), v.dtype, v.kind.value, v.owner]) for v in self.variables
        )

    @classmethod
    def from_wire(cls, rows: bytes) -> "Manifest":
        """Rebuild a manifest from `to_wire`'s bytes.

        Each row is measured before it is decoded, so what is allocated stays near what was received.

        Raises:
            RemoteProtocolError: the bytes are not a manifest.
        """
        try:
            return cls(tuple(_spec_from_wire(row) for row in _rows(rows)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"the manifest is not valid: {error!r:.200}") from error

    def check_same_variables(self, other: "Manifest", ours: str, theirs: str) -> None:
        """Compare by name, whatever the order.

        Args:
            other: the manifest of the other side.
            ours: whom `self` belongs to, for the message.
            theirs: whom `other` belongs to.

        Raises:
            ManifestMismatch: naming the first variable that differs, with both views.
        """
        mine = {spec.name: spec for spec in self.variables}
        yours = {spec.name: spec for spec in other.variables}
        for name in [*mine, *(name for name in yours if name not in mine)]:
            left, right = mine.get(name), yours.get(name)
            if left != right:
                raise ManifestMismatch(
                    f"variable {name!r} differs: {ours} has {_view(left)}, {theirs} has {_view(right)}"
                )


def _view(spec: VariableSpec | None) -> str:
    return spec.describe() if spec else "no such variable"


def _rows(data: bytes) -> Iterator[object]:
    walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    walker.feed(data)
    start, count = 0, 0
    while start < len(data):
        walker.skip()
        end = walker.tell()
        count += 1
        if end - start > MAX_ROW_BYTES or count > MAX_VARIABLES:
            raise ValueError(f"row {count} is too long, or there are more than {MAX_VARIABLES}")
        yield msgpack.unpackb(
            data[start:end], strict_map_key=True, max_array_len=MAX_DIMENSIONS, max_map_len=0, max_ext_len=0
        )
        start = end


def _spec_from_wire(row: object) -> VariableSpec:
    match row:
        case [str(name), list(shape), str(dtype), str(kind), int(owner)] if all(
            type(number) is int for number in (*shape, owner)
        ):
            return VariableSpec(name, tuple(shape), dtype, Kind(kind), owner)
        case _:
            raise ValueError("a row is not [name, shape, dtype, kind, owner]")


@dataclass(frozen=True)
class SideSpec:
    """An array that travels with each push after the variables, such as logits [B, C]."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the array, without alignment."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies: `offset` and `size_bytes` within the arena, in bytes."""

    spec: VariableSpec | SideSpec
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without the gap that follows."""
        return self.spec.size_bytes

    @property
    def end(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.spec.size_bytes


@dataclass(frozen=True)
class Run:
    """A contiguous stretch of one owner, kind and dtype: a kernel runs once over it, gaps included.

    `small_end` divides it: tensors below `SMALL_BYTES` lie in `[start, small_end)`, large ones after.
    """

    owner: int
    kind: Kind
    dtype: str
    start: int
    small_end: int
    end: int
    slots: tuple[Slot, ...]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Offsets of all tensors of a manifest in one arena.

    Order: (owner, kind, dtype, small before large, manifest order), each tensor at a multiple of 64 bytes.

    Attributes:
        manifest: what is laid out.
        slots: variables in layout order.
        runs: the same, grouped by owner, kind and dtype.
        sides: side arrays, after all variables.
        values_bytes: bytes of the variables, a multiple of 64: the payload of a values frame.
        payload_bytes: with the side arrays: the payload of a push frame.
    """

    manifest: Manifest
    slots: tuple[Slot, ...]
    runs: tuple[Run, ...]
    sides: tuple[Slot, ...]
    values_bytes: int
    payload_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, sides: Sequence[SideSpec] = ()) -> "Layout":
        """Lay out a manifest; both sides get the same result from the same manifest."""
        dtype_order = {name: index for index, name in enumerate(ITEM_BYTES)}
        order = sorted(
            manifest.variables,
            key=lambda v: (v.owner, v.kind is Kind.STATE, dtype_order[v.dtype], v.size_bytes >= SMALL_BYTES),
        )
        runs: list[Run] = []
        slots: list[Slot] = []
        offset = 0
        index = 0
        while index < len(order):
            first = order[index]
            key = (first.owner, first.kind, first.dtype)
            start = small_end = offset
            run_slots: list[Slot] = []
            while index < len(order) and (order[index].owner, order[index].kind, order[index].dtype) == key:
                slot = Slot(order[index], offset)
                run_slots.append(slot)
                offset = _aligned(slot.end)
                if slot.size_bytes < SMALL_BYTES:
                    small_end = offset
                index += 1
            runs.append(Run(*key, start, small_end, offset, tuple(run_slots)))
            slots.extend(run_slots)
        values_bytes = offset
        side_slots: list[Slot] = []
        for side in sides:
            side_slots.append(Slot(side, offset))
            offset = _aligned(offset + side.size_bytes)
        return cls(manifest, tuple(slots), tuple(runs), tuple(side_slots), values_bytes, offset)

    @cached_property
    def by_name(self) -> Mapping[str, Slot]:
        """Slots of variables by name."""
        return {slot.spec.name: slot for slot in self.slots}

    @cached_property
    def gap_bytes(self) -> NDArray[np.int64]:
        """Offsets of all bytes that belong to no tensor; by it tests check that nothing leaks in them."""
        ends = [slot.end for slot in (*self.slots, *self.sides)]
        starts = [*(slot.offset for slot in (*self.slots, *self.sides)), self.payload_bytes][1:]
        pieces = [np.arange(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def runs_of(self, kind: Kind) -> tuple[Run, ...]:
        """Return the runs of one kind, in layout order."""
        return tuple(run for run in self.runs if run.kind is kind)
