"""Processes that are killed at points of their own and started again, each by a thread that waits for its end."""

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.integration.processes import Process, Processes, ServerProcess

Start = Callable[[str | None], Process]
"""Starts a process that is to meet these faults, or none."""


def keep_alive(start: Start, faults: Sequence[str]) -> Process:
    """Start a process again each time that its fault has killed it; return the last one, which has ended well."""
    for fault in faults:
        process = start(fault)
        assert process.ends() == -signal.SIGKILL, f"{fault} did not kill {process.name}"
        action, point = fault.split(",")[0].split("@")
        process.says(f"^injected: {action} at {point}")
    process = start(None)
    process.ends_with(0)
    return process


def run_through(
    processes: Processes,
    server_options: Mapping[str, Any],
    server_faults: Sequence[str],
    clients: Mapping[str, tuple[Callable[[str, str | None], Process], Sequence[str]]],
) -> ServerProcess:
    """Run server and clients to their end through all their faults; return the last server.

    Args:
        processes: starts them.
        server_options: with a directory of checkpoints, if it is to die.
        server_faults: each kills one server; the next one goes on from the checkpoints.
        clients: by name; how one is started, with the server's address and a fault or none, and its faults.
    """
    first = server_faults[0] if server_faults else None
    server = processes.server(**server_options, inject=first)
    address = server.address
    started = 0

    def serve(fault: str | None) -> Process:
        nonlocal started
        started += 1
        return server if started == 1 else processes.again(server, inject=fault, resume=True)

    with ThreadPoolExecutor(1 + len(clients)) as threads:
        ends = [
            threads.submit(keep_alive, lambda fault, start=start: start(address, fault), faults)
            for start, faults in clients.values()
        ]
        last = threads.submit(keep_alive, serve, server_faults).result()
        for end in ends:
            end.result()
    assert isinstance(last, ServerProcess)
    return last
