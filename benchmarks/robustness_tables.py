"""From finished cells to figures: averages over seeds, gaps, differences, muting times. Pure.

A *setup* is a cell without its seed: `setup_of(cell)`, a cell whose seed is 0. Points are percentage points of
accuracy. Whatever is compared is compared seed by seed, on the seeds that both sides have, and then averaged.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from benchmarks.robustness_cells import FAULTS, NUMPY, TENSORFLOW, TRUSTED, WORKERS, Cell
from benchmarks.robustness_results import Outcome, Results

Points = dict[Cell, float]


def setup_of(cell: Cell) -> Cell:
    """Return the cell without its seed."""
    return replace(cell, seed=0)


def standard(results: Results) -> Results:
    """Keep what the claims are about: five workers in NumPy, 100 trusted examples, one kind of fault at a time."""
    return {
        cell: outcome
        for cell, outcome in results.items()
        if (cell.workers, cell.trusted, cell.framework) == (WORKERS, TRUSTED, NUMPY) and "+" not in cell.fault
    }


@dataclass(frozen=True)
class Average:
    """Mean accuracy over seeds, how many there were, and how many of the runs diverged."""

    accuracy: float
    seeds: int
    diverged: int


def averages(results: Results) -> dict[Cell, Average]:
    """Return the mean over seeds of each setup."""
    groups: dict[Cell, list[Outcome]] = defaultdict(list)
    for cell, outcome in results.items():
        groups[setup_of(cell)].append(outcome)
    return {
        setup: Average(mean(o.accuracy for o in group), len(group), sum(not o.done for o in group))
        for setup, group in groups.items()
    }


def compared(results: Results, other: Callable[[Cell], Cell]) -> Points:
    """Return, by setup, by how many points a cell is above the one that `other` names for it."""
    groups: dict[Cell, list[float]] = defaultdict(list)
    for cell, outcome in results.items():
        against = results.get(other(cell))
        if against is not None and other(cell) != cell:
            groups[setup_of(cell)].append(100 * (outcome.accuracy - against.accuracy))
    return {setup: mean(group) for setup, group in groups.items()}


def gaps(results: Results) -> Points:
    """Return how many points each setup is below its clean run; negative if above."""
    return {setup: -points for setup, points in compared(results, lambda cell: cell.clean).items()}


def differences(results: Results, rule: str, other: str) -> Points:
    """Return how many points `rule` is above `other`, by setup of `rule`."""
    ours = compared(results, lambda cell: replace(cell, rule=other))
    return {setup: points for setup, points in ours.items() if setup.rule == rule}


def framework_differences(results: Results) -> Points:
    """Return, by cell, how many points TensorFlow workers are above NumPy workers at the final values."""
    pairs = {cell: replace(cell, framework=NUMPY) for cell in results if cell.framework == TENSORFLOW}
    return {
        cell: 100 * (results[cell].final_accuracy - results[other].final_accuracy)
        for cell, other in pairs.items()
        if other in results
    }


@dataclass(frozen=True)
class Mutings:
    """What `Muting` says of one setup, one entry per seed."""

    first: tuple[int | None, ...]
    lasting: tuple[int | None, ...]
    mean_bad_weight: float


def mutings(results: Results) -> dict[Cell, Mutings]:
    """Return how sleepers were muted, by setup, for the rules that give weights by trust."""
    groups: dict[Cell, dict[int, Outcome]] = defaultdict(dict)
    for cell, outcome in results.items():
        if cell.fault == "sleeper" and cell.validator_every and outcome.muting is not None:
            groups[setup_of(cell)][cell.seed] = outcome
    found = {}
    for setup, group in groups.items():
        known = [group[seed].muting for seed in sorted(group)]
        muted = [muting for muting in known if muting is not None]
        found[setup] = Mutings(
            tuple(m.first for m in muted), tuple(m.lasting for m in muted), mean(m.mean_bad_weight for m in muted)
        )
    return found


# ---- words ---------------------------------------------------------------------------------------------


def sorted_by_points(points: Mapping[Cell, float]) -> list[tuple[Cell, float]]:
    """Return setups from the fewest points to the most."""
    return sorted(points.items(), key=lambda item: item[1])


def name_of(setup: Cell) -> str:
    """Return where in the grid a setup is, without its rule."""
    kind = f"{setup.bad} {words(setup.fault)}" if setup.bad else "nobody bad"
    return f"{setup.dataset}, {kind}" + ("" if setup.alike else ", unlike shards")


def words(fault: str) -> str:
    """Return the name of a fault as it reads in a table."""
    return fault.replace("_", " ")


def fault_order(fault: str) -> tuple[int, str]:
    """Return what sorts faults as they are listed, others after them."""
    return (FAULTS.index(fault) if fault in FAULTS else len(FAULTS), fault)


def rounds_of(times: Iterable[int | None]) -> str:
    """Return muting times of several seeds: `3, 4, never`."""
    return ", ".join("never" if time is None else str(time) for time in times)


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    known = list(values)
    return sum(known) / len(known)


def decimal(points: float, digits: int = 1, sign: bool = False) -> str:
    """Return points with decimals; what rounds to zero has no minus."""
    rounded = round(points, digits) + 0.0
    return f"{rounded:+.{digits}f}" if sign else f"{rounded:.{digits}f}"
