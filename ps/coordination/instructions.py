"""What the coordinator tells the server to do, in words of a run; carried out in order by `ps.server`."""

from dataclasses import dataclass
from enum import StrEnum

from protocol.messages import Status
from ps.coordination.members import SessionId


@dataclass(frozen=True)
class Contribution:
    """One rank's push in a round; `refused` says why it counts with weight 0, or is empty.

    `labels` is the digest of its labels in ensemble mode. `staleness` is how many pushes were applied since the
    values at which it was computed; 0 in sync. `state_norm` is that of the changes of its floating state.
    """

    rank: int
    session: SessionId
    seq: int
    loss: float | None
    accuracy: float | None
    examples: int
    gradient_norm: float
    refused: str = ""
    labels: bytes | None = None
    staleness: int = 0
    state_norm: float = 0.0


@dataclass(frozen=True)
class AskInitial:
    """Ask this connection for the initial values."""

    session: SessionId


@dataclass(frozen=True)
class Begin:
    """The values are agreed upon and round `step` is about to begin: what is there is worth keeping."""

    step: int


@dataclass(frozen=True)
class CloseRound:
    """Turn the contributions (rank order, refused ones included) into one and make values(step + 1).

    `references` are the numbers of the validators whose gradient at this step is in its slot, ascending; `late` are
    the ranks that it closes without because they took too long.
    """

    step: int
    contributions: tuple[Contribution, ...]
    references: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class SkipRound:
    """The round is void: values stay, step + 1."""

    step: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Reply:
    """Send the current values; `seq` names the push that this answers, 0 a pull."""

    session: SessionId
    seq: int
    applied: bool
    reason: str = ""


@dataclass(frozen=True)
class WeighAnswers:
    """Weigh the logits of these ranks (ascending), which are the answers to the batch of one step."""

    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SendWeights:
    """Send a rank the weights of its examples; `seq` names the logits that this answers."""

    session: SessionId
    rank: int
    seq: int


@dataclass(frozen=True)
class Announce:
    """Tell the operator."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Finish:
    """The run has ended; tell every connection that still is there, write what is to be written, exit."""

    status: Status
    reason: str


Instruction = AskInitial | Begin | CloseRound | SkipRound | Reply | WeighAnswers | SendWeights | Announce | Finish


@dataclass(frozen=True)
class Take:
    """Receive the push's payload into the slot of this rank, or of the validator of this number."""

    rank: int


class Useless(StrEnum):
    """As what a push is counted that is not taken, by the name of the counter."""

    DUPLICATE = "duplicates"
    STALE = "stale"
    LATE = "late"


@dataclass(frozen=True)
class Drop:
    """Read the payload and forget it; then tell `Coordinator.dropped` of it, which counts and answers it.

    Nothing has changed until then: the sender may be lost before its payload is complete.

    Attributes:
        counted: as what it is counted; None: not at all, it is answered with the weights of its examples.
        reason: why it is not taken; None: it was judged before and is answered from memory.
        min_step: values of an earlier step are no answer.
    """

    counted: Useless | None
    reason: str | None = None
    min_step: int = 0
