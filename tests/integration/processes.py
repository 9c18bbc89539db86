"""Real server and worker processes for tests: started, watched by what they say, and always ended.

A test waits for events (a line, an exit), never for a time. What processes said is printed at the end of the test,
so pytest shows it when the test fails.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]

PATIENCE_S = 150.0
"""How long a test waits for an event: far longer than it takes, since machines are busy."""


class Process:
    """A child process whose lines are read as they come."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._lines: list[str] = []
        self._streams: dict[str, list[str]] = {"out": [], "err": []}
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a signal to the group of a script must not reach pytest
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream, self._streams[kind]), name=f"{name}-{kind}")
            for stream, kind in ((self._process.stdout, "out"), (self._process.stderr, "err"))
        ]
        self._open = len(self._readers)
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], kept: list[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    kept.append(line.rstrip("\n"))
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it has said so far, on both streams."""
        with self._changed:
            return "\n".join(self._lines)

    @property
    def errors(self) -> list[str]:
        """The lines on standard error."""
        with self._changed:
            return list(self._streams["err"])

    def says(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Wait until so many lines match a regular expression; return the last of these matches."""

        def found() -> list[re.Match[str]]:
            return [match for line in self._lines if (match := re.search(pattern, line))]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= times or not self._open, PATIENCE_S)
            matches = found()
        if len(matches) < times:
            pytest.fail(f"{self.name} said {pattern!r} {len(matches)} times, not {times}")
        return matches[times - 1]

    def tell(self, line: str = "") -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL, also when it is stopped."""
        self._process.kill()
        self._process.wait()

    def ends(self) -> int:
        """Wait for its end and return the exit code (minus the signal that killed it)."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} does not end")
        for reader in self._readers:
            reader.join()
        return code

    def ends_with(self, code: int) -> None:
        """Wait for its end; it must be with this exit code, and without a traceback."""
        assert (self.name, self.ends()) == (self.name, code)
        assert "Traceback" not in self.log

    def fails(self, code: int, *words: str) -> str:
        """Wait for its end; it must be with this exit code and one sentence, the last line of standard error.

        Returns:
            The sentence, which holds all `words`.
        """
        self.ends_with(code)
        sentences = [line for line in self.errors if re.match(r"(weighmaster-\w+|light-worker): ", line)]
        assert len(sentences) == 1, f"{self.name} said {len(sentences)} sentences, not 1"
        assert self.errors[-1] == sentences[0], f"{self.name} said more after its sentence"
        for word in words:
            assert word in sentences[0], f"{word!r} is not in: {sentences[0]}"
        return sentences[0]

    def close(self) -> None:
        """Kill it if it lives, and release everything."""
        if self._process.poll() is None:
            self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        for reader in self._readers:
            reader.join()


class ServerProcess(Process):
    """`python -m ps` on a port of its own."""

    def __init__(
        self,
        name: str,
        directory: Path,
        options: dict[str, Any],
        environment: dict[str, str],
        under: Sequence[str] = (),
    ) -> None:
        self.directory, self.options, self.environment = directory, options, environment
        self.port_file = directory / "port"
        self.export = directory / "final.safetensors"
        self.summary_file = directory / "summary.json"
        defaults = {
            "port": 0,
            "port_file": self.port_file,
            "run_dir": directory,
            "export": self.export,
            "summary": self.summary_file,
        }
        command = [sys.executable, "-m", "ps", *as_options(defaults | options)]
        super().__init__(name, [*under, *command], environment)

    @property
    def port(self) -> int:
        """The port; waits until the server listens. The port file is there before the server says so."""
        self.says(r"listening on \S+:\d+")
        return int(self.port_file.read_text())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def values(self) -> dict[str, Any]:
        """The exported values by name."""
        return load_file(self.export)

    def summary(self) -> dict[str, Any]:
        """What became of the run."""
        return json.loads(self.summary_file.read_text())

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of `rounds.jsonl`."""
        path = Path(self.options.get("run_dir", self.directory)) / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def as_options(options: dict[str, Any]) -> list[str]:
    """Turn `heartbeat_interval=1` into `--heartbeat-interval 1`; True is a flag, None is left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


# Where the tests run in the background of a script, Ctrl-C is ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

P = TypeVar("P", bound=Process)


class Processes:
    """Starts processes and ends them all with the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Process] = []
        ours = ("WEIGHMASTER_", "TF_CONFIG")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self._environment |= {"PYTHONUNBUFFERED": "1"}

    def server(self, env: dict[str, str] | None = None, under: Sequence[str] = (), **options: Any) -> ServerProcess:
        """Start a server with these options (underscores for dashes); it listens on any free port of 127.0.0.1.

        `under` is a command that runs it: the words before its own.
        """
        directory = self._directory / f"server-{len(self._started)}"
        directory.mkdir(mode=0o700)
        return self._keep(ServerProcess("server", directory, options, self._environment | (env or {}), under))

    def again(self, server: ServerProcess, **changes: Any) -> ServerProcess:
        """Start a server that has ended once more: same port, files and options but for `changes`.

        What it was to break on purpose is not repeated.
        """
        options = server.options | {"port": server.port, "inject": None} | changes
        return self._keep(ServerProcess("server again", server.directory, options, server.environment))

    def python(self, name: str, *arguments: object, env: dict[str, str] | None = None) -> Process:
        """Start `python ...` with these arguments, in the root of the checkout."""
        return self.command(name, sys.executable, *arguments, env=env)

    def command(self, name: str, *words: object, env: dict[str, str] | None = None) -> Process:
        """Start any command in the root of the checkout; `env` is added to the environment."""
        return self._keep(Process(name, [str(word) for word in words], self._environment | (env or {})))

    def worker(self, server: ServerProcess, **options: Any) -> Process:
        """Start `python -m worker` for a server."""
        name = f"worker {options.get('rank', 'auto')}"
        return self.python(name, "-m", "worker", *as_options({"ps": server.address} | options))

    def _keep(self, process: P) -> P:
        self._started.append(process)
        return process

    def close(self) -> None:
        """End all that still runs, and print what everyone said."""
        for process in reversed(self._started):
            process.close()
        for process in self._started:
            print(f"---- {process.name} (process {process.pid})\n{process.log}")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Start processes; none outlives the test."""
    started = Processes(tmp_path)
    yield started
    started.close()
