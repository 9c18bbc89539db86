"""How a store computes."""

import math
from dataclasses import dataclass

from protocol.errors import ConfigurationError
from ps.storage.optimizers import Optimizer
from ps.storage.versions import GRACE_S, VERSIONS


class NotFinite(ValueError):
    """A value is NaN or infinite.

    Attributes:
        variable: name of the first variable with one.
    """

    def __init__(self, variable: str) -> None:
        super().__init__(f"variable {variable!r} has a value that is NaN or infinite")
        self.variable = variable


@dataclass(frozen=True)
class StoreConfig:
    """How a store computes.

    Attributes:
        optimizer: what turns the weighted sum of gradients into new values.
        slots: gradients that may be held at once; one of them is one row of the slab.
        threads: threads that share an update. Results do not depend on it.
        clip_norm: largest Euclidean norm of the weighted sum of trainable gradients; None for no limit.
        ema_decay: `average <- decay average + (1 - decay) value` at each update; None for no average.
        release_timeout_s: seconds that an update waits for a version to be released, after it cut readers off.
        references: rows of the slab after the slots, for gradients that are compared with and never applied.
        reductions: whether inner products or trimmed means will be asked for: their loops are loaded at once.
        checkpoints: whether snapshots will be taken.
        versions: buffers of values, at least 3; more where replies of several versions are on their way at once.
        grace_s: seconds that an update waits for a version to be released before it cuts readers off.
    """

    optimizer: Optimizer
    slots: int
    threads: int = 2
    clip_norm: float | None = None
    ema_decay: float | None = None
    release_timeout_s: float = 60.0
    references: int = 0
    reductions: bool = False
    checkpoints: bool = False
    versions: int = VERSIONS
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        if self.slots < 1 or self.threads < 1:
            raise ConfigurationError(
                f"a store needs a slot and a thread at least, not {self.slots} slots and {self.threads} threads"
            )
        if self.references < 0:
            raise ConfigurationError(f"a store cannot have {self.references} rows for references")
        if self.versions < VERSIONS:
            raise ConfigurationError(f"a store needs {VERSIONS} versions of the values, not {self.versions}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigurationError(f"the norm to clip at must be finite and above 0, not {self.clip_norm}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigurationError(f"the EMA decay must be at least 0 and below 1, not {self.ema_decay}")
