"""`python -m ps`: read the options, serve one run, leave its results behind."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from protocol.errors import ExitCode, Interrupted, WeighmasterError

# All else is imported by `main` and what it calls: a Ctrl-C that comes while it loads is to be a sentence as well.
if TYPE_CHECKING:
    from pathlib import Path

    from protocol.injector import Faults
    from protocol.tokens import Grant
    from protocol.transport import Listener
    from ps.coordination.instructions import Finish
    from ps.gathering import Gathering
    from ps.monitoring.console import Console
    from ps.server import ParameterServer
    from ps.settings.command_line import ExportRequest, TokenRequest
    from ps.settings.config import ServerConfig

PROGRAM = "weighmaster-ps"

_log_format = "text"
"""As asked for, once the options are read."""

logger = logging.getLogger("weighmaster.ps")


class _ToConsole(logging.Handler):
    """Writes log records as lines above the progress line."""

    def __init__(self, console: "Console", formatter: logging.Formatter) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        for line in self.format(record).splitlines():
            self._console.say(line)


def serve(config: "ServerConfig") -> int:
    """Serve one run and return the exit code."""
    # The compiler behind the kernels takes a second that --help need not wait for.
    from protocol.injection import Plan
    from protocol.injector import Faults
    from protocol.messages import Side
    from ps.monitoring.log_format import formatter_of, open_console

    global _log_format
    _log_format = config.log_format
    plan = Plan.parse(config.inject, Side.SERVER)
    console = open_console(config.steps, sys.stdout, config.log_format)
    handler = _ToConsole(console, formatter_of(config.log_format))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if plan.announcement:
            logger.warning("%s", plan.announcement)
        with _prepared(config, console, Faults(plan)) as prepared:
            if prepared.config.gathers:
                return _serve_those_who_come(prepared, console)
            with contextlib.closing(prepared.server(prepared.config, None)) as server:
                return _serve(prepared.config, server, console)
    finally:
        console.close()
        logger.removeHandler(handler)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What is there before anybody is let in.

    Attributes:
        config: what the operator asked for; if it leaves the number of workers open, with that of the checkpoint.
        grants: who may join with which token.
        faults: what is to break on purpose.
        server: makes the server, of a configuration that says how many workers there are.
    """

    config: "ServerConfig"
    grants: "tuple[Grant, ...]"
    faults: "Faults"
    server: "Callable[[ServerConfig, Gathering | None], ParameterServer]"


def _is_in(directory: "Path", path: "Path") -> bool:
    """Say whether a file is to lie in a directory, however the two are written."""
    return os.path.realpath(path.parent) == os.path.realpath(directory)


@contextlib.contextmanager
def _prepared(config: "ServerConfig", console: "Console", faults: "Faults") -> "Iterator[_Prepared]":
    """Check everything that can be checked before there is a server, and open what it needs."""
    import secrets

    from protocol.tokens import read_grants
    from ps import outcome
    from ps.checkpointing import open_checkpoints, with_known_workers
    from ps.monitoring.tensorboard import check_installed
    from ps.server import ParameterServer

    if config.tensorboard is not None:
        check_installed()
    grants = read_grants(config.token_file) if config.token_file else ()
    files = {"--export": config.export, "--summary": config.summary, "--port-file": config.port_file}
    named = [(option, path) for option, path in files.items() if path is not None]
    for option, path in named:
        if not _is_in(config.run_dir, path):  # before anything is made: who is refused leaves nothing behind
            outcome.check_writable(option, path)
    outcome.make_run_directory(config.run_dir)
    in_run_directory = [(option, path) for option, path in named if _is_in(config.run_dir, path)]
    if config.summary is None:
        in_run_directory.append(("--run-dir", config.run_dir / "summary.json"))
    for option, path in in_run_directory:
        outcome.check_writable(option, path)
    with open_checkpoints(config, faults) as (checkpoints, restored):
        load_init = config.init is not None and restored is None
        initial_values = outcome.load_initial_values(config.init) if config.init and load_init else None
        epoch = secrets.randbits(63)

        def server(counted: "ServerConfig", gathering: "Gathering | None") -> ParameterServer:
            return ParameterServer(
                counted, console, epoch, grants, initial_values, checkpoints, restored, faults, gathering
            )

        yield _Prepared(with_known_workers(config, restored), tuple(grants), faults, server)


def _serve(config: "ServerConfig", server: "ParameterServer", console: "Console") -> int:
    listener = server.listen()
    server.accept_history()
    _tell_where(config, listener)
    return _run(config, server, listener, console)


def _serve_those_who_come(prepared: _Prepared, console: "Console") -> int:
    """Serve as many workers as come: count them, then make the server for so many."""
    from protocol.addresses import Address
    from protocol.errors import NoProgress
    from protocol.transport import Listener
    from ps.gathering import Gathering

    config = prepared.config
    _check_master(config)
    listener = Listener(Address(config.host, config.port), config.congestion_control)
    gathering = Gathering(config, prepared.grants, prepared.faults)
    _tell_where(config, listener)
    _interrupt_by_signals(gathering)
    try:
        with gathering:
            counted = config.for_workers(gathering.gather(listener))
            with contextlib.closing(prepared.server(counted, gathering)) as server:
                return _run(counted, server, listener, console)
    except (Interrupted, NoProgress) as error:
        return _leave_without_results(config, gathering, error)


def _check_master(config: "ServerConfig") -> None:
    """Find a master of the user's own before workers come; it is tried when it is known for how many."""
    if config.master is not None:
        from ps.rules.user_network import load_user_master

        load_user_master(config.master)


def _tell_where(config: "ServerConfig", listener: "Listener") -> None:
    from ps import outcome

    if config.port_file is not None:
        outcome.write_port_file(config.port_file, listener.address.port)
    to_come = config.workers if config.gathers else config.start_workers
    logger.info("listening on %s, workers to come: %s", listener.address, to_come)
    _warn_of_exposure(config)


def _run(config: "ServerConfig", server: "ParameterServer", listener: "Listener", console: "Console") -> int:
    _interrupt_by_signals(server)
    finish = server.run(listener)
    console.close()
    return _leave_results(config, server, finish)


def _leave_without_results(config: "ServerConfig", gathering: "Gathering", error: WeighmasterError) -> int:
    """Say how a run ended that had too few workers to begin with, and write that down as for any other run."""
    from ps import outcome

    finish, summary = gathering.ending(error), gathering.summary(error)
    outcome.write_summary(config.summary or config.run_dir / "summary.json", summary)
    _say_ended(config, f"the run ended at step 0: {finish.reason}", finish.status, error.exit_code, 0)
    return error.exit_code


def _leave_results(config: "ServerConfig", server: "ParameterServer", finish: "Finish") -> int:
    """Write what the run leaves behind, and say how it ended; that one thing cannot be written costs no other."""
    from protocol.messages import Status
    from ps import outcome

    unwritten: list[WeighmasterError] = []

    def attempt(write: Callable[[], None]) -> None:
        try:
            write()
        except WeighmasterError as error:
            unwritten.append(error)

    attempt(lambda: server.ending.keep_last(finish))
    summary, summary_path = server.ending.summary(finish), config.summary or config.run_dir / "summary.json"
    values, export_path = server.ending.final_values(), config.export
    if finish.status is Status.DONE and export_path is not None and values is not None:

        def export() -> None:
            outcome.export_values(export_path, values)
            logger.info("final values are in %s", export_path)

        attempt(export)
    attempt(lambda: outcome.write_summary(summary_path, summary))
    if finish.status is Status.DONE and not unwritten:
        logger.info("%s; summary in %s", _in_short(summary), summary_path)
        return server.ending.exit_code(finish)
    why = "; and ".join([*([finish.reason] if finish.reason else []), *map(str, unwritten)])
    code = unwritten[0].exit_code if unwritten else server.ending.exit_code(finish)
    _say_ended(config, f"the run ended at step {summary['steps']}: {why}", finish.status, code, summary["steps"])
    return code


def _say_ended(config: "ServerConfig", reason: str, status: str, code: ExitCode, step: int) -> None:
    from ps.monitoring.log_format import ended

    with contextlib.suppress(OSError):  # nobody may be reading; the exit code still says it
        if config.log_format == "json":
            print(ended(time.time(), status, reason, code, step), flush=True)
        else:
            print(f"{PROGRAM}: {reason}", file=sys.stderr)


def inspect(path: "Path") -> int:
    """Show what is in a checkpoint, or in a directory of them; that it is damaged, or the newest, is an error."""
    from protocol.errors import CheckpointError
    from ps.checkpoint_report import describe

    report = describe(path)
    print(report.text, flush=True)
    if report.damage:
        raise CheckpointError(report.damage)
    return ExitCode.DONE


def export(request: "ExportRequest") -> int:
    """Write the values of a checkpoint to a file."""
    from ps import checkpoint_report

    checkpoint_report.export(request.directory, request.to, request.out)
    print(f"values are in {request.out}")
    return ExitCode.DONE


def make_token(request: "TokenRequest") -> int:
    """Make a token and print or append its line."""
    from protocol.messages import Role
    from protocol.tokens import Grant, append_grant, new_token

    name = None if request.name == "*" else request.name
    grant = Grant(name, Role(request.role), request.rank, new_token().encode("ascii"))
    if request.file is None:
        print(grant.line())
    else:
        append_grant(request.file, grant)
    return ExitCode.DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    from ps.settings.command_line import build_command, execute

    return execute(build_command(serve, make_token, inspect, export), arguments)


def _warn_of_exposure(config: "ServerConfig") -> None:
    from protocol.addresses import is_loopback

    if config.insecure:
        logger.warning("WARNING: --insecure admits anyone who can reach this port")
    if config.tls is not None:
        asked = "; clients must show a certificate too" if config.tls.asks_clients else ""
        logger.info("TLS 1.3%s; fingerprint of the certificate: %s", asked, config.tls.certificate.hex())
    elif not is_loopback(config.host):
        logger.warning("WARNING: the traffic is neither secret nor tamper-proof; use a network that you trust")
    if config.status_port is not None and config.token_file is not None and not is_loopback(config.status_host):
        logger.warning(
            "WARNING: the status page speaks plain HTTP also to other machines, and is opened by tokens, which can "
            "be read on the way; put TLS before it, or use a network that you trust"
        )


def _in_short(summary: Mapping[str, Any]) -> str:
    parts = [f"done: {summary['steps']} steps in {summary['seconds']:.1f} s"]
    if summary["final_loss"] is not None:
        parts.append(f"loss {summary['final_loss']:.4f}")
    if summary["test_accuracy"] is not None:
        parts.append(f"test accuracy {summary['test_accuracy']:.4f} at step {summary['test_accuracy_step']}")
    return ", ".join(parts)


def _leave(number: int, frame: FrameType | None) -> None:
    """End a process that serves nobody yet; an exception could be swallowed by what is being imported."""
    interrupted = Interrupted(signal.Signals(number).name)
    descriptor, line = 2, f"{PROGRAM}: {interrupted}"
    if _log_format == "json":
        from protocol.log_lines import ended  # loaded long since

        descriptor, line = 1, ended(time.time(), str(interrupted), interrupted.exit_code, {})
    with contextlib.suppress(OSError):  # nobody may be reading; the exit code still says it
        os.write(descriptor, f"{line}\n".encode())
    os._exit(int(interrupted.exit_code))


def _interrupt_by_signals(whom: "ParameterServer | Gathering") -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        whom.interrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":
    sys.exit(main())
