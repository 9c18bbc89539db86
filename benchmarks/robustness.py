"""Train with bad workers under every aggregation rule, with real processes, and measure what each rule saves.

    python -m benchmarks.robustness --claims --json FILE       what the project claims of its master, 3 seeds
    python -m benchmarks.robustness --rules mean,krum --faults sign_flip --bad 2 --seeds 11 --json FILE
    python -m benchmarks.robustness --report --json FILE       write tables and picture for the docs

`python -m ps` over loopback sockets, five worker processes and one for the validator, which compute the gradients
of a small perceptron in NumPy. Cells that are in the file are not run again.
"""

import queue
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import click

from benchmarks.processes import ROOT, BenchmarkError
from benchmarks.robustness_cells import (
    BAD,
    DATASETS,
    EVERY,
    FAULTS,
    RULES,
    SEEDS,
    TENSORFLOW,
    TRUSTED,
    WORKERS,
    Cell,
    Choice,
    claims,
    grid,
    tensorflow_pairs,
)
from benchmarks.robustness_data import load, save
from benchmarks.robustness_lane import Lane
from benchmarks.robustness_results import Outcome, ResultFile, Results
from benchmarks.robustness_tensorflow import TensorFlowLane

DOCS = ROOT / "docs"
FRAGMENT, PICTURE = "robustness.md", "robustness.png"


@contextmanager
def lanes(number: int, cells: Sequence[Cell], data_dir: Path | None) -> Iterator[list[Lane]]:
    """Make lanes with the data that the cells need; all their processes are ended in the end."""
    with tempfile.TemporaryDirectory(prefix="weighmaster-bench-") as directory:
        data = Path(directory)
        for name in sorted({cell.dataset for cell in cells}):
            save(load(name, data_dir), data / name)
        kind = TensorFlowLane if any(cell.framework == TENSORFLOW for cell in cells) else Lane
        made = [kind(data, data_dir) for _ in range(number)]
        try:
            yield made
        finally:
            for lane in made:
                lane.close()


def run_all(cells: Sequence[Cell], file: ResultFile, number: int, data_dir: Path | None) -> list[str]:
    """Run what is not in the file yet, so many cells at a time; return what failed, in words."""
    todo = [cell for cell in cells if cell not in file.results]
    print(f"{len(cells)} cells, {len(cells) - len(todo)} of them known", flush=True)
    failures: list[str] = []
    if not todo:
        return failures
    start = time.monotonic()
    with lanes(number, todo, data_dir) as made, ThreadPoolExecutor(number) as pool:
        free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in made:
            free.put(lane)
        running: dict[Future[Outcome], Cell] = {pool.submit(_run_one, cell, free): cell for cell in todo}
        try:
            for finished, future in enumerate(as_completed(running), 1):
                cell = running[future]
                told = _took(file, cell, future, failures)
                left_s = (time.monotonic() - start) / finished * (len(todo) - finished)
                print(f"[{finished}/{len(todo)}] {cell.describe()}: {told}; {duration(left_s)} left", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for lane in made:
                lane.close()
            raise
    print(f"{len(todo)} cells in {duration(time.monotonic() - start)}")
    return failures


def _run_one(cell: Cell, free: "queue.SimpleQueue[Lane]") -> Outcome:
    lane = free.get()
    try:
        return lane.run(cell)
    finally:
        free.put(lane)


def _took(file: ResultFile, cell: Cell, future: "Future[Outcome]", failures: list[str]) -> str:
    """Keep a finished cell; return what to say of it."""
    try:
        outcome = future.result()
    except BenchmarkError as error:
        failures.append(f"{cell.describe()}: {error}")
        return f"FAILED, {error}"
    file.add(cell, outcome)
    clean = file.results.get(cell.clean)
    compared = "" if clean is None or cell == cell.clean else f", clean {clean.accuracy:.4f}"
    ended = "" if outcome.done else ", diverged"
    return f"{outcome.accuracy:.4f}{compared}{ended} ({outcome.seconds:.1f} s)"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def report(results: Results, directory: Path) -> None:
    """Write the tables and the picture.

    Raises:
        ClickException: matplotlib is not installed.
    """
    from benchmarks.robustness_report import markdown

    try:
        from benchmarks.robustness_picture import draw
    except ModuleNotFoundError as error:
        raise click.ClickException(
            "the picture needs matplotlib: .venv/bin/pip install -e '.[benchmarks]'"
        ) from error
    (directory / FRAGMENT).write_text(markdown(results))
    draw(results, directory / PICTURE)
    print(f"wrote {directory / FRAGMENT} and {directory / PICTURE}")


class _List(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas: any text, or whole numbers from 0 on."""

    def __init__(self, name: str, allowed: Sequence[str] = (), numbers: bool = False) -> None:
        self.name = name
        self._allowed, self._numbers = allowed, numbers

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        wrong = [part for part in parts if self._allowed and part not in self._allowed]
        if wrong:
            self.fail(f"{wrong[0]!r} is not one of {', '.join(self._allowed)}", param, ctx)
        if self._numbers and not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r} is not a list of whole numbers such as 0,2,4", param, ctx)
        return tuple(int(part) for part in parts) if self._numbers else tuple(parts)


_NUMBERS = _List("N,N", numbers=True)


@click.command()
@click.option("--claims", "only_claims", is_flag=True, help="The cells behind what the project claims.")
@click.option("--tensorflow-check", is_flag=True, help="A few cells with NumPy and with TensorFlow workers.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing; write tables and picture.")
@click.option("--rules", type=_List("NAME,NAME", RULES), default=RULES, help="Default: all.")
@click.option("--faults", type=_List("NAME,NAME"), default=FAULTS, help="Default: all; A+B mixes two kinds.")
@click.option("--bad", type=_NUMBERS, default=(0, *BAD), help="Numbers of bad workers.", show_default=True)
@click.option("--validator-every", "every", type=_NUMBERS, default=EVERY, help="0: none.", show_default=True)
@click.option("--datasets", type=_List("NAME,NAME", DATASETS), default=DATASETS, show_default=True)
@click.option("--seeds", type=_NUMBERS, default=SEEDS, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=WORKERS, show_default=True)
@click.option("--trusted", type=click.IntRange(1), default=TRUSTED, help="Trusted examples.", show_default=True)
@click.option("--lanes", "number", type=click.IntRange(1), default=2, help="Cells at a time.", show_default=True)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the IDX files of Fashion-MNIST are.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="File of finished cells, read and appended.")
@click.option("--report-dir", type=click.Path(path_type=Path), default=DOCS, help="For --report.  [default: docs]")
def main(
    only_claims: bool, tensorflow_check: bool, only_report: bool, number: int, data_dir: Path | None,
    path: Path | None, report_dir: Path, **chosen: Sequence[int] | Sequence[str] | int,
) -> None:  # fmt: skip
    """Measure aggregation rules against bad workers, with real processes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        file = ResultFile(path)
        if only_report:
            return report(file.results, report_dir)
        choice = Choice(**chosen)  # type: ignore[arg-type]
        if tensorflow_check:
            cells, number = tensorflow_pairs(choice.seeds[:1], choice.datasets), 1
        else:
            cells = claims(choice.seeds, choice.datasets) if only_claims else grid(choice)
        failures = run_all(cells, file, number, data_dir)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    if failures:
        raise click.ClickException(f"{len(failures)} cells failed; the first: {failures[0]}")


if __name__ == "__main__":
    main()
