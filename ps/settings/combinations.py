"""What each option may be, and what goes with what: tables that drive refusals, help texts and tests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from protocol.errors import ConfigurationError


def option_name(field_name: str) -> str:
    """Return the option of a field: `start_timeout` is `--start-timeout`."""
    return "--" + field_name.replace("_", "-")


# ---- what goes with what -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    """One row of what goes with what: any value of each column goes with any value of the others."""

    mode: tuple[str, ...]
    consistency: tuple[str, ...]
    aggregation: tuple[str, ...]
    on_worker_loss: tuple[str, ...]


RULES_OF_MEANS = ("mean", "clipped_mean")
RULES_WITH_FAULTY = ("trimmed_mean", "krum", "multi_krum")
RULES_WITH_VALIDATORS = ("cosine_trust", "evidence", "master")
RULES = (*RULES_OF_MEANS, "median", *RULES_WITH_FAULTY, *RULES_WITH_VALIDATORS)

AT_EACH_PUSH = ("async", "ssp")
"""Where a push is applied as it comes: no two are ever compared, and a worker that is lost has left."""

LOSSES = ("wait", "shrink")

COMBINATIONS: tuple[Combination, ...] = (
    Combination(mode=("shared",), consistency=("sync",), aggregation=RULES, on_worker_loss=LOSSES),
    Combination(mode=("shared",), consistency=AT_EACH_PUSH, aggregation=("mean",), on_worker_loss=("shrink",)),
    Combination(mode=("ensemble",), consistency=("sync",), aggregation=("master",), on_worker_loss=LOSSES),
)
"""All that the server can do. Choices, refusals and help texts come from here."""

COLUMNS: tuple[str, ...] = tuple(column.name for column in fields(Combination))

CHOICES: Mapping[str, tuple[str, ...]] = {
    **{
        column: tuple(dict.fromkeys(value for row in COMBINATIONS for value in getattr(row, column)))
        for column in COLUMNS
    },
    "mean_over": ("workers", "examples"),
    "weighting": ("batch", "sample"),
    "head": ("softmax", "sigmoid"),
    "weight_acts_on": ("gradient", "update"),
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "exponential", "cosine"),
    "log_format": ("text", "json"),
}
"""The values of every option that takes one of a few words."""


def check_combination(asked: Mapping[str, str], table: Sequence[Combination] = COMBINATIONS) -> None:
    """Check that one row of `table` has all of `asked`.

    Args:
        asked: the value of each column of `Combination`, by column.
        table: what goes with what.

    Raises:
        ConfigurationError: naming two options that never go together, or all when any two would.
    """
    if any(all(asked[column] in getattr(row, column) for column in COLUMNS) for row in table):
        return
    clash: Sequence[str] = COLUMNS
    pairs = [(one, other) for index, one in enumerate(COLUMNS) for other in COLUMNS[index + 1 :]]
    for one, other in pairs:
        if not any(asked[one] in getattr(row, one) and asked[other] in getattr(row, other) for row in table):
            clash = (one, other)
            break
    named = [f"{option_name(column)} {asked[column]}" for column in clash]
    raise ConfigurationError(f"{', '.join(named[:-1])} and {named[-1]} do not go together; change one of them")


# ---- what needs what -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """`option`, set to anything but its default, does something only when `other` is one of `values`.

    Without `values`, it does something only when `other` is given at all.
    """

    option: str
    other: str
    values: tuple[str, ...] = ()


NEEDS: tuple[Need, ...] = (
    *(
        Need(option, "mode", ("shared",))
        for option in (
            *("evaluators", "shards", "quorum", "validators", "validator_every", "validator_seed_file"),
            *("clip_worker_norm", "clip_norm", "ema_decay"),
        )
    ),
    *(Need(option, "mode", ("ensemble",)) for option in ("weighting", "head", "weight_acts_on")),
    Need("weight_acts_on", "weighting", ("batch",)),
    Need("quorum", "consistency", ("sync",)),
    Need("max_staleness", "consistency", AT_EACH_PUSH),
    Need("staleness_discount", "consistency", AT_EACH_PUSH),
    Need("ssp_bound", "consistency", ("ssp",)),
    Need("mean_over", "consistency", ("sync",)),
    Need("mean_over", "aggregation", RULES_OF_MEANS),
    Need("clip_worker_norm", "aggregation", tuple(r for r in RULES if r not in ("median", "trimmed_mean"))),
    Need("faulty_workers", "aggregation", RULES_WITH_FAULTY),
    Need("validators", "aggregation", RULES_WITH_VALIDATORS),
    Need("validator_every", "aggregation", RULES_WITH_VALIDATORS),
    Need("validator_seed_file", "aggregation", RULES_WITH_VALIDATORS),
    Need("master", "aggregation", ("master",)),
    Need("beta1", "optimizer", ("adam", "adamw")),
    Need("beta2", "optimizer", ("adam", "adamw")),
    Need("epsilon", "optimizer", ("adam", "adamw")),
    Need("weight_decay", "optimizer", ("adamw",)),
    Need("momentum", "optimizer", ("sgd",)),
    Need("nesterov", "optimizer", ("sgd",)),
    Need("decay_steps", "schedule", ("exponential", "cosine")),
    Need("decay_rate", "schedule", ("exponential",)),
    Need("staircase", "schedule", ("exponential",)),
    *(Need(option, "checkpoint_dir") for option in ("checkpoint_every", "keep", "resume")),
    *(Need(option, "status_port") for option in ("status_host", "status_port_file")),
    Need("tls_cert", "tls_key"),
    Need("tls_key", "tls_cert"),
    Need("tls_ca", "tls_cert"),
)


# ---- limits --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Limits of a number; `above` and `below` are excluded, `low` and `high` are allowed."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def allow(self, value: float) -> bool:
        """Tell whether `value` is finite and within the limits."""
        return (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        return " and ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)


MAX_WORKERS = 1024
"""Each takes a thread and a gradient's memory; more than this was never tried."""

SMALLEST_NORMAL = 2.0**-126
"""Of float32. A term against division by zero that is below may be taken for 0."""

_POSITIVE = Bounds(above=0)
_SECONDS = Bounds(above=0, high=10**8)
_STEPS = Bounds(low=1, high=10**15)

BOUNDS: Mapping[str, Bounds] = {
    "port": Bounds(low=0, high=65535),
    "status_port": Bounds(low=0, high=65535),
    "workers": Bounds(low=1, high=MAX_WORKERS),
    "evaluators": Bounds(low=0, high=1024),
    "validators": Bounds(low=0, high=64),
    "validator_every": Bounds(low=1, high=10**9),
    "faulty_workers": Bounds(low=0, high=MAX_WORKERS),
    "shards": Bounds(low=1, high=1_000_000),
    "quorum": Bounds(low=1, high=MAX_WORKERS),
    "max_staleness": Bounds(low=0, high=10**15),
    "staleness_discount": Bounds(low=0, high=100),
    "ssp_bound": Bounds(low=1, high=10**15),
    "steps": _STEPS,
    "seed": Bounds(low=0, high=2**63 - 1),
    "threads": Bounds(low=1, high=256),
    "learning_rate": _POSITIVE,
    "beta1": Bounds(low=0, below=1),
    "beta2": Bounds(low=0, below=1),
    "epsilon": Bounds(low=SMALLEST_NORMAL),
    "weight_decay": Bounds(low=0),
    "momentum": Bounds(low=0, below=1),
    "decay_steps": _STEPS,
    "decay_rate": Bounds(above=0, high=1),
    "warmup_steps": Bounds(low=0, high=10**15),
    "clip_worker_norm": _POSITIVE,
    "clip_norm": _POSITIVE,
    "ema_decay": Bounds(above=0, below=1),
    "gather_timeout": _SECONDS,
    "start_timeout": _SECONDS,
    "round_timeout": _SECONDS,
    "rejoin_timeout": _SECONDS,
    "idle_timeout": _SECONDS,
    "drain_timeout": _SECONDS,
    "heartbeat_interval": _SECONDS,
    "heartbeat_timeout": _SECONDS,
    "checkpoint_every": _STEPS,
    "keep": Bounds(low=1, high=10**6),
    "max_memory": Bounds(low=1 << 20),
    "max_model_bytes": Bounds(low=1),
}
"""Limits of every option that is a number."""
