"""Runs cells with `python -m worker` and TensorFlow: same data, batches, model and initial values as with NumPy."""

import re
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.numpy_mlp import initial_values
from benchmarks.processes import ROOT, BenchmarkError
from benchmarks.robustness_cells import ABSENT, EVALUATE_EVERY, NONE, TENSORFLOW, Cell
from benchmarks.robustness_lane import Lane
from benchmarks.robustness_results import Outcome

MEASURED = re.compile(r"step (\d+): test loss \S+, test accuracy (\S+)")
"""What an evaluator prints of each measurement."""

DATASET_OPTIONS = {"digits": "digits", "fashion": f"{ROOT}/benchmarks/robustness_data.py:fashion"}


def worker_commands(cell: Cell, port: int, data_dir: Path | None) -> dict[str, list[str]]:
    """Return the command of each process beside the server, by what it is.

    Raises:
        BenchmarkError: the cell needs what the worker's command line does not offer.
    """
    if cell.fault == ABSENT or not cell.alike:
        raise BenchmarkError(f"TensorFlow workers cannot do this: {cell.describe()}")
    common = [sys.executable, "-m", "worker", "--ps", f"127.0.0.1:{port}"]
    common += [
        "--model",
        f"{ROOT}/benchmarks/robustness_model.py:build",
        "--dataset",
        DATASET_OPTIONS[cell.dataset],
    ]
    common += ["--trusted-examples", str(cell.trusted)]
    if data_dir is not None:
        common += ["--data-dir", str(data_dir)]
    commands = {}
    for rank in range(cell.workers):
        fault = [] if cell.fault_of(rank) == NONE else ["--fault", cell.fault_of(rank)]
        batch = ["--batch-size", str(cell.training.batch_size)]
        commands[f"worker{rank}"] = [*common, "--rank", str(rank), *batch, *fault]
    if cell.validator_every:
        commands["validator"] = [*common, "--role", "validator"]
    commands["evaluator"] = [*common, "--role", "evaluator", "--evaluate-every", str(EVALUATE_EVERY)]
    return commands


def measured(printed: str, cell: Cell) -> tuple[float, float]:
    """Return what an evaluator measured: the mean from the first of the last five evaluated steps on, and the last.

    It measures while training goes on, so it may miss some steps, but never the last.

    Raises:
        BenchmarkError: it did not measure the final values.
    """
    accuracies = {int(step): float(share) for step, share in MEASURED.findall(printed)}
    if cell.training.steps not in accuracies:
        raise BenchmarkError("the evaluator did not measure the final values")
    first = cell.training.evaluated_steps()[0]
    last = [share for step, share in accuracies.items() if step >= first]
    return sum(last) / len(last), accuracies[cell.training.steps]


class TensorFlowLane(Lane):
    """A lane that runs cells of either framework; TensorFlow's processes live for one run."""

    def _run(self, cell: Cell, directory: Path) -> Outcome:
        if cell.framework != TENSORFLOW:
            return super()._run(cell, directory)
        start = time.monotonic()
        inputs = np.load(self._data / cell.dataset / "train_features.npy", mmap_mode="r").shape[1:]
        save_file(initial_values(int(np.prod(inputs)), cell.seed), directory / "init.safetensors")
        served = self._serve(cell, directory, f"--init={directory / 'init.safetensors'}", "--evaluators=1")
        commands = worker_commands(cell, served.port(), self._data_dir)
        for who, command in commands.items():
            with (directory / who).open("wb") as log:
                self._start(who, command, log)
        for who in (*commands, "server"):
            code = self._started[who].wait()
            if code:
                said = served.said() if who == "server" else (directory / who).read_text(errors="replace")[-2000:]
                raise BenchmarkError(f"{who} ended with {code}:\n{said}")
        accuracy, final = measured((directory / "evaluator").read_text(), cell)
        return Outcome(accuracy=accuracy, final_accuracy=final, done=True, seconds=time.monotonic() - start)
