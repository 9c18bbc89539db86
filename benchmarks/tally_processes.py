"""Start the server and the light workers of `benchmarks.tally`, and hear what the workers say while they work."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tally import Tally

SUMS = ("--optimizer", "sgd", "--learning-rate", "1")
"""Options of a server whose values are to be the sums of what is pushed."""


def worker_command(
    tally: Tally,
    port: int,
    ranks: Sequence[int],
    pause_s: float = 0.0,
    say_s: float = 0.0,
    reconnect_timeout_s: float = 120.0,
    longest_pause_s: float = 0.0,
) -> list[str]:
    """Return the command line of a process that works as some ranks.

    Args:
        tally: what they push and check.
        port: where they find the server, on this machine.
        ranks: each gets a connection of its own.
        pause_s: length of a step's computation.
        say_s: seconds between two lines of a rank; 0: each answer gets one.
        reconnect_timeout_s: how long to look for a lost server.
        longest_pause_s: if it is more than `pause_s`, each step's computation takes a time drawn between the two.
    """
    values: dict[str, object] = {
        "--port": port,
        "--ranks": ",".join(map(str, ranks)),
        "--workers": tally.workers,
        "--parameters": tally.parameters,
        "--dtype": tally.dtype,
        "--counting": tally.counting,
        "--pause": pause_s,
        "--longest-pause": longest_pause_s,
        "--say-every": say_s,
        "--reconnect-timeout": reconnect_timeout_s,
    }
    options = [str(part) for pair in values.items() for part in pair]
    return [sys.executable, "-m", "benchmarks.tally_worker", *options]


class Lines:
    """The lines of JSON in a file that is being written, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        """Return those that have been written since the last look; a line that is not whole comes later."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
