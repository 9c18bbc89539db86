"""The options of serving, group by group as `--help` shows them; defaults and types are those of `ServerConfig`."""

import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import click
import cloup

from ps.settings.combinations import CHOICES, option_name
from ps.settings.config import AUTO, DEFAULT_WEIGHT_DECAY, ServerConfig, default_of


class _Several(click.types.StringParamType):
    """Texts of an option that may be given several times; its environment variable holds them all."""

    envvar_list_splitter = ";"


class _NumberOrAuto(click.types.IntParamType):
    """A whole number, or the word that leaves it to the server."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the word."""
        if value == AUTO:
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a whole number nor {AUTO}.", param, ctx)


TYPES: dict[Any, Any] = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    Path: click.Path(path_type=Path),
}
"""The type of an option, by that of its field."""


def size_bytes(text: str) -> int:
    """Read a size such as `500M`: a number with suffix k, M, G or T (powers of 1024), or plain bytes.

    Raises:
        click.BadParameter: the text is no size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size in bytes; write 500M or 8G, for instance.")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def common(name: str, text: str) -> dict[str, Any]:
    """Return what all options have: an environment variable, shown, and a help text."""
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
    attributes = common(name, f"{text}.") | {"default": default, "show_default": unset or True}
    if kind is bool:
        attributes["show_default"] = "off"
        return cloup.option(f"{option_name(name)}/{option_name('no_' + name)}", name, **attributes)
    if get_origin(kind) is tuple:
        return cloup.option(option_name(name), name, type=_Several(), multiple=True, metavar=metavar, **attributes)
    type = type or (click.Choice(CHOICES[name]) if name in CHOICES else TYPES[kind])
    return cloup.option(option_name(name), name, type=type, metavar=metavar, **attributes)


def _seconds(name: str, text: str) -> Callable[[Any], Any]:
    return _option(name, text, metavar="SECONDS")


_NOT_KEPT = "not written"

OPTION_GROUPS = (
    cloup.option_group(
        "The run",
        _option(
            "workers",
            "Workers that take part; round 0 waits for all. auto: as many as come, until --gather-timeout passes "
            "without a further one",
            unset="with --shards, they come and go",
            metavar="N|auto",
            type=_NumberOrAuto(),
        ),
        _option(
            "steps", "Rounds of the run; async, ssp: pushes that are applied", unset="none; required", metavar="N"
        ),
        _option("evaluators", "Evaluators whose report the end waits for, even if they come late", metavar="N"),
        _option(
            "shards",
            "Parts of the training data, at least --workers; without --workers also the number of ranks",
            unset="--workers",
            metavar="N",
        ),
        _option("seed", "Seed of everything random, also the workers'", metavar="N"),
        _option("threads", "Threads of an update", unset="CPUs available, at most 4", metavar="N"),
        _option("mode", "Whose variables: one set for all workers, or a network of its own for each"),
    ),
    cloup.option_group(
        "Consistency",
        _option(
            "consistency",
            "When values change. sync: when all workers have pushed, or --quorum of them; async: at each push; "
            "ssp: likewise, but nobody runs ahead of the slowest by more than --ssp-bound",
        ),
        _option("quorum", "sync: usable pushes that close a round", unset="those of all workers", metavar="K"),
        _option(
            "max_staleness",
            "async, ssp: refuse a push whose values have been updated more often than this since",
            unset="none refused",
            metavar="S",
        ),
        _option(
            "staleness_discount",
            "async, ssp: the learning rate of a push that is s updates late is multiplied by (1 + s)^-A",
            metavar="A",
        ),
        _option("ssp_bound", "ssp: pushes that a worker may be ahead of the slowest", metavar="S"),
        _option(
            "on_worker_loss",
            "What a round does whose worker is lost: wait for its return, or go on with the others. "
            "async and ssp always go on",
            unset="wait with --workers and sync, else shrink",
        ),
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
        _option("tls_cert", "Certificate of this server, PEM, its chain after it", unset="no TLS", metavar="FILE"),
        _option("tls_key", "Its key, PEM, readable by you alone", unset="none", metavar="FILE"),
        _option(
            "tls_ca",
            "Authority, PEM, of which clients must show a certificate too",
            unset="they need none",
            metavar="FILE",
        ),
        _option(
            "congestion_control",
            "auto (reno on loopback only), system, or a name that the kernel knows",
            metavar="auto|system|NAME",
        ),
    ),
    cloup.option_group(
        "Time-outs",
        _seconds(
            "gather_timeout",
            "--workers auto: begin when no further worker has come for so long; with a number of --workers it has "
            "no effect",
        ),
        _seconds("start_timeout", "Wait for the workers before round 0"),
        _seconds("round_timeout", "Wait for a round's last push, from its first"),
        _seconds("rejoin_timeout", "Wait for the return of a lost worker"),
        _seconds("idle_timeout", "Wait for any push at all, then end the run"),
        _seconds("drain_timeout", "Wait for the workers' goodbyes at the end"),
        _seconds("heartbeat_interval", "Own silence after which a heartbeat is sent"),
        _seconds("heartbeat_timeout", "Silence of a peer after which it is lost"),
    ),
    cloup.option_group(
        "Checkpoints",
        _option("checkpoint_dir", "Directory of the checkpoints", unset="none kept", metavar="DIR"),
        _option(
            "checkpoint_every",
            "Steps from one checkpoint to the next; with 1 workers get no values that are not on the disk, unless "
            "it cannot be written, which is warned of",
            metavar="N",
        ),
        _option("keep", "Newest checkpoints that stay", metavar="N"),
        _option(
            "resume",
            "Go on from the newest good checkpoint, or start afresh where there is none: "
            "one command line serves the first start and all others",
        ),
    ),
    cloup.option_group(
        "Seeing what happens",
        _option("status_port", "Port of the status page; 0 takes any", unset="no page", metavar="PORT"),
        _option("status_host", "Address of the page; any but loopback needs --token-file or --insecure"),
        _option("status_port_file", "File for that port, written when served", unset=_NOT_KEPT, metavar="FILE"),
        _option("log_format", "Lines of the console: sentences, or an object in each"),
        _option("tensorboard", "Directory for TensorBoard's event files", unset=_NOT_KEPT, metavar="DIR"),
    ),
    cloup.option_group(
        "Files and memory",
        _option("run_dir", "Directory of this run's files", unset="runs/<time>", metavar="DIR"),
        _option(
            "init",
            "Initial values, safetensors; they count only where --resume finds no checkpoint",
            unset="one worker is asked",
            metavar="FILE",
        ),
        _option("export", "File for the final values", unset=_NOT_KEPT, metavar="FILE.safetensors"),
        _option(
            "summary", "File for what became of the run", unset="summary.json in --run-dir", metavar="FILE.json"
        ),
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
    cloup.option_group(
        "Faults on purpose",
        _option(
            "inject",
            "Make a fault happen once, to see what becomes of a run; may be given several times",
            unset="none",
            metavar="ACTION@POINT[,rank=R][,step=S]",
        ),
    ),
)
"""Decorators, in the order of `--help`."""
