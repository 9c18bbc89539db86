"""Measure how long after a step was applied a real browser has drawn its point on the status page.

    python -m benchmarks.page_delay [--steps 100] [--workers 2] [--json FILE]

A step counts as applied when the first worker has its answer, and as drawn when the frame is over in which the
curve of the loss got its point. Steps take irregular times, so that they come at any moment between two looks of
the page.
"""

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from benchmarks.browser import browser, look, wait_for
from benchmarks.contenders import Weighmaster
from benchmarks.processes import BenchmarkError, processes
from benchmarks.recovery_trials import NO_END, Answers
from benchmarks.tally import Tally
from benchmarks.tally_processes import SUMS, worker_command
from benchmarks.workload import Workload
from ps.monitoring.history import MOST_POINTS

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WITHIN_S = 2.0
"""Wanted: every step is drawn so soon after it was applied."""

PARAMETERS = 1000
PAUSES_S = (0.1, 1.5)
"""Shortest and longest computation of a worker: between two looks of the page are several steps, one or none."""

MOST_STEPS = MOST_POINTS - 100
"""Each step has a point of its own up to `MOST_POINTS`, and steps go on while the last one's is awaited."""

WATCH = """
const svg = document.querySelector("#loss-chart svg");
window.drawings = [];
new MutationObserver(() => {
  const points = (svg.querySelector(".curve").getAttribute("d").match(/[ML]/g) ?? []).length;
  requestAnimationFrame(() => requestAnimationFrame(() => drawings.push([points, performance.now()])));
}).observe(svg, { childList: true });
"""
"""Notes how many points the curve has whenever it is drawn, and when its frame is over: the next one begins."""


@dataclass(frozen=True)
class Drawing:
    """A drawing of the curve.

    Attributes:
        points: that it has: one for each step from the first.
        at_ns: when it was on the screen, CLOCK_MONOTONIC.
    """

    points: int
    at_ns: int


@dataclass(frozen=True)
class Delays:
    """What a run has shown.

    Attributes:
        applied_ns: when each step had been applied, from the first, CLOCK_MONOTONIC.
        drawings: of the curve, in order.
    """

    applied_ns: Sequence[int]
    drawings: Sequence[Drawing]

    @property
    def seconds(self) -> list[float]:
        """The time of each step until the first drawing that has it.

        Raises:
            BenchmarkError: a step was not drawn.
        """
        found, later = [], iter(self.drawings)
        drawing = next(later, None)
        for step, applied_ns in enumerate(self.applied_ns):
            while drawing is not None and drawing.points <= step:
                drawing = next(later, None)
            if drawing is None:
                raise BenchmarkError(f"step {step} was not drawn")
            found.append((drawing.at_ns - applied_ns) / 1e9)
        return found


def applied_times(answers: Iterable[Mapping[str, Any]], steps: int) -> list[int]:
    """Return when each of the first steps had been applied, ns: when the values after it first came to a worker.

    Args:
        answers: `step` of the values and `at_ns`, of all workers in any order.
        steps: how many.
    """
    first: dict[int, int] = {}
    for answer in answers:
        first[answer["step"]] = min(answer["at_ns"], first.get(answer["step"], answer["at_ns"]))
    return [first[step + 1] for step in range(steps)]


def is_soon_enough(delays_s: Sequence[float]) -> bool:
    """Say whether every step was drawn in time."""
    return max(delays_s) <= WITHIN_S


def report(delays_s: Sequence[float]) -> str:
    """Return a markdown table, seconds, and the verdict."""
    figures = (statistics.median(delays_s), float(np.quantile(delays_s, 0.95)), max(delays_s))
    lines = [
        "| samples | median, s | 95th percentile, s | largest, s |",
        "| ---: | ---: | ---: | ---: |",
        f"| {len(delays_s)} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |",
    ]
    verdict = "yes" if is_soon_enough(delays_s) else "no"
    return "\n".join([*lines, "", f"within {WITHIN_S:g} s: {verdict}"])


def drawings_of(page: "Chrome") -> list[Drawing]:
    """Return what has been drawn since `WATCH`, by this process's clock."""
    page_ms = page.execute_script("return performance.now()")
    # The way back counts as the page's: delays are told a few ms too long rather than too short.
    ahead_ns = time.monotonic_ns() - round(page_ms * 1e6)
    return [
        Drawing(points, round(at_ms * 1e6) + ahead_ns) for points, at_ms in page.execute_script("return drawings")
    ]


def measure(steps: int, workers: int) -> Delays:
    """Run once, with the page open from before the first step.

    Raises:
        BenchmarkError: there is no browser, a process failed, or a step was not drawn.
    """
    tally, names = Tally(workers, PARAMETERS), [f"worker{rank}" for rank in range(workers)]
    with processes("the page of a run") as running, browser() as page:
        port_file, page_port_file = running.directory / "port", running.directory / "page-port"
        command = Weighmaster().server_command(Workload(PARAMETERS, workers, NO_END, 1), port_file)
        running.start("server", [*command, *SUMS, "--status-port", "0", "--status-port-file", str(page_port_file)])
        port = running.await_port(port_file)
        look(page, f"http://127.0.0.1:{running.await_port(page_port_file)}/")
        page.execute_script(WATCH)
        for rank, name in enumerate(names):
            running.start(name, worker_command(tally, port, [rank], PAUSES_S[0], longest_pause_s=PAUSES_S[1]))
        answers = Answers(running, names)
        for step in range(steps):
            answers.wait(f"step {step}", partial(answers.all_have, step + 2, names))
        wait_for(page, f"drawings.some(([points]) => points >= {steps})")
        said = [answer for name in names for answer in answers.said[name]]
        return Delays(applied_times(said, steps), drawings_of(page))


@click.command()
@click.option("--steps", default=100, type=click.IntRange(30, MOST_STEPS), show_default=True, help="Samples.")
@click.option("--workers", default=2, type=click.IntRange(1), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here too.")
def main(steps: int, workers: int, json_file: Path | None) -> None:
    """Measure and print a table; exit code 1 if a step was drawn too late."""
    try:
        delays = measure(steps, workers)
        delays_s = delays.seconds
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    print(f"From a step's first answer until its point is on the screen, W={workers}.\n\n{report(delays_s)}")
    if json_file:
        json_file.write_text(json.dumps({"delays_s": delays_s, **asdict(delays)}, indent=1) + "\n")
    raise SystemExit(0 if is_soon_enough(delays_s) else 1)


if __name__ == "__main__":
    main()
