"""Measure what a TensorFlow worker costs per step beyond `session.run` and beyond waiting for the server.

    python -m benchmarks.worker_overhead [--dataset fashion_mnist] [--batch-size 100] [--steps 300]

The worker is the real command line in a process whose clocks are read around `session.run`, around sending a push,
around the wait for the first bytes of the answer, and around receiving its values. What is left of a step is
Python between these. Overhead is everything but `session.run` and the wait: moving the bytes counts.
"""

import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.contenders import Weighmaster
from benchmarks.processes import BenchmarkError
from benchmarks.runs import launched, report_of
from benchmarks.workload import Workload

OUTSIDE = ("session.run", "waiting")
"""Phases that are not the worker's overhead."""

PHASES = (*OUTSIDE, "sending", "receiving", "python")


@dataclass(frozen=True)
class Trained(Weighmaster):
    """The product with a real model in rank 0's place of the pre-made gradients."""

    dataset: str = "fashion_mnist"
    batch_size: int = 100
    threads: int = 1

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker, clocked."""
        options = ["--ps", f"127.0.0.1:{port}", "--rank", str(rank), "--model", "mlp", "--dataset", self.dataset]
        options += ["--batch-size", str(self.batch_size), "--threads", str(self.threads)]
        return [sys.executable, "-m", "benchmarks.worker_overhead", "clocked", *options]


class Clocks:
    """Adds up the time in each phase, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.returned_ns: list[int] = []
        self._current: defaultdict[str, int] = defaultdict(int)

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time added to a phase."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.monotonic_ns()
            try:
                return function(*arguments, **named)
            finally:
                self._current[phase] += time.monotonic_ns() - start

        return timed

    def closing_step(self, push: Callable[..., Any]) -> Callable[..., Any]:
        """Return `push` such that its return ends a step."""

        @functools.wraps(push)
        def counted(*arguments: Any, **named: Any) -> Any:
            update = push(*arguments, **named)
            self.returned_ns.append(time.monotonic_ns())
            self.steps.append(dict(self._current))
            self._current.clear()
            return update

        return counted

    def report(self) -> dict[str, list[int]]:
        """Return when steps returned, and from the second on the ns of each phase."""
        spans = [after - before for before, after in zip(self.returned_ns, self.returned_ns[1:], strict=False)]
        phases: dict[str, list[int]] = {
            phase: [step.get(phase, 0) for step in self.steps[1:]] for phase in PHASES[:-1]
        }
        phases["python"] = [span - sum(step.values()) for span, step in zip(spans, self.steps[1:], strict=True)]
        return {"returned_ns": self.returned_ns, **phases}


def run_clocked(options: list[str]) -> int:
    """Run the worker's command line with clocks around its parts; prints their report as the last line."""
    import tensorflow as tf

    from protocol.link import Link
    from worker.__main__ import main as worker_main
    from worker.client import Server

    clocks = Clocks()
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (tf.compat.v1.Session, "run", clocks.around("session.run", tf.compat.v1.Session.run)),
        (Link, "send", clocks.around("sending", Link.send)),
        (Link, "receive", clocks.around("waiting", Link.receive)),
        (Link, "receive_payload", clocks.around("receiving", Link.receive_payload)),
        (Server, "push_buffers", clocks.closing_step(Server.push_buffers)),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    code = worker_main(options)
    print(json.dumps(clocks.report()))
    return code


def measure(contender: Trained, work: Workload) -> dict[str, float]:
    """Run once; returns the median ms per step of each phase, of `overhead` and of the whole `step`.

    Medians are taken of each row by itself, so phases need not add up to the step exactly.

    Raises:
        BenchmarkError: a process failed.
    """
    with launched(contender, work) as running:
        running.wait()
        report = report_of(running)
    columns = {phase: report[phase][work.warmup :] for phase in PHASES}
    columns["overhead"] = [
        sum(parts) for parts in zip(*(columns[phase] for phase in PHASES if phase not in OUTSIDE), strict=True)
    ]
    columns["step"] = [sum(parts) for parts in zip(*(columns[phase] for phase in PHASES), strict=True)]
    return {name: statistics.median(column) / 1e6 for name, column in columns.items()}


@click.command()
@click.option("--dataset", default="fashion_mnist", show_default=True)
@click.option("--batch-size", default=100, type=click.IntRange(1), show_default=True)
@click.option("--workers", default=1, type=click.IntRange(1), show_default=True)
@click.option("--steps", default=300, type=click.IntRange(20), show_default=True)
@click.option("--threads", default=1, type=click.IntRange(1), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(dataset: str, batch_size: int, workers: int, steps: int, threads: int, json_file: Path | None) -> None:
    """Measure a worker's overhead per step."""
    contender = Trained(dataset=dataset, batch_size=batch_size, threads=threads)
    work = Workload(parameters=1_000_000, workers=workers, steps=steps, warmup=steps // 10)
    try:
        figures = measure(contender, work)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    print(
        f"mlp on {dataset}, batch {batch_size}, {workers} workers, median of {steps - work.warmup} steps in ms:\n"
    )
    print("| part of a step | ms |\n| --- | --- |")
    for name, value in figures.items():
        print(f"| {name} | {value:.3f} |")
    print("\noverhead = sending + receiving + python")
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["clocked"]:
        sys.exit(run_clocked(sys.argv[2:]))
    main()
