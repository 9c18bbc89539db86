"""The course of a soak: processes and connections that are broken, and a watch over what must hold."""

import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.processes import processes
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
from benchmarks.soak_processes import Mortals, Setting
from benchmarks.tally import Counting, Tally
from protocol.addresses import Address

TICK_S = 0.05
SAMPLE_S = 0.5

LAST_STEPS = 200
"""Of the last server: from the furthest step on, without faults."""

THE_RUN = "the run"


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


class Soak:
    """A server and workers that are kept alive; all methods are called from one thread.

    Attributes:
        findings: so far.
    """

    def __init__(self, setting: Setting, mortals: Mortals, proxies: list[ArmedProxy]) -> None:
        self.findings = Findings()
        self._setting = setting
        self._mortals = mortals
        self._proxies = proxies
        self._began = time.monotonic()
        self._draw = random.Random(setting.seed + 1)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._sampled_s = 0.0
        self._patience = Patience(setting.patience_s)
        self._ends = False
        mortals.start_server()
        for rank in range(setting.workers):
            self._start_worker(rank)
        self._patience.moved(THE_RUN, self.now_s)

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def _start_worker(self, rank: int) -> None:
        self._mortals.start_worker(rank, self._proxies[rank].address.port)
        self._patience.moved(_named(rank), self.now_s)

    # ---- from the beginning to the end -----------------------------------------------------------------

    def break_things(self) -> Iterator[None]:
        """Let faults happen until the time is over or something does not hold; yields now and then."""
        setting = self._setting
        coming = schedule(setting.seed, setting.mean_s, setting.workers, setting.kinds)
        following = next(coming)
        while self.now_s < setting.seconds and not self.findings.problems:
            if self.now_s >= following.at_s:
                self._let_happen(following)
                following = next(coming)
            self._tick()
            yield
            time.sleep(TICK_S)

    def finish(self) -> None:
        """Let all get well, kill the server a last time, and see the run through to its last step."""
        for proxy in self._proxies:
            proxy.disarm()
        for _, action in self._later:
            action()
        self._later.clear()
        self._ends = True
        self._mortals.steps = steps = self.findings.furthest + LAST_STEPS
        self._mortals.kill("server")
        limit_s = self.now_s + self._setting.patience_s + LAST_STEPS * 10 * self._setting.pause_s
        while not self.findings.problems and not self._mortals.all_done():
            self._tick()
            if self.now_s > limit_s:
                self.findings.problems.append("the run did not end when it was told to")
            time.sleep(TICK_S)
        if not self.findings.problems:
            self._check_end(steps)

    def _check_end(self, steps: int) -> None:
        rounds, values, setting = self.check_history(), load_file(self._mortals.export), self._setting
        problems = [
            Tally(setting.workers, setting.parameters, setting.counting).problem(values, steps),
            values_problem(rounds, values["tally"]),
            f"rounds.jsonl ends at step {len(rounds)} of {steps}" if len(rounds) != steps else "",
        ]
        self.findings.problems += [problem for problem in problems if problem]

    # ---- faults ----------------------------------------------------------------------------------------

    def _let_happen(self, coming: Coming) -> None:
        """Let a fault happen; those on connections happen with the next frame."""
        happens, timeout_s = True, self._setting.heartbeat_timeout_s
        if coming.kind == KILL_WORKER:
            happens = self._mortals.kill(f"worker{coming.rank}")
        elif coming.kind == KILL_SERVER:
            happens = self._mortals.kill("server")
        elif coming.kind == STOP_WORKER:
            happens = self._stop(coming.rank, (0.2 + 1.8 * coming.chance) * timeout_s)
        elif coming.kind in ON_CONNECTION:
            self._proxies[coming.rank].arm(coming.kind, fault_on_connection(coming, timeout_s))
            return  # it is counted when it strikes
        self.findings.faults[coming.kind] += happens

    def _stop(self, rank: int, seconds: float) -> bool:
        process = self._mortals.stop(f"worker{rank}")
        if process is None:
            return False
        self._patience.moved(_named(rank), self.now_s + seconds)
        self._later.append((self.now_s + seconds, lambda: process.send_signal(signal.SIGCONT)))
        return True

    # ---- the watch -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Start again who has died, listen to the workers, look at the server."""
        for due in [entry for entry in self._later if entry[0] <= self.now_s]:
            self._later.remove(due)
            due[1]()
        self._listen()
        for kind in ON_CONNECTION:
            self.findings.faults[kind] = sum(proxy.struck[kind] for proxy in self._proxies)
        for who in list(self._mortals.lives):
            code = self._mortals.process(who).poll()
            if code is not None and not (self._ends and code == 0):
                self._ended(who, code)
        if self.now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = self.now_s
            self._sample()
        waiting = self._patience.problem(self.now_s)
        if waiting:
            self.findings.problems.append(waiting)

    def _ended(self, who: str, code: int) -> None:
        life, mortals = self._mortals.life(who), self._mortals
        itself = who == "server" and life not in mortals.killed and "injected: " in mortals.printed(life)
        if code != -signal.SIGKILL or not (itself or life in mortals.killed):
            self.findings.problems.append(f"{life} ended with {code}:\n{mortals.printed(life)[-2000:]}")
            return
        self.findings.restarts[who] += 1
        if who != "server":
            self._start_worker(int(who.removeprefix("worker")))
            return
        self.findings.faults[INSIDE_SERVER] += itself
        inject, setting = None, self._setting
        if KILL_SERVER in setting.kinds and not self._ends:
            inject = injection_for_start(self._draw.random(), self.findings.furthest, setting.checkpoint_every)
        mortals.start_server(inject)

    def _listen(self) -> None:
        for who, line in self._mortals.heard():
            if "problem" in line:
                self.findings.problems.append(f"{self._mortals.life(who)}: {line['problem']}")
                continue
            self.findings.answers += 1
            self._patience.moved(_named(line["rank"]), self.now_s)
            if line["step"] > self.findings.furthest:
                self.findings.furthest = line["step"]
                self._patience.moved(THE_RUN, self.now_s)

    def _sample(self) -> None:
        proc = Path(f"/proc/{self._mortals.process('server').pid}")
        try:
            memory, status = memory_bytes(int(proc.name)), (proc / "status").read_text()
            descriptors = sum(1 for _ in (proc / "fd").iterdir())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return
        threads = [int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:")]
        if memory is not None and threads:
            life, age_s = self._mortals.lives["server"], self._mortals.age_s("server")
            self.findings.samples.append(Sample(self.now_s, life, age_s, memory[0], threads[0], descriptors))

    def check_history(self) -> list[dict[str, Any]]:
        """Check that `rounds.jsonl` is a whole history, and return its lines."""
        path, rounds = self._mortals.rounds, []
        try:
            rounds = read_rounds(path.read_text()) if path.exists() else []
            all_take_part = self._setting.counting is Counting.ALL
            problem = history_problem(rounds, self._setting.workers, all_take_part)
        except ValueError as error:
            problem = f"a line of rounds.jsonl cannot be read: {error}"
        if problem:
            self.findings.problems.append(problem)
        return rounds


@contextmanager
def soaking(setting: Setting) -> Iterator[Soak]:
    """Start a server, a proxy for each worker, and the workers; nothing is left of them at the end."""
    with processes("soak") as running, ExitStack() as stack:
        port = _free_port()
        proxies = [ArmedProxy(Address("127.0.0.1", port)) for _ in range(setting.workers)]
        for proxy in proxies:
            stack.enter_context(proxy)
        yield Soak(setting, Mortals(setting, running, port), proxies)


def _named(rank: int) -> str:
    return f"worker {rank}"


def _free_port() -> int:
    """Return a port that the first server takes, and those after it again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
