"""The arena: one flat aligned buffer that holds all tensors of a layout."""

import contextlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError, ManifestMismatch
from protocol.tensors import ALIGNMENT, ITEM_BYTES, Layout, Run, SideSpec, Slot, VariableSpec, numpy_dtype

HUGE_PAGE_BYTES = 1 << 21
"""Buffers from this size on are mapped by themselves, with huge pages asked for."""


def aligned_empty(size_bytes: int) -> NDArray[np.uint8]:
    """Return an uninitialised byte buffer at a multiple of 64; pages are touched on first write.

    Large buffers lie on huge pages where the system has them, which spares the kernel much work per copy.
    """
    if size_bytes >= HUGE_PAGE_BYTES:
        # Private: shared memory gets no huge pages, and a forked process would write into it.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not on this system: ordinary pages do as well
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)
    raw = np.empty(size_bytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size_bytes]


@dataclass(frozen=True, eq=False)
class Arena:
    """One flat aligned buffer that holds all tensors of a layout; views share its memory."""

    layout: Layout
    buffer: NDArray[np.uint8] = field(repr=False)

    def __post_init__(self) -> None:
        aligned = self.buffer.nbytes == 0 or self.buffer.ctypes.data % ALIGNMENT == 0
        if self.buffer.dtype != np.uint8 or self.buffer.ndim != 1 or not aligned:
            raise LocalProtocolError("an arena needs a flat uint8 buffer at a multiple of 64 bytes")
        if self.buffer.nbytes < self.layout.values_bytes:
            raise LocalProtocolError(
                f"an arena of {self.buffer.nbytes} bytes cannot hold {self.layout.values_bytes} of variables"
            )

    @classmethod
    def zeros(cls, layout: Layout) -> "Arena":
        """Make an arena of zeros, with room for the side arrays."""
        buffer = aligned_empty(layout.payload_bytes)
        buffer[:] = 0
        return cls(layout, buffer)

    def slot_view(self, slot: Slot) -> NDArray[Any]:
        """Return the tensor in `slot`, shaped and typed, sharing memory."""
        raw = self.buffer[slot.offset : slot.end]
        return raw.view(numpy_dtype(slot.spec.dtype)).reshape(slot.spec.shape)

    def run_view(self, run: Run) -> NDArray[Any]:
        """Return a whole run as one flat typed array, gaps included."""
        return self.buffer[run.start : run.end].view(numpy_dtype(run.dtype))

    def views(self, writeable: bool = False) -> dict[str, NDArray[Any]]:
        """Return all variables by name as views, read-only unless asked otherwise."""
        views: dict[str, NDArray[Any]] = {}
        for slot in self.layout.slots:
            view = self.slot_view(slot)
            view.flags.writeable = writeable and view.flags.writeable
            views[slot.spec.name] = view
        return views

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy arrays into place by name; shapes and dtypes must be exactly the manifest's.

        Raises:
            ManifestMismatch: a name is missing or unknown, or a shape or dtype differs.
        """
        for name in arrays:
            if name not in self.layout.by_name:
                raise ManifestMismatch(f"variable {name!r} is not in the manifest")
        for slot in self.layout.slots:
            array = arrays.get(slot.spec.name)
            if array is None:
                raise ManifestMismatch(f"variable {slot.spec.name!r} is missing")
            check_array(slot.spec, array)
            self.slot_view(slot)[...] = array.view(np.uint16) if slot.spec.dtype == "bfloat16" else array


_DTYPES = {name: np.dtype(name) for name in ITEM_BYTES if name != "bfloat16"}


def check_array(spec: VariableSpec | SideSpec, array: NDArray[Any]) -> None:
    """Check that an array is what its spec says.

    Raises:
        ManifestMismatch: naming the variable, with both views.
    """
    # Identity first: the name of a dtype takes NumPy longer than all the rest.
    if array.shape != spec.shape or (array.dtype is not _DTYPES.get(spec.dtype) and array.dtype.name != spec.dtype):
        raise ManifestMismatch(
            f"variable {spec.name!r} must be {spec.dtype} {list(spec.shape)}, "
            f"not {array.dtype.name} {list(array.shape)}"
        )
