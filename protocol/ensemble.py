"""What ensemble mode adds to the contract: whose a variable is, and the arrays that travel beside gradients.

A worker names its variables as it always does. The server calls those of rank r `member_r/<name>`, since every
rank has its own; what lies below the scope `shared/` is one for all and keeps its name.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import check_array
from protocol.messages import Kind, Offer
from protocol.tensors import SHARED, Layout, Manifest, SideSpec, VariableSpec

MODE = "ensemble"
"""The `mode` of a welcome in which all of this holds."""

SHARED_SCOPE = "shared/"
"""Variables whose name begins so belong to all ranks together."""

DIGEST_BYTES = 16
LOGITS_DTYPES = ("float32", "float64")


class Weighting(StrEnum):
    """What a member's weight is: one number for a batch, or one for each of its examples."""

    BATCH = "batch"
    SAMPLE = "sample"


# ---- names and owners ----------------------------------------------------------------------------------


def member_prefix(rank: int) -> str:
    """Return what the names of a rank's own variables begin with at the server."""
    return f"member_{rank}/"


def as_member(manifest: Manifest, rank: int) -> Manifest:
    """Return a worker's manifest as the server has it: own variables owned by `rank` and called so.

    Raises:
        ValueError: a name becomes too long.
    """
    return Manifest(
        tuple(
            replace(spec, owner=SHARED)
            if spec.name.startswith(SHARED_SCOPE)
            else replace(spec, name=member_prefix(rank) + spec.name, owner=rank)
            for spec in manifest.variables
        )
    )


def as_worker(manifest: Manifest) -> Manifest:
    """Return a member's manifest with the names that its worker uses; owners, and so the layout, stay."""
    return Manifest(tuple(_unprefixed(spec) for spec in manifest.variables))


def _unprefixed(spec: VariableSpec) -> VariableSpec:
    return spec if spec.owner == SHARED else replace(spec, name=spec.name.removeprefix(member_prefix(spec.owner)))


# ---- arrays beside the gradients -----------------------------------------------------------------------


def labels_digest(labels: NDArray[np.int32]) -> bytes:
    """Return 16 bytes of BLAKE2b over labels as little-endian int32: equal labels, equal digests."""
    return hashlib.blake2b(np.ascontiguousarray(labels, "<i4").tobytes(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Answers:
    """The sizes of a member's answers, which its offer declares; all members must declare the same.

    Attributes:
        examples: B, size of a batch, at least 1.
        classes: C, at least 2.
        dtype: of the logits, float32 or float64; weights of examples have it too.
        test_examples: M, size of the test set; 0: this member does not take part in votes.
    """

    examples: int
    classes: int
    dtype: str = "float32"
    test_examples: int = 0

    def __post_init__(self) -> None:
        if self.examples < 1 or self.classes < 2 or self.test_examples < 0:
            raise ValueError(
                f"logits of {self.examples} examples and {self.classes} classes (test: {self.test_examples}) "
                "cannot be weighted"
            )
        if self.dtype not in LOGITS_DTYPES:
            raise ValueError(f"logits must be {' or '.join(LOGITS_DTYPES)}, not {self.dtype!r}")

    @classmethod
    def in_offer(cls, offer: Offer) -> "Answers | None":
        """Return what an offer declares, or None.

        Raises:
            ValueError: it declares what cannot be.
        """
        if not offer.logits_dtype:
            return None
        return cls(offer.examples, offer.classes, offer.logits_dtype, offer.test_examples)

    def describe(self) -> str:
        """Return `float32 logits [32, 10] and 360 test examples`, for messages."""
        return f"{self.dtype} logits [{self.examples}, {self.classes}] and {self.test_examples} test examples"

    @cached_property
    def batch(self) -> Layout:
        """Logits [B, C] and labels [B] of a batch: the payload of LOGITS."""
        return Layout.of(Manifest(()), self._pair(self.examples))

    @cached_property
    def test(self) -> Layout:
        """The same of the test set: the payload of TEST_LOGITS."""
        return Layout.of(Manifest(()), self._pair(self.test_examples))

    @cached_property
    def weights(self) -> Layout:
        """Weights [B]: the payload of WEIGHTS."""
        return Layout.of(Manifest(()), (SideSpec("weights", (self.examples,), self.dtype),))

    def _pair(self, examples: int) -> tuple[SideSpec, SideSpec]:
        return (
            SideSpec("logits", (examples, self.classes), self.dtype),
            SideSpec("labels", (examples,), "int32"),
        )

    def push_sides(self, weighting: Weighting) -> tuple[SideSpec, ...]:
        """Return the side arrays of a push: with sample weights they have travelled before, in LOGITS."""
        return self._pair(self.examples) if weighting is Weighting.BATCH else ()

    def payloads(self, weighting: Weighting) -> Mapping[Kind, int]:
        """Return the bytes of payload of the messages that only this mode has, by kind."""
        kinds = {Kind.TEST_LOGITS: self.test.payload_bytes} if self.test_examples else {}
        if weighting is Weighting.SAMPLE:
            kinds |= {Kind.LOGITS: self.batch.payload_bytes, Kind.WEIGHTS: self.weights.payload_bytes}
        return kinds


def side_payload(layout: Layout, arrays: Mapping[str, NDArray[Any]]) -> Sequence[memoryview | bytes]:
    """Return the bytes of a layout's side arrays in order, gaps included, copied only where they must be.

    Raises:
        ManifestMismatch: an array has another shape or dtype.
    """
    buffers: list[memoryview | bytes] = []
    starts = [*(slot.offset for slot in layout.sides), layout.payload_bytes][1:]
    for slot, start in zip(layout.sides, starts, strict=True):
        array = arrays[slot.spec.name]
        check_array(slot.spec, array)
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        buffers.append(little.reshape(-1).view(np.uint8).data)
        if start > slot.end:
            buffers.append(bytes(start - slot.end))
    return buffers


def side_views(layout: Layout, payload: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Return the side arrays of a payload by name, as views."""
    return {
        slot.spec.name: payload[slot.offset : slot.end].view(slot.spec.dtype).reshape(slot.spec.shape)
        for slot in layout.sides
    }
