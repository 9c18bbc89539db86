"""The course of a soak: processes that are broken and started again, and a watch over what must hold."""

import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.processes import Processes, processes
from benchmarks.server_memory import memory_bytes
from benchmarks.soak_faults import (
    INSIDE_SERVER,
    KILL_SERVER,
    KILL_WORKER,
    ON_CONNECTION,
    STOP_WORKER,
    ArmedProxy,
    Coming,
    fault_on_connection,
    injection_for_start,
    schedule,
)
from benchmarks.soak_invariants import Patience, Sample, history_problem, read_rounds, values_problem
from benchmarks.tally import Counting, Tally
from protocol.transport import Address

TICK_S = 0.05
SAMPLE_S = 0.5
NO_END = 10**9
"""Steps of a run that is to go on until it is told to end."""

LAST_STEPS = 200
"""Of the last server: from the furthest step on, without faults."""


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


@dataclass
class Findings:
    """What a soak has found out.

    Attributes:
        problems: what does not hold; a soak ends at the first.
        faults: how often each kind has happened.
        restarts: how often each process was started again.
        samples: of the server.
        furthest: largest step that a worker has seen.
        answers: that the workers have reported, all of them checked.
    """

    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    furthest: int = 0
    answers: int = 0


class Lines:
    """The lines of a file that have been written since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> list[str]:
        """Return whole lines only."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode().splitlines()


class Soak:
    """A server and workers that are kept alive; all methods are called from one thread, in between `tick`.

    Attributes:
        findings: so far.
    """

    def __init__(self, setting: Setting, running: Processes, proxies: list[ArmedProxy], port: int) -> None:
        self.findings = Findings()
        self._setting = setting
        self._running = running
        self._proxies = proxies
        self._port = port
        self._began = time.monotonic()
        self._draw = random.Random(setting.seed + 1)
        self._lives: Counter[str] = Counter()
        self._born: dict[str, float] = {}
        self._lines: dict[str, Lines] = {}
        self._killed: set[str] = set()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._sampled_at = 0.0
        self._patience = Patience(setting.patience_s)
        self._last_steps: int | None = None
        self._injects = False

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def export(self) -> Path:
        """Where the final values go."""
        return self._running.directory / "final.safetensors"

    # ---- processes -------------------------------------------------------------------------------------

    def start_server(self, extra: list[str] | None = None) -> None:
        """Start the server, at first or again: one command line serves both."""
        setting, directory = self._setting, self._running.directory
        values: dict[str, object] = {
            "--host": "127.0.0.1",
            "--port": self._port,
            "--workers": setting.workers,
            "--steps": self._last_steps or NO_END,
            "--optimizer": "sgd",
            "--learning-rate": 1,
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
        self._start("server", [*command, "--resume", *setting.mode, *(extra or [])])

    def start_worker(self, rank: int) -> None:
        """Start a worker, at first or again."""
        setting = self._setting
        values: dict[str, object] = {
            "--port": self._proxies[rank].address.port,
            "--ranks": rank,
            "--workers": setting.workers,
            "--parameters": setting.parameters,
            "--counting": setting.counting,
            "--pause": setting.pause_s,
            "--say-every": 0.2,
            "--reconnect-timeout": setting.patience_s,
        }
        command = [sys.executable, "-m", "benchmarks.tally_worker"]
        self._start(f"worker{rank}", [*command, *(str(part) for pair in values.items() for part in pair)])
        self._lines[f"worker{rank}"] = Lines(self._running.directory / f"{self._name(f'worker{rank}')}.out")
        self._patience.moved(f"worker {rank}", self.now_s)

    def _start(self, who: str, command: list[str]) -> None:
        self._lives[who] += 1
        if self._lives[who] > 1:
            self.findings.restarts[who] += 1
        self._born[who] = self.now_s
        self._running.start(self._name(who), command)

    def _name(self, who: str) -> str:
        return f"{who}.{self._lives[who]}"

    def _pid(self, who: str) -> int:
        return self._running.started[self._name(who)].pid

    def _kill(self, who: str) -> bool:
        """Send SIGKILL; False if it has ended already and waits to be started again."""
        process = self._running.started[self._name(who)]
        if process.poll() is not None:
            return False
        self._killed.add(self._name(who))
        process.kill()
        return True

    # ---- faults ----------------------------------------------------------------------------------------

    def let_happen(self, coming: Coming) -> None:
        """Let a fault happen; those on connections happen with the next frame."""
        worker, counted = f"worker{coming.rank}", True
        if coming.kind == KILL_WORKER:
            counted = self._kill(worker)
        elif coming.kind == KILL_SERVER:
            counted = self._kill("server")
        elif coming.kind == STOP_WORKER:
            counted = self._stop(coming.rank, (0.2 + 1.8 * coming.chance) * self._setting.heartbeat_timeout_s)
        elif coming.kind in ON_CONNECTION:
            self._proxies[coming.rank].arm(fault_on_connection(coming, self._setting.heartbeat_timeout_s))
        self.findings.faults[coming.kind] += counted

    def _stop(self, rank: int, seconds: float) -> bool:
        process = self._running.started[self._name(f"worker{rank}")]
        if process.poll() is not None:
            return False
        process.send_signal(signal.SIGSTOP)
        self._patience.moved(f"worker {rank}", self.now_s + seconds)
        self._later.append((self.now_s + seconds, lambda: process.send_signal(signal.SIGCONT)))
        return True

    # ---- the watch -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Start again who has died, listen to the workers, look at the server."""
        for due in [entry for entry in self._later if entry[0] <= self.now_s]:
            self._later.remove(due)
            due[1]()
        self._listen()
        for who in list(self._lives):
            code = self._running.started[self._name(who)].poll()
            if code is not None:
                self._ended(who, code)
        if self.now_s - self._sampled_at >= SAMPLE_S:
            self._sampled_at = self.now_s
            self._sample()
        waiting = self._patience.problem(self.now_s)
        if waiting:
            self.findings.problems.append(waiting)

    def _ended(self, who: str, code: int) -> None:
        name = self._name(who)
        if self._last_steps is not None and code == 0:
            return
        itself = who == "server" and "injected: " in self._printed(name)
        if code != -signal.SIGKILL or not (itself or name in self._killed):
            self.findings.problems.append(f"{name} ended with {code}:\n{self._printed(name)[-2000:]}")
            return
        self.findings.faults[INSIDE_SERVER] += itself and name not in self._killed
        if who != "server":
            self.start_worker(int(who.removeprefix("worker")))
            return
        inject = None
        if self._injects:
            setting = self._setting
            inject = injection_for_start(self._draw.random(), self.findings.furthest, setting.checkpoint_every)
        self.start_server([] if inject is None else ["--inject", inject])

    def _printed(self, name: str) -> str:
        return self._running.printed(name) + (self._running.directory / f"{name}.err").read_text()

    def _listen(self) -> None:
        for who, lines in self._lines.items():
            for text in lines.new():
                line = json.loads(text)
                if "problem" in line:
                    self.findings.problems.append(f"{self._name(who)}: {line['problem']}")
                    continue
                self.findings.answers += 1
                self._patience.moved(f"worker {line['rank']}", self.now_s)
                if line["step"] > self.findings.furthest:
                    self.findings.furthest = line["step"]
                    self._patience.moved("the run", self.now_s)

    def _sample(self) -> None:
        pid = self._pid("server")
        memory = memory_bytes(pid)
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return
        threads = [int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:")]
        if memory is None or not threads:
            return
        age_s = self.now_s - self._born["server"]
        life = self._lives["server"]
        self.findings.samples.append(Sample(self.now_s, life, age_s, memory[0], threads[0], descriptors))

    def check_history(self) -> list[dict[str, Any]]:
        """Check that `rounds.jsonl` is a whole history, and return its lines."""
        path = self._running.directory / "run" / "rounds.jsonl"
        try:
            rounds = read_rounds(path.read_text()) if path.exists() else []
            all_take_part = self._setting.counting is Counting.ALL
            problem = history_problem(rounds, self._setting.workers, all_take_part)
        except ValueError as error:
            rounds, problem = [], f"a line of rounds.jsonl cannot be read: {error}"
        if problem:
            self.findings.problems.append(problem)
        return rounds

    # ---- from the beginning to the end -----------------------------------------------------------------

    def break_things(self) -> Iterator[None]:
        """Let faults happen until the time is over or something does not hold; yields now and then."""
        setting = self._setting
        self._injects = KILL_SERVER in setting.kinds
        coming = schedule(setting.seed, setting.mean_s, setting.workers, setting.kinds)
        following, begins_s = next(coming), self.now_s
        self._patience.moved("the run", self.now_s)
        while self.now_s - begins_s < setting.seconds and not self.findings.problems:
            if self.now_s - begins_s >= following.at_s:
                self.let_happen(following)
                following = next(coming)
            self.tick()
            yield
            time.sleep(TICK_S)

    def finish(self) -> None:
        """Let all get well, kill the server a last time, and see the run through to its last step."""
        for proxy in self._proxies:
            proxy.disarm()
        for _, action in self._later:
            action()
        self._later.clear()
        self._injects = False
        steps = self.findings.furthest + LAST_STEPS
        self._last_steps = steps
        self._kill("server")
        deadline_s = self.now_s + self._setting.patience_s + LAST_STEPS * 10 * self._setting.pause_s
        while not self.findings.problems and not self._all_done():
            self.tick()
            if self.now_s > deadline_s:
                self.findings.problems.append("the run did not end when it was told to")
            time.sleep(TICK_S)
        self._check_end(steps)

    def _all_done(self) -> bool:
        return all(self._running.started[self._name(who)].poll() == 0 for who in self._lives)

    def _check_end(self, steps: int) -> None:
        if self.findings.problems:
            return
        rounds = self.check_history()
        values = load_file(self.export)
        setting = self._setting
        problems = [
            Tally(setting.workers, setting.parameters, setting.counting).problem(values, steps),
            values_problem(rounds, values["tally"]),
            f"rounds.jsonl ends at step {len(rounds)} of {steps}" if len(rounds) != steps else "",
        ]
        self.findings.problems += [problem for problem in problems if problem]


@contextmanager
def soaking(setting: Setting) -> Iterator[Soak]:
    """Start a server, a proxy for each worker, and the workers; nothing is left of them at the end."""
    with processes("soak") as running, ExitStack() as stack:
        port = _free_port()
        to = Address("127.0.0.1", port)
        proxies = [stack.enter_context(ArmedProxy(to)) for _ in range(setting.workers)]
        soak = Soak(setting, running, proxies, port)
        soak.start_server()
        for rank in range(setting.workers):
            soak.start_worker(rank)
        yield soak


def _free_port() -> int:
    """Return a port that the first server takes, and those after it again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
