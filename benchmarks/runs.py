"""Let one contender run to the end, and collect what its rank 0 measured."""

import itertools
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.processes import BenchmarkError, Processes, processes
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Result:
    """What one run gave.

    Attributes:
        work: what was run.
        returned_ns: CLOCK_MONOTONIC time at which each step returned in rank 0, in ns.
        checksum: of the final values; None if the contender does no work.
        foreign_cpus: processors kept busy by anything else meanwhile, 0 on an idle machine.
    """

    work: Workload
    returned_ns: tuple[int, ...]
    checksum: float | None
    foreign_cpus: float = 0.0

    @property
    def step_ns(self) -> list[int]:
        """Durations in ns of the steps after the warm-up, from one return to the next."""
        times = self.returned_ns[self.work.warmup - 1 :]
        return [after - before for before, after in itertools.pairwise(times)]


@contextmanager
def launched(contender: Contender, work: Workload) -> Iterator[Processes]:
    """Start the server and the workers of a run."""
    with processes(contender.name) as running:
        port_file = running.directory / "port"
        running.start("server", contender.server_command(work, port_file))
        port = running.await_port(port_file)
        for rank in range(work.workers):
            running.start(f"worker{rank}", contender.worker_command(work, port, rank))
        for number, command in enumerate(contender.other_commands(work, port)):
            running.start(f"other{number}", command)
        yield running


def report_of(running: Processes) -> dict[str, Any]:
    """Return the JSON that rank 0 printed last.

    Raises:
        BenchmarkError: it printed none.
    """
    lines = running.printed("worker0").splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise BenchmarkError(f"{running.label}: rank 0 did not report")
    return dict(json.loads(lines[-1]))


def result_of(running: Processes, work: Workload) -> Result:
    """Return what rank 0 measured.

    Raises:
        BenchmarkError: it did not do all steps.
    """
    report = report_of(running)
    if len(report["returned_ns"]) != work.steps:
        raise BenchmarkError(f"{running.label}: rank 0 did {len(report['returned_ns'])} steps, not {work.steps}")
    return Result(work, tuple(report["returned_ns"]), report.get("checksum"))


def run(contender: Contender, work: Workload) -> Result:
    """Run to the end; start-up is not part of any figure.

    Raises:
        BenchmarkError: a process failed.
    """
    machine_s, own_s = _machine_cpu_s(), _children_cpu_s()
    start = time.monotonic()
    with launched(contender, work) as running:
        running.wait()
        result = result_of(running, work)
    foreign_s = (_machine_cpu_s() - machine_s) - (_children_cpu_s() - own_s)
    return replace(result, foreign_cpus=max(0.0, foreign_s / (time.monotonic() - start)))


def _machine_cpu_s() -> float:
    """Seconds that all processors spent in programs and their system calls, interrupts left out."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
