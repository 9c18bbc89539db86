"""What a run is asked to be, and where it stands."""

from dataclasses import dataclass
from enum import StrEnum

from protocol.ensemble import Weighting
from ps.validation import ALL_ROUNDS, ValidatedRounds


@dataclass(frozen=True)
class RunPolicy:
    """What a run is, and how long each wait may last (seconds).

    The end waits for so many `evaluators` also when they come late, like a worker's goodbye. The start waits for so
    many `validators`; there is room for `validator_slots` of them, and `validated` says which rounds they judge.
    `weighting` makes it an ensemble: each rank gives initial values of its own, and all must have the same labels.
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


class Phase(StrEnum):
    """Where a run stands."""

    GATHERING = "gathering"
    INITIALISING = "initialising"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"
