"""The open round as a pure object: who has pushed, and whether it may close."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ps.instructions import Contribution
from ps.members import name_ranks

MAX_REASONS = 3
"""Different reasons that one sentence names."""


@dataclass
class OpenRound:
    """The pushes that are tagged with one step.

    Attributes:
        step: of the values at which the gradients were computed.
        validated: whether validators are asked for a reference gradient.
        pushes: what has arrived, by rank; refused pushes too.
        references: what has arrived of validators, by number.
        began: when the first of them came (monotonic seconds), or None.
    """

    step: int
    validated: bool = False
    pushes: dict[int, Contribution] = field(default_factory=dict)
    references: dict[int, Contribution] = field(default_factory=dict)
    began: float | None = None

    def take(self, contribution: Contribution, is_reference: bool, now: float) -> None:
        """Add a push to the round."""
        if self.began is None:
            self.began = now
        (self.references if is_reference else self.pushes)[contribution.rank] = contribution

    def contributions(self) -> tuple[Contribution, ...]:
        """Return the pushes of workers in rank order, refused ones included."""
        return tuple(self.pushes[rank] for rank in sorted(self.pushes))

    def usable_references(self) -> tuple[int, ...]:
        """Return the numbers of the validators whose gradient can be used, ascending."""
        return tuple(number for number in sorted(self.references) if not self.references[number].refused)


def may_close(present: frozenset[int], active: frozenset[int], awaited_references: frozenset[int]) -> bool:
    """Say whether a round may close.

    Args:
        present: ranks that have pushed; refused pushes count.
        active: ranks that have not left on purpose.
        awaited_references: validators that are asked for this round, are waited for, and have not pushed.
    """
    return bool(present) and active <= present and not awaited_references


def refusals(contributions: Sequence[Contribution]) -> str:
    """Say which ranks were refused and why, the first few reasons only: variable names may be long."""
    ranks: dict[str, list[int]] = {}
    for contribution in contributions:
        ranks.setdefault(contribution.refused, []).append(contribution.rank)
    return "; ".join(f"{name_ranks(who)}: {why}" for why, who in list(ranks.items())[:MAX_REASONS])
