"""Name what is measured, and say how the processes of each are started."""

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.attacker import MEMBERS, STRANGERS
from benchmarks.processes import BenchmarkError
from benchmarks.workload import LEARNING_RATE, Workload


class Contender(Protocol):
    """What is measured: two command lines that obey one small contract.

    The server writes its port (decimal, newline) to a file, by renaming, once it listens. The worker of rank 0
    ends its standard output with a line of JSON: `returned_ns`, the CLOCK_MONOTONIC time at which each step
    returned, and, if the contender does the work, `checksum` of the final values.
    """

    @property
    def name(self) -> str:
        """What the tables call it."""

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker."""

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return the command lines of whoever else is there: validators, or somebody who looks on."""


@dataclass(frozen=True)
class Wire:
    """The bytes and nothing else, in C: what the sockets allow; or the bytes, the mean and Adam.

    Attributes:
        name: what the tables call it.
        block: bytes of one send or recv call.
        congestion: TCP congestion control; empty for the kernel's own.
        send_buffer: SO_SNDBUF in bytes; 0 lets the kernel tune it.
        receive_buffer: SO_RCVBUF in bytes; 0 lets the kernel tune it.
        huge: 1 asks for 2 MB pages.
        adam: 1 lets the server apply Adam to the mean of the gradients, which are not those of `workload`.
    """

    name: str = "wire"
    block: int = 4 << 20
    congestion: str = "reno"
    send_buffer: int = 512 << 10
    receive_buffer: int = 0
    huge: int = 1
    adam: int = 0

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server; compiles the program first."""
        own = ["--port-file", str(port_file), "--workers", str(work.workers)]
        return [str(compile_wire()), "server", *own, *self._options(work)]

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker."""
        own = ["--port", str(port), "--rank", str(rank)]
        return [str(compile_wire()), "worker", *own, *self._options(work)]

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return nothing: there are none."""
        return []

    def _options(self, work: Workload) -> list[str]:
        values = {
            "--steps": work.steps,
            "--payload": work.payload_bytes,
            "--block": self.block,
            "--congestion": self.congestion,
            "--send-buffer": self.send_buffer,
            "--receive-buffer": self.receive_buffer,
            "--huge": self.huge,
            "--adam": self.adam,
        }
        return [str(part) for pair in values.items() for part in pair]


@dataclass(frozen=True)
class Weighmaster:
    """The product with its defaults: its server's command line, its worker's library."""

    name: str = "weighmaster"

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""
        values = {
            "--host": "127.0.0.1",
            "--port": 0,
            "--port-file": port_file,
            "--workers": work.workers,
            "--steps": work.steps,
            "--optimizer": "adam",
            "--learning-rate": LEARNING_RATE,
            "--summary": port_file.with_name("summary.json"),
            "--run-dir": port_file.with_name("run"),
        }
        return [sys.executable, "-m", "ps", *(str(part) for pair in values.items() for part in pair)]

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker."""
        own = ["--port", str(port), "--rank", str(rank), "--parameters", str(work.parameters)]
        return [sys.executable, "-m", "benchmarks.push_worker", *own]

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return nothing: there are none."""
        return []


@dataclass(frozen=True)
class Secured(Weighmaster):
    """The product over TLS 1.3, with certificates of a test authority."""

    name: str = "weighmaster-tls"

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""
        files = make_authority()
        own = ["--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server.key")]
        return [*super().server_command(work, port_file), *own]

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker."""
        return [*super().worker_command(work, port, rank), "--tls-ca", str(make_authority() / "ca.pem")]


@dataclass(frozen=True)
class Watched(Weighmaster):
    """The product with TensorBoard's files, its page polled and its metrics scraped once a second."""

    name: str = "weighmaster-watched"

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""
        page = ["--status-port", "0", "--status-port-file", str(page_directory() / "port")]
        board = ["--tensorboard", str(port_file.with_name("board"))]
        return [*super().server_command(work, port_file), *page, *board]

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return the command line of who looks on."""
        own = ["--status-port-file", str(page_directory() / "port")]
        return [[sys.executable, "-m", "benchmarks.onlooker", *own]]


@dataclass(frozen=True)
class Attacked(Weighmaster):
    """The product while somebody attacks it in one of the ways of `benchmarks.attacker`.

    Attributes:
        attack: which.
    """

    attack: str = ""

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server, with a rank more for a malicious worker; no round waits for it."""
        if self.attack not in MEMBERS:
            return super().server_command(work, port_file)
        room = replace(work, workers=work.workers + 1)
        return [*super().server_command(room, port_file), "--quorum", str(work.workers)]

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return the command line of the attacker."""
        own = ["--port", str(port), "--rank", str(work.workers), "--parameters", str(work.parameters)]
        return [[sys.executable, "-m", "benchmarks.attacker", *own, "--attack", self.attack]]


@dataclass(frozen=True)
class Judged(Weighmaster):
    """The product with a validator in every round and a rule that judges by it; gradients have something in common.

    Attributes:
        rule: the aggregation rule.
    """

    name: str = "master"
    rule: str = "master"

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""
        return [*super().server_command(work, port_file), "--aggregation", self.rule, "--validator-every", "1"]

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker."""
        return [*super().worker_command(work, port, rank), "--alike"]

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return the command line of the one validator."""
        own = ["--port", str(port), "--parameters", str(work.parameters), "--alike"]
        return [[sys.executable, "-m", "benchmarks.push_worker", *own]]


@dataclass(frozen=True)
class Pickle:
    """Pickled dicts and Adam in plain NumPy: what people write."""

    name: str = "pickle"

    def server_command(self, work: Workload, port_file: Path) -> list[str]:
        """Return the command line of the server."""
        own = ["--port-file", str(port_file), "--workers", str(work.workers)]
        return [*self._command("server", work), *own]

    def worker_command(self, work: Workload, port: int, rank: int) -> list[str]:
        """Return the command line of one worker."""
        return [*self._command("worker", work), "--port", str(port), "--rank", str(rank)]

    def other_commands(self, work: Workload, port: int) -> list[list[str]]:
        """Return nothing: there are none."""
        return []

    def _command(self, mode: str, work: Workload) -> list[str]:
        sizes = ["--parameters", str(work.parameters), "--steps", str(work.steps)]
        return [sys.executable, "-m", "benchmarks.pickle_baseline", mode, *sizes]


KNOWN: dict[str, Callable[[], Contender]] = {
    "wire": Wire,
    "weighmaster": Weighmaster,
    "weighmaster-tls": Secured,
    "weighmaster-watched": Watched,
    **{f"attacked-{name}": partial(Attacked, f"attacked-{name}", name) for name in (*STRANGERS, *MEMBERS)},
    "pickle": Pickle,
    "evidence": lambda: Judged("evidence", "evidence"),
    "master": Judged,
}


def contender_of(spec: str) -> Contender:
    """Return the contender that `name` or `wire:setting=value:setting=value` stands for.

    Raises:
        ValueError: no such contender or setting.
    """
    name, *settings = spec.split(":")
    if name not in KNOWN:
        raise ValueError(f"no contender {name!r}: choose from {', '.join(KNOWN)}")
    contender = KNOWN[name]()
    if not settings:
        return contender
    if not isinstance(contender, Wire):
        raise ValueError(f"{name!r} has no settings; only wire has")
    changes: dict[str, Any] = {"name": spec}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "congestion":
            changes[key] = value
        elif key in ("block", "send_buffer", "receive_buffer", "huge", "adam"):
            changes[key] = int(value)
        else:
            raise ValueError(f"wire has no setting {key!r}")
    return replace(contender, **changes)


@functools.cache
def compile_wire() -> Path:
    """Compile wire.c for this processor, once per process; returns the program.

    Raises:
        BenchmarkError: there is no C compiler, or it refused.
    """
    directory = tempfile.mkdtemp(prefix="weighmaster-wire-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    program = Path(directory) / "wire"
    source = Path(__file__).with_name("wire.c")
    fast = ["-O3", "-march=native", "-fno-math-errno"]  # the last vectorises square roots
    command = ["cc", *fast, "-std=c11", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"]
    command += ["-o", str(program), str(source), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BenchmarkError("wire.c needs a C compiler called cc: install gcc or clang") from error
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"cc refused wire.c:\n{error.stderr}") from error
    return program


@functools.cache
def page_directory() -> Path:
    """Make a directory for the port of the status page, once per process."""
    directory = tempfile.mkdtemp(prefix="weighmaster-page-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@functools.cache
def make_authority() -> Path:
    """Make a test authority, once per process; returns the directory of its files.

    Raises:
        BenchmarkError: openssl is not there, or refused.
    """
    directory = tempfile.mkdtemp(prefix="weighmaster-tls-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    script = Path(__file__).parents[1] / "scripts" / "make_test_ca.sh"
    try:
        subprocess.run([str(script), directory], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"no certificates could be made: {error.stderr}") from error
    return Path(directory)
