"""From configuration to the pure parts: optimizer, schedule, store."""

from ps.config import ServerConfig
from ps.optimizers import SGD, Adam, AdamW, Optimizer
from ps.schedules import Constant, Cosine, ExponentialDecay, Schedule, WarmUp
from ps.store import StoreConfig


def make_optimizer(config: ServerConfig) -> Optimizer:
    """Return the optimizer that was asked for."""
    match config.optimizer:
        case "adam":
            return Adam(config.beta1, config.beta2, config.epsilon)
        case "adamw":
            return AdamW(config.beta1, config.beta2, config.epsilon, config.weight_decay)
        case _:
            return SGD(config.momentum, config.nesterov)


def make_schedule(config: ServerConfig) -> Schedule:
    """Return the learning-rate schedule that was asked for."""
    schedule: Schedule = Constant(config.learning_rate)
    if config.schedule == "exponential":
        assert config.decay_steps is not None and config.decay_rate is not None
        schedule = ExponentialDecay(config.learning_rate, config.decay_steps, config.decay_rate, config.staircase)
    elif config.schedule == "cosine":
        assert config.decay_steps is not None
        schedule = Cosine(config.learning_rate, config.decay_steps)
    return WarmUp(schedule, config.warmup_steps) if config.warmup_steps else schedule


def store_config(config: ServerConfig) -> StoreConfig:
    """Return what the store needs to know."""
    return StoreConfig(
        optimizer=make_optimizer(config),
        slots=config.workers,
        threads=config.threads,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
    )
