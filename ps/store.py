"""The server's numbers: versions of the values, moments, moving average, and the slab that gradients arrive in.

Values are immutable versions in three buffers. An update reads the current buffer and writes a free one, so a
sender that holds a version never sees it change. Results depend on the order of the slots only, never on the
order of arrival or on the number of threads.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import aligned_empty
from protocol.errors import ConfigurationError, LocalProtocolError
from protocol.tensors import FLOATING, ITEM_BYTES, Kind, Layout, Manifest, Run, numpy_dtype
from ps import kernels
from ps.optimizers import Optimizer
from ps.receiver import COMPUTED, PushCheck, Receiver, first_not_finite, plan_blocks
from ps.thread_team import ThreadTeam, pieces
from ps.versions import VERSIONS, Hold, Version, Versions

__all__ = ["Hold", "NotFinite", "PushCheck", "Receiver", "Store", "StoreConfig", "Version"]


class NotFinite(ValueError):
    """A value is NaN or infinite.

    Attributes:
        variable: name of the first variable with one.
    """

    def __init__(self, variable: str) -> None:
        super().__init__(f"variable {variable!r} has a value that is NaN or infinite")
        self.variable = variable


@dataclass(frozen=True)
class StoreConfig:
    """How a store computes.

    Attributes:
        optimizer: what turns the weighted sum of gradients into new values.
        slots: gradients that may be held at once; one of them is one row of the slab.
        threads: threads that share an update. Results do not depend on it.
        clip_norm: largest Euclidean norm of the weighted sum of trainable gradients; None for no limit.
        ema_decay: `average <- decay average + (1 - decay) value` at each update; None for no average.
        release_timeout_s: seconds that an update waits for a version to be released.
    """

    optimizer: Optimizer
    slots: int
    threads: int = 2
    clip_norm: float | None = None
    ema_decay: float | None = None
    release_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.slots < 1 or self.threads < 1:
            raise ConfigurationError(
                f"a store needs a slot and a thread at least, not {self.slots} slots and {self.threads} threads"
            )
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigurationError(f"the norm to clip at must be finite and above 0, not {self.clip_norm}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigurationError(f"the EMA decay must be at least 0 and below 1, not {self.ema_decay}")


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a kernel finds a run, made once: a round that many wait for should not build views.

    Attributes:
        run: the run.
        rows: the slab in the dtype of the run, [slots, payload elements].
        column: of the slab, where the run begins.
        values: the run in each of the version buffers, [n] each.
        pieces: element ranges that threads may share.
    """

    run: Run
    rows: NDArray[Any]
    column: int
    values: tuple[NDArray[Any], ...]
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class _TrainableRun(_Place):
    """A run with what the optimizer keeps for it: moments [m, n], and the moving average [n], or [0]."""

    moments: NDArray[Any]
    average: NDArray[Any]


class Store:
    """Values, moments and gradients of one layout.

    `hold`, its release, `current`, `evaluation_values` and `export` may be called from any thread, each `Receiver`
    from the thread that receives; `initialise`, `apply` and `skip` from one thread at a time. A slot must not be
    received into while `apply` uses it.

    Raises:
        ConfigurationError: a variable has a dtype that cannot be computed in.
    """

    def __init__(self, layout: Layout, config: StoreConfig) -> None:
        self.check_supported(layout.manifest)
        self.layout = layout
        self.config = config
        optimizer = config.optimizer
        kernels.warm_up(optimizer.kernel, sorted({run.dtype for run in layout.runs} & set(COMPUTED)))
        self._blocks = plan_blocks(layout)
        # Uninitialised on purpose: a row that is never received into costs no memory.
        self._slab = aligned_empty(config.slots * layout.payload_bytes).reshape(config.slots, -1)
        self._versions = Versions(layout, config.release_timeout_s)
        self._trainable = tuple(self._trainable_run(run) for run in layout.runs_of(Kind.TRAINABLE))
        self._state = tuple(self._place(run) for run in layout.runs_of(Kind.STATE))
        self._elements = layout.values_bytes // ITEM_BYTES["float32"]
        self._team = ThreadTeam(config.threads)
        self._updates = 0
        self._writing = threading.Lock()

    @staticmethod
    def memory_bytes(layout: Layout, config: StoreConfig) -> int:
        """Return the bytes of all arrays of a store: known, and to be printed, before anything is allocated.

        That is the slots, three versions, the optimizer's moments and the moving average. Rows of the slab that
        are never received into are counted and cost nothing.
        """
        trainable = sum(run.end - run.start for run in layout.runs_of(Kind.TRAINABLE))
        per_trainable = len(config.optimizer.moments) + (config.ema_decay is not None)
        return config.slots * layout.payload_bytes + VERSIONS * layout.values_bytes + per_trainable * trainable

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

    def _place(self, run: Run) -> _Place:
        dtype = numpy_dtype(run.dtype)
        return _Place(
            run=run,
            rows=self._slab.view(dtype),
            column=run.start // dtype.itemsize,
            values=tuple(arena.run_view(run) for arena in self._versions.arenas),
            pieces=tuple(pieces((run.end - run.start) // dtype.itemsize)),
        )

    def _trainable_run(self, run: Run) -> _TrainableRun:
        size = run.end - run.start
        moments = _zeros(len(self.config.optimizer.moments) * size)
        average = _zeros(size if self.config.ema_decay is not None else 0)
        shape = (len(self.config.optimizer.moments), size // ITEM_BYTES[run.dtype])
        place = self._place(run)
        return _TrainableRun(
            **vars(place), moments=moments.view(run.dtype).reshape(shape), average=average.view(run.dtype)
        )

    # ---- gradients in ----------------------------------------------------------------------------------

    def receiver(self, slot: int) -> Receiver:
        """Return a receiver for a row of the slab; make one per slot and `restart` it for each push."""
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
            for block in self._blocks:
                inside = block.gap_starts < self.layout.values_bytes
                kernels.zero_ranges(arena.buffer, block.gap_starts[inside], block.gap_ends[inside])
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
    ) -> Version:
        """Close a round: make the next version out of the current one and the gradients in `slots`.

        Trainable variables get the optimizer's update for the sum of weight x clip factor x gradient, scaled
        down to `clip_norm`; floating state gets the sum of weight x delta added; other state is copied from the
        first slot. Sums are taken in the given order and in the dtype of the variable.

        Args:
            slots: rows whose gradients count, in rank order; refused ones are left out.
            weights: one per slot, at least 0. A gradient of weight 0 is not read.
            clip_factors: one per slot, or None.
            learning_rate: of this round.

        Raises:
            NoProgress: no buffer became free in `release_timeout_s`.
            LocalProtocolError: no slots, or lengths that differ.
        """
        factors = clip_factors if clip_factors is not None else [1.0] * len(slots)
        if not len(slots) == len(weights) == len(factors) > 0:
            raise LocalProtocolError("a round needs at least one slot, and one weight and clip factor for each")
        clipped = [float(weight) * float(factor) for weight, factor in zip(weights, factors, strict=True)]
        with self._writing:
            old, version = self._versions.current()
            target = self._versions.reserve()
            if self.config.clip_norm is not None:
                norm = self._aggregate_norm(slots, clipped)
                scale = min(1.0, self.config.clip_norm / norm) if norm else 1.0
                clipped = [weight * scale for weight in clipped]
            calls = self._update_calls(slots, clipped, learning_rate, old, target)
            calls += self._state_calls(slots, weights, old, target)
            self._team.run(calls, self._elements)
            self._updates += 1
            return self._versions.publish(target, version.step + 1)

    def _summands(
        self, place: _Place, slots: Sequence[int], weights: Sequence[float]
    ) -> tuple[NDArray[Any], int, NDArray[np.int64], NDArray[Any]]:
        """Return the first four arguments of a kernel over a run, without what weighs nothing."""
        counted = [(slot, weight) for slot, weight in zip(slots, weights, strict=True) if weight]
        return (
            place.rows,
            place.column,
            np.array([slot for slot, _ in counted], np.int64),
            np.array([weight for _, weight in counted], place.run.dtype),
        )

    def _aggregate_norm(self, slots: Sequence[int], weights: Sequence[float]) -> float:
        squares: list[list[float]] = []
        calls: list[Callable[[], None]] = []

        def add(square: list[float], *arguments: Any) -> None:
            square.append(kernels.weighted_sum_of_squares(*arguments))

        for trainable in self._trainable:
            summands = self._summands(trainable, slots, weights)
            for start, stop in trainable.pieces:
                squares.append([])
                calls.append(partial(add, squares[-1], *summands, start, stop))
        self._team.run(calls, self._elements)
        return math.sqrt(sum(square[0] for square in squares))

    def _update_calls(
        self, slots: Sequence[int], weights: Sequence[float], learning_rate: float, old: int, new: int
    ) -> list[Callable[[], None]]:
        optimizer = self.config.optimizer
        kernel = kernels.UPDATES[optimizer.kernel]
        rate = 0.0 if self.config.ema_decay is None else 1 - self.config.ema_decay
        scalars = (rate, *optimizer.scalars(self._updates + 1, learning_rate))
        calls: list[Callable[[], None]] = []
        for trainable in self._trainable:
            arguments = (
                *self._summands(trainable, slots, weights),
                trainable.values[old],
                trainable.values[new],
                trainable.moments,
                trainable.average,
                np.array(scalars, trainable.run.dtype),
            )
            calls += [partial(kernel, *arguments, start, stop) for start, stop in trainable.pieces]
        return calls

    def _state_calls(
        self, slots: Sequence[int], weights: Sequence[float], old: int, new: int
    ) -> list[Callable[[], None]]:
        calls: list[Callable[[], None]] = []
        for place in self._state:
            if place.run.dtype in COMPUTED:
                arguments = (*self._summands(place, slots, weights), place.values[old], place.values[new])
                calls += [partial(kernels.add_weighted, *arguments, start, stop) for start, stop in place.pieces]
            else:
                source = place.rows[slots[0], place.column : place.column + place.values[new].size]
                calls.append(partial(np.copyto, place.values[new], source))
        return calls

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
        """Return moments, and `average` if there is one, by name and variable: read-only views, as `export`'s."""
        arrays = {
            moment: self._named(lambda trainable, index=index: trainable.moments[index])  # type: ignore[misc]
            for index, moment in enumerate(self.config.optimizer.moments)
        }
        if self.config.ema_decay is not None:
            arrays["average"] = self._named(lambda trainable: trainable.average)
        return arrays

    def _named(self, array_of: Callable[[_TrainableRun], NDArray[Any]]) -> dict[str, NDArray[Any]]:
        named: dict[str, NDArray[Any]] = {}
        for trainable in self._trainable:
            raw = array_of(trainable).view(np.uint8)
            for slot in trainable.run.slots:
                part = raw[slot.offset - trainable.run.start : slot.end - trainable.run.start]
                view = part.view(slot.spec.dtype).reshape(slot.spec.shape)
                view.flags.writeable = False
                named[slot.spec.name] = view
        return named

    def close(self) -> None:
        """End the threads that share updates; the values stay readable."""
        self._team.close()


def _zeros(size_bytes: int) -> NDArray[np.uint8]:
    buffer = aligned_empty(size_bytes)
    buffer[:] = 0
    return buffer
