"""The command `weighmaster-ps`: options in, `ServerConfig` out. What it then runs is handed in."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import cloup
from click.core import ParameterSource

from protocol.errors import ConfigurationError, ExitCode, WeighmasterError
from protocol.log_lines import asks_for_json, ended
from protocol.messages import Role
from ps.settings.combinations import option_name
from ps.settings.config import ServerConfig
from ps.settings.options import OPTION_GROUPS, TYPES

PROGRAM = "weighmaster-ps"
"""With this name begins each sentence that ends the process, however it was started."""

STARTED_AS = "WEIGHMASTER_STARTED_AS"
"""The scripts tell by this variable what the user typed."""


@dataclass(frozen=True)
class TokenRequest:
    """What `weighmaster-ps token` is asked for.

    Attributes:
        name: whom the token is for; `*` is anyone.
        role: `worker`, `validator` or `evaluator`.
        rank: the rank it is good for; None is any.
        file: where the line is appended; None: standard output.
    """

    name: str
    role: str
    rank: int | None
    file: Path | None


@dataclass(frozen=True)
class ExportRequest:
    """What `weighmaster-ps export` is asked for.

    Attributes:
        directory: one checkpoint, or a directory of them.
        to: format, of `EXPORT_FORMATS`.
        out: file to write.
    """

    directory: Path
    to: str
    out: Path


EXPORT_FORMATS = ("npz", "safetensors")


def invocation() -> str:
    """Return what starts this program again: a script, `python -m ps`, or the command where it is installed."""
    script = os.environ.get(STARTED_AS, "").strip()
    if script:
        return script
    return "python -m ps" if Path(sys.argv[0]).name == "__main__.py" else PROGRAM


def _rank(text: str) -> int | None:
    if text == "*":
        return None
    if not text.isdecimal() or len(text) > 6:
        raise click.BadParameter(f"{text!r} is not a rank; give a number from 0, or '*' for any.")
    return int(text)


def _version() -> str:
    try:
        return version("weighmaster")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def _configuration(values: dict[str, Any]) -> ServerConfig:
    if values["steps"] is None:
        raise ConfigurationError("--steps is missing: say how many rounds to train, there or in WEIGHMASTER_STEPS")
    return ServerConfig(**{name: value for name, value in values.items() if value is not None})


def build_command(
    serve: Callable[[ServerConfig], int],
    make_token: Callable[[TokenRequest], int],
    inspect: Callable[[Path], int] | None = None,
    export: Callable[[ExportRequest], int] | None = None,
) -> cloup.Group:
    """Make the command; without a sub-command it calls `serve`, with one what has its name.

    Args:
        serve: runs the server and returns the exit code.
        make_token: makes a token and returns the exit code.
        inspect: shows what is in a checkpoint, or in a directory of them; None: there is no such sub-command.
        export: writes the values of a checkpoint to a file; None: there is no such sub-command.
    """

    @click.version_option(_version(), prog_name=PROGRAM)
    @click.pass_context
    def command(context: click.Context, /, **values: Any) -> int | None:
        """Serve the variables of a training run.

        Without a sub-command it serves: it waits for the workers, makes one gradient of theirs in every
        round, updates the variables and hands them out.
        Time-outs are seconds. The command line wins over the environment.
        """
        if context.invoked_subcommand is None:
            if (
                values["mode"] == "ensemble"
                and context.get_parameter_source("aggregation") is ParameterSource.DEFAULT
            ):
                values["aggregation"] = "master"  # an ensemble has no other
            return serve(_configuration(values))
        for name in values:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise ConfigurationError(
                    f"{option_name(name)} is an option of serving and does not go with the sub-command "
                    f"{context.invoked_subcommand}"
                )
        return None

    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    decorated: Any = command
    for add_options in reversed(OPTION_GROUPS):
        decorated = add_options(decorated)
    group = cloup.group(PROGRAM, invoke_without_command=True, context_settings=settings)(decorated)
    group.add_command(_token_command(make_token))
    if inspect is not None:
        group.add_command(_inspect_command(inspect))
    if export is not None:
        group.add_command(_export_command(export))
    return group


def _option(name: str, text: str, **attributes: Any) -> Callable[[Any], Any]:
    # Without environment variables: what is meant for a worker, its rank say, must not change what is made here.
    return cloup.option(option_name(name), name, help=text, **{"show_default": True} | attributes)


def _checkpoint_directory() -> Callable[[Any], Any]:
    kind = click.Path(exists=True, file_okay=False, path_type=Path)
    return cloup.argument("directory", metavar="DIR", type=kind)


def _inspect_command(inspect: Callable[[Path], int]) -> click.Command:
    @cloup.command("inspect")
    @_checkpoint_directory()
    def command(directory: Path) -> int:
        """Show what is in the checkpoint DIR, or in each of a directory of them, and whether it is undamaged.

        The exit code is 6 if it is damaged; of a directory of them, if the newest is.
        """
        return inspect(directory)

    return command


def _export_command(export: Callable[[ExportRequest], int]) -> click.Command:
    @cloup.command("export")
    @_checkpoint_directory()
    @_option("to", "Format of the file.", type=click.Choice(EXPORT_FORMATS), default="safetensors")
    @_option(
        "out",
        "File to write, ending in the format's name.",
        type=TYPES[Path],
        metavar="FILE",
        show_default="DIR with this ending, beside it",
    )
    def command(directory: Path, to: str, out: Path | None) -> int:
        """Write the values in the checkpoint DIR, or in the newest good one of a directory of them, to a file."""
        if out is None:
            whole = directory.resolve()  # `.` has no name
            out = whole.with_name(f"{whole.name}.{to}")
        if out.suffix != f".{to}":
            raise ConfigurationError(f"--out must name a file that ends in .{to}, as --to {to} does, not {out}")
        return export(ExportRequest(directory, to, out))

    return command


def _token_command(make_token: Callable[[TokenRequest], int]) -> click.Command:
    @cloup.command("token")
    @_option("name", "Whom the token is for; * is anyone.", default="*")
    @_option("role", "What its holder may be.", type=click.Choice([role.value for role in Role]), default="worker")
    @_option("rank", "Rank that it is good for; * is any.", type=_rank, default="*", metavar="R")
    @_option(
        "file",
        "File to which the line is appended, made readable by you alone.",
        type=TYPES[Path],
        metavar="FILE",
        show_default="standard output",
    )
    def token(name: str, role: str, rank: int | None, file: Path | None) -> int:
        """Make a token: one line `name role rank token`, for the server's file and for its holder's."""
        if not name.isprintable() or not 0 < len(name) <= 128 or len(name.split()) != 1 or name[0] == "#":
            raise ConfigurationError(f"--name must be 1 to 128 printable characters without space: {name!r}")
        if role != "worker" and rank is not None:
            raise ConfigurationError(f"--role {role} and --rank exclude each other: only workers have a rank")
        return make_token(TokenRequest(name, role, rank, file))

    return token


def execute(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one line on standard error, never a traceback.

    Args:
        command: of `build_command`.
        arguments: None takes those of the process.
    """
    try:
        outcome = command.main(
            None if arguments is None else list(arguments), prog_name=invocation(), standalone_mode=False
        )
    except click.exceptions.Abort:
        return ExitCode.SIGINT
    except click.ClickException as error:
        context = getattr(error, "ctx", None)  # of the sub-command, if it was in one
        command_path = context.command_path if context else invocation()
        _complain(f"{error.format_message()} See `{command_path} --help`.", error.exit_code, arguments)
        return error.exit_code
    except WeighmasterError as error:
        _complain(str(error), error.exit_code, arguments)
        return error.exit_code
    return outcome if isinstance(outcome, int) else ExitCode.DONE


def _complain(text: str, exit_code: int, arguments: Sequence[str] | None) -> None:
    """Say why nothing is served, as the log is asked for; the commands beside serving have no log."""
    words = sys.argv[1:] if arguments is None else arguments
    is_serving = not words or words[0].startswith("-")
    if is_serving and asks_for_json(words, os.environ.get("WEIGHMASTER_LOG_FORMAT")):
        print(ended(time.time(), text, exit_code, {}), flush=True)
    else:
        print(f"{PROGRAM}: {text}", file=sys.stderr)


def parse(arguments: Sequence[str]) -> ServerConfig:
    """Read options and environment into a configuration, and run nothing.

    Raises:
        ConfigurationError: the options cannot be understood or do not go together.
    """
    parsed: list[ServerConfig] = []

    def keep(config: ServerConfig) -> int:
        parsed.append(config)
        return ExitCode.DONE

    try:
        build_command(keep, lambda _: ExitCode.DONE).main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        raise ConfigurationError(error.format_message()) from error
    if not parsed:
        raise ConfigurationError("these arguments start no server")
    return parsed[0]
