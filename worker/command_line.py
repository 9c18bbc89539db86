"""The command `weighmaster-worker`: options in, `WorkerConfig` out. What it then runs is handed in."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import click
import cloup

from protocol.addresses import Address, parse_address
from protocol.errors import ConfigurationError, ExitCode, WeighmasterError
from protocol.injection import GOES, Action
from protocol.log_lines import asks_for_json, ended
from protocol.messages import Side
from worker.config import (
    DATASETS,
    DEFAULT_BATCH_SIZE,
    LOG_FORMATS,
    MODELS,
    ROLES,
    WorkerConfig,
    default_of,
    option_name,
    parse_tf_config,
)
from worker.faults import FAULTS
from worker.output import Output

PROGRAM = "weighmaster-worker"

STARTED_AS = "WEIGHMASTER_STARTED_AS"
"""The scripts tell by this variable what the user typed."""

_TYPES: dict[Any, Any] = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
    tuple[str, ...]: click.STRING,
}


def invocation() -> str:
    """Return what starts this program again: a script, `python -m worker`, or the command where it is installed."""
    script = os.environ.get(STARTED_AS, "").strip()
    if script:
        return script
    return "python -m worker" if Path(sys.argv[0]).name == "__main__.py" else PROGRAM


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ConfigurationError as error:
        raise click.BadParameter(f"{error}.") from error


def _rank(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or len(text) > 9:
        raise click.BadParameter(f"{text!r} is not a rank; give a number from 0, or auto.")
    return int(text)


def _version() -> str:
    try:
        return version("weighmaster")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def _option(
    name: str, text: str, *, unset: str | None = None, metavar: str | None = None, type: Any = None
) -> Callable[[Any], Any]:
    """Declare the option of one field of `WorkerConfig`; its default and type are the field's.

    `unset` says what happens without it; such an option is None when it was not given.
    """
    kind = WorkerConfig.__dataclass_fields__[name].type
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    attributes: dict[str, Any] = {
        "envvar": f"WEIGHMASTER_{name.upper()}",
        "show_envvar": True,
        "help": f"{text}.",
        "default": None if unset else default_of(name),
        "show_default": unset or True,
    }
    if kind is bool:
        attributes["show_default"] = "off"
        return cloup.option(f"{option_name(name)}/{option_name('no_' + name)}", name, **attributes)
    attributes["multiple"] = kind == tuple[str, ...]
    return cloup.option(option_name(name), name, type=type or _TYPES[kind], metavar=metavar, **attributes)


POINTS = [point for point, sides in GOES.items() if Side.WORKER in sides]
ACTIONS = list(Action)

_OPTION_GROUPS = (
    cloup.option_group(
        "Who this is",
        _option(
            "ps",
            "Address of the parameter server; an IPv6 address stands in brackets",
            unset="TF_CONFIG, else 127.0.0.1:5014",
            metavar="HOST:PORT",
            type=_address,
        ),
        _option(
            "rank",
            "Number of this worker, from 0; auto takes the lowest that is free",
            unset="TF_CONFIG, else auto",
            metavar="R|auto",
            type=_rank,
        ),
        _option("name", "Name of this worker, under which it is remembered", unset="host name and rank"),
        _option(
            "role",
            "A worker computes gradients; a validator does so on trusted examples, by which the server judges the "
            "workers; an evaluator measures the values on the test data",
            unset="worker with --rank; else TF_CONFIG, else worker",
            type=click.Choice(ROLES),
        ),
        _option("token_file", "File with this worker's own line", unset="no token", metavar="FILE"),
        _option(
            "congestion_control",
            "auto (reno on loopback only), system, or a name that the kernel knows",
            metavar="auto|system|NAME",
        ),
        _option(
            "log_format", "Lines of the console: sentences, or an object in each", type=click.Choice(LOG_FORMATS)
        ),
    ),
    cloup.option_group(
        "TLS",
        _option(
            "tls_ca",
            "Authority, PEM, that the server's certificate must be of; it must also be for the name in --ps",
            unset="no TLS",
            metavar="FILE",
        ),
        _option(
            "tls_fingerprint",
            "Instead of --tls-ca: SHA-256 of the server's certificate, which must be this very one",
            unset="no TLS",
            metavar="SHA256",
        ),
        _option(
            "tls_cert",
            "Certificate of this worker, PEM, for a server that asks for one",
            unset="none",
            metavar="FILE",
        ),
        _option("tls_key", "Its key, PEM, readable by you alone", unset="none", metavar="FILE"),
    ),
    cloup.option_group(
        "What it computes",
        _option("model", f"The model: {', '.join(MODELS)}, or a function of yours", metavar="NAME|FILE.py:FUNC"),
        _option(
            "dataset",
            f"The data: {', '.join(DATASETS)}, NumPy arrays, or a function of yours",
            metavar="NAME|npz:FILE|FILE.py:FUNC",
        ),
        _option("data_dir", "Directory of the data set's files", unset="the data set's own", metavar="DIR"),
        _option(
            "batch_size",
            "Examples of one gradient",
            unset=f"{DEFAULT_BATCH_SIZE}; validator: all trusted examples",
            metavar="N",
        ),
        _option(
            "trusted_examples",
            "Training examples kept out of every shard for a validator; 0 for one that has its own data set",
            metavar="N",
        ),
        _option(
            "own_data",
            "This worker's data set is its own: it trains on all of it, and not on its share of one that all have",
        ),
        _option(
            "evaluate_every",
            "evaluator: steps between two evaluations; member of an ensemble: between two votes",
            metavar="STEPS",
        ),
        _option("seed", "Refuse a server whose seed is another", unset="the server's", metavar="N"),
        _option("threads", "Threads of TensorFlow", unset="CPUs available", metavar="N"),
        _option("legacy_keras", "Use the tf-keras package, which tf.compat.v1.layers needs"),
        _option(
            "dry_run",
            "Build the model, prove that its variables can be fed, compute one batch, print what it needs, and end",
        ),
    ),
    cloup.option_group(
        "Faults on purpose",
        _option(
            "fault",
            f"Push what a broken or hostile worker would, to see what the server does: {', '.join(FAULTS)}; "
            "some take a number, as in scale:-10",
            unset="behave",
            metavar="NAME[:NUMBER]",
        ),
        _option(
            "inject",
            f"Once, at a point of a step, {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]} this process, its connection "
            f"or its push; points are {', '.join(POINTS)}; may be given several times, or several separated by ;",
            unset="nothing happens",
            metavar="ACTION[:SECONDS]@POINT[,rank=R][,step=S]",
        ),
    ),
    cloup.option_group(
        "Time-outs",
        _option("connect_timeout", "Wait for the server at the start", metavar="SECONDS"),
        _option("reconnect_timeout", "Wait for a lost server's return", metavar="SECONDS"),
    ),
)


def _configuration(values: dict[str, Any], tf_config: str) -> WorkerConfig:
    """Fill what was not given from `TF_CONFIG`, and leave the rest to the defaults."""
    asked = {name: value for name, value in values.items() if value is not None}
    if "rank" in asked:
        asked.setdefault("role", "worker")  # nobody else has a rank
    has_role = "role" in asked
    wants_task = not has_role or (asked["role"] == "worker" and "rank" not in asked)
    if tf_config.strip() and (wants_task or "ps" not in asked):
        task = parse_tf_config(tf_config, for_address="ps" not in asked, for_task=wants_task)
        asked.setdefault("ps", task.ps or default_of("ps"))
        asked.setdefault("role", task.role or default_of("role"))
        if asked["role"] == "worker":
            asked.setdefault("rank", task.rank)
    if asked.get("rank") == "auto":
        asked["rank"] = None
    try:
        return WorkerConfig(**asked)
    except ConfigurationError as error:
        if has_role or f"--role {asked.get('role')} " not in f"{error} ":
            raise
        raise ConfigurationError(f"{error}; the role is TF_CONFIG's, over which --role wins") from error


def build_command(run: Callable[[WorkerConfig], int]) -> cloup.Command:
    """Make the command.

    Args:
        run: runs the worker and returns the exit code.
    """

    @click.version_option(_version(), prog_name=PROGRAM)
    def command(**values: Any) -> int:
        """Compute gradients for a parameter server, or evaluate its values.

        The worker may be started before the server: it waits. Time-outs are seconds. The command line wins
        over the environment, which wins over TF_CONFIG.
        """
        return run(_configuration(values, os.environ.get("TF_CONFIG", "")))

    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    decorated: Any = command
    for add_options in reversed(_OPTION_GROUPS):
        decorated = add_options(decorated)
    return cloup.command(PROGRAM, context_settings=settings)(decorated)


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
        _complain(f"{error.format_message()} See `{invocation()} --help`.", error.exit_code, arguments)
        return error.exit_code
    except WeighmasterError as error:
        _complain(str(error), error.exit_code, arguments)
        return error.exit_code
    return outcome if isinstance(outcome, int) else ExitCode.DONE


def _complain(text: str, exit_code: int, arguments: Sequence[str] | None) -> None:
    """Say why a worker ends before it is known who it is, as the log is asked for."""
    words = sys.argv[1:] if arguments is None else arguments
    if asks_for_json(words, os.environ.get("WEIGHMASTER_LOG_FORMAT")):
        Output()(ended(time.time(), text, exit_code, {}))
    else:
        Output(sys.stderr)(f"{PROGRAM}: {text}")  # where nobody can hear it, the exit code still says it


def parse(arguments: Sequence[str]) -> WorkerConfig:
    """Read options and environment into a configuration, and run nothing.

    Raises:
        ConfigurationError: the options cannot be understood or do not go together.
    """
    parsed: list[WorkerConfig] = []

    def keep(config: WorkerConfig) -> int:
        parsed.append(config)
        return ExitCode.DONE

    try:
        build_command(keep).main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        raise ConfigurationError(error.format_message()) from error
    if not parsed:
        raise ConfigurationError("these arguments start no worker")
    return parsed[0]
