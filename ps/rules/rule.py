"""What a rule is: what it is shown of a round, what it answers, and what else it may do.

A rule never sees a gradient. It says which measurements it needs, gets them in a `RoundView`, and answers with a
`Decision` that the store carries out. What else it can do it shows by having the methods of `Totals`, `Alarmed`,
`Learner`, `Remembers` or `Explains`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from protocol.errors import LocalProtocolError
from ps.rules.geometry import Geometry, Vector


class Need(StrEnum):
    """What must be measured before a rule can judge a round."""

    GRAM = "gram"
    """All inner products of the round's gradients, whatever their number."""
    REFERENCE = "reference"
    """Inner products with the last validator gradient."""
    MOMENTUM = "momentum"
    """Inner products with the optimizer's first moment."""


@dataclass(frozen=True)
class RoundView:
    """What a rule may look at; all tuples have one entry per rank present, in rank order.

    Attributes:
        step: the step of the round.
        ranks: who pushed, ascending.
        names: who they are; what is remembered of a worker is remembered by name.
        usable: False for a push that was refused: it is present and counts nothing.
        examples: size of the batch behind each gradient.
        norms: Euclidean norm of each gradient before clipping; not finite where it is not usable.
        losses: the loss that each rank reported; NaN where it reported none.
        accuracies: the accuracy that each rank reported; NaN where it reported none.
        geometry: what was measured for the rule's needs; None if it has none.
    """

    step: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    usable: tuple[bool, ...]
    examples: tuple[int, ...]
    norms: tuple[float, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    geometry: Geometry | None = None

    def __post_init__(self) -> None:
        columns = (self.names, self.usable, self.examples, self.norms, self.losses, self.accuracies)
        if set(map(len, columns)) != {len(self.ranks)}:
            raise LocalProtocolError("a round's view needs one entry per rank in every column")
        if sorted(set(self.ranks)) != list(self.ranks):
            raise LocalProtocolError(f"a round's ranks must ascend, not {self.ranks}")

    def measured(self) -> Geometry:
        """Return the geometry.

        Raises:
            LocalProtocolError: nothing was measured.
        """
        if self.geometry is None:
            raise LocalProtocolError(f"round {self.step} was not measured for its rule")
        return self.geometry


@dataclass(frozen=True, eq=False)
class Decision:
    """What a round's gradients count; arrays are float64 [ranks present], in rank order.

    Attributes:
        weights: at least 0; their sum is 1, or 0 where nothing is to be applied.
        factors: what each gradient is multiplied by before it is weighted, above 0: at most 1 when norms are
            clipped; above 1 only where the rule says that it lengthens gradients. What is applied is
            `sum_i weights_i factors_i g_i`.
        trim: if not None, the rows are combined coordinate by coordinate instead: of each coordinate the `trim`
            smallest and the `trim` largest values among the usable rows are dropped and the others averaged.
        fallback: why another rule judged this round (a sentence), or empty.
        yardstick: what each rank counts in the usual length of changes of state, which bounds everybody's; None
            where all usable ranks count the same. Who is not trusted should have no say.
    """

    weights: Vector
    factors: Vector
    trim: int | None = None
    fallback: str = ""
    yardstick: Vector | None = None


class Rule(Protocol):
    """An aggregation rule."""

    @property
    def needs(self) -> frozenset[Need]:
        """What `RoundView.geometry` must hold."""

    def decide(self, view: RoundView) -> Decision:
        """Judge a round."""


@runtime_checkable
class Learner(Protocol):
    """A rule that learns from the rounds that it has judged."""

    def learn(self) -> None:
        """Train on what was judged so far; nobody waits for it."""


@runtime_checkable
class Alarmed(Protocol):
    """A rule that notices when a validator should look."""

    @property
    def wants_validation(self) -> bool:
        """Whether the last rounds look so bad that rounds should be validated more often."""


@runtime_checkable
class Remembers(Protocol):
    """A rule whose decisions depend on earlier rounds; a checkpoint keeps what it knows of them."""

    def state(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as arrays and plain values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""


@runtime_checkable
class Totals(Protocol):
    """A rule that measures many gradients against their total, and says what each counts in it."""

    def coefficients(self, view: RoundView) -> Vector:
        """Return the coefficients [ranks present]; 0 for what is not usable."""


@runtime_checkable
class Explains(Protocol):
    """A rule that can say why a worker counts what it counts."""

    def reasons(self, view: RoundView, name: str) -> str:
        """Return a few words on a worker of this round."""
