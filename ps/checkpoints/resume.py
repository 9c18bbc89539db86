"""What may change when a run goes on from a checkpoint, and what may not: one table over all options."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from protocol.errors import ConfigurationError
from ps.settings.combinations import RULES_WITH_FAULTY, option_name
from ps.settings.config import ServerConfig, default_of

Setting = str | int | float | bool | None
"""The value of an option as JSON holds it; floats come back with the same bits."""


class Change(Enum):
    """What becomes of a run whose option has changed since the checkpoint."""

    FREE = "no bit of the values depends on it; not kept in a checkpoint"
    CHOSEN = "training goes on otherwise, as was asked; said"
    APART = "the values are no longer comparable with those of a run that was never stopped; said"
    NEVER = "what the checkpoint holds has no meaning under another value; refused"


def _never_changes(config: ServerConfig) -> bool:
    return False


@dataclass(frozen=True)
class Option:
    """One row: what a change of a field means, and why.

    Attributes:
        change: what becomes of the run.
        why: the reason; of APART and NEVER it is said to the user.
        not_on_or_off: a number may change, but not from or to none (None, 0).
        fixed: says of which runs the field must not change, whatever `change` is.
    """

    change: Change
    why: str
    not_on_or_off: bool = False
    fixed: Callable[[ServerConfig], bool] = _never_changes


def _has_network_of_all_ranks(config: ServerConfig) -> bool:
    return config.mode == "ensemble" or config.master is not None


def _has_network_of_all_shards(config: ServerConfig) -> bool:
    return config.elastic and config.master is not None


def _free(why: str) -> Option:
    return Option(Change.FREE, why)


def _chosen(why: str) -> Option:
    return Option(Change.CHOSEN, why)


def _apart(why: str) -> Option:
    return Option(Change.APART, why)


def _never(why: str) -> Option:
    return Option(Change.NEVER, why)


_ADDRESS = _free("where the server is found")
_RESULTS = _free("where results go")
_VIEW = _free("it shows the run and changes nothing of it")
_PATIENCE = _free("a wait that it ends is told when it ends")
_CHECKPOINTS = _free("when and where the values are kept, not what they are")
_RATE = _chosen("the learning rate is a function of the step alone")
_LIMIT = _chosen("clipping remembers nothing")
_MOMENTS = _never("the correction for the moments' first steps takes one value for all steps")
_MASTER = _never("the master has learned with it")

OPTIONS: Mapping[str, Option] = {
    # what a run is
    "mode": _never("it says whose the variables are"),
    "seed": _never("batches and dropout are drawn from it"),
    "consistency": _never("steps count rounds or pushes by it"),
    "steps": _chosen("values(k) do not depend on where the run is to end"),
    "shards": Option(Change.APART, "the training data is divided anew", fixed=_has_network_of_all_shards),
    # who takes part
    "workers": Option(
        Change.APART,
        "rounds and networks are made for so many workers",
        fixed=_has_network_of_all_ranks,
    ),
    "quorum": _apart("other gradients make a round"),
    "on_worker_loss": _free("a round that a worker is missing from is told when it closes"),
    "evaluators": _free("they change no values"),
    "validators": Option(Change.APART, "whom the rule trusts rests on them", not_on_or_off=True),
    "validator_every": _chosen("a round's draw depends on it, the secret and the step alone"),
    "validator_seed_file": _free("read at the first start only: the secret is in the checkpoint"),
    # staleness
    "max_staleness": _chosen("nothing is remembered of a push that was refused"),
    "staleness_discount": _RATE,
    "ssp_bound": _chosen("ranks that are too far ahead wait until the others come up"),
    # how gradients are weighed
    "aggregation": _never("what one rule remembers of the workers another cannot use"),
    "faulty_workers": _chosen("the rules that take it remember nothing"),
    "mean_over": _chosen("a mean remembers nothing"),
    "master": _MASTER,
    "weighting": _MASTER,
    "head": _MASTER,
    "weight_acts_on": _never("the optimizer's moments are of what it makes"),
    "clip_worker_norm": _LIMIT,
    "clip_norm": _LIMIT,
    # how values change
    "optimizer": _never("the checkpoint holds the moments of one kind"),
    "beta1": _MOMENTS,
    "beta2": _MOMENTS,
    "momentum": Option(Change.CHOSEN, "without it no moment is kept", not_on_or_off=True),
    "nesterov": _chosen("it keeps the moment of plain momentum"),
    "epsilon": _chosen("moments do not contain it"),
    "weight_decay": _chosen("moments do not contain it"),
    "learning_rate": _RATE,
    "schedule": _RATE,
    "decay_steps": _RATE,
    "decay_rate": _RATE,
    "staircase": _RATE,
    "warmup_steps": _RATE,
    "ema_decay": Option(
        Change.CHOSEN, "a moving average cannot begin, or end, in the middle of a run", not_on_or_off=True
    ),
    # where and how it runs
    "host": _ADDRESS,
    "port": _ADDRESS,
    "port_file": _ADDRESS,
    "token_file": _free("who may come in"),
    "insecure": _free("who may come in"),
    "tls_cert": _free("how bytes travel"),
    "tls_key": _free("how bytes travel"),
    "tls_ca": _free("who may come in"),
    "status_host": _VIEW,
    "status_port": _VIEW,
    "status_port_file": _VIEW,
    "log_format": _VIEW,
    "tensorboard": _VIEW,
    "congestion_control": _free("how bytes travel"),
    "threads": _free("sums are taken in an order that does not depend on their number"),
    "max_memory": _free("a limit, not a choice"),
    "max_model_bytes": _free("a limit, not a choice"),
    "gather_timeout": _PATIENCE,
    "start_timeout": _PATIENCE,
    "round_timeout": _PATIENCE,
    "rejoin_timeout": _PATIENCE,
    "idle_timeout": _PATIENCE,
    "drain_timeout": _PATIENCE,
    "heartbeat_interval": _PATIENCE,
    "heartbeat_timeout": _PATIENCE,
    "run_dir": _RESULTS,
    "export": _RESULTS,
    "summary": _RESULTS,
    "init": _free("read at the first start only: the checkpoint has the values"),
    "checkpoint_dir": _CHECKPOINTS,
    "checkpoint_every": _CHECKPOINTS,
    "keep": _CHECKPOINTS,
    "resume": _CHECKPOINTS,
    "inject": _free("a fault on purpose is told when it happens"),
}
"""Every field of `ServerConfig`, and what a change of it means on resume."""

_RESOLVED: Mapping[str, Callable[[ServerConfig], Setting]] = {
    "shards": lambda config: config.shard_count,
    "validators": lambda config: config.awaited_validators,
    "validator_every": lambda config: config.validator_every or 1,
    "faulty_workers": lambda config: config.assumed_faulty if config.aggregation in RULES_WITH_FAULTY else None,
    "weight_decay": lambda config: config.decay_of_weights,
}
"""What is kept of options whose default depends on others: what they come to."""


def settings_of(config: ServerConfig) -> dict[str, Setting]:
    """Return what a checkpoint keeps of the configuration: all on which values depend, and no path or secret."""
    return {
        name: _RESOLVED[name](config) if name in _RESOLVED else getattr(config, name)
        for name, option in OPTIONS.items()
        if option.change is not Change.FREE
    }


def check_resumable(saved: Mapping[str, object], config: ServerConfig) -> list[str]:
    """Check that a run can go on from a checkpoint under `config`.

    Args:
        saved: `settings_of` the configuration that the checkpoint was made under, as JSON gives it back. An option
            that it lacks is one that did not exist then: it counts as left out.
        config: of the server that starts.

    Returns:
        A sentence for each change that people should know of.

    Raises:
        ConfigurationError: naming the first option that must not change, both values, and what to do.
    """
    told = []
    for change, name, before, now in _changes(saved, config):
        option = OPTIONS[name]
        if change is Change.NEVER:
            raise ConfigurationError(
                f"the checkpoint is of a run with {_as_given(name, before)} and cannot go on with "
                f"{_as_given(name, now)}: {option.why}; start with {_as_given(name, before)}, "
                "or give another --checkpoint-dir for a run of its own"
            )
        sentence = (
            f"going on with {_as_given(name, now)}, the checkpoint is of a run with {_as_given(name, before)}"
        )
        told.append(f"{sentence}: {_consequence(option)}" if change is Change.APART else sentence)
    return told


def reason_not_comparable(saved: Mapping[str, object], config: ServerConfig) -> str | None:
    """Say in short why values will differ from those of a run that was never stopped; None if they will not.

    Options that were changed by choice, such as the learning rate, are no such reason: who makes the same change at
    the same step gets the same bits.

    Args:
        saved: see `check_resumable`, which has passed.
        config: of the server that starts.
    """
    changed = [option_name(name) for change, name, _, _ in _changes(saved, config) if change is Change.APART]
    return f"resumed with another {' and '.join(changed)}" if changed else None


def _changes(saved: Mapping[str, object], config: ServerConfig) -> Iterator[tuple[Change, str, object, Setting]]:
    """Yield what has changed: kind of change, field, value before, value now."""
    for name, now in settings_of(config).items():
        option = OPTIONS[name]
        if name not in saved and name in _RESOLVED:
            continue  # what it came to then is not known
        before = saved.get(name, default_of(name))
        if before == now:
            continue
        fixed = option.fixed(config) or (option.not_on_or_off and bool(before) is not bool(now))
        yield Change.NEVER if fixed else option.change, name, before, now


def _consequence(option: Option) -> str:
    return f"{option.why}, so values will differ from those of a run that was never stopped"


def _as_given(name: str, value: object) -> str:
    if value is None:
        return f"no {option_name(name)}"
    if isinstance(value, bool):
        return option_name(name if value else f"no_{name}")
    return f"{option_name(name)} {value}"
