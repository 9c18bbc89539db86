"""Lose a worker, or the server, of a run that is going on, and take the time until it goes on again."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoint_place import file_system_of
from benchmarks.contenders import Weighmaster
from benchmarks.processes import POLL_S, BenchmarkError, Processes, processes
from benchmarks.tally import Counting, Tally
from benchmarks.tally_processes import SUMS, Lines, worker_command
from benchmarks.workload import Workload
from protocol.addresses import Address
from protocol.frame_faults import Way
from protocol.proxy import FaultProxy
from ps.checkpoints.directory import CheckpointDirectory, checkpoints_in

NO_END = 10**9
LIGHT = Workload(parameters=100_000, workers=3, steps=NO_END, warmup=1)
PAUSE_S = 0.02
"""A light worker's computation: a step takes a little longer."""

STEPS_BEFORE = 30
"""Answers that each worker has had before something is broken."""

WAIT_S = 120.0
"""For anything at all."""

CHECKPOINT_EVERY = 20
PAIR = ("worker0", "worker1")
"""Of the runs whose server is killed."""


@dataclass(frozen=True)
class Loss:
    """A worker was lost.

    Attributes:
        seconds: until all others went on; see `goes_on_ns`.
        step_s: median time of a step before.
    """

    seconds: float
    step_s: float


@dataclass(frozen=True)
class Restart:
    """A server was killed and started again; seconds from the start of its process.

    Attributes:
        listening_s: until its port was open.
        first_values_s: until a worker had the restored values.
        first_step_s: until a worker had an answer to a push.
        reading_s: how long it took to read and check the newest checkpoint, in another process, just before.
        step_s: median time of a step before.
        file_system: that the checkpoint was on.
    """

    listening_s: float
    first_values_s: float
    first_step_s: float
    reading_s: float
    step_s: float
    file_system: str


class Answers:
    """What workers that say every answer have said so far, in ns of CLOCK_MONOTONIC."""

    def __init__(self, running: Processes, names: Sequence[str]) -> None:
        self._running = running
        self._lines = {name: Lines(running.directory / f"{name}.out") for name in names}
        self.said: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def wait(self, what: str, is_there: Callable[[], bool], but: Sequence[str] = ()) -> None:
        """Listen until something is there.

        Args:
            what: that is waited for, for messages.
            is_there: asked after each look.
            but: processes that may have ended.

        Raises:
            BenchmarkError: a process ended or a worker got a wrong answer; or it takes too long.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            for name, lines in self._lines.items():
                self.said[name] += lines.new()
            problems = [line["problem"] for lines in self.said.values() for line in lines if "problem" in line]
            ended = [
                name
                for name, process in self._running.started.items()
                if name not in but and process.poll() is not None
            ]
            if problems or ended:
                raise BenchmarkError(f"while waiting for {what}: {problems or ended} ended")
            if is_there():
                return
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{what} did not come within {WAIT_S:.0f} s")
            time.sleep(POLL_S / 4)

    def all_have(self, count: int, names: Sequence[str], after_ns: int = 0) -> bool:
        """Say whether each of some workers has had so many answers after a moment."""
        return all(len(self.times_after(name, after_ns)) >= count for name in names)

    def times_after(self, name: str, after_ns: int) -> list[int]:
        """Return when a worker had its answers after a moment."""
        return [line["at_ns"] for line in self.said[name] if line["at_ns"] > after_ns]

    def step_s(self, before_ns: int) -> float:
        """Return the median time of a step before a moment; the first steps are left out."""
        gaps = [
            gap
            for lines in self.said.values()
            for gap in step_times([line["at_ns"] for line in lines if line["at_ns"] < before_ns])
        ]
        return statistics.median(gaps) / 1e9


def step_times(times_ns: Sequence[int], skipped: int = 5) -> list[int]:
    """Return the times in ns from one answer to the next, without the first ones."""
    return [after - before for before, after in itertools.pairwise(times_ns[skipped:])]


def goes_on_ns(times_ns: Sequence[int], lost_ns: int) -> int:
    """Return when a worker goes on after another was lost: at the end of the longer of its first two waits.

    The first may end soon, by a push of the lost worker that had arrived; then it is the second that may be long.

    Args:
        times_ns: of its first two answers after the loss.
        lost_ns: moment of the loss.
    """
    first, second = times_ns[:2]
    return first if first - lost_ns > second - first else second


def losses(mode: Sequence[str], cuts_link: bool, heartbeat_timeout_s: float, trials: int) -> Iterator[Loss]:
    """Lose rank 2 of a run of three, some times, each in a run of its own.

    Args:
        mode: options of the server.
        cuts_link: nothing passes between it and the server from a moment on; else it is killed.
        heartbeat_timeout_s: of the server.
        trials: how many.

    Raises:
        BenchmarkError: something else happened.
    """
    timing = ["--heartbeat-interval", heartbeat_timeout_s / 4, "--heartbeat-timeout", heartbeat_timeout_s]
    for _ in range(trials):
        with processes("lost worker") as running:
            port_file = running.directory / "port"
            command = Weighmaster().server_command(LIGHT, port_file)
            running.start("server", [*command, *SUMS, *mode, *map(str, timing)])
            port = running.await_port(port_file)
            with FaultProxy(Address("127.0.0.1", port)) as proxy:
                yield _lose(running, port, proxy, cuts_link)


def _lose(running: Processes, port: int, proxy: FaultProxy, cuts_link: bool) -> Loss:
    others, lost = ["worker0", "worker1"], "worker2"
    tally = Tally(LIGHT.workers, LIGHT.parameters, Counting.NONE)
    for rank, name in enumerate([*others, lost]):
        reached = proxy.address.port if name == lost else port
        running.start(name, worker_command(tally, reached, [rank], PAUSE_S))
    answers = Answers(running, [*others, lost])
    answers.wait("the first steps", lambda: answers.all_have(STEPS_BEFORE, [*others, lost]))
    began_ns = time.monotonic_ns()
    if cuts_link:
        proxy.swallow(*Way)
    else:
        running.started[lost].kill()
    answers.wait("the next steps", lambda: answers.all_have(2, others, began_ns), [lost])
    ends_ns = max(goes_on_ns(answers.times_after(name, began_ns), began_ns) for name in others)
    return Loss((ends_ns - began_ns) / 1e9, answers.step_s(began_ns))


def restarts(parameters: int, trials: int, directory: Path | None) -> Iterator[Restart]:
    """Kill the server of a run of two, and start it again, some times; the workers live on.

    Args:
        parameters: float32, under Adam: a checkpoint holds three times as many.
        trials: how many.
        directory: in which a directory of checkpoints is made for the time; None: that of the run.

    Raises:
        BenchmarkError: something else happened.
    """
    tally = Tally(2, parameters, Counting.NONE, "float32")
    with processes("restart") as running, TemporaryDirectory(dir=directory or running.directory) as place:
        port_file = running.directory / "port"
        command = Weighmaster().server_command(Workload(parameters, 2, NO_END, 1), port_file)
        command += ["--checkpoint-dir", place, "--checkpoint-every", str(CHECKPOINT_EVERY), "--resume"]
        running.start("server0", command)
        port = running.await_port(port_file)
        for rank, name in enumerate(PAIR):
            running.start(name, worker_command(tally, port, [rank]))
        answers = Answers(running, PAIR)
        for trial in range(trials):
            yield _restart(running, answers, Path(place), trial, [*command, "--port", str(port)])


def _restart(running: Processes, answers: Answers, place: Path, trial: int, command: Sequence[str]) -> Restart:
    old, new, port_file = f"server{trial}", f"server{trial + 1}", running.directory / "port"
    dead, since_ns = [f"server{number}" for number in range(trial + 1)], time.monotonic_ns()
    answers.wait("a new checkpoint", lambda: has_kept(place, answers, since_ns), dead[:-1])
    killed_ns = time.monotonic_ns()
    running.started[old].kill()
    running.started[old].wait()
    reading_s = reading_time_s(place)
    port_file.unlink()
    began_ns = time.monotonic_ns()
    running.start(new, command)
    answers.wait("the server", port_file.exists, dead)
    listening_ns = time.monotonic_ns()
    answers.wait("the first new step", lambda: answers.all_have(2, PAIR, began_ns), dead)
    values_ns, step_ns = (min(answers.times_after(name, began_ns)[at] for name in PAIR) for at in (0, 1))
    return Restart(
        listening_s=(listening_ns - began_ns) / 1e9,
        first_values_s=(values_ns - began_ns) / 1e9,
        first_step_s=(step_ns - began_ns) / 1e9,
        reading_s=reading_s,
        step_s=answers.step_s(killed_ns),
        file_system=file_system_of(place),
    )


def has_kept(checkpoints: Path, answers: Answers, since_ns: int) -> bool:
    """Say whether the workers have made some steps since a moment, and a checkpoint of one of them is there."""
    if not answers.all_have(CHECKPOINT_EVERY + 2, PAIR, since_ns):
        return False
    first = min(line["step"] for name in PAIR for line in answers.said[name] if line["at_ns"] > since_ns)
    return any(int(path.name.split("-")[1]) > first for path in checkpoints_in(checkpoints))


def reading_time_s(checkpoints: Path) -> float:
    """Return the seconds that it takes to read the newest checkpoint and to check its sums."""
    directory = CheckpointDirectory.open(checkpoints, keep=3)
    try:
        began = time.perf_counter()
        directory.newest()
        return time.perf_counter() - began
    finally:
        directory.close()
