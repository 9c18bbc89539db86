"""Define gradients from whose sums one can tell what was applied: a step that is lost or doubled shows at once.

Every worker pushes three arrays, and the server's optimizer is plain SGD with learning rate 1:

- `tally` [W]: the value of place r becomes the number of pushes of rank r that were applied, each by its weight;
- `marks` [1]: becomes the sum of a number that belongs to each step, whoever took part in it (rounds only);
- `bulk` [P]: a pattern, times what follows from `tally`. Values that are torn, or of two versions, do not agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERIOD = 1009
"""After so many steps the marks come again; a prime, so that no interval of checkpoints goes with it."""

TOLERANCE = 1e-3
"""For sums of weights that are no powers of two. A push that is lost or doubled moves a tally by 1 / W at least."""

Arrays = Mapping[str, NDArray[Any]]


class Counting(StrEnum):
    """What a tally must be."""

    ALL = "all"
    """Rounds of all workers: every tally of step k is k / W."""

    ROUNDS = "rounds"
    """Rounds of whoever is there: the tallies of step k make k together."""

    PUSHES = "pushes"
    """Single pushes: as rounds, and each tally is a whole number that grows by one with each push of that rank."""

    NONE = "none"
    """Nothing is checked."""


def marks() -> NDArray[np.int64]:
    """Return the marks of steps 0 to `PERIOD` - 1, int64 [PERIOD], 1 to `PERIOD` each."""
    return 1 + (np.arange(PERIOD, dtype=np.int64) * 619) % PERIOD


@dataclass(frozen=True)
class Tally:
    """The gradients of all ranks, and what values they make.

    Attributes:
        workers: W, at most.
        parameters: P, elements of `bulk`.
        counting: which sums must come out.
        dtype: of all arrays. float32 holds the sums exactly for some thousand steps of a power of two of workers.
    """

    workers: int
    parameters: int
    counting: Counting = Counting.ALL
    dtype: str = "float64"

    @cached_property
    def pattern(self) -> NDArray[Any]:
        """1 to 7 by place, [P]."""
        return (1 + np.arange(self.parameters) * 5 % 7).astype(self.dtype)

    @cached_property
    def _marks_before(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(marks())])

    @property
    def _tolerance(self) -> float:
        """None where every weight is a power of two and all sums are exact."""
        is_exact = self.counting is Counting.PUSHES or (
            self.counting is Counting.ALL and self.workers & (self.workers - 1) == 0
        )
        return 0.0 if is_exact else TOLERANCE

    def initial_values(self) -> dict[str, NDArray[Any]]:
        """Return zeros by name."""
        sizes = {"tally": self.workers, "marks": 1, "bulk": self.parameters}
        return {name: np.zeros(size, self.dtype) for name, size in sizes.items()}

    def gradients(self, rank: int) -> dict[str, NDArray[Any]]:
        """Return the gradients of a rank at step 0, by name; `mark` makes those of other steps of them."""
        gradients = self.initial_values()
        gradients["tally"][rank] = -1
        gradients["bulk"][:] = -factor(rank) * self.pattern
        self.mark(gradients, 0)
        return gradients

    def mark(self, gradients: Arrays, step: int) -> None:
        """Make gradients those of a step, in place."""
        gradients["marks"][0] = -float(marks_at(step))

    def problem(self, values: Arrays, step: int) -> str:
        """Return in what values of a step are not what they must be; empty if they are right."""
        if self.counting is Counting.NONE:
            return ""
        tally = values["tally"].astype(np.float64)
        tolerance = self._tolerance
        if abs(tally.sum() - step) > tolerance:
            return f"step {step} holds the pushes of {tally.sum():g} steps: {tally.tolist()}"
        if self.counting is Counting.ALL and np.abs(tally - step / self.workers).max() > tolerance:
            return f"at step {step} the ranks have not counted the same: {tally.tolist()}"
        if self.counting is Counting.PUSHES and not np.array_equal(tally, np.floor(tally)):
            return f"at step {step} parts of pushes have been applied: {tally.tolist()}"
        expected = self.marks_before(step)
        if self.counting is not Counting.PUSHES and abs(float(values["marks"][0]) - expected) > 50 * tolerance:
            return f"the marks of step {step} are {values['marks'][0]:g} and must be {expected}"
        return self._bulk_problem(values["bulk"], tally, step)

    def progress_problem(self, rank: int, before: float, after: float, applied: bool) -> str:
        """Return what is wrong with how a rank's tally has moved from one answer to the next, if anything.

        Args:
            rank: whose.
            before: its tally when it made the push.
            after: its tally in the answer of the same server; no restart lies between.
            applied: whether the server says that the push has counted.
        """
        moved = after - before
        if self.counting is Counting.NONE:
            return ""
        if self.counting is Counting.PUSHES and moved not in ((1.0,) if applied else (0.0, 1.0)):
            return f"a push of rank {rank} has counted {moved:g} times"
        if moved < -TOLERANCE or (applied and moved < 1 / self.workers - TOLERANCE):
            return f"a push of rank {rank} was applied, and its tally went from {before:g} to {after:g}"
        return ""

    def marks_before(self, step: int) -> int:
        """Return the sum of the marks of all steps before one."""
        periods, rest = divmod(step, PERIOD)
        return periods * int(self._marks_before[PERIOD]) + int(self._marks_before[rest])

    def _bulk_problem(self, bulk: NDArray[Any], tally: NDArray[np.float64], step: int) -> str:
        scale = sum(factor(rank) * count for rank, count in enumerate(tally.tolist()))
        wrong = np.abs(bulk - self.pattern * np.asarray(scale, self.dtype)) > 50 * self._tolerance
        if not wrong.any():
            return ""
        place = int(wrong.argmax())
        expected = float(self.pattern[place]) * scale
        return (
            f"at step {step} {int(wrong.sum())} of {bulk.size} values are wrong, the first at {place}: "
            f"{bulk[place]:g} instead of {expected:g}"
        )


def factor(rank: int) -> int:
    """Return by what a rank multiplies the pattern: 1 to 4."""
    return 1 + rank % 4


def marks_at(step: int) -> int:
    """Return the mark of a step."""
    return 1 + (step % PERIOD * 619) % PERIOD


def tally_of_rounds(rounds: Sequence[Mapping[str, Any]], workers: int) -> NDArray[np.float64]:
    """Return the tallies, float64 [W], that the lines of `rounds.jsonl` make."""
    tally = np.zeros(workers)
    for line in rounds:
        counted = [rank for rank in line["ranks"] if rank not in line["refused"]]
        tally[counted] += 1 / max(1, len(counted))
    return tally
