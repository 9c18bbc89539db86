"""The command `weighmaster-ps`: options in, `ServerConfig` out. What it then runs is handed in."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import click
import cloup
from click.core import ParameterSource

from protocol.errors import ConfigurationError, ExitCode, WeighmasterError
from protocol.messages import Role
from ps.config import CHOICES, DEFAULT_WEIGHT_DECAY, ServerConfig, default_of, option_name

PROGRAM = "weighmaster-ps"
"""With this name begins each sentence that ends the process, however it was started."""

STARTED_AS = "WEIGHMASTER_STARTED_AS"
"""The scripts tell by this variable what the user typed."""

_TYPES: dict[Any, Any] = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
}


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


def size_bytes(text: str) -> int:
    """Read a size such as `500M`: a number with suffix k, M, G or T (powers of 1024), or plain bytes.

    Raises:
        click.BadParameter: the text is no size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size in bytes; write 500M or 8G, for instance.")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


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


def _common(name: str, text: str) -> dict[str, Any]:
    return {
        "envvar": f"WEIGHMASTER_{name.upper()}",
        "show_envvar": True,
        "help": text,
    }


def _option(
    name: str,
    text: str,
    *,
    unset: str | None = None,
    metavar: str | None = None,
    default: object = None,
    type: Any = None,
) -> Callable[[Any], Any]:
    """Declare the option of one field of `ServerConfig`; its default and type are the field's.

    `unset` says what happens without it, for fields whose default is None.
    """
    kind = ServerConfig.__dataclass_fields__[name].type
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    default = default_of(name) if default is None else default
    attributes = _common(name, f"{text}.") | {"default": default, "show_default": unset or True}
    if kind is bool:
        attributes["show_default"] = "off"
        return cloup.option(f"{option_name(name)}/{option_name('no_' + name)}", name, **attributes)
    type = type or (click.Choice(CHOICES[name]) if name in CHOICES else _TYPES[kind])
    return cloup.option(option_name(name), name, type=type, metavar=metavar, **attributes)


def _seconds(name: str, text: str) -> Callable[[Any], Any]:
    return _option(name, text, metavar="SECONDS")


_NOT_KEPT = "not written"

_OPTION_GROUPS = (
    cloup.option_group(
        "The run",
        _option("workers", "Workers that take part; round 0 waits for all", unset="none; required", metavar="N"),
        _option("steps", "Rounds of the run", unset="none; required", metavar="N"),
        _option("evaluators", "Evaluators whose report the end waits for, even if they come late", metavar="N"),
        _option("shards", "Parts of the training data, at least --workers", unset="--workers", metavar="N"),
        _option("seed", "Seed of everything random, also the workers'", metavar="N"),
        _option("threads", "Threads of an update", unset="CPUs available, at most 4", metavar="N"),
        _option("mode", "Whose variables: one set for all workers, or a network of its own for each"),
        _option("consistency", "When a round closes: when all workers have pushed"),
        _option("on_worker_loss", "What a round does whose worker is lost: wait for its return"),
    ),
    cloup.option_group(
        "Gradients",
        _option("aggregation", "Rule that makes one gradient of all; an ensemble has master alone"),
        _option("mean_over", "mean, clipped_mean: what counts the same: each worker, or each example"),
        _option(
            "faulty_workers",
            "trimmed_mean, krum, multi_krum: how many workers may be bad",
            unset="as many as the rule stands",
            metavar="N",
        ),
        _option(
            "master", "master: a network of your own, in TensorFlow", unset="built in", metavar="FILE.py:FUNCTION"
        ),
        _option("clip_worker_norm", "Largest norm of one worker's gradient", unset="no limit", metavar="NORM"),
        _option("clip_norm", "Largest norm of the aggregated gradient", unset="no limit", metavar="NORM"),
    ),
    cloup.option_group(
        "Ensemble (--mode ensemble --aggregation master)",
        _option("weighting", "What a weight is of: a member's whole batch, or each of its examples"),
        _option("head", "How the master's scores become weights: with sum 1, or each for itself"),
        _option("weight_acts_on", "What the weight of a batch multiplies: the gradient, or the step"),
    ),
    cloup.option_group(
        "Validation (cosine_trust, evidence, master)",
        _option(
            "validators",
            "Validators that the start waits for, and that there is room for",
            unset="1 if asked for below; one may come later",
            metavar="N",
        ),
        _option(
            "validator_every",
            "Validate round 0 and one round in K on average, which ones only the server knows",
            unset="every round, once a validator is there",
            metavar="K",
        ),
        _option(
            "validator_seed_file",
            "File whose bytes draw the rounds, for repeatable runs; keep it from the workers",
            unset="a secret of this run",
            metavar="FILE",
        ),
    ),
    cloup.option_group(
        "Optimizer",
        _option("optimizer", "What turns a gradient into new values"),
        _option("learning_rate", "Step size, before the schedule", metavar="RATE"),
        _option("beta1", "adam, adamw: decay of the first moment", metavar="FRACTION"),
        _option("beta2", "adam, adamw: decay of the second moment", metavar="FRACTION"),
        _option("epsilon", "adam, adamw: term against division by zero", metavar="NUMBER"),
        _option("weight_decay", "adamw: decoupled weight decay", unset=f"{DEFAULT_WEIGHT_DECAY}", metavar="RATE"),
        _option("momentum", "sgd: momentum", metavar="FRACTION"),
        _option("nesterov", "sgd: look ahead along the momentum"),
        _option("ema_decay", "Decay of a moving average of the variables", unset="none kept", metavar="FRACTION"),
    ),
    cloup.option_group(
        "Learning-rate schedule",
        _option("schedule", "How the learning rate changes"),
        _option("decay_steps", "exponential: steps of one decay; cosine: of all", unset="none", metavar="STEPS"),
        _option("decay_rate", "exponential: factor of one decay", unset="none", metavar="FRACTION"),
        _option("staircase", "exponential: decay at whole multiples of --decay-steps only"),
        _option("warmup_steps", "Steps over which the rate rises from 0", metavar="STEPS"),
    ),
    cloup.option_group(
        "Network and access",
        _option("host", "Address to listen on; any but loopback needs --token-file or --insecure"),
        _option("port", "TCP port; 0 takes any that is free", metavar="PORT"),
        _option("port_file", "File for the port, written when listening", unset=_NOT_KEPT, metavar="FILE"),
        _option("token_file", "Lines `name role rank token`, * is any", unset="no proof asked", metavar="FILE"),
        _option("insecure", "Listen on any address without tokens: anyone who reaches the port may join"),
        _option(
            "congestion_control",
            "auto (reno on loopback only), system, or a name that the kernel knows",
            metavar="auto|system|NAME",
        ),
    ),
    cloup.option_group(
        "Time-outs",
        _seconds("start_timeout", "Wait for the workers before round 0"),
        _seconds("round_timeout", "Wait for a round's last push, from its first"),
        _seconds("rejoin_timeout", "Wait for the return of a lost worker"),
        _seconds("drain_timeout", "Wait for the workers' goodbyes at the end"),
        _seconds("heartbeat_interval", "Own silence after which a heartbeat is sent"),
        _seconds("heartbeat_timeout", "Silence of a peer after which it is lost"),
    ),
    cloup.option_group(
        "Files and memory",
        _option("run_dir", "Directory of this run's files", unset="runs/<time>", metavar="DIR"),
        _option("init", "Initial values, safetensors", unset="one worker is asked", metavar="FILE"),
        _option("export", "File for the final values", unset=_NOT_KEPT, metavar="FILE.safetensors"),
        _option("summary", "File for what became of the run", unset=_NOT_KEPT, metavar="FILE.json"),
        _option(
            "max_memory",
            "Memory in bytes, with suffix k, M or G, above which the server does not start",
            unset="80 % of the machine's or container's",
            metavar="BYTES",
            type=size_bytes,
        ),
        _option(
            "max_model_bytes",
            "Largest set of variables that a worker may declare, in bytes, with suffix k, M or G",
            metavar="BYTES",
            default="8G",
            type=size_bytes,
        ),
    ),
)


def _configuration(values: dict[str, Any]) -> ServerConfig:
    for name, meaning in (("workers", "how many workers take part"), ("steps", "how many rounds to train")):
        if values[name] is None:
            raise ConfigurationError(
                f"{option_name(name)} is missing: say {meaning}, there or in WEIGHMASTER_{name.upper()}"
            )
    return ServerConfig(**{name: value for name, value in values.items() if value is not None})


def build_command(serve: Callable[[ServerConfig], int], make_token: Callable[[TokenRequest], int]) -> cloup.Group:
    """Make the command; without a sub-command it calls `serve`, with `token` it calls `make_token`.

    Args:
        serve: runs the server and returns the exit code.
        make_token: makes a token and returns the exit code.
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
    for add_options in reversed(_OPTION_GROUPS):
        decorated = add_options(decorated)
    group = cloup.group(PROGRAM, invoke_without_command=True, context_settings=settings)(decorated)
    group.add_command(_token_command(make_token))
    return group


def _token_command(make_token: Callable[[TokenRequest], int]) -> click.Command:
    def option(name: str, text: str, **attributes: Any) -> Callable[[Any], Any]:
        return cloup.option(option_name(name), name, **{"show_default": True} | _common(name, text) | attributes)

    @cloup.command("token")
    @option("name", "Whom the token is for; * is anyone.", default="*")
    @option("role", "What its holder may be.", type=click.Choice([role.value for role in Role]), default="worker")
    @option("rank", "Rank that it is good for; * is any.", type=_rank, default="*", metavar="R")
    @option(
        "file",
        "File to which the line is appended, made readable by you alone.",
        type=_TYPES[Path],
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
        print(f"{PROGRAM}: {error.format_message()} See `{command_path} --help`.", file=sys.stderr)
        return error.exit_code
    except WeighmasterError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code
    return outcome if isinstance(outcome, int) else ExitCode.DONE


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
