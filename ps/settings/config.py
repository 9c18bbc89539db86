"""What the operator asks of the server: typed, checked, and silent about nothing that cannot be done."""

import re
from dataclasses import MISSING, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from protocol.certificates import ServerTls
from protocol.errors import ConfigurationError
from ps.settings.access import check_access
from ps.settings.combinations import (
    AT_EACH_PUSH,
    BOUNDS,
    CHOICES,
    COLUMNS,
    MAX_WORKERS,
    NEEDS,
    RULES_WITH_FAULTY,
    RULES_WITH_VALIDATORS,
    Need,
    check_combination,
    option_name,
)
from ps.settings.machine import available_cpus, memory_limit_bytes

MEMORY_SHARE = 0.8
"""Share of the machine's or container's memory that the server may plan for; the rest is the system's."""

MAX_UPDATE_THREADS = 4
"""More threads than this do not make an update faster: it is bound by memory."""

DEFAULT_WEIGHT_DECAY = 0.01
"""AdamW's decay if none is given; with 0 it would be Adam."""


AUTO: Final = "auto"
"""In place of a number of workers: as many as come; see `ServerConfig.gathers`."""


def _default_run_dir() -> Path:
    return Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything that the server is told; times are seconds, sizes are bytes.

    Attributes:
        steps: rounds until the run is done, counted over all resumes; `async` and `ssp`: applied pushes.
        workers: ranks that round 0 waits for; None: elastic, workers come and go, and the first one starts; `auto`:
            as many as have come when none more has come for `gather_timeout`. See `for_workers`.
        host: address to listen on; one that is not loopback needs `token_file` or `insecure`.
        port: TCP port; 0 takes any that is free.
        port_file: where to write the port once the server listens.
        evaluators: that the end waits for even if they come late, `drain_timeout` at most.
        shards: parts into which the training data is divided; None: as many as workers. Without `workers` it is
            also the number of ranks that there is room for.
        mode: one set of variables for all (`shared`), or a network of its own for each worker (`ensemble`).
        consistency: when values change: in rounds (`sync`), at each push (`async`), or so within a bound (`ssp`).
        quorum: usable pushes that close a round; None: those of all.
        max_staleness: async, ssp: updates since its values were taken up to which a push is applied; None: any.
        staleness_discount: async, ssp: exponent A; a push that is s updates late counts (1 + s)^-A.
        ssp_bound: ssp: pushes that a rank may be ahead of the slowest live one.
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
        on_worker_loss: what becomes of a round whose worker is lost: it stays open (`wait`), or closes with the
            others (`shrink`); None: see `worker_loss`.
        gather_timeout: with `workers` auto, time without a further worker after which those who are there are all.
        start_timeout: wait for the first `workers` ranks; with `workers` auto, also the longest time to count them.
        round_timeout: wait for a round's last push, from its first.
        rejoin_timeout: wait for a lost worker's return.
        idle_timeout: wait for any push at all.
        drain_timeout: wait for the workers' goodbyes at the end.
        heartbeat_interval: own silence after which a heartbeat is sent.
        heartbeat_timeout: a peer's silence after which it is lost.
        run_dir: directory of this run's files.
        init: safetensors file of initial values, not looked at where there is a checkpoint to go on from; None: one
            rank is asked.
        checkpoint_dir: directory of the checkpoints; None: none are kept.
        checkpoint_every: steps from one checkpoint to the next; at 1 the run also waits for each to be written.
        keep: newest checkpoints that stay.
        resume: go on from the newest good checkpoint; start afresh where there is none.
        inject: faults on purpose, as `protocol.injection` reads them.
        export: where to write the final values.
        summary: where to write what became of the run.
        token_file: `name role rank token` lines; None: no proof is asked for.
        insecure: listen on any address without tokens.
        tls_cert: certificate of the server, PEM, with those between it and its authority; None: no TLS.
        tls_key: its key, PEM.
        tls_ca: authority of which clients must show a certificate, PEM; None: they need none.
        status_host: address of the status page; one that is not loopback needs `token_file` or `insecure`.
        status_port: its TCP port; 0 takes any that is free; None: there is no page.
        status_port_file: where to write that port once it is served.
        log_format: of the console's lines, sentences (`text`) or an object in each (`json`).
        tensorboard: directory for TensorBoard's event files; None: none are written.
        max_memory: the server refuses to start above this.
        max_model_bytes: largest set of variables that a worker may declare.
        congestion_control: `auto` (reno on loopback addresses only), `system`, or the kernel's name of one.
    """

    steps: int
    workers: int | Literal["auto"] | None = None
    host: str = "127.0.0.1"
    port: int = 5014
    port_file: Path | None = None
    evaluators: int = 0
    shards: int | None = None
    mode: str = "shared"
    consistency: str = "sync"
    quorum: int | None = None
    max_staleness: int | None = None
    staleness_discount: float = 0.0
    ssp_bound: int = 3
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
    on_worker_loss: str | None = None
    gather_timeout: float = 10.0
    start_timeout: float = 300.0
    round_timeout: float = 300.0
    rejoin_timeout: float = 120.0
    idle_timeout: float = 3600.0
    drain_timeout: float = 30.0
    heartbeat_interval: float = 5.0
    heartbeat_timeout: float = 30.0
    run_dir: Path = field(default_factory=_default_run_dir)
    init: Path | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 100
    keep: int = 3
    resume: bool = False
    inject: tuple[str, ...] = ()
    export: Path | None = None
    summary: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    status_host: str = "127.0.0.1"
    status_port: int | None = None
    status_port_file: Path | None = None
    log_format: str = "text"
    tensorboard: Path | None = None
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
            if value is not None and not (name == "workers" and value == AUTO) and not bounds.allow(value):
                raise ConfigurationError(f"{option_name(name)} must be {bounds}, not {value}")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigurationError(f"{option_name(name)} must be {' or '.join(choices)}, not {value}")
        check_combination(
            {column: getattr(self, column) for column in COLUMNS} | {"on_worker_loss": self.worker_loss}
        )
        self._check_membership()
        self._check_needs()
        self._check_pairs()
        check_access(self)
        if not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion_control):
            raise ConfigurationError(
                f"--congestion-control must be auto, system or a name that the kernel knows, such as reno, "
                f"not {self.congestion_control!r}"
            )

    @property
    def elastic(self) -> bool:
        """Whether workers come and go as they like, and none is waited for but the first."""
        return self.workers is None

    @property
    def gathers(self) -> bool:
        """Whether it is yet to be seen how many workers take part; nothing is served before that is known."""
        return self.workers == AUTO

    def for_workers(self, count: int) -> "ServerConfig":
        """Return this configuration for a number of workers, once they are counted.

        Raises:
            ConfigurationError: what was asked for cannot be done with so many.
        """
        return replace(self, workers=count)

    @property
    def ranks(self) -> int:
        """Ranks that there is room for: 0 to `ranks - 1`; before the workers are counted, how many there may be."""
        if isinstance(self.workers, int):
            return self.workers
        if self.gathers:
            return MAX_WORKERS if self.shards is None else min(self.shards, MAX_WORKERS)
        assert self.shards is not None  # see _check_membership
        return self.shards

    @property
    def start_workers(self) -> int:
        """Ranks that round 0 waits for; before the workers are counted, the least that there may be."""
        return self.workers if isinstance(self.workers, int) else 1

    @property
    def worker_loss(self) -> str:
        """What becomes of a round whose worker is lost, `wait` or `shrink`."""
        if self.on_worker_loss is not None:
            return self.on_worker_loss
        return "shrink" if self.elastic or self.consistency in AT_EACH_PUSH else "wait"

    @property
    def shard_count(self) -> int:
        """Parts into which the training data is divided; 1 in an ensemble, whose members all train on all of it."""
        if self.mode == "ensemble":
            return 1
        return self.ranks if self.shards is None else self.shards

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
        return max(0, ((self.quorum or self.ranks) - needed_beside) // 2)

    @cached_property
    def tls(self) -> ServerTls | None:
        """The server's side of TLS, from its files; None without. They were read, and found good, at the start."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def decay_of_weights(self) -> float | None:
        """AdamW's decoupled decay; None for other optimizers."""
        if self.optimizer != "adamw":
            return None
        return DEFAULT_WEIGHT_DECAY if self.weight_decay is None else self.weight_decay

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != default_of(name))

    def _meets(self, need: Need) -> bool:
        other = getattr(self, need.other)
        return other in need.values if need.values else other is not None

    def _check_membership(self) -> None:
        if self.workers is None:
            if self.mode == "ensemble":
                raise ConfigurationError("--mode ensemble needs --workers: it has a network for each of them")
            if self.shards is None:
                raise ConfigurationError(
                    "--workers is missing: say how many workers take part, there or in WEIGHMASTER_WORKERS, "
                    "or auto for as many as come, or give --shards instead, and workers come and go as they like"
                )
            if self.shards > MAX_WORKERS:
                raise ConfigurationError(
                    f"--shards {self.shards} without --workers is also the number of ranks, "
                    f"which must be at most {MAX_WORKERS}"
                )
            if self.worker_loss == "wait":
                raise ConfigurationError(
                    "--on-worker-loss wait needs --workers: without it there is no number of workers to wait for"
                )
        if self.quorum is not None and self.quorum > self.ranks:
            whole = "shards" if self.elastic else "workers"
            raise ConfigurationError(
                f"--quorum {self.quorum} is more than there can be; "
                f"it must be at most {option_name(whole)}, which is {self.ranks}"
            )

    def _check_needs(self) -> None:
        for need in NEEDS:
            if self._is_set(need.option) and not self._meets(need):
                if not need.values:
                    raise ConfigurationError(f"{option_name(need.option)} needs {option_name(need.other)}")
                raise ConfigurationError(
                    f"{option_name(need.option)} works only with {option_name(need.other)} "
                    f"{' or '.join(need.values)}, not with {option_name(need.other)} {getattr(self, need.other)}"
                )
        for name in ("decay_steps", "decay_rate"):
            wanted = any(need.option == name and self.schedule in need.values for need in NEEDS)
            if wanted and getattr(self, name) is None:
                raise ConfigurationError(f"--schedule {self.schedule} needs {option_name(name)}")
        if self.nesterov and not self.momentum:
            raise ConfigurationError("--nesterov needs --momentum above 0")

    def _check_pairs(self) -> None:
        if self.mode == "shared" and self.shard_count < self.ranks:
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
        for name in ("validator_every", "validator_seed_file"):
            if self.validators == 0 and self._is_set(name):
                raise ConfigurationError(
                    f"{option_name(name)} and --validators 0 exclude each other: there is nobody to judge a round"
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
        files = ("port_file", "status_port_file", "init", "export", "summary", "token_file")
        for name in (*files, "checkpoint_dir", "tensorboard"):
            path = getattr(self, name)
            if path is not None and taken.setdefault(path, name) != name:
                raise ConfigurationError(
                    f"{option_name(taken[path])} and {option_name(name)} both name {path}; give two names"
                )

    def _check_faulty(self) -> None:
        if self.elastic and self.faulty_workers is None and self.quorum is None:
            raise ConfigurationError(
                f"--aggregation {self.aggregation} without --workers cannot tell how many may be bad: "
                "say it by --faulty-workers"
            )
        faulty = self.assumed_faulty
        needed = 2 * faulty + (1 if self.aggregation == "trimmed_mean" else 3)
        limit = "quorum" if self.quorum is not None else "shards" if self.elastic else "workers"
        most = self.quorum if self.quorum is not None else self.ranks
        if most < needed:
            raise ConfigurationError(
                f"--aggregation {self.aggregation} needs at least {needed} workers to stand {faulty} bad ones, "
                f"{option_name(limit)} is {most}: "
                "take more workers, a lower --faulty-workers or another rule"
            )


def default_of(name: str) -> Any:
    """Return the default of a field; None when there is none, or when the machine decides."""
    default = ServerConfig.__dataclass_fields__[name].default
    return None if default is MISSING else default
