"""The open round as a pure object: who has pushed, and whether it may close."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps.coordination.instructions import Contribution
from ps.coordination.members import SessionId, name_ranks

MAX_REASONS = 3
"""Different reasons that one sentence names."""


@dataclass(frozen=True)
class Answer:
    """A member's logits in a round whose examples are weighed one by one; `labels` is their digest."""

    session: SessionId
    seq: int
    labels: bytes


@dataclass
class OpenRound:
    """The pushes that are tagged with one step.

    Attributes:
        step: of the values at which the gradients were computed.
        validated: whether validators are asked for a reference gradient.
        pushes: what has arrived, by rank; refused pushes too.
        references: what has arrived of validators, by number.
        answers: logits that have arrived, by rank; none where single examples are not weighed.
        weighed: the ranks whose answers were weighed, after which they may push; None before.
        began: when the first push of a worker came, after the weighing when that was (monotonic seconds), or None.
        opened: when it was opened.
        losses: when ranks that have not pushed were lost in this round, each time.
        left_behind: ranks that this round waits for no more, since they took too long.
    """

    step: int
    validated: bool = False
    pushes: dict[int, Contribution] = field(default_factory=dict)
    references: dict[int, Contribution] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    weighed: frozenset[int] | None = None
    began: float | None = None
    opened: float = 0.0
    losses: dict[int, list[float]] = field(default_factory=dict)
    left_behind: set[int] = field(default_factory=set)

    @property
    def has_begun(self) -> bool:
        """Whether somebody's gradient or answer of this step is here."""
        return bool(self.pushes or self.answers or self.weighed)

    def take(self, contribution: Contribution, is_reference: bool, now: float) -> None:
        """Add a push to the round; a validator's does not begin it: that it has come is nobody's business."""
        if is_reference:
            self.references[contribution.rank] = contribution
            return
        if self.began is None:
            self.began = now
        self.pushes[contribution.rank] = contribution
        self.losses.pop(contribution.rank, None)

    def lose(self, rank: int, now: float) -> float:
        """Note that a rank was lost; return since when: its first loss, if it has not pushed since."""
        times = self.losses.setdefault(rank, [])
        times.append(now)
        return times[0]

    def contributions(self) -> tuple[Contribution, ...]:
        """Return the pushes of workers in rank order, refused ones included."""
        return tuple(self.pushes[rank] for rank in sorted(self.pushes))

    def usable_references(self) -> tuple[int, ...]:
        """Return the numbers of the validators whose gradient can be used, ascending."""
        return tuple(number for number in sorted(self.references) if not self.references[number].refused)


def may_close(
    present: frozenset[int],
    refused: frozenset[int],
    awaited: frozenset[int],
    awaited_references: frozenset[int],
    quorum: int | None = None,
) -> bool:
    """Say whether a round may close: every policy of a round comes down to this.

    Args:
        present: ranks that have pushed; refused pushes count.
        refused: those of them whose push cannot be used.
        awaited: ranks that the round counts on, present or not: all that have not left on purpose, or, where lost
            and late ones are left out, those that are there and in time.
        awaited_references: validators that are asked for this round, are waited for, and have not pushed.
        quorum: so many usable pushes suffice; None: all awaited ranks must be present.
    """
    if not present or awaited_references:
        return False
    return awaited <= present or (quorum is not None and len(present - refused) >= quorum)


def other_labels(digests: Mapping[int, bytes | None]) -> dict[int, str]:
    """Return which ranks have other labels than the lowest rank, and why they are refused for it.

    Args:
        digests: by rank, of those that are not refused already.
    """
    first = min(digests, default=0)
    return {
        rank: f"its labels are not those of rank {first}: all members must have the same data, seed and batch size"
        for rank in sorted(digests)
        if digests[rank] != digests[first]
    }


def refusals(contributions: Sequence[Contribution]) -> str:
    """Say which ranks were refused and why, the first few reasons only: variable names may be long."""
    ranks: dict[str, list[int]] = {}
    for contribution in contributions:
        ranks.setdefault(contribution.refused, []).append(contribution.rank)
    return "; ".join(f"{name_ranks(who)}: {why}" for why, who in list(ranks.items())[:MAX_REASONS])
