"""A run that a test leads step by step to where a fault is to happen, and what must be true of it afterwards."""

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.marked_worker import PLACES, mark
from tests.integration.processes import Process, Processes, ServerProcess

STEPS = {"sync": 5, "async": 10, "ssp": 10}


@dataclass(frozen=True)
class Mode:
    """A way to train: options of the server, and how many workers."""

    name: str
    workers: int
    options: dict[str, Any]

    @property
    def is_sync(self) -> bool:
        return "consistency" not in self.options

    @property
    def leaves_out(self) -> bool:
        return bool(self.options)

    @property
    def quorum(self) -> int | None:
        return self.options.get("quorum")

    @property
    def steps(self) -> int:
        """Of a run with one fault in its third turn."""
        return STEPS[self.options.get("consistency", "sync")]

    @property
    def turned(self) -> int:
        """The step after the first two turns."""
        return 2 if self.is_sync else 2 * self.workers


WAIT = Mode("sync, wait", 2, {})
SHRINK = Mode("sync, shrink", 2, {"on_worker_loss": "shrink"})
QUORUM = Mode("quorum", 3, {"quorum": 2})
ASYNC = Mode("async", 2, {"consistency": "async"})
SSP = Mode("ssp", 2, {"consistency": "ssp", "ssp_bound": 2})
MODES = (WAIT, SHRINK, QUORUM, ASYNC, SSP)

VICTIM = 1


@dataclass
class Scene:
    """A server and its marked workers.

    Attributes:
        processes: starts them.
        mode: how they train.
        address: of a proxy before the server, or empty.
        workers: by rank.
        answers: how often each of them was answered so far.
    """

    processes: Processes
    mode: Mode
    address: str = ""
    server: ServerProcess = field(init=False)
    workers: dict[int, Process] = field(default_factory=dict)
    answers: Counter[int] = field(default_factory=Counter)

    def open(self, to_victim: str | None = None, **options: Any) -> None:
        """Start everybody; `to_victim` is what is to happen to the worker of rank 1."""
        patience = {"start_timeout": 60, "rejoin_timeout": 30, "round_timeout": 60, "drain_timeout": 20}
        measured = {
            "optimizer": "sgd",
            "learning_rate": 1.0,
            "workers": self.mode.workers,
            "steps": self.mode.steps,
        }
        self.server = self.processes.server(**measured | patience | self.mode.options | options)
        for rank in range(self.mode.workers):
            self.start(rank, to_victim if rank == VICTIM else None)
        for worker in self.workers.values():
            worker.says("begins with step 0")

    def start(self, rank: int, inject: str | None = None, slot: int | None = None, *more: object) -> Process:
        words = ["--rank", rank, "--commanded", *(["--inject", inject] if inject else []), *more]
        if not self.mode.is_sync:
            words += ["--by-push", rank if slot is None else slot]
        name, address = f"marked worker {rank}", self.address or self.server.address
        worker = self.processes.python(name, "-m", "tests.faults.marked_worker", address, *words)
        self.workers[rank], self.answers[rank] = worker, 0
        return worker

    # ---- leading -------------------------------------------------------------------------------------

    def push(self, *ranks: int) -> None:
        for rank in ranks:
            self.workers[rank].tell("push")

    def answered(self, *ranks: int) -> None:
        for rank in ranks:
            self.answers[rank] += 1
            self.workers[rank].says("answered with step", times=self.answers[rank])

    def turn(self) -> None:
        """Let each worker push once; under a quorum the last one comes too late."""
        ranks = range(self.mode.workers)
        groups = [ranks] if self.mode.is_sync else [[rank] for rank in ranks]
        if self.mode.quorum is not None:
            groups = [ranks[: self.mode.quorum], ranks[self.mode.quorum :]]
        for group in groups:
            self.push(*group)
            self.answered(*group)

    def others(self) -> list[int]:
        return [rank for rank in self.workers if rank != VICTIM]

    def others_push(self) -> None:
        """Let all but the victim push once, and wait for their answers: nobody may wait for the victim."""
        self.push(*self.others())
        self.answered(*self.others())

    def go(self, *ranks: int) -> None:
        for rank in ranks or self.workers:
            self.workers[rank].tell("go")

    def dies(self, process: Process, report: str) -> None:
        assert process.ends() == -signal.SIGKILL
        process.says(f"^injected: {report}$")

    # ---- what must be true ---------------------------------------------------------------------------

    def ends_well(self) -> None:
        for process in (*self.workers.values(), self.server):
            process.ends_with(0)
        summary = self.server.summary()
        steps = int(self.server.options["steps"])
        assert (summary["status"], summary["steps"]) == ("done", steps)
        assert [line["step"] for line in self.server.rounds()] == list(range(steps)), "each step once"
        self.explained()

    def total(self) -> float:
        """Return the sum of all that was applied."""
        (values,) = self.server.values().values()
        assert (values == values[0]).all()
        return -float(values[0])

    def explained(self) -> None:
        """The rounds that were written give the final values to the bit."""
        lines = self.server.rounds()
        if self.mode.is_sync:
            total = sum(
                sum(mark(rank, line["step"]) for rank in line["ranks"]) / len(line["ranks"]) for line in lines
            )
            assert self.total() == total
            assert all(len(line["ranks"]) == self.mode.quorum for line in lines) or self.mode.quorum is None
            return
        applied = self.applied()
        assert len(applied) == len(lines), "a push was lost, or applied twice"
        assert Counter(rank for line in lines for rank in line["ranks"]) == Counter(
            slot if slot < self.mode.workers else VICTIM for slot, _ in applied
        )

    def applied(self) -> list[tuple[int, int]]:
        """Return (slot, number) of all pushes whose bit is in the final values."""
        total = self.total()
        assert total == int(total)
        return [divmod(place, PLACES) for place in range(3 * PLACES) if int(total) >> place & 1]

    def ranks(self) -> list[list[int]]:
        return [line["ranks"] for line in self.server.rounds()]

    def is_same(self) -> None:
        """The values are those of an undisturbed run, bit for bit, and all pushes were in their rounds."""
        everyone = list(range(self.mode.workers))
        assert self.ranks() == [everyone] * int(self.server.options["steps"])
        self.explained()
        assert self.server.summary()["deterministic"] is True

    def is_bounded(self, since: int = 0) -> None:
        """No rank was ever further ahead than the bound, counted from the beginning or from a return at `since`."""
        bound = int(self.mode.options["ssp_bound"])
        everyone, later = Counter({0: 0, 1: 0}), Counter({0: 0, 1: 0})
        for line in self.server.rounds():
            (rank,) = line["ranks"]
            everyone[rank] += 1
            later[rank] += line["step"] >= since
            ahead = min(abs(pushes[0] - pushes[1]) for pushes in (everyone, later))
            assert ahead <= bound or line["step"] < since, f"{ahead} pushes ahead in step {line['step']}"


def checkpoints(directory: Path) -> list[int]:
    """Return the steps of the checkpoints that are there."""
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("step-*") if path.suffix != ".abandoned")
