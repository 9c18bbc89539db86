"""From configuration to the parts that it chooses: optimizer, schedule, store, policy."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from protocol.arena import Arena
from protocol.ensemble import MODE, Weighting
from protocol.errors import ConfigurationError, ManifestMismatch
from protocol.tensors import Layout
from ps.coordination.policy import Consistency, RunPolicy
from ps.coordination.validation import SECRET_BYTES, ValidatedRounds
from ps.ensemble_mode import EnsembleConfig, EnsembleMode
from ps.rules.aggregation import (
    ClippedMean,
    CosineTrust,
    Krum,
    Mean,
    MeanOver,
    Median,
    MultiKrum,
    TrimmedMean,
)
from ps.rules.ensemble import ActsOn, Head
from ps.rules.evidence import Evidence
from ps.rules.master import Master
from ps.rules.rule import Rule
from ps.settings.combinations import RULES_OF_MEANS
from ps.settings.config import ServerConfig
from ps.storage import kernels, reductions
from ps.storage.optimizers import SGD, Adam, AdamW, Optimizer
from ps.storage.schedules import Constant, Cosine, ExponentialDecay, Schedule, WarmUp
from ps.storage.store import Store
from ps.storage.store_config import NotFinite, StoreConfig
from ps.storage.versions import VERSIONS

logger = logging.getLogger("weighmaster.ps")

KILOBYTE, MEGABYTE = 1e3, 1e6


def _adamw(config: ServerConfig) -> Optimizer:
    assert config.decay_of_weights is not None
    return AdamW(config.beta1, config.beta2, config.epsilon, config.decay_of_weights)


OPTIMIZERS: Mapping[str, Callable[[ServerConfig], Optimizer]] = {
    "adam": lambda config: Adam(config.beta1, config.beta2, config.epsilon),
    "adamw": _adamw,
    "sgd": lambda config: SGD(config.momentum, config.nesterov),
}
"""What makes each optimizer, by the value of `--optimizer`."""


def make_optimizer(config: ServerConfig) -> Optimizer:
    """Return the optimizer that was asked for."""
    return OPTIMIZERS[config.optimizer](config)


def _master(config: ServerConfig) -> Rule:
    validated = config.awaited_validators > 0
    if config.master is None:
        return Master(validated, config.seed)
    from ps.rules.user_master import UserMaster
    from ps.rules.user_network import load_user_master

    function = load_user_master(config.master)
    return UserMaster(function, config.ranks, validated=validated, seed=config.seed)


RULES: Mapping[str, Callable[[ServerConfig], Rule]] = {
    "mean": lambda config: Mean(MeanOver(config.mean_over)),
    "clipped_mean": lambda config: ClippedMean(MeanOver(config.mean_over)),
    "median": lambda config: Median(),
    "trimmed_mean": lambda config: TrimmedMean(config.assumed_faulty),
    "krum": lambda config: Krum(config.assumed_faulty),
    "multi_krum": lambda config: MultiKrum(config.assumed_faulty),
    "cosine_trust": lambda config: CosineTrust(),
    "evidence": lambda config: Evidence(validated=config.awaited_validators > 0),
    "master": _master,
}
"""What makes each rule, by the value of `--aggregation`."""


def make_rule(config: ServerConfig) -> Rule:
    """Return the aggregation rule that was asked for.

    Raises:
        ConfigurationError: the user's own master cannot be used.
    """
    if config.mode == MODE:
        return Mean()  # never asked: an ensemble's master weighs answers, not gradients
    return RULES[config.aggregation](config)


def _exponential(config: ServerConfig) -> Schedule:
    assert config.decay_steps is not None and config.decay_rate is not None
    return ExponentialDecay(config.learning_rate, config.decay_steps, config.decay_rate, config.staircase)


def _cosine(config: ServerConfig) -> Schedule:
    assert config.decay_steps is not None
    return Cosine(config.learning_rate, config.decay_steps)


SCHEDULES: Mapping[str, Callable[[ServerConfig], Schedule]] = {
    "constant": lambda config: Constant(config.learning_rate),
    "exponential": _exponential,
    "cosine": _cosine,
}
"""What makes each schedule, by the value of `--schedule`; the warm-up comes before it."""


def make_schedule(config: ServerConfig) -> Schedule:
    """Return the learning-rate schedule that was asked for."""
    schedule = SCHEDULES[config.schedule](config)
    return WarmUp(schedule, config.warmup_steps) if config.warmup_steps else schedule


def store_config(config: ServerConfig) -> StoreConfig:
    """Return what the store needs to know."""
    return StoreConfig(
        optimizer=make_optimizer(config),
        slots=config.ranks,
        references=config.validator_slots,
        checkpoints=config.checkpoint_dir is not None,
        versions=VERSIONS if config.consistency == "sync" else config.ranks + 2,
        reductions=config.aggregation not in RULES_OF_MEANS,
        threads=config.threads,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
    )


def size_text(size_bytes: float) -> str:
    """Return a size as people write it: `203.2 kB`, `72.0 MB`."""
    if size_bytes < MEGABYTE:
        return f"{size_bytes / KILOBYTE:.1f} kB"
    return f"{size_bytes / MEGABYTE:.1f} MB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + 's'}"


def make_store(config: ServerConfig, layout: Layout, initial_values: Mapping[str, NDArray[Any]] | None) -> Store:
    """Make the store of a run, with `initial_values` in it if there are any.

    Raises:
        ConfigurationError: a dtype cannot be computed in, or the memory does not suffice.
        ManifestMismatch: the initial values are not those of the layout, or not finite.
    """
    Store.check_supported(layout.manifest)
    wanted = store_config(config)
    needed = Store.memory_bytes(layout, wanted)
    holders = [_count(n, noun) for n, noun in ((wanted.slots, "worker"), (wanted.references, "validator")) if n]
    logger.info(
        "%s of %s; the server will hold %s (gradients of %s, %d versions, moments%s)",
        _count(len(layout.slots), "variable"),
        size_text(layout.values_bytes),
        size_text(needed),
        " and ".join(holders),
        wanted.versions,
        ", a copy of them for checkpoints" if wanted.checkpoints else "",
    )
    if needed > config.max_memory:
        raise ConfigurationError(
            f"the model needs {size_text(needed)} on the server, above --max-memory "
            f"{size_text(config.max_memory)}: allow more, or use fewer workers"
        )
    store = Store(layout, wanted)
    if initial_values is not None:
        try:
            arena = Arena.zeros(layout)
            arena.fill(initial_values)
            store.initialise(arena.buffer)
        except (ManifestMismatch, NotFinite) as error:
            store.close()
            raise ManifestMismatch(f"--init {config.init} does not fit the workers' model: {error}") from error
    return store


def make_ensemble(config: ServerConfig, initial_values: dict[str, NDArray[Any]] | None) -> EnsembleMode | None:
    """Return what a server in mode ensemble has more; None in other modes.

    Raises:
        ConfigurationError: the user's own master cannot be loaded.
    """
    if config.mode != MODE:
        return None
    wanted = EnsembleConfig(
        members=config.ranks,
        weighting=Weighting(config.weighting),
        acts_on=ActsOn(config.weight_acts_on),
        head=Head(config.head),
        seed=config.seed,
        master=config.master,
        store=store_config(config),
        max_memory=config.max_memory,
        max_model_bytes=config.max_model_bytes,
    )
    return EnsembleMode(wanted, make_schedule(config), initial_values)


def warm_up(config: ServerConfig, dtype: str) -> None:
    """Load the kernels that a run on this dtype will need, or compile them: the first time that takes some 20 s."""
    kernels.warm_up(make_optimizer(config).kernel, (dtype,))
    if config.aggregation not in RULES_OF_MEANS:
        reductions.warm_up((dtype,))


def secret_of(config: ServerConfig) -> bytes:
    """Return the secret that draws the validated rounds of a run that begins.

    Raises:
        ConfigurationError: its file cannot be read, or is empty.
    """
    if config.validator_seed_file is None:
        return os.urandom(SECRET_BYTES)
    try:
        seed = config.validator_seed_file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"--validator-seed-file {config.validator_seed_file} cannot be read: {error.strerror}"
        ) from error
    if not seed:
        raise ConfigurationError(
            f"--validator-seed-file {config.validator_seed_file} is empty: write any bytes into it"
        )
    return hashlib.sha256(seed).digest()


def policy_of(config: ServerConfig, secret: bytes) -> RunPolicy:
    """Return what the coordinator needs to know; `secret` draws the validated rounds."""
    return RunPolicy(
        workers=config.ranks,
        steps=config.steps,
        start_timeout_s=config.start_timeout,
        round_timeout_s=config.round_timeout,
        rejoin_timeout_s=config.rejoin_timeout,
        drain_timeout_s=config.drain_timeout,
        evaluators=config.evaluators,
        validators=config.awaited_validators,
        validator_slots=config.validator_slots,
        validated=ValidatedRounds(config.validator_every or 1, secret),
        weighting=Weighting(config.weighting) if config.mode == MODE else None,
        elastic=config.elastic,
        consistency=Consistency(config.consistency),
        quorum=config.quorum,
        shrink=config.worker_loss == "shrink",
        max_staleness=config.max_staleness,
        ssp_bound=config.ssp_bound,
        idle_timeout_s=config.idle_timeout,
    )
