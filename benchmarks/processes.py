"""Start processes, notice when one fails, and leave none behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

START_TIMEOUT_S = 120.0
"""For a server to write its port: compiling kernels for the first time takes a while."""

RUN_TIMEOUT_S = 1800.0
POLL_S = 0.02


class BenchmarkError(Exception):
    """A run did not end as it should; the text says which process failed and ends with its output."""


@dataclass
class Processes:
    """The processes of one run by what they are: `server`, `worker0`, ...

    Attributes:
        label: of the run, for messages.
        directory: theirs, removed at the end; what they print is kept there.
        started: those that were started, ended ones included.
    """

    label: str
    directory: Path
    started: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def start(self, who: str, command: Sequence[str]) -> None:
        """Start a process that can import this checkout."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with self._file(who, "out").open("wb") as out, self._file(who, "err").open("wb") as err:
            self.started[who] = subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment
            )

    def printed(self, who: str) -> str:
        """Return the standard output of a process so far."""
        return self._file(who, "out").read_text()

    def alive(self) -> bool:
        """Say whether any process still runs.

        Raises:
            BenchmarkError: one has failed.
        """
        codes = {who: process.poll() for who, process in self.started.items()}
        for who, code in codes.items():
            if code:
                tail = (self.printed(who) + self._file(who, "err").read_text())[-2000:]
                raise BenchmarkError(f"{self.label}: {who} ended with {code}:\n{tail}")
        return any(code is None for code in codes.values())

    def wait(self) -> None:
        """Wait until all have ended well.

        Raises:
            BenchmarkError: one failed, or it takes too long.
        """
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while self.alive():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.label} did not end within {RUN_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def await_port(self, port_file: Path) -> int:
        """Return the port, as soon as the server has written it to its file.

        Raises:
            BenchmarkError: it ended, or it takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            if not self.alive():
                raise BenchmarkError(f"{self.label}: the server ended before it listened")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.label}: the server did not listen within {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return int(port_file.read_text())

    def _file(self, who: str, suffix: str) -> Path:
        return self.directory / f"{who}.{suffix}"


@contextmanager
def processes(label: str) -> Iterator[Processes]:
    """Give a run its directory; whatever still runs at the end, or at SIGTERM, is killed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="weighmaster-bench-") as directory:
        running = Processes(label, Path(directory))
        try:
            yield running
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in running.started.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
