"""What a checkpoint holds of a store, taken while training goes on, and how it is put back.

The values are held, not copied: nobody writes to a version. What changes in place is copied into one buffer, which
is made at the first snapshot and used again: the optimizer's moments, the moving average, and the gradients of
validators that later rounds are still compared with.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import aligned_empty
from protocol.errors import LocalProtocolError, ManifestMismatch
from protocol.tensors import ITEM_BYTES, Run, numpy_dtype
from ps.storage.runs import Calls, TrainableRun
from ps.storage.thread_team import ThreadTeam

VALUES, OPTIMIZER, REFERENCES = "values", "optimizer", "references"
"""The groups of tensors of a snapshot."""

AVERAGE = "average"
"""What the moving average is called among the moments."""

Tensors = Mapping[str, Mapping[str, NDArray[Any]]]
"""Group, then name."""


@dataclass(frozen=True, eq=False)
class StoreSnapshot:
    """A store at one step; good until `release`, which any thread may call, and which must come.

    Attributes:
        step: of the values.
        updates: applied so far.
        tensors: read-only views. `values` by variable; `optimizer` by `m/<variable>`, `v/<variable>` or
            `momentum/<variable>`, and `average/<variable>`; `references` by `<row>/<variable>`.
    """

    step: int
    updates: int
    tensors: dict[str, dict[str, NDArray[Any]]]
    _release: Callable[[], None] = field(repr=False)

    def release(self) -> None:
        """Let the values go, and the buffer of the copies; further calls do nothing."""
        self._release()


class Copies:
    """The buffer that what changes in place is copied to.

    Args:
        runs: what is trained.
        moments: names of the optimizer's moments, in order.
        averaged: whether there is a moving average.
        rows: of the slab, those of validators.
    """

    def __init__(self, runs: Sequence[TrainableRun], moments: Sequence[str], averaged: bool, rows: range) -> None:
        self._runs = tuple(runs)
        self._moments = tuple(moments)
        self._averaged = averaged
        self._rows = rows
        self._buffer: NDArray[np.uint8] | None = None
        self._lock = threading.Lock()  # guards `_taken`
        self._taken: object | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer, with room for all references."""
        arrays = len(self._moments) + self._averaged + len(self._rows)
        return arrays * sum(run.run.end - run.run.start for run in self._runs)

    def take(self, rows: Sequence[int], team: ThreadTeam) -> tuple[dict[str, dict[str, NDArray[Any]]], object]:
        """Copy, and return read-only views, and what `give_back` wants.

        Args:
            rows: of the slab, to be copied too.
            team: shares the work.

        Raises:
            LocalProtocolError: the copies before have not been given back, or a row is not a validator's.
        """
        token = object()
        with self._lock:
            if self._taken is not None:
                raise LocalProtocolError("a snapshot of the store was taken before the last one was released")
            self._taken = token
        try:
            return self._copy(rows, team), token
        except BaseException:
            self.give_back(token)
            raise

    def give_back(self, token: object) -> None:
        """Let the buffer be used again, if `token` is of the last `take`."""
        with self._lock:
            if self._taken is token:
                self._taken = None

    def _copy(self, rows: Sequence[int], team: ThreadTeam) -> dict[str, dict[str, NDArray[Any]]]:
        if self._buffer is None:
            self._buffer = aligned_empty(self.size_bytes)
        groups: dict[str, dict[str, NDArray[Any]]] = {OPTIMIZER: {}, REFERENCES: {}}
        calls: Calls = []
        start = 0
        for run, group, prefix, source in self._arrays(rows):
            copy = self._buffer[start : start + source.nbytes].view(source.dtype)
            start += source.nbytes
            calls += [partial(np.copyto, copy[first:end], source[first:end]) for first, end in run.pieces]
            for name, view in views(run.run, copy):
                view.flags.writeable = False
                groups[group][f"{prefix}/{name}"] = view
        team.run(calls, start // ITEM_BYTES["float32"])
        return groups

    def places(self, rows: Sequence[int]) -> dict[str, dict[str, NDArray[Any]]]:
        """Return writeable views of what changes in place, by the names that `take` gives to the copies.

        Raises:
            LocalProtocolError: a row is not a validator's.
        """
        groups: dict[str, dict[str, NDArray[Any]]] = {OPTIMIZER: {}, REFERENCES: {}}
        for run, group, prefix, array in self._arrays(rows):
            groups[group] |= {f"{prefix}/{name}": view for name, view in views(run.run, array)}
        return groups

    def clear(self, rows: Sequence[int]) -> None:
        """Zero the trainable part of rows, gaps included: whatever was in a row before must not be measured."""
        for _, group, _, array in self._arrays(rows):
            if group == REFERENCES:
                array[...] = 0

    def _arrays(self, rows: Sequence[int]) -> Iterator[tuple[TrainableRun, str, str, NDArray[Any]]]:
        bad = [row for row in rows if row not in self._rows]
        if bad:
            raise LocalProtocolError(f"row {bad[0]} of the store is no validator's")
        for run in self._runs:
            for index, moment in enumerate(self._moments):
                yield run, OPTIMIZER, moment, run.moments[index]
            if self._averaged:
                yield run, OPTIMIZER, AVERAGE, run.average
            for row in rows:
                yield run, REFERENCES, str(row), run.rows[row, run.column : run.column + run.values[0].size]


def views(run: Run, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield name and view, shaped and typed, of each variable in an array that holds a whole run."""
    raw = array.view(np.uint8)
    for slot in run.slots:
        part = raw[slot.offset - run.start : slot.end - run.start]
        yield slot.spec.name, part.view(numpy_dtype(slot.spec.dtype)).reshape(slot.spec.shape)


def reference_rows(
    references: Mapping[str, NDArray[Any]], moved_rows: int, room: range
) -> tuple[tuple[int, ...], dict[str, NDArray[Any]]]:
    """Return the rows that references are of, ascending, and the references by where they lie now.

    Those of validators that this run has no room for are left out.

    Args:
        references: by `<row>/<variable>`, as they were.
        moved_rows: by how much the rows of validators have moved since, with the number of workers.
        room: the rows of validators.

    Raises:
        ManifestMismatch: a name has no such form.
    """
    renamed: dict[str, NDArray[Any]] = {}
    rows: set[int] = set()
    for name, array in references.items():
        number, slash, variable = name.partition("/")
        if not (number.isdecimal() and slash):
            raise ManifestMismatch(f"the checkpoint has a reference {name!r}, which names no row and variable")
        row = int(number) + moved_rows
        if row in room:
            rows.add(row)
            renamed[f"{row}/{variable}"] = array
    return tuple(sorted(rows)), renamed


def check_same(group: str, here: Mapping[str, NDArray[Any]], there: Mapping[str, NDArray[Any]]) -> None:
    """Check that a checkpoint's tensors are those of this run.

    Raises:
        ManifestMismatch: naming the first whose dtype or shape differs, or that one side lacks, with both views.
    """
    for name in [*here, *(name for name in there if name not in here)]:
        ours, theirs = _described(here.get(name)), _described(there.get(name))
        if ours != theirs:
            raise ManifestMismatch(
                f"the checkpoint does not fit this run: of its {group}, {name!r} is {theirs}, and here it is {ours}"
            )


def _described(array: NDArray[Any] | None) -> str:
    return "missing" if array is None else f"{array.dtype.name} {list(array.shape)}"
