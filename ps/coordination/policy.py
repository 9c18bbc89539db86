"""What a run is asked to be, and where it stands."""

from dataclasses import dataclass
from enum import StrEnum

from protocol.ensemble import Weighting
from ps.coordination.validation import ALL_ROUNDS, ValidatedRounds


class Consistency(StrEnum):
    """When gradients are applied: those of a step together, or each at once, without and with a bound."""

    SYNC = "sync"
    ASYNC = "async"
    SSP = "ssp"


@dataclass(frozen=True)
class RunPolicy:
    """What a run is, and how long each wait may last (seconds).

    The end waits for so many `evaluators` also when they come late, like a worker's goodbye. The start waits for so
    many `validators`; there is room for `validator_slots` of them, and `validated` says which rounds they judge.
    `weighting` makes it an ensemble: each rank gives initial values of its own, and all must have the same labels.

    Attributes:
        workers: ranks that there is room for.
        elastic: ranks are those that come: the start waits for one of them, not for all.
        consistency: when gradients are applied.
        quorum: sync: so many usable pushes close a round; None: all.
        shrink: a rank that is lost, or late for too long, is not waited for; else the run waits for its return.
        max_staleness: async, SSP: gradients of values older by more applied pushes are refused; None: none are.
        ssp_bound: SSP: so many pushes a rank may be ahead of the slowest one.
        idle_timeout_s: the run ends when no push at all has come for so long.
    """

    workers: int
    steps: int
    start_timeout_s: float
    round_timeout_s: float
    rejoin_timeout_s: float
    drain_timeout_s: float
    evaluators: int = 0
    validators: int = 0
    validator_slots: int = 0
    validated: ValidatedRounds = ALL_ROUNDS
    weighting: Weighting | None = None
    elastic: bool = False
    consistency: Consistency = Consistency.SYNC
    quorum: int | None = None
    shrink: bool = False
    max_staleness: int | None = None
    ssp_bound: int = 1
    idle_timeout_s: float = 3600.0

    @property
    def is_sync(self) -> bool:
        """Whether the gradients of one step are applied together."""
        return self.consistency is Consistency.SYNC

    @property
    def leaves_out(self) -> bool:
        """Whether rounds may close without a rank that has not left on purpose."""
        return self.shrink or self.quorum is not None or not self.is_sync


class Phase(StrEnum):
    """Where a run stands."""

    GATHERING = "gathering"
    INITIALISING = "initialising"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"
