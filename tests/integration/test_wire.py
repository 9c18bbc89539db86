"""The C server that benchmarks compare with: its update must be Adam on the mean, or it is no floor for anybody."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contenders import Wire, contender_of
from benchmarks.processes import processes
from benchmarks.workload import BETA1, BETA2, EPSILON, LEARNING_RATE, Workload

STEPS = 3
HEADER = Path(__file__).parents[2] / "benchmarks" / "wire_adam.h"
(STREAMED,) = (int(more) << 20 for more in re.findall(r"STREAMED_FLOATS = (\d+) << 20;", HEADER.read_text()))
"""Values with more elements than this are written past the caches."""

needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="wire.c needs a C compiler called cc")


def gradient_of(rank, elements):
    mixed = np.arange(elements, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(rank * 2246822519 % 2**32)
    return ((mixed >> 8).astype(np.float32) / np.float32(2**24) - np.float32(0.5)) * np.float32(0.01)


def adam_on_the_mean(workers, elements):
    total = gradient_of(0, elements)
    for rank in range(1, workers):
        total += gradient_of(rank, elements)
    mean = total * np.float32(1 / workers)
    first, second, values = np.zeros((3, elements), np.float32)
    for step in range(1, STEPS + 1):
        rate = np.float32(LEARNING_RATE * np.sqrt(1 - BETA2**step) / (1 - BETA1**step))
        first += (mean - first) * np.float32(1 - BETA1)
        second += (mean * mean - second) * np.float32(1 - BETA2)
        values -= first * rate / (np.sqrt(second) + np.float32(EPSILON))
    return values


def values_that_arrive(workers, elements, directory: Path):
    work = Workload(elements, workers, STEPS, 1)
    wire = replace(Wire(), adam=1)
    file = directory / "values"
    with processes("wire") as running:
        port_file = running.directory / "port"
        running.start("server", wire.server_command(work, port_file))
        port = running.await_port(port_file)
        for rank in range(workers):
            last = ["--values-file", str(file)] if rank == workers - 1 else []
            running.start(f"worker{rank}", [*wire.worker_command(work, port, rank), *last])
        running.wait()
    return np.fromfile(file, np.float32)


@needs_a_compiler
@pytest.mark.parametrize(
    ("workers", "elements"),
    [(1, 20), (2, 1025), (3, 10_007), (4, 8192), (5, 3000), (9, 3000), (2, STREAMED + 4711)],
)
def test_workers_get_what_adam_makes_of_the_mean_of_all_gradients_in_rank_order(workers, elements, tmp_path):
    found = values_that_arrive(workers, elements, tmp_path)
    np.testing.assert_array_equal(found, adam_on_the_mean(workers, elements))


def test_adam_is_a_setting_of_wire():
    assert contender_of("wire:adam=1") == Wire("wire:adam=1", adam=1)
    assert Wire().adam == 0
