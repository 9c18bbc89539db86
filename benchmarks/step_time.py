"""Measure the time of a synchronous step against what the sockets allow and against what people write.

    python -m benchmarks.step_time [--sizes 25000000,1000000] [--workers 1,2,4] [--rounds 5] [--json FILE]

The contenders take turns within each round, in rotated order, so that a change of the machine's load meets all of
them; ratios compare runs of the same round only.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contenders import Contender, contender_of
from benchmarks.processes import BenchmarkError
from benchmarks.runs import Result, run
from benchmarks.workload import Workload

MOVED_PARAMETERS = 6e8
"""Parameters that a timed run moves per worker when --steps is not given: 24 steps of 25e6, 600 of 1e6."""

CHECKSUM_TOLERANCE = 1e-4
"""Relative; contenders round differently, but those that apply Adam end with the same values."""


def numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def specs(text: str) -> list[Contender]:
    try:
        return [contender_of(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def option_of(kind: Callable[[str], Any]) -> Any:
    return lambda context, parameter, text: kind(text)


def workload(parameters: int, workers: int, steps: int | None) -> Workload:
    """Choose the steps of a run: `steps` timed ones, or as many as its size allows, after a warm-up."""
    timed = steps or max(10, min(600, round(MOVED_PARAMETERS / parameters)))
    warmup = max(3, timed // 10)
    return Workload(parameters, workers, timed + warmup, warmup)


@dataclass
class Cell:
    """All runs of one size and number of workers: per contender and round, one figure in ms.

    Attributes:
        quantile: of a run's steps; 0.5 makes the figure the median.
        step_ms: the figures by contender, in order of the rounds.
        foreign_cpus: of every run.
    """

    parameters: int
    workers: int
    quantile: float
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    foreign_cpus: list[float] = field(default_factory=list)

    def add(self, name: str, result: Result) -> None:
        """Note the figure of a run."""
        self.step_ms.setdefault(name, []).append(float(np.quantile(result.step_ns, self.quantile)) / 1e6)
        self.foreign_cpus.append(result.foreign_cpus)

    def ratios(self, name: str, base: str) -> list[float]:
        """Return, round by round, how many times as long as `base` a step of `name` takes."""
        return [mine / theirs for mine, theirs in zip(self.step_ms[name], self.step_ms[base], strict=True)]


def measure(contenders: Sequence[Contender], work: Workload, rounds: int, quantile: float) -> Cell:
    """Let the contenders take turns for some rounds.

    Raises:
        BenchmarkError: a process failed, or two contenders that do the work end with different values.
    """
    cell = Cell(work.parameters, work.workers, quantile)
    for turn in range(rounds):
        results: dict[str, Result] = {}
        shift = turn % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            results[contender.name] = run(contender, work)
        check_same_values(results)
        for contender in contenders:
            cell.add(contender.name, results[contender.name])
        figures = ", ".join(f"{name} {times[-1]:.2f}" for name, times in cell.step_ms.items())
        print(
            f"P={work.parameters:g} W={work.workers} round {turn + 1}/{rounds}: {figures} ms",
            file=sys.stderr,
            flush=True,
        )
    return cell


def check_same_values(results: dict[str, Result]) -> None:
    sums = {name: result.checksum for name, result in results.items() if result.checksum is not None}
    if len(sums) < 2:
        return
    low, high = min(sums.values()), max(sums.values())
    if high - low > CHECKSUM_TOLERANCE * max(abs(low), abs(high)):
        raise BenchmarkError(f"the contenders did not do the same work: checksums {sums}")


def spread(figures: Sequence[float], digits: int) -> str:
    """Return the median, then the smallest and the largest."""
    middle, low, high = statistics.median(figures), min(figures), max(figures)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"  # noqa: RUF001


def table(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Return a markdown table: step times in ms, and ratios to the first contender in the same round."""
    base = names[0]
    heads = [
        "P",
        "W",
        *(f"{name}, ms" for name in names),
        *(f"{name} / {base}" for name in names[1:]),
        "other load",
    ]
    if {"weighmaster", "pickle"}.issubset(names):
        heads.insert(-1, "pickle / weighmaster")
    rows = [heads, ["---"] * len(heads)]
    for cell in cells:
        row = [f"{cell.parameters:g}", str(cell.workers)]
        row += [spread(cell.step_ms[name], 2) for name in names]
        row += [spread(cell.ratios(name, base), 2) for name in names[1:]]
        if "pickle / weighmaster" in heads:
            row.append(spread(cell.ratios("pickle", "weighmaster"), 1))
        row.append(spread(cell.foreign_cpus, 2))
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


@click.command()
@click.option("--sizes", default="25000000,1000000", callback=option_of(numbers), show_default=True)
@click.option("--workers", default="1,2,4", callback=option_of(numbers), show_default=True)
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True)
@click.option("--steps", type=click.IntRange(2), help="Timed steps of a run; by default chosen by size.")
@click.option(
    "--contenders",
    default="wire,weighmaster,pickle",
    callback=option_of(specs),
    show_default=True,
    help="The first is what ratios refer to; wire takes settings, as in wire:block=262144:congestion=bbr.",
)
@click.option(
    "--quantile",
    default=0.5,
    type=click.FloatRange(0, 1),
    show_default=True,
    help="Which step of a run counts: 0.5 is the median, 0.1 shows through the load of a busy machine.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here too.")
def main(
    sizes: list[int],
    workers: list[int],
    rounds: int,
    steps: int | None,
    contenders: list[Contender],
    quantile: float,
    json_file: Path | None,
) -> None:
    """Measure step times and print a table."""
    names = [contender.name for contender in contenders]
    try:
        cells = [
            measure(contenders, workload(parameters, count, steps), rounds, quantile)
            for parameters in sizes
            for count in workers
        ]
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    step = "Median step" if quantile == 0.5 else f"Step at quantile {quantile:g}"
    print(f"{step} in ms, median (smallest–largest) of {rounds} rounds; ", end="")  # noqa: RUF001
    print(f"{os.cpu_count()} processors, {platform.system()} {platform.release()}. ", end="")
    print("Other load: processors kept busy by other programs.\n")
    print(table(cells, names))
    if json_file:
        rows = [
            {
                "parameters": cell.parameters,
                "workers": cell.workers,
                "step_ms": cell.step_ms,
                "ratios": {name: cell.ratios(name, names[0]) for name in names},
                "foreign_cpus": cell.foreign_cpus,
            }
            for cell in cells
        ]
        json_file.write_text(
            json.dumps({"processors": os.cpu_count(), "quantile": quantile, "cells": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
