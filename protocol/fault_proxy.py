"""`python -m protocol.fault_proxy`: read the options, be the proxy until a signal comes."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from protocol.addresses import parse_address
from protocol.errors import ConfigurationError, Interrupted, WeighmasterError
from protocol.frame_faults import KINDS, Fault
from protocol.proxy import FaultProxy

PROGRAM = "weighmaster-proxy"
"""With this name begins the sentence that ends the process."""

DESCRIPTION = """\
Stands between workers and their parameter server and does to exactly one frame what a fault says.
Workers get the proxy's address as their --ps. It listens on 127.0.0.1 and says its port and, in a line
each, which faults have fired."""

FAULT_HELP = f"""\
A FAULT is ACTION[:ARGUMENT]@KIND[,number=N], and strikes the N-th frame of a kind, counted from 0 over all
connections (heartbeats: of both ways).

actions:
  cut[:PART]            pass on a part of the frame and cut the connection: start (nothing), header, half,
                        last (all but one byte), or a number of bytes  [half]
  delay:SECONDS         pass it on later; what follows on its way waits behind it
  double                pass it on twice
  hold                  keep it; pass it on once a later connection is welcomed, ahead of all that this says
  swallow               do not pass it on
  blackhole[:SECONDS]   from this frame on nothing passes, not even the end of a connection, for so long  [ever]
                        ,way=up|down|both: up is from workers to the server  [both]

kinds:
  {", ".join(list(KINDS)[:10])},
  {", ".join(list(KINDS)[10:])}

example:
  python -m protocol.fault_proxy --to 127.0.0.1:5014 cut:half@push,number=3 delay:2@values,number=9"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. See `python -m protocol.fault_proxy --help`.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line: `to` (Address), `port`, `port_file` (Path or None), `faults` (list of Fault).

    Raises:
        ConfigurationError: it cannot be understood.
    """
    parser = _Parser(
        prog="python -m protocol.fault_proxy",
        description=DESCRIPTION,
        epilog=FAULT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="the parameter server")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="port of the proxy; 0 takes any  [0]")
    parser.add_argument("--port-file", type=Path, metavar="FILE", help="file for the port, written when listening")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="see below; none: it only passes on")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        raise ConfigurationError(f"--port {options.port} is not a port from 0 to 65535")
    try:
        options.to = parse_address(options.to)
    except ConfigurationError as error:
        raise ConfigurationError(f"--to {error}") from error
    options.faults = [Fault.parse(text) for text in options.faults]
    return options


def run(options: argparse.Namespace) -> NoReturn:
    """Serve until a signal ends it.

    Raises:
        ConfigurationError: it cannot listen, or the port file cannot be written.
        Interrupted: by the signal.
    """
    with FaultProxy(options.to, *options.faults, port=options.port, say=_say) as proxy:
        if options.port_file is not None:
            _write_port_file(options.port_file, proxy.address.port)
        _say(f"listening on {proxy.address}, passing on to {options.to}; faults to come: {len(options.faults)}")
        while True:
            signal.pause()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        run(parse(arguments))
    except WeighmasterError as error:
        with contextlib.suppress(OSError):  # nobody may be reading; the exit code still says it
            print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _write_port_file(path: Path, port: int) -> None:
    """Write the port so that the file is there whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(f"{port}\n", encoding="ascii")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"--port-file {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
