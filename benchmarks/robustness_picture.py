"""Draws what the rules save, fault by fault. Needs matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.robustness_cells import BAD, DATASETS, Cell
from benchmarks.robustness_report import TITLES
from benchmarks.robustness_results import Results
from benchmarks.robustness_tables import Average, averages, fault_order, standard, words

SERIES = (
    ("mean", 0, "mean", "x", "#999999"),
    ("median", 0, "median", "v", "#56b4e9"),
    ("krum", 0, "Krum", "s", "#e69f00"),
    ("cosine_trust", 10, "cosine trust, K=10", "D", "#cc79a7"),
    ("master", 10, "master, K=10", "o", "#000000"),
)
"""Rule, K, label, marker and colour; the colours are told apart by colour-blind readers too."""

SPREAD = 0.55
"""Width, in faults, over which the markers of one fault are spread, so that none hides another."""


def draw(results: Results, path: Path) -> None:
    """Write a picture with a panel for each data set and number of bad workers."""
    known = averages(standard(results))
    figure, grid = pyplot.subplots(
        len(BAD), len(DATASETS), figsize=(13, 7.5), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    kinds = {setup.fault for setup in known if setup.bad and setup != setup.clean}
    faults = sorted(kinds, key=fault_order)
    for row, bad in zip(grid, BAD, strict=True):
        for axes, dataset in zip(row, DATASETS, strict=True):
            _panel(axes, {s: a for s, a in known.items() if (s.dataset, s.bad) == (dataset, bad)}, faults)
            axes.set_title(f"{TITLES[dataset]}: {bad} of 5 workers bad", fontsize=10)
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy, %")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Axes, known: dict[Cell, Average], faults: list[str]) -> None:
    clean = next((average for setup, average in known.items() if setup == setup.clean), None)
    if clean is not None:
        axes.axhline(
            100 * clean.accuracy, color="#009e73", linewidth=1.5, label="clean: mean of the good workers only"
        )
    for number, (rule, k, label, marker, colour) in enumerate(SERIES):
        offset = SPREAD * (number / (len(SERIES) - 1) - 0.5)
        points = {s.fault: a.accuracy for s, a in known.items() if (s.rule, s.validator_every) == (rule, k)}
        places = [place for place, fault in enumerate(faults) if fault in points]
        axes.plot(
            [place + offset for place in places],
            [100 * points[faults[place]] for place in places],
            marker,
            color=colour,
            markersize=6,
            label=label,
        )
    axes.set_xticks(range(len(faults)), [words(fault) for fault in faults], rotation=40, ha="right", fontsize=9)
    axes.set_xlim(-0.6, len(faults) - 0.4)
    axes.set_ylim(-2, 102)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    for place in range(1, len(faults)):
        axes.axvline(place - 0.5, color="#eeeeee", linewidth=0.6, zorder=0)
