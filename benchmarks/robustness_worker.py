"""One worker or validator process of the robustness benchmark: runs one job after the other.

A job is a line of JSON on standard input, its result a line of JSON on standard output; the process ends with its
input. Gradients are NumPy's, pushed through `worker.connect`, and a bad rank pushes what `worker.faults` makes.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import worker
from benchmarks import numpy_mlp
from benchmarks.robustness_cells import NONE
from benchmarks.robustness_data import opened, shard_of, trusted_examples
from protocol.errors import Diverged
from worker.batches import Shard, gather
from worker.corruption import Corrupt
from worker.definitions import Dataset
from worker.faults import Contribution, Situation, parse_fault

JOIN_TIMEOUT_S = 30.0
VALIDATOR = "validator"


@dataclass(frozen=True)
class Job:
    """What one process does in one run.

    Attributes:
        port: of the server on this machine.
        role: `worker` or `validator`.
        rank: the one to ask the server for.
        shard: whose examples to train on; also whose fault it is. Differs from `rank` when bad ranks are absent.
        shards: how many there are.
        data: directory that `robustness_data.save` wrote.
        alike: whether shards are drawn alike.
        trusted: examples held out of all shards.
        seed: of the run.
        steps: of the run.
        batch_size: examples in a batch of a worker; a validator takes all trusted examples each time.
        fault: what to do wrong, or `none`.
        evaluated_steps: steps whose values are measured on the test data.
    """

    port: int
    role: str
    rank: int
    shard: int
    shards: int
    data: str
    alike: bool
    trusted: int
    seed: int
    steps: int
    batch_size: int
    fault: str = NONE
    evaluated_steps: tuple[int, ...] = ()


@dataclass
class Result:
    """What became of a job.

    Attributes:
        done: False when the run ended as diverged.
        pushes: how many were made.
        refused: how many of them did not count.
        accuracies: share of right answers on the test data by step; of a run that diverged also at its last step.
        compute_s: seconds spent on gradients.
        error: what went wrong, or empty.
    """

    done: bool = False
    pushes: int = 0
    refused: int = 0
    accuracies: dict[int, float] = field(default_factory=dict)
    compute_s: float = 0.0
    error: str = ""


class Computer:
    """Computes what a job pushes, at any values."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.dataset = _opened(job.data)
        self.inputs = int(np.prod(self.dataset.train_features.shape[1:]))
        self._shards: dict[int, Shard] = {}
        self._fault = None if job.fault == NONE else parse_fault(job.fault)
        self._trusted = trusted_examples(self.dataset, job.trusted, job.seed) if job.role == VALIDATOR else None

    def push_of(self, step: int, values: numpy_mlp.Values) -> Contribution:
        """Return what this worker pushes at the values of a step."""
        if self._trusted is not None:
            return _contribution(values, *self._trusted)
        if self._fault is None:
            return self._honest(step, values, self.job.shard, None)
        job = self.job
        situation = Situation(job.seed, job.shard, step, job.steps, job.shards, numpy_mlp.CLASSES)
        return self._fault.push(situation, lambda rank, corrupt: self._honest(step, values, rank, corrupt))

    def accuracy(self, values: numpy_mlp.Values) -> float:
        """Return the share of right answers on the test data."""
        return numpy_mlp.accuracy(values, self.dataset.test_features, self.dataset.test_labels)

    def _honest(self, step: int, values: numpy_mlp.Values, rank: int, corrupt: Corrupt | None) -> Contribution:
        features, labels = gather(self.dataset, self._shard(rank).batch_ids(step, self.job.batch_size))
        if corrupt is not None:
            features, labels = corrupt(features, labels)
        return _contribution(values, features, labels)

    def _shard(self, rank: int) -> Shard:
        if rank not in self._shards:
            job = self.job
            labels = self.dataset.train_labels
            self._shards[rank] = shard_of(labels, rank, job.shards, job.seed, job.trusted, job.alike)
        return self._shards[rank]


@cache
def _opened(directory: str) -> Dataset:
    return opened(Path(directory))


def _contribution(values: numpy_mlp.Values, features: NDArray[Any], labels: NDArray[np.int32]) -> Contribution:
    computed = numpy_mlp.compute(values, numpy_mlp.as_inputs(features), labels)
    return Contribution([computed.gradients[name] for name in values], computed.loss, computed.accuracy)


def do(job: Job) -> Result:
    """Take part in one run, to its end.

    Raises:
        WeighmasterError: it ended otherwise than by its last step or by diverging.
    """
    computer, result = Computer(job), Result()
    initial = numpy_mlp.initial_values(computer.inputs, job.seed)
    examples = job.trusted if job.role == VALIDATOR else job.batch_size
    rank = None if job.role == VALIDATOR else job.rank
    with worker.connect(
        f"127.0.0.1:{job.port}", initial, rank=rank, role=job.role, seed=job.seed, connect_timeout=JOIN_TIMEOUT_S
    ) as server:
        update = server.pull()
        try:
            while not update.done:
                start = time.perf_counter()
                if update.step in job.evaluated_steps:
                    result.accuracies[update.step] = computer.accuracy(update.values)
                pushed = computer.push_of(update.step, update.values)
                result.compute_s += time.perf_counter() - start
                gradients = dict(zip(update.values, pushed.gradients, strict=True))
                update = server.push(gradients, loss=pushed.loss, accuracy=pushed.accuracy, examples=examples)
                result.pushes += 1
                result.refused += not update.applied
            result.done = True
        except Diverged:
            pass  # its last values are what the rule has made of the model
        if job.evaluated_steps:
            result.accuracies[update.step] = computer.accuracy(update.values)
    return result


def main(lines: Iterable[str], answer: Callable[[str], None]) -> None:
    """Do the jobs of `lines`, one after the other; an error is an answer too."""
    for line in lines:
        try:
            with np.errstate(all="ignore"):  # faults make values overflow, and the server judges them
                result = do(Job(**json.loads(line)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark must hear of it and not wait
            result = Result(error=f"{type(error).__name__}: {error}")
        answer(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(sys.stdin, lambda text: print(text, flush=True))
