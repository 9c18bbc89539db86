"""`python -m worker`: read the options, build the model, join the run, take part in it until it is done."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from protocol.errors import Interrupted, WeighmasterError

# All else is imported by `main` and what it calls: a Ctrl-C that comes while it loads is to be a sentence as well.
if TYPE_CHECKING:
    from worker.config import WorkerConfig

PROGRAM = "weighmaster-worker"

_log_format = "text"
"""As asked for, once the options are read."""

LEAVE_S = 4.0
"""A signal ends the process within this time even when TensorFlow is in the middle of a long step."""


def run(config: "WorkerConfig") -> int:
    """Run one worker, validator or evaluator and return the exit code."""
    from worker import job

    global _log_format
    _log_format = config.log_format
    try:
        token = job.token_of(config)
        dataset = job.load_data(config)
        job.load_tensorflow()
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)
        prepared = job.prepare(config, dataset)
        return job.print_plan(prepared) if config.dry_run else job.take_part(prepared, token)
    except WeighmasterError as error:
        if config.log_format != "json":
            raise
        return job.end_badly(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    from worker.command_line import build_command, execute

    return execute(build_command(run), arguments)


def _leave(number: int, frame: FrameType | None) -> None:
    """End a process that has joined no run yet; an exception could be swallowed by what is being imported."""
    _ignore_signals()
    _exit(Interrupted(signal.Signals(number).name))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Take leave of the run, and of the user's code."""
    _ignore_signals()
    interrupted = Interrupted(signal.Signals(number).name)
    # A step inside TensorFlow cannot be broken off: the exception below waits for its end, this timer does not.
    timer = threading.Timer(LEAVE_S, _exit, (interrupted,))
    timer.daemon = True
    timer.start()
    raise interrupted


def _ignore_signals() -> None:
    """Let a second signal change nothing: it would break into the leave that the first one takes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _exit(interrupted: Interrupted) -> None:
    descriptor, line = 2, f"{PROGRAM}: {interrupted}"
    if _log_format == "json":
        from protocol.log_lines import ended  # loaded long since

        descriptor, line = 1, ended(time.time(), str(interrupted), interrupted.exit_code, {})
    with contextlib.suppress(OSError):  # nobody may be reading; the exit code still says it
        os.write(descriptor, f"{line}\n".encode())  # the streams may be held by what does not end
    os._exit(int(interrupted.exit_code))


if __name__ == "__main__":
    sys.exit(main())
