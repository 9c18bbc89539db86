"""What the operator asks of a worker: typed, checked, with `TF_CONFIG` understood for addresses and rank."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from protocol.addresses import Address, parse_address
from protocol.certificates import ClientTls, parse_fingerprint
from protocol.errors import ConfigurationError
from protocol.injection import Plan
from protocol.messages import MAX_NAME_CHARACTERS, MAX_RANK, Side
from worker.faults import parse_fault

DEFAULT_ADDRESS = Address("127.0.0.1", 5014)

MODELS: tuple[str, ...] = ("mlp", "cifar10_cnn")
"""Models that ship, by name; listed here because `worker.models` needs TensorFlow."""

DATASETS: tuple[str, ...] = ("digits", "mnist", "fashion_mnist", "cifar10")
"""Data sets that ship, by name."""

LOG_FORMATS: tuple[str, ...] = ("text", "json")

ROLES: tuple[str, ...] = ("worker", "validator", "evaluator")

DEFAULT_BATCH_SIZE = 32
"""Of a worker; a validator takes all its trusted examples."""

_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")

_LIMITS: Mapping[str, tuple[float, float]] = {
    "rank": (0, MAX_RANK),
    "batch_size": (1, 1_000_000_000),
    "trusted_examples": (0, 1_000_000_000),
    "threads": (1, 1024),
    "seed": (0, 2**63 - 1),
    "evaluate_every": (1, 10**15),
}
"""Lowest and highest value of every option that counts something."""

_MAX_SECONDS = 10**8


def available_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything that a worker is told; times are seconds.

    Attributes:
        ps: address of the parameter server.
        rank: number of this worker; None: the server hands out the lowest that is free.
        name: who this is; None: host name and rank.
        role: `worker` computes gradients, `validator` does so on trusted examples that no worker has, `evaluator`
            measures the values on the test data.
        model: a name of `MODELS`, or `file.py:function`.
        dataset: a name of `DATASETS`, `npz:FILE`, or `file.py:function`.
        data_dir: where the data set's files are; None: where the data set looks by itself.
        batch_size: examples of one gradient; None: `DEFAULT_BATCH_SIZE`, and of a validator all that it trusts.
        trusted_examples: examples held out of every shard, drawn by the seed; of a validator those that it trusts,
            and 0 for a data set of its own, which it trusts as a whole.
        own_data: a worker's data set is its own; it trains on all of it.
        threads: of TensorFlow within one operation.
        legacy_keras: use the tf-keras package, as `tf.compat.v1.layers` needs.
        seed: what the server's seed must be; None: whatever it is.
        token_file: the one line `name role rank token` of this worker; None: none is sent.
        tls_ca: authority of the server's certificate, PEM; turns TLS on.
        tls_fingerprint: SHA-256 of the server's certificate instead, in hexadecimal; turns TLS on. With neither of
            the two there is no TLS.
        tls_cert: certificate of this worker, PEM, for a server that asks for one.
        tls_key: its key, PEM.
        log_format: of its lines, sentences (`text`) or an object in each (`json`).
        evaluate_every: steps between two evaluations of an evaluator, or two votes of an ensemble's member.
        fault: how this worker misbehaves on purpose, as `worker.faults.parse_fault` reads it; None: not at all.
        inject: what happens to this process or its connection on purpose, as `protocol.injection` reads it.
        connect_timeout: wait for the server at the start.
        reconnect_timeout: wait for the server once it was lost.
        congestion_control: `auto` (reno on loopback addresses only), `system`, or the kernel's name of one.
        dry_run: build the model, prove that its variables can be fed, compute one batch, and use no network.
    """

    ps: Address = DEFAULT_ADDRESS
    rank: int | None = None
    name: str | None = None
    role: str = "worker"
    model: str = "mlp"
    dataset: str = "digits"
    data_dir: Path | None = None
    batch_size: int | None = None
    trusted_examples: int = 100
    own_data: bool = False
    threads: int = field(default_factory=available_cpus)
    legacy_keras: bool = False
    seed: int | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_fingerprint: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_format: str = "text"
    evaluate_every: int = 20
    fault: str | None = None
    inject: tuple[str, ...] = ()
    connect_timeout: float = 60.0
    reconnect_timeout: float = 120.0
    congestion_control: str = "auto"
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check every value, then what goes with what.

        Raises:
            ConfigurationError: naming the option, or both options.
        """
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigurationError(f"{option_name(name)} must be from {low} to {high}, not {value}")
        for name in ("connect_timeout", "reconnect_timeout"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and 0 < seconds <= _MAX_SECONDS):
                raise ConfigurationError(
                    f"{option_name(name)} must be above 0 and at most {_MAX_SECONDS} seconds, not {seconds}"
                )
        if self.role not in ROLES:
            raise ConfigurationError(f"--role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {self.role}")
        if self.name is not None:
            _check_name(self.name)
        if self.model not in MODELS and not _FUNCTION.fullmatch(self.model):
            raise ConfigurationError(f"--model must be {', '.join(MODELS)} or file.py:function, not {self.model!r}")
        npz = self.dataset.startswith("npz:") and len(self.dataset) > len("npz:")
        if self.dataset not in DATASETS and not npz and not _FUNCTION.fullmatch(self.dataset):
            raise ConfigurationError(
                f"--dataset must be {', '.join(DATASETS)}, npz:FILE or file.py:function, not {self.dataset!r}"
            )
        if not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion_control):
            raise ConfigurationError(
                f"--congestion-control must be auto, system or a name that the kernel knows, such as reno, "
                f"not {self.congestion_control!r}"
            )
        if self.role != "worker" and self.rank is not None:
            raise ConfigurationError(
                f"--role {self.role} and --rank exclude each other: only a worker has a rank; leave --rank out"
            )
        if self.fault is not None:
            parse_fault(self.fault)
            if self.role != "worker":
                raise ConfigurationError(
                    f"--fault and --role {self.role} exclude each other: only a worker misbehaves; leave one out"
                )
        self._check_own_data()
        if self.log_format not in LOG_FORMATS:
            raise ConfigurationError(f"--log-format must be {' or '.join(LOG_FORMATS)}, not {self.log_format}")
        self._check_tls()
        Plan.parse(self.inject, Side.WORKER)
        if self.role == "validator" and self.evaluate_every != default_of("evaluate_every"):
            raise ConfigurationError(
                f"--evaluate-every works only with --role evaluator, not with --role {self.role}"
            )

    def _check_own_data(self) -> None:
        if not self.own_data:
            return
        if self.role != "worker":
            cure = "give --trusted-examples 0 instead" if self.role == "validator" else "leave it out"
            raise ConfigurationError(
                f"--own-data works only with --role worker, not with --role {self.role}; {cure}"
            )
        if self.trusted_examples not in (0, default_of("trusted_examples")):
            raise ConfigurationError(
                "--own-data and --trusted-examples exclude each other: nobody else has any of these examples, so "
                "none is held out; leave --trusted-examples out"
            )

    @cached_property
    def tls(self) -> ClientTls | None:
        """This side of TLS, from its files; None without. They were read, and found good, at the start."""
        if self.tls_ca is None and self.tls_fingerprint is None:
            return None
        pin = None if self.tls_fingerprint is None else parse_fingerprint(self.tls_fingerprint)
        return ClientTls(self.tls_ca, pin, self.tls_cert, self.tls_key)

    def _check_tls(self) -> None:
        if self.tls_ca is not None and self.tls_fingerprint is not None:
            raise ConfigurationError(
                "--tls-ca and --tls-fingerprint exclude each other: know the server by one of them"
            )
        tls = self.tls  # its files are read here, where they can still be mended
        for name in ("tls_cert", "tls_key"):
            if getattr(self, name) is not None and tls is None:
                raise ConfigurationError(
                    f"{option_name(name)} needs --tls-ca or --tls-fingerprint, by which the server is known"
                )


def option_name(field_name: str) -> str:
    """Return the option of a field: `batch_size` is `--batch-size`."""
    return "--" + field_name.replace("_", "-")


def default_of(name: str) -> Any:
    """Return the default of a field; None when there is none, or when the machine decides."""
    default = WorkerConfig.__dataclass_fields__[name].default
    return None if default is MISSING else default


def _check_name(name: str) -> None:
    if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and len(name.split()) == 1 and name != "*"):
        raise ConfigurationError(
            f"--name must be 1 to {MAX_NAME_CHARACTERS} printable characters without spaces, not {name!r}"
        )


# ---- TF_CONFIG -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterTask:
    """What `TF_CONFIG` says of this process; None where it says nothing."""

    ps: Address | None = None
    rank: int | None = None
    role: str | None = None


def parse_tf_config(text: str, *, for_address: bool = True, for_task: bool = True) -> ClusterTask:
    """Read the JSON of the environment variable `TF_CONFIG`, as TensorFlow's distributed training defines it.

    A chief is rank 0 and worker i is i + 1; without a chief worker i is i.

    Args:
        text: `{"cluster": {"ps": ["host:port"], "chief": [...], "worker": [...]}, "task": {"type", "index"}}`.
        for_address: whether the server is asked for; what is not asked for may be anything.
        for_task: whether rank and role are asked for.

    Raises:
        ConfigurationError: the text is malformed, or describes a process that is no worker.
    """
    try:
        document = json.loads(text or "{}")
    except ValueError as error:
        raise _malformed(f"is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _malformed("is not a JSON object")
    cluster, task = document.get("cluster", {}), document.get("task", {})
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _malformed("needs objects for 'cluster' and 'task'")
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise _malformed(f"needs a list of host:port for {job!r}")
    rank, role = _rank_and_role(cluster, task) if for_task else (None, None)
    ps = _server(cluster.get("ps", [])) if for_address else None
    if for_address and task and ps is None:
        raise ConfigurationError("TF_CONFIG lists no 'ps' in its cluster; add it there or give --ps")
    return ClusterTask(ps, rank, role)


def _server(addresses: list[str]) -> Address | None:
    if len(addresses) > 1:
        raise _malformed(f"lists {len(addresses)} parameter servers where there is one")
    try:
        return parse_address(addresses[0]) if addresses else None
    except ConfigurationError as error:
        raise _malformed(f"has a wrong address for 'ps': {error}") from error


def _rank_and_role(cluster: Mapping[str, list[str]], task: Mapping[str, Any]) -> tuple[int | None, str | None]:
    if not task:
        return None, None
    job, index = task.get("type"), task.get("index", 0)
    if type(index) is not int or index < 0:
        raise _malformed(f"needs a number from 0 as the task's 'index', not {index!r}")
    listed = cluster.get(job, []) if isinstance(job, str) else []
    if listed and index >= len(listed):
        raise _malformed(f"says {job} {index}, but the cluster lists only {len(listed)}")
    match job:
        case "evaluator":
            return None, "evaluator"
        case "chief" if index == 0:
            return 0, "worker"
        case "worker":
            return index + bool(cluster.get("chief")), "worker"
        case "ps":
            raise _malformed("says that this process is the ps; start the server (`python -m ps`) for it")
        case _:
            raise _malformed(f"has a task that is no chief, worker or evaluator: {job!r} {index}")


def _malformed(what: str) -> ConfigurationError:
    return ConfigurationError(f"TF_CONFIG {what}; correct it or unset it")
