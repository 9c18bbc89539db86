"""The processes of a soak: how each is started, at first and again, and how they are broken."""

import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Processes
from benchmarks.tally import Counting, Tally
from benchmarks.tally_processes import SUMS, Lines, worker_command

SAY_S = 0.2
"""How often a worker says where it is."""

NO_END = 10**9
"""Steps of a run that is to go on until it is told to end."""


@dataclass(frozen=True)
class Setting:
    """What a soak is.

    Attributes:
        seconds: how long faults come.
        mean_s: mean time between two of them.
        kinds: which.
        workers: how many.
        parameters: float64, of the bulk.
        counting: what the workers check.
        mode: options of the server that say how values change.
        seed: of the faults.
        pause_s: length of a step's computation.
        checkpoint_every: steps.
        heartbeat_timeout_s: of the server.
        patience_s: how long nobody may get on.
    """

    seconds: float
    mean_s: float
    kinds: tuple[str, ...]
    workers: int
    parameters: int
    counting: Counting
    mode: tuple[str, ...]
    seed: int
    pause_s: float
    checkpoint_every: int
    heartbeat_timeout_s: float
    patience_s: float


class Mortals:
    """A server and workers, each of which dies and is started again; a life is one start.

    Attributes:
        lives: how often each process was started.
        killed: lives that were ended from here.
        steps: of the run, for the next server that starts.
    """

    def __init__(self, setting: Setting, running: Processes, port: int) -> None:
        self.lives: Counter[str] = Counter()
        self.killed: set[str] = set()
        self.steps = NO_END
        self._setting = setting
        self._running = running
        self._port = port
        self._born: dict[str, float] = {}
        self._lines: dict[str, Lines] = {}

    @property
    def export(self) -> Path:
        """Where the final values go."""
        return self._running.directory / "final.safetensors"

    @property
    def rounds(self) -> Path:
        """Where the server writes of each round."""
        return self._running.directory / "run" / "rounds.jsonl"

    def start_server(self, inject: str | None = None) -> None:
        """Start the server: one command line serves the first start and all others."""
        setting, directory = self._setting, self._running.directory
        values: dict[str, object] = {
            "--host": "127.0.0.1",
            "--port": self._port,
            "--workers": setting.workers,
            "--steps": self.steps,
            "--run-dir": directory / "run",
            "--export": self.export,
            "--checkpoint-dir": directory / "checkpoints",
            "--checkpoint-every": setting.checkpoint_every,
            "--heartbeat-interval": setting.heartbeat_timeout_s / 4,
            "--heartbeat-timeout": setting.heartbeat_timeout_s,
            "--round-timeout": setting.patience_s,
            "--rejoin-timeout": setting.patience_s,
            "--start-timeout": setting.patience_s,
        }
        command = [sys.executable, "-m", "ps", *(str(part) for pair in values.items() for part in pair)]
        extra = [] if inject is None else ["--inject", inject]
        self._start("server", [*command, *SUMS, "--resume", *setting.mode, *extra])

    def start_worker(self, rank: int, port: int) -> None:
        """Start a worker that finds the server at a port."""
        setting = self._setting
        tally = Tally(setting.workers, setting.parameters, setting.counting)
        command = worker_command(tally, port, [rank], setting.pause_s, SAY_S, setting.patience_s)
        who = f"worker{rank}"
        self._start(who, command)
        self._lines[who] = Lines(self._running.directory / f"{self.life(who)}.out")

    def _start(self, who: str, command: list[str]) -> None:
        self.lives[who] += 1
        self._born[who] = time.monotonic()
        self._running.start(self.life(who), command)

    def life(self, who: str) -> str:
        """Return the name of a process's present life."""
        return f"{who}.{self.lives[who]}"

    def process(self, who: str) -> "subprocess.Popen[bytes]":
        """Return the present process."""
        return self._running.started[self.life(who)]

    def age_s(self, who: str) -> float:
        """Return the seconds since its start."""
        return time.monotonic() - self._born[who]

    def heard(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what workers have said since the last time: who, and what."""
        return [(who, line) for who, lines in self._lines.items() for line in lines.new()]

    def printed(self, life: str) -> str:
        """Return all that a life has printed."""
        return self._running.printed(life) + (self._running.directory / f"{life}.err").read_text()

    def kill(self, who: str) -> bool:
        """Send SIGKILL; False if it has ended already and waits to be started again."""
        if self.process(who).poll() is not None:
            return False
        self.killed.add(self.life(who))
        self.process(who).kill()
        return True

    def stop(self, who: str) -> "subprocess.Popen[bytes] | None":
        """Send SIGSTOP, and return to whom SIGCONT is due; None if it has ended already."""
        process = self.process(who)
        if process.poll() is not None:
            return None
        process.send_signal(signal.SIGSTOP)
        return process

    def all_done(self) -> bool:
        """Say whether all have ended well."""
        return all(self.process(who).poll() == 0 for who in self.lives)
