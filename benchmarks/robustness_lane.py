"""A lane runs cells one after the other: a new server for each, and worker processes that stay."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.processes import ROOT, START_TIMEOUT_S, BenchmarkError
from benchmarks.robustness_cells import ABSENT, NONE, Cell
from benchmarks.robustness_results import Muting, Outcome, muting_of
from benchmarks.robustness_worker import VALIDATOR, Job

CELL_TIMEOUT_S = 300.0
"""For one run; a hundred times what it takes on a quiet machine."""

POLL_S = 0.005
DIVERGED = 5
"""Exit code of a server whose run diverged, which is a finding and not a failure."""

ROUND_LOG = "rounds.jsonl"


def server_command(cell: Cell, directory: Path) -> list[str]:
    """Return the command that serves a cell; its files go into `directory`."""
    training = cell.training
    options: dict[str, object] = {
        "port": 0,
        "port-file": directory / "port",
        "run-dir": directory / "run",
        "summary": directory / "summary.json",
        "workers": len(ranks(cell)),
        "steps": training.steps,
        "seed": cell.seed,
        "threads": 1,
        "learning-rate": training.learning_rate,
        "aggregation": cell.rule,
    }
    if cell.told_faulty is not None:
        options["faulty-workers"] = cell.told_faulty
    if cell.validator_every:
        options["validator-every"] = cell.validator_every
        options["validator-seed-file"] = directory / "validator-seed"
    return [sys.executable, "-m", "ps", *(f"--{name}={value}" for name, value in options.items())]


def ranks(cell: Cell) -> list[int]:
    """Return the shards that take part, ascending; their position is the rank at the server."""
    absent = cell.bad_ranks if cell.fault == ABSENT else ()
    return [rank for rank in range(cell.workers) if rank not in absent]


def jobs(cell: Cell, port: int, data: Path) -> list[Job]:
    """Return what each process does; rank 0 also measures, and a validator comes last."""
    training = cell.training
    common: dict[str, Any] = {
        "port": port,
        "shards": cell.workers,
        "data": str(data),
        "alike": cell.alike,
        "trusted": cell.trusted,
        "seed": cell.seed,
        "steps": training.steps,
        "batch_size": training.batch_size,
    }
    given = []
    for rank, shard in enumerate(ranks(cell)):
        fault = NONE if cell.fault == ABSENT else cell.fault_of(shard)
        measured = training.evaluated_steps() if rank == 0 else ()
        given.append(Job(role="worker", rank=rank, shard=shard, fault=fault, evaluated_steps=measured, **common))
    if cell.validator_every:
        given.append(Job(role=VALIDATOR, rank=-1, shard=-1, **common))
    return given


class Player:
    """A worker process that does jobs."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.robustness_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def give(self, job: Job) -> None:
        """Hand out a job."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait for the result of the job.

        Raises:
            BenchmarkError: the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError("a worker process ended in the middle of a job")
        return dict(json.loads(line))


def environment() -> dict[str, str]:
    """Return the environment of a process: this checkout, and one thread for its linear algebra."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass
class Served:
    """A server process and where its files are."""

    process: "subprocess.Popen[bytes]"
    directory: Path

    def port(self) -> int:
        """Return the port as soon as it listens.

        Raises:
            BenchmarkError: it ended, or it takes too long.
        """
        file, deadline = self.directory / "port", time.monotonic() + START_TIMEOUT_S
        while not file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the server did not start:\n{self.said()}")
            time.sleep(POLL_S)
        return int(file.read_text())

    def said(self) -> str:
        """Return the end of what it printed."""
        return (self.directory / "log").read_text(errors="replace")[-2000:]


class Lane:
    """Worker processes that stay, and the server of the moment. One thread runs cells; another may close it."""

    def __init__(self, data: Path, data_dir: Path | None = None) -> None:
        """Make a lane without any process yet.

        Args:
            data: directory with a folder for each data set, as `robustness_data.save` writes it.
            data_dir: where the original files are, for those who read them themselves.
        """
        self._data, self._data_dir = data, data_dir
        self._players: list[Player] = []
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def run(self, cell: Cell) -> Outcome:
        """Run a cell to its end.

        Raises:
            BenchmarkError: a process failed, or it takes too long; the lane is good for the next cell.
        """
        watchdog = threading.Timer(CELL_TIMEOUT_S, self._kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            with tempfile.TemporaryDirectory(prefix="weighmaster-bench-") as directory:
                return self._run(cell, Path(directory))
        except BaseException:
            self._kill()
            raise
        finally:
            watchdog.cancel()

    def close(self) -> None:
        """End all processes, and start no more."""
        self._closed = True
        self._kill()

    def _run(self, cell: Cell, directory: Path) -> Outcome:
        start = time.monotonic()
        served = self._serve(cell, directory)
        port = served.port()
        given = jobs(cell, port, self._data / cell.dataset)
        players = self._first_players(len(given))
        for player, job in zip(players, given, strict=True):
            player.give(job)
        results = []
        for player in players:
            results.append(player.result())
            if results[-1]["error"]:
                raise BenchmarkError(f"{results[-1]['error']}; the server said:\n{served.said()}")
        code = served.process.wait()
        if code not in (0, DIVERGED):
            raise BenchmarkError(f"the server ended with {code}:\n{served.said()}")
        return outcome_of(cell, results, directory, time.monotonic() - start)

    def _serve(self, cell: Cell, directory: Path, *options: str) -> Served:
        """Start the server of a cell."""
        (directory / "validator-seed").write_text(f"{cell.seed:064x}\n")
        with (directory / "log").open("wb") as log:
            return Served(self._start("server", [*server_command(cell, directory), *options], log), directory)

    def _start(self, who: str, command: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a process that lives for one run."""
        with self._lock:
            if self._closed:
                raise BenchmarkError("the benchmark is ending")
            self._started[who] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment()
            )
            return self._started[who]

    def _first_players(self, number: int) -> list[Player]:
        with self._lock:
            while len(self._players) < number and not self._closed:
                self._players.append(Player())
            return self._players[:number]

    def _kill(self) -> None:
        with self._lock:
            processes: list[subprocess.Popen[Any]] = [player.process for player in self._players]
            processes += self._started.values()
            self._players, self._started = [], {}
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def outcome_of(cell: Cell, results: list[dict[str, Any]], directory: Path, seconds: float) -> Outcome:
    """Put together what a run gave.

    Raises:
        BenchmarkError: values were not measured that should have been.
    """
    first = results[0]
    measured = {int(step): float(share) for step, share in first["accuracies"].items()}
    if first["done"]:
        wanted = cell.training.evaluated_steps()
        if set(measured) != set(wanted):
            raise BenchmarkError(f"rank 0 measured steps {sorted(measured)}, not {list(wanted)}")
        accuracy = sum(measured.values()) / len(measured)
    else:
        accuracy = measured[max(measured)]
    return Outcome(
        accuracy=accuracy,
        final_accuracy=measured[max(measured)],
        done=first["done"],
        seconds=seconds,
        refused=sum(result["refused"] for result in results[: len(ranks(cell))]),
        validated=results[-1]["pushes"] if cell.validator_every else 0,
        muting=_muting(cell, directory / "run" / ROUND_LOG),
    )


def _muting(cell: Cell, file: Path) -> Muting | None:
    if not cell.bad or cell.fault == ABSENT or not file.exists():
        return None
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    bad = {str(rank) for rank in cell.bad_ranks}
    weights = {
        int(row["step"]): sum(weight for rank, weight in row["weights"].items() if rank in bad) for row in rows
    }
    return muting_of(weights, cell.training.steps // 2)
