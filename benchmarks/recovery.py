"""Measure how soon a run goes on: after a worker is lost, and after the server has died and is started again.

    python -m benchmarks.recovery [--trials 5] [--parameters 25000000] [--json FILE]

Lost worker: the time until the last of the others goes on, which is the end of the longer of its first two waits
for an answer. Server: the time from the start of its process to the first new step; reading the checkpoint is also
measured by itself.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.processes import BenchmarkError
from benchmarks.recovery_trials import Loss, Restart, losses, restarts

MODES = {
    "shrink": ("--on-worker-loss", "shrink"),
    "quorum": ("--quorum", "2"),
    "async": ("--consistency", "async"),
    "ssp": ("--consistency", "ssp", "--ssp-bound", "3"),
}

KILLED_S = 1.0
"""Wanted: the others go on within so long, and one step."""

RESTARTED_S = 3.0
"""Wanted: the first new step comes within so long, and the reading of the checkpoint."""


def spread(figures: Sequence[float]) -> str:
    """Return median, smallest and largest, of seconds."""
    return f"{statistics.median(figures):.3f} ({min(figures):.3f}–{max(figures):.3f})"  # noqa: RUF001


def wanted_s(name: str, trials: Sequence[Loss], heartbeat_timeout_s: float) -> float:
    """Return within how many seconds the others must go on, the median of the trials of `mode/what`."""
    step_s = statistics.median(trial.step_s for trial in trials)
    return step_s + (KILLED_S if name.endswith("kill -9") else heartbeat_timeout_s)


def go_on_in_time(name: str, trials: Sequence[Loss], heartbeat_timeout_s: float) -> bool:
    """Say whether they do."""
    return statistics.median(trial.seconds for trial in trials) <= wanted_s(name, trials, heartbeat_timeout_s)


def back_in_time(trials: Sequence[Restart]) -> bool:
    """Say whether the first new step comes in time after a restart, the median of the trials."""
    reading_s = statistics.median(trial.reading_s for trial in trials)
    return statistics.median(trial.first_step_s for trial in trials) <= RESTARTED_S + reading_s


def losses_table(rows: dict[str, list[Loss]], heartbeat_timeout_s: float) -> str:
    """Return a markdown table, seconds."""
    lines = [
        "| mode | what | others go on after, s | wanted: up to, s | a step before, ms | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for name, trials in rows.items():
        mode, what = name.split("/")
        step_ms = statistics.median(trial.step_s for trial in trials) * 1e3
        limit_s = wanted_s(name, trials, heartbeat_timeout_s)
        holds = "yes" if go_on_in_time(name, trials, heartbeat_timeout_s) else "NO"
        seconds = spread([trial.seconds for trial in trials])
        lines.append(f"| {mode} | {what} | {seconds} | {limit_s:.2f} | {step_ms:.1f} | {holds} |")
    return "\n".join(lines)


def restarts_table(trials: Sequence[Restart]) -> str:
    """Return a markdown table, seconds from the start of the process."""
    reading_s = statistics.median(trial.reading_s for trial in trials)
    figures = {
        "server listens": [trial.listening_s for trial in trials],
        "first worker is back, with the restored values": [trial.first_values_s for trial in trials],
        "first new step": [trial.first_step_s for trial in trials],
        "reading the checkpoint, by itself": [trial.reading_s for trial in trials],
        "a step before": [trial.step_s for trial in trials],
    }
    lines = [
        "| what | s |",
        "| --- | ---: |",
        *(f"| {what} | {spread(times)} |" for what, times in figures.items()),
    ]
    holds = "yes" if back_in_time(trials) else "NO"
    return "\n".join([*lines, "", f"wanted: first new step within {RESTARTED_S + reading_s:.2f} s: {holds}"])


@click.command()
@click.option("--trials", default=5, type=click.IntRange(1), show_default=True)
@click.option("--parameters", default=25_000_000, type=click.IntRange(1), show_default=True, help="Of (b).")
@click.option("--only", type=click.Choice(["losses", "restarts"]), help="One half only.")
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--heartbeat-timeout", "timeout_s", default=5.0, show_default=True)
@click.option(
    "--checkpoint-dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where directories of checkpoints are made; by default the run's own, which is temporary.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here too.")
def main(
    trials: int,
    parameters: int,
    only: str | None,
    modes: str,
    timeout_s: float,
    directory: Path | None,
    json_file: Path | None,
) -> None:
    """Measure and print tables: medians, smallest and largest. Exit code 1 if a median is above what is wanted."""
    lost: dict[str, list[Loss]] = {}
    back: list[Restart] = []
    try:
        if only != "restarts":
            for mode in modes.split(","):
                for what in ("kill -9", "link cut"):
                    lost[f"{mode}/{what}"] = []
                    for loss in losses(MODES[mode], what == "link cut", timeout_s, trials):
                        lost[f"{mode}/{what}"].append(loss)
                        say(f"{mode}, {what}: {loss.seconds:.3f} s, steps of {loss.step_s * 1e3:.1f} ms")
        if only != "losses":
            for restart in restarts(parameters, trials, directory):
                back.append(restart)
                say(f"restart: first new step {restart.first_step_s:.3f} s, reading {restart.reading_s:.3f} s")
    except (BenchmarkError, KeyError) as error:
        raise click.ClickException(str(error)) from error
    print(f"Median (smallest–largest) of {trials}, heartbeat timeout {timeout_s:g} s.\n")  # noqa: RUF001
    if lost:
        print(losses_table(lost, timeout_s), end="\n\n")
    if back:
        print(f"P={parameters:g}, W=2, Adam, checkpoints on {back[0].file_system}\n\n{restarts_table(back)}")
    if json_file:
        figures = {
            "losses": {name: [vars(trial) for trial in rows] for name, rows in lost.items()},
            "restarts": [vars(trial) for trial in back],
        }
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    on_time = [go_on_in_time(name, trials_of, timeout_s) for name, trials_of in lost.items()]
    raise SystemExit(0 if all(on_time) and (not back or back_in_time(back)) else 1)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
