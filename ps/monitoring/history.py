"""The course of a run for plots: means over stretches of steps, thinned out as it grows. Pure bookkeeping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 1000
"""Points that are kept; when there are so many, each two become one, so that 500 to 1000 are there from then on."""

MOST_NAMES = 256
"""Workers whose weights are kept: 256 x 1000 means and their counts are 4 MB."""

AWAY_STEPS = 100
"""Beyond `MOST_NAMES`, a new worker takes the place of the one that was away longest, if that is so many steps."""

ROUNDS, LOSS, LOSS_ROUNDS, ACCURACY, ACCURACY_ROUNDS, EXAMPLES, SECONDS = range(7)
"""Columns of the sums of a point."""


@dataclass(frozen=True, eq=False)
class HistoryView:
    """The points of a history as they are now; nothing in it changes any more.

    Attributes:
        generation: changes whenever earlier points become others, so that who knows them must get all anew.
        stride: steps of a point.
        names: of the workers, one for each column of `shares`; new ones are added at the end.
        steps: int64 [points]: the first step of each, a multiple of the stride, ascending.
        rounds: int64 [points]: rounds that it is made of; of the last one, so far.
        loss: float64 [points]: mean of the rounds' losses; NaN if none was told.
        accuracy: float64 [points]: likewise, in [0, 1].
        examples_per_s: float64 [points]: examples of these rounds over the time that they took; NaN if not known.
        shares: float64 [points, names]: mean weight in fair shares (1: as much as an equal part of the round's
            total) over the rounds in which the worker was present; NaN where it was in none.
    """

    generation: int
    stride: int
    names: tuple[str, ...]
    steps: NDArray[np.int64]
    rounds: NDArray[np.int64]
    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    examples_per_s: NDArray[np.float64]
    shares: NDArray[np.float64]


class RunHistory:
    """Loss, accuracy, throughput and every worker's weight over the steps, in bounded memory.

    A point holds the means over `stride` steps; all points have the same stride. When there are `MOST_POINTS`, each
    two become one and the stride doubles: the history is thinned, never cut.
    """

    def __init__(self) -> None:
        self.stride = 1
        self._generation = 0
        self._points = 0
        self._steps = np.zeros(MOST_POINTS, np.int64)
        self._sums = np.zeros((MOST_POINTS, SECONDS + 1))
        self._columns: dict[str, int] = {}
        self._seen: list[int] = []
        self._shares = np.zeros((MOST_POINTS, 0))
        self._present = np.zeros((MOST_POINTS, 0), np.int64)
        self._closed_at: float | None = None

    def add(
        self,
        step: int,
        loss: float | None,
        accuracy: float | None,
        examples: int,
        shares: Mapping[str, float],
        now: float,
    ) -> None:
        """Take note of a closed round.

        Args:
            step: of the round; ascending.
            loss: mean over its examples; None or not finite: not known.
            accuracy: likewise.
            examples: that its usable pushes were computed on.
            shares: by name, the weight in fair shares of everyone present; empty for a void round.
            now: monotonic seconds.
        """
        point = self._point_of(step)
        sums = self._sums[point]
        sums[ROUNDS] += 1
        if loss is not None and math.isfinite(loss):
            sums[LOSS] += loss
            sums[LOSS_ROUNDS] += 1
        if accuracy is not None and math.isfinite(accuracy):
            sums[ACCURACY] += accuracy
            sums[ACCURACY_ROUNDS] += 1
        if self._closed_at is not None:
            sums[EXAMPLES] += examples
            sums[SECONDS] += now - self._closed_at
        self._closed_at = now
        columns = {name: self._column_of(name, step) for name in shares}
        known = [(column, shares[name]) for name, column in columns.items() if column is not None]
        if known:
            where = [column for column, _ in known]
            self._shares[point, where] += [share for _, share in known]
            self._present[point, where] += 1

    def _point_of(self, step: int) -> int:
        first = step - step % self.stride
        if self._points and self._steps[self._points - 1] >= first:
            return self._points - 1
        if self._points == MOST_POINTS:
            self._thin_out()
            return self._point_of(step)
        self._steps[self._points] = first
        self._points += 1
        return self._points - 1

    def _thin_out(self) -> None:
        """Make one point of all that fall into the same stretch of twice the stride."""
        self.stride *= 2
        self._generation += 1
        firsts = self._steps - self._steps % self.stride
        starts = np.flatnonzero(np.diff(firsts, prepend=firsts[0] - 1))
        self._points = len(starts)
        self._steps[: self._points] = firsts[starts]
        for sums in (self._sums, self._shares, self._present):
            sums[: self._points] = np.add.reduceat(sums, starts, axis=0)
            sums[self._points :] = 0

    def _column_of(self, name: str, step: int) -> int | None:
        """Return where a worker's weights are kept, or None if there is no room for it."""
        column = self._columns.get(name)
        if column is None:
            column = self._make_room(name, step)
        if column is not None:
            self._seen[column] = step
        return column

    def _make_room(self, name: str, step: int) -> int | None:
        if len(self._columns) < MOST_NAMES:
            column = len(self._columns)
            width = self._shares.shape[1]
            if column == width:
                more = ((0, 0), (0, max(8, width)))
                self._shares, self._present = np.pad(self._shares, more), np.pad(self._present, more)
            self._seen.append(step)
        else:
            column = min(range(MOST_NAMES), key=self._seen.__getitem__)
            if step - self._seen[column] < AWAY_STEPS:
                return None
            del self._columns[next(known for known, at in self._columns.items() if at == column)]
            self._shares[:, column] = 0
            self._present[:, column] = 0
            self._generation += 1
        self._columns[name] = column
        return column

    def view(self) -> HistoryView:
        """Return the points as they are now, copied."""
        points, names = self._points, len(self._columns)
        sums, present = self._sums[:points], self._present[:points, :names]
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = sums[:, EXAMPLES] / sums[:, SECONDS]
            rate[~np.isfinite(rate)] = np.nan
            return HistoryView(
                generation=self._generation,
                stride=self.stride,
                names=tuple(sorted(self._columns, key=self._columns.__getitem__)),
                steps=self._steps[:points].copy(),
                rounds=sums[:, ROUNDS].astype(np.int64),
                loss=sums[:, LOSS] / sums[:, LOSS_ROUNDS],
                accuracy=sums[:, ACCURACY] / sums[:, ACCURACY_ROUNDS],
                examples_per_s=rate,
                shares=self._shares[:points, :names] / present,
            )

    def state(self) -> dict[str, Any]:
        """Return everything but the clock as arrays and plain values."""
        points, names = self._points, len(self._columns)
        return {
            "stride": self.stride,
            "generation": self._generation,
            "steps": self._steps[:points].copy(),
            "sums": self._sums[:points].copy(),
            "names": sorted(self._columns, key=self._columns.__getitem__),
            "seen": list(self._seen),
            "shares": self._shares[:points, :names].copy(),
            "present": self._present[:points, :names].copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; the time until the next round counts for nothing."""
        points, names = len(state["steps"]), [str(name) for name in state["names"]]
        self.stride, self._generation, self._points = int(state["stride"]), int(state["generation"]) + 1, points
        self._columns = {name: column for column, name in enumerate(names)}
        self._seen = [int(step) for step in state["seen"]]
        self._shares = np.zeros((MOST_POINTS, len(names)))
        self._present = np.zeros((MOST_POINTS, len(names)), np.int64)
        self._sums[:] = 0
        self._steps[:points], self._sums[:points] = state["steps"], state["sums"]
        self._shares[:points], self._present[:points] = state["shares"], state["present"]
        self._closed_at = None
