"""The store of an ensemble: every member owns a part of the values, and all own the shared part together.

A row of the slab holds what one member pushes: the shared part, its own part, and what travels beside them. The
values are one arena in the order of owners, so a member's part of them is two pieces, which are sent as they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from protocol.arena import aligned_empty
from protocol.errors import LocalProtocolError
from protocol.tensors import SHARED, Kind, Layout, Manifest, Run
from ps.storage.receiver import Blocks, Receiver, first_not_finite
from ps.storage.runs import Calls, Place, delta_calls, update_calls
from ps.storage.snapshots import OPTIMIZER, StoreSnapshot, Tensors, check_same
from ps.storage.store import Store
from ps.storage.store_config import NotFinite, StoreConfig
from ps.storage.versions import Version

UPDATES = "updates"
"""What a snapshot calls the updates of each owner, int64 [1 + N]: of shared variables, then of each member's."""


@dataclass(frozen=True)
class MemberWeights:
    """What the gradients of a round count; one entry for each member present, in rank order.

    Attributes:
        slots: ranks that are present.
        shared: factor of each gradient in the sum for shared variables.
        own: factor of each gradient for the variables of its owner.
        steps: factor of the optimizer's step for these.
    """

    slots: Sequence[int]
    shared: Sequence[float]
    own: Sequence[float]
    steps: Sequence[float]


def whole_layout(parts: Sequence[Layout]) -> Layout:
    """Return the layout of all values, of the members' parts; shared variables are the same in each."""
    variables = {spec.name: spec for part in parts for spec in part.manifest.variables}
    return Layout.of(Manifest(tuple(variables.values())))


class MemberStore(Store):
    """A store whose rows are members' parts; see `Store` for which thread may call what.

    Args:
        parts: layout of each rank's part, side arrays included.
        config: without clipping of the aggregate and without a moving average.
    """

    def __init__(self, parts: Sequence[Layout], config: StoreConfig) -> None:
        self.parts = tuple(parts)
        whole = whole_layout(parts)
        self._columns = {SHARED: 0}
        for rank, part in enumerate(parts):
            own = [run.start for run in part.runs if run.owner == rank]
            self._columns[rank] = own[0] if own else 0
        self._starts = {owner: _bounds(whole, owner)[0] for owner in self._columns}
        super().__init__(whole, config, max(part.payload_bytes for part in parts))
        self._updates_of = dict.fromkeys(self._columns, 0)
        self._initial = np.zeros(0, np.uint8)
        self._initialised: set[int] = set()

    @staticmethod
    def bytes_for(parts: Sequence[Layout], config: StoreConfig) -> int:
        """Return the bytes of all arrays, before anything is allocated; see `Store.memory_bytes`."""
        whole = whole_layout(parts)
        trainable = sum(run.end - run.start for run in whole.runs_of(Kind.TRAINABLE))
        rows = config.slots * max(part.payload_bytes for part in parts)
        moments = len(config.optimizer.moments) * (2 if config.checkpoints else 1)
        return rows + config.versions * whole.values_bytes + moments * trainable

    def _column(self, run: Run) -> int:
        return self._columns[run.owner] + run.start - self._starts[run.owner]

    def receiver(self, slot: int) -> Receiver:
        """Return a receiver for the row of a rank."""
        part = self.parts[slot]
        return Receiver(self._slab[slot][: part.payload_bytes], part, Blocks.of(part))

    def row(self, rank: int) -> NDArray[np.uint8]:
        """Return what a rank has pushed, uint8 [payload_bytes of its part]."""
        row: NDArray[np.uint8] = self._slab[rank][: self.parts[rank].payload_bytes]
        return row

    def part_of(self, buffer: memoryview, rank: int) -> list[memoryview]:
        """Return a rank's part of values as pieces that together are its payload."""
        bounds = (_bounds(self.layout, SHARED), _bounds(self.layout, rank))
        return [buffer[start:end] for start, end in bounds if end > start]

    def initialise_part(self, rank: int, values: NDArray[np.uint8]) -> bool:
        """Take a rank's initial values; of the shared variables those of rank 0 count.

        Args:
            rank: whose they are.
            values: uint8 [values_bytes of its part].

        Returns:
            Whether the values of all ranks are there now, and in force.

        Raises:
            NotFinite: a floating variable has NaN or infinite values.
            LocalProtocolError: the buffer has another size.
        """
        part = self.parts[rank]
        if values.nbytes != part.values_bytes:
            raise LocalProtocolError(f"initial values of {values.nbytes} bytes do not fill {part.values_bytes}")
        bad = first_not_finite(values, part)
        if bad is not None:
            raise NotFinite(bad)
        if not self._initial.size:
            self._initial = aligned_empty(self.layout.values_bytes)
        start, end = _bounds(self.layout, rank)
        column = self._columns[rank]
        self._initial[start:end] = values[column : column + end - start]
        if rank == 0:
            start, end = _bounds(self.layout, SHARED)
            self._initial[start:end] = values[start:end]
        self._initialised.add(rank)
        if len(self._initialised) < len(self.parts):
            return False
        self.initialise(self._initial)
        self._initial = np.zeros(0, np.uint8)
        self._updates_of = dict.fromkeys(self._columns, 0)
        return True

    def apply_members(self, weights: MemberWeights, learning_rate: float) -> Version:
        """Close a round: update the shared variables, and those of the members that are present.

        What belongs to a member that is missing stays as it is, its moments and its count of updates too. Owned
        state takes its owner's change as it is, shared floating state the mean of all changes.

        Args:
            weights: what each gradient counts.
            learning_rate: of this round.

        Raises:
            NoProgress: no buffer became free in `release_timeout_s`.
            LocalProtocolError: nobody is present.
        """
        if not weights.slots:
            raise LocalProtocolError("a round needs at least one member")
        with self._writing:
            old, version = self._versions.current()
            buffers = (old, self._versions.reserve())
            calls: Calls = []
            everyone = [1 / len(weights.slots)] * len(weights.slots)
            calls += self._owner_calls(SHARED, weights.slots, weights.shared, everyone, learning_rate, buffers)
            for slot, own, step in zip(weights.slots, weights.own, weights.steps, strict=True):
                calls += self._owner_calls(slot, [slot], [own], [1.0], learning_rate * step, buffers)
            touched = {SHARED, *weights.slots}
            calls += [
                partial(np.copyto, place.values[buffers[1]], place.values[old])
                for place in (*self._trainable, *self._state)
                if place.run.owner not in touched
            ]
            self._team.run(calls, self._elements)
            self._updates += 1
            return self._versions.publish(buffers[1], version.step + 1)

    def snapshot(self, references: Sequence[int] = ()) -> StoreSnapshot:
        """Return all that `restore` needs, see `Store.snapshot`; with the updates of each owner."""
        snapshot = super().snapshot(references)
        snapshot.tensors[OPTIMIZER][UPDATES] = np.array(list(self._updates_of.values()), np.int64)
        return snapshot

    def restore(self, step: int, updates: int, tensors: Tensors, moved_rows: int = 0) -> Version:
        """Take over what a snapshot holds, see `Store.restore`."""
        optimizer = dict(tensors.get(OPTIMIZER, {}))
        counts = {name: optimizer.pop(name) for name in (UPDATES,) if name in optimizer}
        check_same(OPTIMIZER, {UPDATES: np.zeros(len(self._columns), np.int64)}, counts)
        version = super().restore(step, updates, {**tensors, OPTIMIZER: optimizer}, moved_rows)
        self._updates_of = dict(zip(self._columns, counts[UPDATES].tolist(), strict=True))
        self._initial = np.zeros(0, np.uint8)
        self._initialised.clear()
        return version

    def _owner_calls(
        self,
        owner: int,
        slots: Sequence[int],
        weights: Sequence[float],
        deltas: Sequence[float],
        learning_rate: float,
        buffers: tuple[int, int],
    ) -> Calls:
        optimizer = self.config.optimizer
        self._updates_of[owner] += 1
        scalars = (0.0, *optimizer.scalars(self._updates_of[owner], learning_rate))
        trainable = [place for place in self._trainable if place.run.owner == owner]
        state: list[Place] = [place for place in self._state if place.run.owner == owner]
        calls = update_calls(optimizer.kernel, trainable, (slots, weights), scalars, buffers)
        return calls + delta_calls(state, (slots, deltas), buffers)


def _bounds(layout: Layout, owner: int) -> tuple[int, int]:
    """Return the first byte of an owner's variables and the first after them."""
    runs = [run for run in layout.runs if run.owner == owner]
    return (runs[0].start, runs[-1].end) if runs else (0, 0)
