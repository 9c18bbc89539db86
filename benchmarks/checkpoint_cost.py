"""Measure what checkpoints cost: the time of a step while one is taken every 20 steps, against none.

    python -m benchmarks.checkpoint_cost [--pairs 20] [--checkpoint-dir DIR] [--json FILE]

Times are means over whole periods of 20 steps: one step in twenty pays for the copying, and a median would hide it.
Two designs:

- `alternate`: one run with a checkpoint every 40 steps. The 20 steps that begin with one are compared with the 20
  that follow. Valid only where writing has ended before those begin: this is checked for each pair.
- `runs`: short runs, with a checkpoint every 20 steps and with none, take turns. Valid always, and slower.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.checkpoint_place import file_system_of
from benchmarks.contenders import Weighmaster
from benchmarks.processes import POLL_S, BenchmarkError
from benchmarks.runs import Result, launched, result_of, run
from benchmarks.workload import Workload
from ps.checkpoints.directory import checkpoints_in

PERIOD = 20
"""Steps from one checkpoint to the next."""

WANTED = 1.10

SHORT_PERIODS = 4
"""Timed periods of a short run."""


@dataclass(frozen=True)
class Checkpointed(Weighmaster):
    """The product with checkpoints.

    Attributes:
        directory: in which each run makes one for its checkpoints.
        every: steps from one to the next.
    """

    name: str = "checkpointed"
    directory: str = ""
    every: int = PERIOD

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""
        own = ["--checkpoint-dir", self.directory, "--checkpoint-every", str(self.every), "--keep", "2"]
        return [*super().server_command(work, port_file), *own]


@dataclass(frozen=True)
class Pair:
    """Two periods that are compared: mean time of a step in ms, and whether the writing had ended in time."""

    with_ms: float
    without_ms: float
    is_valid: bool = True

    @property
    def ratio(self) -> float:
        """How many times as long a step takes with a checkpoint."""
        return self.with_ms / self.without_ms


def mean_ms(returned_ns: Sequence[int], first: int, last: int) -> float:
    """Return the mean time in ms of the steps from the return of values(first) to that of values(last)."""
    return (returned_ns[last - 1] - returned_ns[first - 1]) / (last - first) / 1e6


def alternating_pairs(returned_ns: Sequence[int], written_ns: dict[int, int]) -> list[Pair]:
    """Return the pairs of a run with a checkpoint every two periods; the first is warm-up.

    A checkpoint is taken when values(k) have been made, while they are sent: the period that pays for it begins
    with the return of values(k - 1).

    Args:
        returned_ns: when values(1), values(2), ... came back.
        written_ns: when the checkpoint of a step was seen to be whole.
    """
    pairs = []
    for step in range(2 * PERIOD, len(returned_ns) - 2 * PERIOD + 2, 2 * PERIOD):
        begin, middle, end = step - 1, step + PERIOD - 1, step + 2 * PERIOD - 1
        pairs.append(
            Pair(
                mean_ms(returned_ns, begin, middle),
                mean_ms(returned_ns, middle, end),
                written_ns.get(step, returned_ns[-1]) < returned_ns[middle - 1],
            )
        )
    return pairs


def alternate(parameters: int, workers: int, pairs: int, directory: Path) -> list[Pair]:
    """Measure all pairs in one run.

    Raises:
        BenchmarkError: a process failed.
    """
    work = Workload(parameters, workers, 2 * PERIOD * (pairs + 1), warmup=PERIOD)
    written_ns: dict[int, int] = {}
    with (
        TemporaryDirectory(dir=directory) as place,
        launched(Checkpointed(directory=place, every=2 * PERIOD), work) as running,
    ):
        while running.alive():
            for path in checkpoints_in(Path(place)):
                written_ns.setdefault(int(path.name.split("-")[1]), time.monotonic_ns())
            time.sleep(POLL_S)
        check_written(running.directory)
        return alternating_pairs(result_of(running, work).returned_ns, written_ns)


def taking_turns(parameters: int, workers: int, pairs: int, directory: Path) -> list[Pair]:
    """Measure each pair by two short runs.

    Raises:
        BenchmarkError: a process failed.
    """
    work = Workload(parameters, workers, PERIOD * (SHORT_PERIODS + 1), warmup=PERIOD - 1)
    measured = []
    for turn in range(pairs):
        with TemporaryDirectory(dir=directory) as place:
            contenders = [Checkpointed(directory=place), Weighmaster()]
            results = {own.name: run(own, work) for own in (contenders if turn % 2 else reversed(contenders))}
        with_ms, without_ms = (_mean_of(results[own.name]) for own in contenders)
        measured.append(Pair(with_ms, without_ms))
        print(f"pair {turn + 1}/{pairs}: {with_ms:.2f} ms with, {without_ms:.2f} ms without", flush=True)
    return measured


def _mean_of(result: Result) -> float:
    """Return the mean time of a step in ms over the periods that begin with checkpoints 1 to 4; see above."""
    first = PERIOD - 1
    return mean_ms(result.returned_ns, first, first + SHORT_PERIODS * PERIOD)


def check_written(directory: Path) -> None:
    """Check that no checkpoint of a run that has ended has failed.

    Raises:
        BenchmarkError: one has.
    """
    failures = json.loads((directory / "summary.json").read_text())["checkpoint_failures"]
    if failures:
        raise BenchmarkError(f"{failures} checkpoints could not be written: the figures would be of nothing")


@click.command()
@click.option("--parameters", default=25_000_000, type=click.IntRange(20), show_default=True)
@click.option("--workers", default=2, type=click.IntRange(1), show_default=True)
@click.option("--pairs", default=20, type=click.IntRange(1), show_default=True)
@click.option("--design", default="alternate", type=click.Choice(["alternate", "runs"]), show_default=True)
@click.option(
    "--checkpoint-dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where directories of checkpoints are made; by default the system's place for temporary files.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here too.")
def main(
    parameters: int, workers: int, pairs: int, design: str, directory: Path | None, json_file: Path | None
) -> None:
    """Measure; exit code 1 if checkpoints cost more than is wanted, or if the design was not valid."""
    measure = alternate if design == "alternate" else taking_turns
    try:
        with TemporaryDirectory(prefix="weighmaster-checkpoints-", dir=directory) as place:
            on = file_system_of(Path(place))
            measured = measure(parameters, workers, pairs, Path(place))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    ratios = [pair.ratio for pair in measured]
    late = sum(not pair.is_valid for pair in measured)
    middle = statistics.median(ratios)
    print(f"P={parameters:g}, W={workers}, Adam; {design}; checkpoints on {on}; mean times of {PERIOD} steps.\n")
    print("| what | median | smallest | largest |\n| --- | ---: | ---: | ---: |")
    for what, figures in (
        ("a step with a checkpoint every 20, ms", [pair.with_ms for pair in measured]),
        ("a step without, ms", [pair.without_ms for pair in measured]),
        (f"ratio, {len(ratios)} pairs", ratios),
    ):
        print(f"| {what} | {statistics.median(figures):.3f} | {min(figures):.3f} | {max(figures):.3f} |")
    if late:
        print(
            f"\nNOT VALID: {late} checkpoints were still being written when the period without began: --design runs"
        )
    print(f"\nwanted: at most {WANTED:.2f}: {'yes' if middle <= WANTED else 'NO'}")
    if json_file:
        rows = [asdict(pair) | {"ratio": pair.ratio} for pair in measured]
        json_file.write_text(json.dumps({"design": design, "file_system": on, "pairs": rows}, indent=1) + "\n")
    raise SystemExit(0 if middle <= WANTED and not late else 1)


if __name__ == "__main__":
    main()
