"""The server's numbers: versions of the values, moments, moving average, and the slab that gradients arrive in.

Values are immutable versions in a few buffers. An update reads the current buffer and writes a free one, so a
sender that holds a version never sees it change. Results depend on the order of the slots only, never on the
order of arrival or on the number of threads.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import aligned_empty
from protocol.errors import ConfigurationError, LocalProtocolError
from protocol.tensors import FLOATING, ITEM_BYTES, Kind, Layout, Manifest, Run, numpy_dtype
from ps.storage import kernels, reductions
from ps.storage.comparison import Comparison
from ps.storage.receiver import COMPUTED, Blocks, Receiver, first_not_finite
from ps.storage.runs import (
    Place,
    TrainableRun,
    Weighted,
    delta_calls,
    piece_count,
    scale_calls,
    square_calls,
    trim_calls,
    update_calls,
)
from ps.storage.snapshots import (
    AVERAGE,
    OPTIMIZER,
    REFERENCES,
    VALUES,
    Copies,
    StoreSnapshot,
    Tensors,
    check_same,
    reference_rows,
    views,
)
from ps.storage.store_config import NotFinite, StoreConfig
from ps.storage.thread_team import ThreadTeam, pieces
from ps.storage.versions import Hold, Version, Versions


class Store:
    """Values, moments and gradients of one layout.

    `hold`, its release and a snapshot's, `current`, `evaluation_values` and `export` may be called from any thread,
    each `Receiver` from the thread that receives; all else from one thread at a time. A row of the slab must not be
    received into while it is applied or measured. Rows are numbered: the slots from 0, then the references.

    Attributes:
        layout: of the values.
        config: how it computes.
        validator_rows: the rows for references.
        comparison: how the gradients in its rows lie to each other.

    Raises:
        ConfigurationError: a variable has a dtype that cannot be computed in.
    """

    def __init__(self, layout: Layout, config: StoreConfig, row_bytes: int | None = None) -> None:
        """Allocate everything; `row_bytes` is the size of a row, None for the payload of the layout."""
        self.check_supported(layout.manifest)
        self.layout = layout
        self.config = config
        optimizer = config.optimizer
        kernels.warm_up(optimizer.kernel, sorted({run.dtype for run in layout.runs} & set(COMPUTED)))
        if config.reductions:
            reductions.warm_up(sorted({run.dtype for run in layout.runs} & set(COMPUTED)))
        self._blocks = Blocks.of(layout)
        rows = config.slots + config.references
        # Uninitialised on purpose: a row that is never received into costs no memory.
        row_bytes = layout.payload_bytes if row_bytes is None else row_bytes
        self._slab = aligned_empty(rows * row_bytes).reshape(rows, row_bytes)
        self._versions = Versions(layout, config.release_timeout_s, config.versions, config.grace_s)
        self._trainable = tuple(self._trainable_run(run) for run in layout.runs_of(Kind.TRAINABLE))
        self.validator_rows = range(config.slots, rows)
        averaged = config.ema_decay is not None
        self._copies = Copies(self._trainable, optimizer.moments, averaged, self.validator_rows)
        self._state = tuple(self._place(run) for run in layout.runs_of(Kind.STATE))
        self._elements = layout.values_bytes // ITEM_BYTES["float32"]
        self._team = ThreadTeam(config.threads)
        self.comparison = Comparison(self._trainable, rows, bool(optimizer.moments), self._team, self._elements)
        self._updates = 0
        self._writing = threading.Lock()

    @staticmethod
    def memory_bytes(layout: Layout, config: StoreConfig) -> int:
        """Return the bytes of all arrays of a store: known, and to be printed, before anything is allocated.

        That is the slots and references, the versions, the optimizer's moments and the moving average, and a copy
        of what changes in place if there are checkpoints. Rows of the slab that are never received into are counted
        and cost nothing.
        """
        trainable = sum(run.end - run.start for run in layout.runs_of(Kind.TRAINABLE))
        per_trainable = len(config.optimizer.moments) + (config.ema_decay is not None)
        if config.checkpoints:
            per_trainable += per_trainable + config.references
        rows = config.slots + config.references
        return rows * layout.payload_bytes + config.versions * layout.values_bytes + per_trainable * trainable

    @staticmethod
    def check_supported(manifest: Manifest) -> None:
        """Check that a store can compute with all variables.

        Raises:
            ConfigurationError: naming the first variable of a floating dtype other than float32 and float64.
        """
        for spec in manifest.variables:
            if spec.dtype in FLOATING and spec.dtype not in COMPUTED:
                raise ConfigurationError(
                    f"variable {spec.name!r} is {spec.dtype}: the server computes in float32 and float64 only; "
                    f"keep the variable in float32 and cast it where it is used"
                )

    def _place(self, run: Run) -> Place:
        dtype = numpy_dtype(run.dtype)
        return Place(
            run=run,
            rows=self._slab.view(dtype),
            column=self._column(run) // dtype.itemsize,
            values=tuple(arena.run_view(run) for arena in self._versions.arenas),
            pieces=tuple(pieces((run.end - run.start) // dtype.itemsize)),
        )

    def _column(self, run: Run) -> int:
        """Return the byte of a row where a run begins."""
        return run.start

    def _trainable_run(self, run: Run) -> TrainableRun:
        size = run.end - run.start
        moments = _zeros(len(self.config.optimizer.moments) * size)
        average = _zeros(size if self.config.ema_decay is not None else 0)
        shape = (len(self.config.optimizer.moments), size // ITEM_BYTES[run.dtype])
        place = self._place(run)
        return TrainableRun(
            **vars(place), moments=moments.view(run.dtype).reshape(shape), average=average.view(run.dtype)
        )

    # ---- gradients in ----------------------------------------------------------------------------------

    def receiver(self, slot: int) -> Receiver:
        """Return a receiver for a row of the slab; make one per row and `restart` it for each push."""
        return Receiver(self._slab[slot], self.layout, self._blocks)

    # ---- versions out ----------------------------------------------------------------------------------

    @property
    def current(self) -> Version:
        """The newest values. They may be overwritten once two newer versions exist: `hold` them to be safe."""
        return self._versions.current()[1]

    @property
    def updates(self) -> int:
        """Updates applied so far; void rounds do not count."""
        return self._updates

    @property
    def has_momentum(self) -> bool:
        """Whether there is a first moment to measure against: the optimizer keeps one, and has made an update."""
        return bool(self.config.optimizer.moments) and self._updates > 0

    def hold(self, cut_off: Callable[[], None] | None) -> Hold:
        """Pin the current version.

        Args:
            cut_off: called, from the thread that applies, when this hold is one of those that leave no buffer
                free; it must lead to `release` soon. None: never called, the update waits.
        """
        return self._versions.hold(cut_off)

    def first_not_finite(self) -> str | None:
        """Return the first floating variable whose current value is NaN or infinite somewhere, or None."""
        return first_not_finite(self._versions.arenas[self._versions.current()[0]].buffer, self.layout)

    # ---- rounds ----------------------------------------------------------------------------------------

    def initialise(self, values: NDArray[np.uint8] | memoryview) -> Version:
        """Take over a copy of initial values as step 0, with moments of zero and the average at the values.

        Args:
            values: `values_bytes` bytes in layout order; what lies in the gaps is ignored.

        Raises:
            NotFinite: a floating variable has NaN or infinite values; the store is as before.
            LocalProtocolError: the buffer has another size.
        """
        source = np.frombuffer(values, np.uint8)
        if source.nbytes != self.layout.values_bytes:
            raise LocalProtocolError(
                f"initial values of {source.nbytes} bytes do not fill the layout's {self.layout.values_bytes}"
            )
        with self._writing:
            target = self._versions.reserve()
            arena = self._versions.arenas[target]
            np.copyto(arena.buffer, source)
            for first, stop in self._blocks.gaps:
                arena.buffer[first:stop] = 0  # those behind the values are no part of it
            bad = first_not_finite(arena.buffer, self.layout)
            if bad is not None:
                raise NotFinite(bad)
            for trainable in self._trainable:
                trainable.moments[...] = 0
                if trainable.average.size:
                    trainable.average[...] = arena.run_view(trainable.run)
            self._updates = 0
            return self._versions.publish(target, 0)

    def skip(self) -> Version:
        """Close a void round: the same values under the next step."""
        with self._writing:
            buffer, version = self._versions.current()
            return self._versions.publish(buffer, version.step + 1)

    def apply(
        self,
        slots: Sequence[int],
        weights: Sequence[float],
        clip_factors: Sequence[float] | None,
        learning_rate: float,
        state_factors: Sequence[float] | None = None,
    ) -> Version:
        """Close a round: make the next version out of the current one and the gradients in `slots`.

        Trainable variables get the optimizer's update for the sum of weight x clip factor x gradient, scaled
        down to `clip_norm`; floating state gets the sum of weight x state factor x delta added; other state is
        copied from the first slot. Sums are taken in the given order and in the dtype of the variable.

        Args:
            slots: rows whose gradients count, in rank order; refused ones are left out.
            weights: one per slot, at least 0. A gradient of weight 0 is not read.
            clip_factors: one per slot, or None.
            learning_rate: of this round.
            state_factors: one per slot, at least 0, or None.

        Raises:
            NoProgress: no buffer became free in `release_timeout_s`.
            LocalProtocolError: no slots, or lengths that differ.
        """
        given = [factors for factors in (clip_factors, state_factors) if factors is not None]
        if not slots or any(len(numbers) != len(slots) for numbers in (weights, *given)):
            raise LocalProtocolError("a round needs at least one slot, and one weight and clip factor for each")
        gradients, deltas = (slots, _scaled(weights, clip_factors)), (slots, _scaled(weights, state_factors))
        with self._writing:
            old, version = self._versions.current()
            target = self._versions.reserve()
            return self._close(gradients, deltas, learning_rate, (old, target), version.step + 1)

    def apply_trimmed(
        self,
        slots: Sequence[int],
        trim: int,
        learning_rate: float,
        state_factors: Sequence[float] | None = None,
    ) -> Version:
        """Close a round with the trimmed mean of each coordinate in place of a weighted sum.

        Of each coordinate of a floating variable the `trim` smallest and the `trim` largest values are dropped
        and the others averaged. For a trainable variable the result is scaled down to `clip_norm` and updates it;
        for a state variable it is that of state factor x delta, and is added. Other state is copied from the first
        slot. What lies in the slots is overwritten, so no memory is needed. The order of the slots does not matter.

        Args:
            slots: rows whose gradients count, in rank order; refused ones are left out.
            trim: at least 0; 2 trim is less than the number of slots.
            learning_rate: of this round.
            state_factors: one per slot, at least 0, or None.

        Raises:
            NoProgress: no buffer became free in `release_timeout_s`.
            LocalProtocolError: the trim leaves no value, or the lengths differ.
        """
        if not 0 <= 2 * trim < len(slots):
            raise LocalProtocolError(f"{trim} values cannot be trimmed at each end of {len(slots)}")
        if state_factors is not None and len(state_factors) != len(slots):
            raise LocalProtocolError("a trimmed round needs one state factor for each slot")
        rows = self.comparison.rows(slots)
        factors = zip(slots, state_factors or (), strict=False)
        clipped = {slot: factor for slot, factor in factors if factor != 1.0}
        floating = [place for place in self._state if place.run.dtype in COMPUTED]
        with self._writing:
            old, version = self._versions.current()
            target = self._versions.reserve()
            self._team.run(scale_calls(floating, (list(clipped), list(clipped.values()))), self._elements)
            self._team.run(trim_calls((*self._trainable, *floating), rows, trim), self._elements)
            combined = (slots[:1], [1.0])
            return self._close(combined, combined, learning_rate, (old, target), version.step + 1)

    def _close(
        self, gradients: Weighted, deltas: Weighted, learning_rate: float, buffers: tuple[int, int], step: int
    ) -> Version:
        """Make version `step` in the second of the buffers, out of the first and what is weighted."""
        if self.config.clip_norm is not None:
            squares = np.zeros(piece_count(self._trainable))
            self._team.run(square_calls(self._trainable, gradients, squares), self._elements)
            norm = math.sqrt(sum(squares.tolist()))
            scale = min(1.0, self.config.clip_norm / norm) if norm else 1.0
            gradients = (gradients[0], [weight * scale for weight in gradients[1]])
        optimizer = self.config.optimizer
        rate = 0.0 if self.config.ema_decay is None else 1 - self.config.ema_decay
        scalars = (rate, *optimizer.scalars(self._updates + 1, learning_rate))
        calls = update_calls(optimizer.kernel, self._trainable, gradients, scalars, buffers)
        calls += delta_calls(self._state, deltas, buffers)
        self._team.run(calls, self._elements)
        self._updates += 1
        return self._versions.publish(buffers[1], step)

    # ---- what evaluation, export and checkpoints read --------------------------------------------------

    def evaluation_values(self, out: NDArray[np.uint8]) -> Version:
        """Copy the values to evaluate into `out` (uint8 [values_bytes]) and return them as a version.

        These are the moving average of the trainable variables, if there is one, and all else as it is now.
        The average changes in place, so this waits for an update that is under way, and the next waits for it.
        """
        with self._writing:
            current, version = self._versions.current()
            np.copyto(out, self._versions.arenas[current].buffer)
            for trainable in self._trainable:
                if trainable.average.size:
                    out[trainable.run.start : trainable.run.end] = trainable.average.view(np.uint8)
        return Version(version.step, out.data.toreadonly())

    def export(self) -> dict[str, NDArray[Any]]:
        """Return the values to evaluate by name, as read-only views that are good until the next update."""
        current, _ = self._versions.current()
        views = self._versions.arenas[current].views()
        if self.config.ema_decay is not None:
            views.update(self._named(lambda trainable: trainable.average))
        return views

    def optimizer_arrays(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return moments, and `average` if there is one, by name and variable: read-only views, as `export`'s.

        Nothing but tests looks at them so: a checkpoint is of copies.
        """
        arrays = {
            moment: self._named(lambda trainable, index=index: trainable.moments[index])  # type: ignore[misc]
            for index, moment in enumerate(self.config.optimizer.moments)
        }
        if self.config.ema_decay is not None:
            arrays[AVERAGE] = self._named(lambda trainable: trainable.average)
        return arrays

    def _named(self, array_of: Callable[[TrainableRun], NDArray[Any]]) -> dict[str, NDArray[Any]]:
        named: dict[str, NDArray[Any]] = {}
        for trainable in self._trainable:
            for name, view in views(trainable.run, array_of(trainable)):
                view.flags.writeable = False
                named[name] = view
        return named

    # ---- checkpoints -----------------------------------------------------------------------------------

    def snapshot(self, references: Sequence[int] = ()) -> StoreSnapshot:
        """Return all that `restore` needs, for another thread to write: values are held, what changes is copied.

        Time: one copy of moments, average and references, shared by the threads of updates.

        Args:
            references: rows with gradients of validators that later rounds are still compared with.

        Raises:
            LocalProtocolError: the last snapshot was not released, a row is no validator's, or the store was not
                made for checkpoints.
        """
        if not self.config.checkpoints:
            raise LocalProtocolError("a snapshot was taken of a store that has no room for one")
        with self._writing:
            current, version = self._versions.current()
            copies, token = self._copies.take(references, self._team)
            hold = self._versions.hold(None)
            tensors = {VALUES: self._versions.arenas[current].views(), **copies}
            updates = self._updates

        def release() -> None:
            hold.release()
            self._copies.give_back(token)

        return StoreSnapshot(version.step, updates, tensors, release)

    def restore(self, step: int, updates: int, tensors: Tensors, moved_rows: int = 0) -> Version:
        """Take over what a snapshot holds: from here on every bit is as it would have been.

        On error the store is as before.

        Args:
            step: of the values.
            updates: applied so far.
            tensors: as in `StoreSnapshot`; groups without tensors may be missing.
            moved_rows: by how much the rows of validators have moved, with the number of workers.

        Raises:
            ManifestMismatch: the variables or the optimizer are others; names the first difference.
            NotFinite: a floating variable has NaN or infinite values.
            NoProgress: no buffer became free in `release_timeout_s`.
        """
        rows, references = reference_rows(tensors.get(REFERENCES, {}), moved_rows, self.validator_rows)
        given = {VALUES: tensors.get(VALUES, {}), OPTIMIZER: tensors.get(OPTIMIZER, {}), REFERENCES: references}
        with self._writing:
            target = self._versions.reserve()
            arena = self._versions.arenas[target]
            places = {VALUES: arena.views(writeable=True), **self._copies.places(rows)}
            for group, here in places.items():
                check_same(group, here, given[group])
            for name, place in places[VALUES].items():
                np.copyto(place, given[VALUES][name])
            bad = first_not_finite(arena.buffer, self.layout)
            if bad is not None:
                raise NotFinite(bad)
            self._copies.clear(rows)
            for group in (OPTIMIZER, REFERENCES):
                for name, place in places[group].items():
                    np.copyto(place, given[group][name])
            self._updates = updates
            return self._versions.publish(target, step)

    def close(self) -> None:
        """End the threads that share updates; the values stay readable."""
        self._team.close()


def _scaled(weights: Sequence[float], factors: Sequence[float] | None) -> list[float]:
    factors = [1.0] * len(weights) if factors is None else factors
    return [float(weight) * float(factor) for weight, factor in zip(weights, factors, strict=True)]


def _zeros(size_bytes: int) -> NDArray[np.uint8]:
    buffer = aligned_empty(size_bytes)
    buffer[:] = 0
    return buffer
