"""Let 64 workers share one server: whether all values are right, nobody starves, and what it costs the server.

    python -m benchmarks.many_workers [--workers 64] [--steps 200] [--parameters 100000] [--json FILE]

Each worker has a connection of its own; some share a process. Every answer is checked, element by element.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.contenders import Weighmaster
from benchmarks.processes import BenchmarkError, Processes, processes
from benchmarks.recovery_trials import step_times
from benchmarks.server_memory import SAMPLE_S, memory_bytes
from benchmarks.tally import Counting, Tally
from benchmarks.tally_processes import SUMS, Lines, worker_command
from benchmarks.workload import Workload

STARVED = 2.0
"""Wanted: no worker has fewer pushes than the busiest one has, divided by this; and the median step of the slowest
takes no longer than that of all, times this."""


@dataclass(frozen=True)
class Shares:
    """What each worker got, and what it cost.

    Attributes:
        pushes: of each rank.
        step_ms: median time of a step, over all ranks.
        slowest_ms: median time of a step of the rank for which it is longest.
        longest_ms: longest time that any rank has ever waited for an answer.
        apart_ms: median over the steps of the time from the first rank's answer to the last one's; None in async.
        threads: of the server, at most.
        descriptors: of the server, at most.
        peak_bytes: memory of the server, at most.
    """

    pushes: tuple[int, ...]
    step_ms: float
    slowest_ms: float
    longest_ms: float
    apart_ms: float | None
    threads: int
    descriptors: int
    peak_bytes: int

    @property
    def is_fair(self) -> bool:
        """Whether nobody starves."""
        return max(self.pushes) <= STARVED * min(self.pushes) and self.slowest_ms <= STARVED * self.step_ms


def shares_of(times_ns: Sequence[Sequence[int]], threads: int, descriptors: int, peak_bytes: int) -> Shares:
    """Make figures of the times at which each rank had its answers; the first is that of a pull."""
    gaps = [step_times(times, skipped=1) for times in times_ns]
    medians = [statistics.median(own) for own in gaps]
    together = len({len(times) for times in times_ns}) == 1
    apart = np.ptp(np.array(times_ns), axis=0)[1:] if together else None
    return Shares(
        pushes=tuple(len(times) - 1 for times in times_ns),
        step_ms=statistics.median(medians) / 1e6,
        slowest_ms=max(medians) / 1e6,
        longest_ms=max(max(own) for own in gaps) / 1e6,
        apart_ms=None if apart is None else float(np.median(apart)) / 1e6,
        threads=threads,
        descriptors=descriptors,
        peak_bytes=peak_bytes,
    )


def watched(running: Processes) -> tuple[int, int, int]:
    """Wait until all have ended; return the largest threads, descriptors and memory (bytes) of the server.

    Raises:
        BenchmarkError: a process failed: an answer was wrong, perhaps.
    """
    proc, most = Path(f"/proc/{running.started['server'].pid}"), np.zeros(3, np.int64)
    while running.alive():
        try:
            memory = memory_bytes(int(proc.name))
            descriptors = sum(1 for _ in (proc / "fd").iterdir())
            threads = sum(1 for _ in (proc / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            memory = None
        if memory is not None:
            most = np.maximum(most, [threads, descriptors, memory[1]])
        time.sleep(SAMPLE_S)
    return int(most[0]), int(most[1]), int(most[2])


def measure(work: Workload, consistency: str, shared_by: int) -> Shares:
    """Run once.

    Args:
        work: steps of each worker.
        consistency: of the server: sync or async.
        shared_by: workers in one process.

    Raises:
        BenchmarkError: a process failed, or a worker got a wrong answer.
    """
    is_sync = consistency == "sync"
    tally = Tally(work.workers, work.parameters, Counting.ALL if is_sync else Counting.PUSHES, "float32")
    with processes(f"{work.workers} workers, {consistency}") as running:
        port_file = running.directory / "port"
        command = Weighmaster().server_command(work, port_file)
        steps = work.steps if is_sync else work.steps * work.workers
        running.start("server", [*command, *SUMS, "--steps", str(steps), "--consistency", consistency])
        port = running.await_port(port_file)
        groups = [range(at, min(at + shared_by, work.workers)) for at in range(0, work.workers, shared_by)]
        for number, ranks in enumerate(groups):
            running.start(f"workers{number}", worker_command(tally, port, ranks))
        threads, descriptors, peak_bytes = watched(running)
        times: list[list[int]] = [[] for _ in range(work.workers)]
        for number in range(len(groups)):
            for line in Lines(running.directory / f"workers{number}.out").new():
                times[line["rank"]].append(line["at_ns"])
    return shares_of(times, threads, descriptors, peak_bytes)


def row(consistency: str, shares: Shares) -> str:
    """Return a line of the table."""
    pushes = f"{min(shares.pushes)} to {max(shares.pushes)}"
    figures = [shares.step_ms, shares.slowest_ms, shares.longest_ms, shares.apart_ms]
    cells = [consistency, pushes, *("" if figure is None else f"{figure:.1f}" for figure in figures)]
    cells += [str(shares.threads), str(shares.descriptors), f"{shares.peak_bytes / 1e6:.0f}"]
    return "| " + " | ".join([*cells, "yes" if shares.is_fair else "NO"]) + " |"


@click.command()
@click.option("--workers", default=64, type=click.IntRange(1), show_default=True, help="A power of two.")
@click.option("--steps", default=200, type=click.IntRange(5), show_default=True, help="Of each worker.")
@click.option("--parameters", default=100_000, type=click.IntRange(20), show_default=True, help="float32.")
@click.option("--modes", default="sync,async", show_default=True)
@click.option("--workers-in-process", "shared_by", default=16, type=click.IntRange(1), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here too.")
def main(workers: int, steps: int, parameters: int, modes: str, shared_by: int, json_file: Path | None) -> None:
    """Measure and print a table; exit code 1 if a value is wrong or somebody starves."""
    work = Workload(parameters, workers, steps, warmup=1)
    try:
        found = {mode: measure(work, mode, shared_by) for mode in modes.split(",")}
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    print(f"W={workers}, P={parameters:g}, {steps} steps of each; all answers were right.\n")
    heads = ["mode", "pushes of a rank", "step, ms", "slowest rank, ms", "longest wait, ms", "answers apart, ms"]
    heads += ["threads", "descriptors", "peak, MB", "nobody starves"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    print("\n".join(row(mode, shares) for mode, shares in found.items()))
    if json_file:
        json_file.write_text(json.dumps({mode: asdict(shares) for mode, shares in found.items()}, indent=1) + "\n")
    raise SystemExit(0 if all(shares.is_fair for shares in found.values()) else 1)


if __name__ == "__main__":
    main()
