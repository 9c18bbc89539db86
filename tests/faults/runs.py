"""What the fault tests share: a server of plain SGD, light workers, and the values that arithmetic demands."""

from typing import Any

import numpy as np

from tests.faults.light_worker import value_at
from tests.integration.processes import Process, Processes, ServerProcess

MEASURED = {"optimizer": "sgd", "learning_rate": 1.0, "start_timeout": 100}

QUICK_BEATS = {"heartbeat_interval": 0.3, "heartbeat_timeout": 1.5}
"""Silence is noticed soon. A busy machine may then lose a worker that is well: it returns, and no value changes."""


def serve(processes: Processes, workers: int, steps: int, **options: Any) -> ServerProcess:
    """Start a server whose updates are exact in float32."""
    return processes.server(workers=workers, steps=steps, **MEASURED | options)


def light(processes: Processes, address: str, rank: int | None, *words: object, workers: int = 0) -> Process:
    """Start a light worker; with `workers` it checks every value that it gets."""
    arguments = ["-m", "tests.faults.light_worker", address, "--workers", str(workers)]
    if rank is not None:
        arguments += ["--rank", str(rank)]
    return processes.python(f"light worker {rank}", *arguments, *map(str, words))


def assert_values(server: ServerProcess, expected: float) -> None:
    """Compare every exported bit."""
    values = server.values()
    assert sorted(values) == ["b", "w"]
    np.testing.assert_array_equal(values["w"], np.full_like(values["w"], expected))
    np.testing.assert_array_equal(values["b"], np.full(3, -expected, np.float32))


def assert_done(server: ServerProcess, workers: int, steps: int) -> dict[int, dict[str, Any]]:
    """Wait for a good end with the values of an undisturbed run; return the summary's workers by rank."""
    server.ends_with(0)
    summary = server.summary()
    assert (summary["status"], summary["steps"]) == ("done", steps)
    assert_values(server, value_at(steps, workers))
    return {row["rank"]: row for row in summary["workers"]}
