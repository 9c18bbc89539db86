"""From a closed round to new values: measure what the rule needs, ask it, have the store carry it out.

`RoundCloser.close` is called by `ParameterServer._update`, by way of `ps.modes.SharedMode`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from protocol.errors import CheckpointError
from ps.coordination.instructions import CloseRound, Contribution
from ps.rules.aggregation import Mean, clip_factors, state_factors
from ps.rules.geometry import Geometry, Vector, from_products, from_projections
from ps.rules.rule import Alarmed, Decision, Learner, Need, Remembers, RoundView, Rule, Totals
from ps.storage.schedules import Schedule
from ps.storage.store import Store

MAX_GRAM = 8
"""Up to so many gradients all inner products are taken, also for rules that can do with a few of them."""

MAX_UNAPPLIED = 10
"""So many rounds in a row in which the rule applies nothing end the run as diverged."""

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Closed:
    """What became of a round.

    Attributes:
        view: what the rule saw; None of a void round.
        decision: what it answered; None of a void round.
        weights: of the ranks that counted.
        fresh: whether a validator's gradient of this step was there.
    """

    view: RoundView | None = None
    decision: Decision | None = None
    weights: Mapping[int, float] = field(default_factory=dict)
    fresh: bool = False


class RoundCloser:
    """Holds the rule, its memory included, and the reference gradient between the rounds.

    Args:
        rule: judges each round.
        schedule: of the learning rate.
        clip_worker_norm: largest norm of one gradient; None for no limit.
        staleness_discount: the learning rate of a round whose gradients are up to s steps old is multiplied by
            `(1 + s)^-discount`.
            Source: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019 (polynomial staleness).

    Attributes:
        rule: judges each round.
        unapplied: rounds in a row of which the rule applied nothing, those judged by an old reference left out.
    """

    def __init__(
        self,
        rule: Rule,
        schedule: Schedule,
        clip_worker_norm: float | None = None,
        staleness_discount: float = 0.0,
    ) -> None:
        self.rule = rule
        self.unapplied = 0
        self._schedule = schedule
        self._clip_worker_norm = clip_worker_norm
        self._staleness_discount = staleness_discount
        self._references: tuple[int, ...] = ()
        self._reference_norm: float | None = None
        # Asked once: whether an object follows a protocol takes longer to find out than the mean of a round.
        self._alarmed = rule if isinstance(rule, Alarmed) else None
        self._learner = rule if isinstance(rule, Learner) else None
        self._totals = rule if isinstance(rule, Totals) else None

    def reference_arrives(self, number: int) -> None:
        """The slot of a validator is being overwritten: its earlier gradient is no more."""
        self._references = tuple(known for known in self._references if known != number)

    def close(self, store: Store, closing: CloseRound, names: Sequence[str]) -> Closed:
        """Make values(step + 1) of values(step) and the round's gradients.

        Args:
            store: has the gradients in the slots of their ranks.
            closing: the round.
            names: who the contributions are from.
        """
        fresh = bool(closing.references)
        if fresh:
            self._references = closing.references
        needs = self.rule.needs
        view = _view(closing, names, self._measure(store, closing, names, needs) if needs else None)
        decision = self.rule.decide(view)
        weights = decision.weights.tolist()
        counted = {rank: weight for rank, weight in zip(view.ranks, weights, strict=True) if weight > 0}
        if not counted:
            # A reference that has grown old may agree with nobody for a while: only fresh ones tell of a dead end.
            self.unapplied += fresh or not self._references
            store.skip()
            return Closed(view, decision, counted, fresh)
        self.unapplied = 0
        rate, deltas = self._rate(closing), self._state_factors(closing, decision, weights)
        if decision.trim is not None:
            store.apply_trimmed(tuple(counted), decision.trim, rate, deltas)
        else:
            store.apply(
                tuple(counted), tuple(counted.values()), self._factors(view, decision, weights), rate, deltas
            )
        return Closed(view, decision, counted, fresh)

    def _rate(self, closing: CloseRound) -> float:
        rate = self._schedule(closing.step)
        if self._staleness_discount == 0.0:
            return rate
        oldest = max((c.staleness for c in closing.contributions if not c.refused), default=0)
        return rate * math.pow(1.0 + oldest, -self._staleness_discount)

    def _factors(self, view: RoundView, decision: Decision, weights: list[float]) -> list[float] | None:
        factors = decision.factors
        if self._clip_worker_norm is not None:
            norms = [norm if use else 0.0 for norm, use in zip(view.norms, view.usable, strict=True)]
            factors = np.minimum(factors, clip_factors(norms, self._clip_worker_norm))
        return _of_counted(factors, weights)

    def _state_factors(self, closing: CloseRound, decision: Decision, weights: list[float]) -> list[float] | None:
        if isinstance(self.rule, Mean):
            return None  # which believes everybody, in this too
        if not any(c.state_norm for c in closing.contributions if not c.refused):
            return None  # no floating state, or none that has changed
        norms = [c.state_norm for c in closing.contributions]
        factors = state_factors(norms, [not c.refused for c in closing.contributions], decision.yardstick)
        return _of_counted(factors, weights)

    def _measure(self, store: Store, closing: CloseRound, names: Sequence[str], needs: frozenset[Need]) -> Geometry:
        usable = [not c.refused for c in closing.contributions]
        slots = tuple([c.rank for c in closing.contributions if not c.refused])
        fresh = bool(closing.references)
        references = self._references if Need.REFERENCE in needs else ()
        moment = Need.MOMENTUM in needs and store.has_momentum
        if len(slots) <= MAX_GRAM or self._totals is None:
            products = store.comparison.inner_products(slots, references, moment)
            geometry = from_products(products, usable, len(references), moment, fresh)
        else:
            coefficients = self._totals.coefficients(_view(closing, names)).tolist()
            counted = [coefficient for coefficient, use in zip(coefficients, usable, strict=True) if use]
            projections = store.comparison.projections(slots, counted, references, moment)
            norms = [c.gradient_norm for c in closing.contributions]
            geometry = from_projections(projections, norms, usable, coefficients, len(references), moment, fresh)
        if geometry.reference_norm is not None:
            self._reference_norm = geometry.reference_norm
        elif self._reference_norm is not None:  # its gradient is gone, what is remembered is how long it was
            geometry = replace(geometry, reference_norm=self._reference_norm)
        return geometry

    @property
    def wants_validation(self) -> bool:
        """Whether the rule sees reason to ask a validator more often for now."""
        return self._alarmed is not None and self._alarmed.wants_validation

    def learn(self) -> None:
        """Let the rule learn from what it has judged."""
        if self._learner is not None:
            self._learner.learn()

    # ---- checkpoints -----------------------------------------------------------------------------------

    @property
    def references(self) -> tuple[int, ...]:
        """The rows of the store that later rounds are still compared with: a checkpoint must hold them."""
        return self._references if Need.REFERENCE in self.rule.needs else ()

    def state(self) -> dict[str, Any]:
        """Return everything that later rounds depend on beside the store, as arrays and plain values."""
        return {
            "unapplied": self.unapplied,
            "references": list(self._references),
            "reference_norm": self._reference_norm,
            "rule": self.rule.state() if isinstance(self.rule, Remembers) else None,
            "rule_name": type(self.rule).__name__,
        }

    def restore(self, state: Mapping[str, Any], moved_rows: int = 0, room: range | None = None) -> None:
        """Take over what `state` returned; the store must have got its references back.

        Args:
            state: as it was returned, or read from JSON.
            moved_rows: by how much the rows of validators have moved, with the number of workers.
            room: the rows of validators, if they may be fewer now.

        Raises:
            CheckpointError: the memory is another rule's, or the user's own master has other variables now.
        """
        name = type(self.rule).__name__
        if isinstance(self.rule, Remembers) and state["rule"] is not None:
            if state["rule_name"] != name:
                raise CheckpointError(
                    f"the checkpoint has the memory of the rule {state['rule_name']}, and this run's is {name}: "
                    "give the same --aggregation and --master as before"
                )
            self.rule.restore(state["rule"])
        self.unapplied = int(state["unapplied"])
        rows = [int(row) + moved_rows for row in state["references"]]
        self._references = tuple(row for row in rows if room is None or row in room)
        norm = state["reference_norm"]
        self._reference_norm = None if norm is None else float(norm)


def _of_counted(factors: Vector, weights: list[float]) -> list[float] | None:
    """Return the factors of those with a weight above 0; None where all are 1."""
    chosen = [factor for factor, weight in zip(factors.tolist(), weights, strict=True) if weight > 0]
    return None if chosen.count(1.0) == len(chosen) else chosen


def _view(closing: CloseRound, names: Sequence[str], geometry: Geometry | None = None) -> RoundView:
    everyone = closing.contributions
    return RoundView(
        step=closing.step,
        ranks=tuple([c.rank for c in everyone]),  # of a list: of a generator it takes twice as long
        names=tuple(names),
        usable=tuple([not c.refused for c in everyone]),
        examples=tuple([c.examples for c in everyone]),
        norms=tuple([c.gradient_norm for c in everyone]),
        losses=tuple([NAN if c.loss is None else c.loss for c in everyone]),
        accuracies=tuple([NAN if c.accuracy is None else c.accuracy for c in everyone]),
        geometry=geometry,
    )


def line_of(
    step: int, contributions: Sequence[Contribution], closed: Closed, late: Sequence[int] = ()
) -> dict[str, object]:
    """Return what is written of a closed round, ready for JSON.

    Args:
        step: of the round.
        contributions: who pushed, in rank order.
        closed: what became of it.
        late: ranks that it closed without.
    """
    line: dict[str, object] = {
        "step": step,
        "ranks": [c.rank for c in contributions],
        "refused": [c.rank for c in contributions if c.refused],
        "late": list(late),
        "weights": {str(rank): round(weight, 6) for rank, weight in closed.weights.items()},
    }
    if closed.fresh:
        line["validated"] = True
    return line
