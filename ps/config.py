"""What the operator asks of the server: typed, checked, and silent about nothing that cannot be done."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from protocol.errors import ConfigurationError
from protocol.transport import is_loopback

MEMORY_SHARE = 0.8
"""Share of the machine's or container's memory that the server may plan for; the rest is the system's."""

MAX_UPDATE_THREADS = 4
"""More threads than this do not make an update faster: it is bound by memory."""

DEFAULT_WEIGHT_DECAY = 0.01
"""AdamW's decay if none is given; with 0 it would be Adam."""


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

COMBINATIONS: tuple[Combination, ...] = (
    Combination(mode=("shared",), consistency=("sync",), aggregation=RULES, on_worker_loss=("wait",)),
    Combination(mode=("ensemble",), consistency=("sync",), aggregation=("master",), on_worker_loss=("wait",)),
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
}
"""The values of every option that takes one of a few words."""


@dataclass(frozen=True)
class Need:
    """`option`, set to anything but its default, does something only when `other` is one of `values`."""

    option: str
    other: str
    values: tuple[str, ...]


NEEDS: tuple[Need, ...] = (
    *(
        Need(option, "mode", ("shared",))
        for option in (
            *("evaluators", "shards", "validators", "validator_every", "validator_seed_file"),
            *("clip_worker_norm", "clip_norm", "ema_decay"),
        )
    ),
    *(Need(option, "mode", ("ensemble",)) for option in ("weighting", "head", "weight_acts_on")),
    Need("weight_acts_on", "weighting", ("batch",)),
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
)


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


_POSITIVE = Bounds(above=0)
_SECONDS = Bounds(above=0, high=10**8)

BOUNDS: Mapping[str, Bounds] = {
    "port": Bounds(low=0, high=65535),
    "workers": Bounds(low=1, high=1024),
    "evaluators": Bounds(low=0, high=1024),
    "validators": Bounds(low=0, high=64),
    "validator_every": Bounds(low=1, high=10**9),
    "faulty_workers": Bounds(low=0, high=1024),
    "shards": Bounds(low=1, high=1_000_000),
    "steps": Bounds(low=1, high=10**15),
    "seed": Bounds(low=0, high=2**63 - 1),
    "threads": Bounds(low=1, high=256),
    "learning_rate": _POSITIVE,
    "beta1": Bounds(low=0, below=1),
    "beta2": Bounds(low=0, below=1),
    "epsilon": _POSITIVE,
    "weight_decay": Bounds(low=0),
    "momentum": Bounds(low=0, below=1),
    "decay_steps": Bounds(low=1, high=10**15),
    "decay_rate": Bounds(above=0, high=1),
    "warmup_steps": Bounds(low=0, high=10**15),
    "clip_worker_norm": _POSITIVE,
    "clip_norm": _POSITIVE,
    "ema_decay": Bounds(above=0, below=1),
    "start_timeout": _SECONDS,
    "round_timeout": _SECONDS,
    "rejoin_timeout": _SECONDS,
    "drain_timeout": _SECONDS,
    "heartbeat_interval": _SECONDS,
    "heartbeat_timeout": _SECONDS,
    "max_memory": Bounds(low=1 << 20),
    "max_model_bytes": Bounds(low=1),
}
"""Limits of every option that is a number."""


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


# ---- the configuration ---------------------------------------------------------------------------------


def available_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: the smaller of the machine's and the cgroups', in bytes.

    Args:
        root: where `proc` and `sys` are, for tests.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroups = root / "sys/fs/cgroup"
    candidates = [cgroups / "memory/memory.limit_in_bytes"]
    own = _read(root / "proc/self/cgroup")
    for line in own.splitlines():
        if line.startswith("0::"):
            group = cgroups / line.removeprefix("0::").strip().lstrip("/")
            candidates.extend(
                parent / "memory.max" for parent in (group, *group.parents) if parent.is_relative_to(cgroups)
            )
    limits.extend(int(text) for text in map(_read, candidates) if text.strip().isdigit())
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _default_run_dir() -> Path:
    return Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything that the server is told; times are seconds, sizes are bytes.

    Attributes:
        workers: ranks that round 0 waits for.
        steps: rounds until the run is done, counted over all resumes.
        host: address to listen on; one that is not loopback needs `token_file` or `insecure`.
        port: TCP port; 0 takes any that is free.
        port_file: where to write the port once the server listens.
        evaluators: that the end waits for even if they come late, `drain_timeout` at most.
        shards: parts into which the training data is divided; None: as many as workers.
        mode: one set of variables for all (`shared`), or a network of its own for each worker (`ensemble`).
        consistency: when a round closes (`sync`: all have pushed).
        aggregation: the rule that makes one gradient of W.
        faulty_workers: how many workers `trimmed_mean`, `krum` and `multi_krum` assume to be bad; None: as many as
            the rule can stand.
        validators: clients on trusted data that the start waits for; None: one if `validator_every` is given or the
            rule cannot do without, else none, and one may come later.
        validator_every: mean distance of the rounds that validators judge; None: 1, every round.
        validator_seed_file: file whose bytes draw these rounds; None: a secret of this run.
        master: `file.py:function` of a master network of the user's own; None: the built-in one.
        weighting: ensemble: what a weight is of, a member's whole batch or each example.
        head: ensemble: how the master's scores become weights (`softmax`: with sum 1; `sigmoid`: each for itself).
        weight_acts_on: ensemble: what the weight of a batch multiplies, the gradient or the optimizer's step.
        mean_over: what the mean counts: every worker the same, or every example the same.
        optimizer: what turns the gradient into new values.
        learning_rate: step size, before the schedule.
        beta1: Adam's decay of the first moment.
        beta2: Adam's decay of the second moment.
        epsilon: Adam's term against division by zero, as TensorFlow places it.
        weight_decay: AdamW's decoupled decay; None: `DEFAULT_WEIGHT_DECAY` there.
        momentum: of SGD.
        nesterov: look ahead along the momentum.
        schedule: how the learning rate changes with the step.
        decay_steps: steps of one decay (`exponential`) or of the whole (`cosine`).
        decay_rate: factor over `decay_steps`.
        staircase: decay in whole steps of `decay_steps`.
        warmup_steps: steps over which the rate rises from 0.
        clip_worker_norm: largest global norm of one worker's gradient; None: no limit.
        clip_norm: largest global norm of the aggregate; None: no limit.
        ema_decay: decay of the moving average of the variables; None: none is kept.
        seed: of everything random, handed out to the workers.
        threads: that update the variables.
        on_worker_loss: what becomes of a round whose worker is lost (`wait`).
        start_timeout: wait for the first `workers` ranks.
        round_timeout: wait for a round's last push, from its first.
        rejoin_timeout: wait for a lost worker's return.
        drain_timeout: wait for the workers' goodbyes at the end.
        heartbeat_interval: own silence after which a heartbeat is sent.
        heartbeat_timeout: a peer's silence after which it is lost.
        run_dir: directory of this run's files.
        init: safetensors file of initial values; None: one rank is asked.
        export: where to write the final values.
        summary: where to write what became of the run.
        token_file: `name role rank token` lines; None: no proof is asked for.
        insecure: listen on any address without tokens.
        max_memory: the server refuses to start above this.
        max_model_bytes: largest set of variables that a worker may declare.
        congestion_control: `auto` (reno on loopback addresses only), `system`, or the kernel's name of one.
    """

    workers: int
    steps: int
    host: str = "127.0.0.1"
    port: int = 5014
    port_file: Path | None = None
    evaluators: int = 0
    shards: int | None = None
    mode: str = "shared"
    consistency: str = "sync"
    aggregation: str = "mean"
    faulty_workers: int | None = None
    validators: int | None = None
    validator_every: int | None = None
    validator_seed_file: Path | None = None
    master: str | None = None
    weighting: str = "batch"
    head: str = "softmax"
    weight_acts_on: str = "gradient"
    mean_over: str = "workers"
    optimizer: str = "adam"
    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    schedule: str = "constant"
    decay_steps: int | None = None
    decay_rate: float | None = None
    staircase: bool = False
    warmup_steps: int = 0
    clip_worker_norm: float | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    seed: int = 0
    threads: int = field(default_factory=lambda: min(MAX_UPDATE_THREADS, available_cpus()))
    on_worker_loss: str = "wait"
    start_timeout: float = 300.0
    round_timeout: float = 300.0
    rejoin_timeout: float = 120.0
    drain_timeout: float = 30.0
    heartbeat_interval: float = 5.0
    heartbeat_timeout: float = 30.0
    run_dir: Path = field(default_factory=_default_run_dir)
    init: Path | None = None
    export: Path | None = None
    summary: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    max_memory: int = field(default_factory=lambda: int(MEMORY_SHARE * memory_limit_bytes()))
    max_model_bytes: int = 8 << 30
    congestion_control: str = "auto"

    def __post_init__(self) -> None:
        """Check every value, then what goes with what.

        Raises:
            ConfigurationError: naming the option, or both options.
        """
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not bounds.allow(value):
                raise ConfigurationError(f"{option_name(name)} must be {bounds}, not {value}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"{option_name(name)} must be {' or '.join(choices)}, not {getattr(self, name)}"
                )
        check_combination({column: getattr(self, column) for column in COLUMNS})
        self._check_needs()
        self._check_pairs()
        self._check_access()
        if not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion_control):
            raise ConfigurationError(
                f"--congestion-control must be auto, system or a name that the kernel knows, such as reno, "
                f"not {self.congestion_control!r}"
            )

    @property
    def shard_count(self) -> int:
        """Parts into which the training data is divided; 1 in an ensemble, whose members all train on all of it."""
        if self.mode == "ensemble":
            return 1
        return self.workers if self.shards is None else self.shards

    @property
    def awaited_validators(self) -> int:
        """Validators that the start waits for."""
        if self.validators is not None:
            return self.validators
        if self.mode == "ensemble":
            return 0
        return int(self.validator_every is not None or self.aggregation == "cosine_trust")

    @property
    def validator_slots(self) -> int:
        """Validators that there is room for."""
        if self.mode == "ensemble" or self.aggregation not in RULES_WITH_VALIDATORS:
            return 0
        return 1 if self.validators is None else self.validators

    @property
    def assumed_faulty(self) -> int:
        """Workers that the rules with such a number assume to be bad."""
        if self.faulty_workers is not None:
            return self.faulty_workers
        needed_beside = 1 if self.aggregation == "trimmed_mean" else 3
        return max(0, (self.workers - needed_beside) // 2)

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != default_of(name))

    def _check_needs(self) -> None:
        for need in NEEDS:
            other = getattr(self, need.other)
            if self._is_set(need.option) and other not in need.values:
                raise ConfigurationError(
                    f"{option_name(need.option)} works only with {option_name(need.other)} "
                    f"{' or '.join(need.values)}, not with {option_name(need.other)} {other}"
                )
        for name in ("decay_steps", "decay_rate"):
            wanted = any(need.option == name and self.schedule in need.values for need in NEEDS)
            if wanted and getattr(self, name) is None:
                raise ConfigurationError(f"--schedule {self.schedule} needs {option_name(name)}")
        if self.nesterov and not self.momentum:
            raise ConfigurationError("--nesterov needs --momentum above 0")

    def _check_pairs(self) -> None:
        if self.mode == "shared" and self.shard_count < self.workers:
            raise ConfigurationError(
                f"--shards {self.shards} leaves some of --workers {self.workers} without data; "
                f"it must be at least {self.workers}"
            )
        if self.aggregation in RULES_WITH_FAULTY:
            self._check_faulty()
        if self.master is not None and self._is_set("head"):
            raise ConfigurationError(
                "--head and --master exclude each other: a master of your own has its own head"
            )
        if self.aggregation == "cosine_trust" and self.validators == 0:
            raise ConfigurationError(
                "--aggregation cosine_trust needs a validator: --validators must be at least 1"
            )
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigurationError(
                f"--heartbeat-timeout {self.heartbeat_timeout:g} s must be longer than "
                f"--heartbeat-interval {self.heartbeat_interval:g} s"
            )
        if self.export is not None and self.export.suffix != ".safetensors":
            raise ConfigurationError(f"--export must name a file that ends in .safetensors, not {self.export}")
        taken: dict[Path, str] = {}
        for name in ("port_file", "init", "export", "summary", "token_file"):
            path = getattr(self, name)
            if path is not None and taken.setdefault(path, name) != name:
                raise ConfigurationError(
                    f"{option_name(taken[path])} and {option_name(name)} both name {path}; they need two files"
                )

    def _check_faulty(self) -> None:
        faulty = self.assumed_faulty
        needed = 2 * faulty + (1 if self.aggregation == "trimmed_mean" else 3)
        if self.workers < needed:
            raise ConfigurationError(
                f"--aggregation {self.aggregation} needs at least {needed} workers to stand {faulty} bad ones, "
                f"--workers is {self.workers}: take more workers, a lower --faulty-workers or another rule"
            )

    def _check_access(self) -> None:
        if self.insecure and self.token_file is not None:
            raise ConfigurationError("--insecure and --token-file exclude each other: give one of them")
        if not (is_loopback(self.host) or self.insecure or self.token_file is not None):
            raise ConfigurationError(
                f"--host {self.host} lets other machines connect, so it needs --token-file "
                "(make one with the server's sub-command `token`), or --insecure to admit anyone"
            )


def option_name(field_name: str) -> str:
    """Return the option of a field: `start_timeout` is `--start-timeout`."""
    return "--" + field_name.replace("_", "-")


def default_of(name: str) -> Any:
    """Return the default of a field; None when there is none, or when the machine decides."""
    default = ServerConfig.__dataclass_fields__[name].default
    return None if default is MISSING else default
