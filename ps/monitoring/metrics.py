"""What is remembered of a run for the progress line and the summary. Pure: time is an argument."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import Contribution

WEIGHT_ROUNDS = 20
"""The summary's weight of a worker is its mean over so many last rounds; a round without it counts 0."""

RATE_WINDOW_S = 10.0
"""Examples per second are taken over so many last seconds."""


@dataclass(frozen=True)
class TestResult:
    """An evaluator's last report: loss and accuracy on the test set at the values of `step`."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    step: int
    loss: float
    accuracy: float | None


@dataclass
class Metrics:
    """Running figures of a run.

    Attributes:
        loss: mean over the last round's examples, at the values before the update; None before the first.
        accuracy: likewise.
        test: the evaluator's last report.
    """

    loss: float | None = None
    accuracy: float | None = None
    test: TestResult | None = None
    _weights: deque[Mapping[int, float]] = field(default_factory=lambda: deque(maxlen=WEIGHT_ROUNDS))
    _examples: deque[tuple[float, int]] = field(default_factory=deque)

    def round_closed(self, contributions: Sequence[Contribution], weights: Mapping[int, float], now: float) -> None:
        """Take note of a closed round; `weights` by rank, without those that did not count."""
        usable = [c for c in contributions if not c.refused]
        self.loss = _mean([(c.loss, c.examples) for c in usable], self.loss)
        self.accuracy = _mean([(c.accuracy, c.examples) for c in usable], self.accuracy)
        self._weights.append(dict(weights))
        self._examples.append((now, sum(c.examples for c in usable)))
        while now - self._examples[0][0] > RATE_WINDOW_S:
            self._examples.popleft()

    def tested(self, result: TestResult) -> None:
        """Take note of an evaluator's report; an older step never replaces a newer one."""
        if self.test is None or result.step >= self.test.step:
            self.test = result

    def weight(self, rank: int) -> float:
        """Return the mean weight of a rank over the last rounds."""
        return sum(w.get(rank, 0.0) for w in self._weights) / len(self._weights) if self._weights else 0.0

    def examples_per_s(self, now: float) -> float:
        """Return the throughput over the last seconds."""
        recent = [(t, n) for t, n in self._examples if now - t <= RATE_WINDOW_S]
        if len(recent) < 2:
            return 0.0
        return sum(n for _, n in recent[1:]) / max(recent[-1][0] - recent[0][0], 1e-9)

    def summary(self, coordinator: Coordinator, status: str, seconds: float) -> dict[str, Any]:
        """Return the summary of a run, ready for JSON."""
        deterministic, reason = self.determinism(coordinator)
        return {
            "status": status,
            "steps": coordinator.step,
            "seconds": round(seconds, 3),
            "final_loss": _finite(self.loss),
            "final_accuracy": _finite(self.accuracy),
            "test_loss": _finite(self.test.loss) if self.test else None,
            "test_accuracy": _finite(self.test.accuracy) if self.test else None,
            "test_accuracy_step": self.test.step if self.test else None,
            "deterministic": deterministic,
            "deterministic_reason": reason,
            "void_rounds": coordinator.void_rounds,
            "short_rounds": coordinator.short_rounds,
            "workers": [
                {
                    "rank": member.rank,
                    "name": member.name,
                    "weight": round(self.weight(rank), 6),
                    "threads": member.threads,
                    "software": member.software,
                    "pushes": coordinator.pushes.get(rank, 0),
                    "rejected": coordinator.rejected.get(rank, 0),
                    "stale": coordinator.stale.get(rank, 0),
                    "late": coordinator.late.get(rank, 0),
                    "duplicates": coordinator.duplicates.get(rank, 0),
                }
                for rank, member in sorted(coordinator.registry.members.items())
            ],
        }

    def state(self) -> dict[str, Any]:
        """Return all but the throughput, as plain values."""
        test = self.test
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "test": None if test is None else [test.step, test.loss, test.accuracy],
            "weights": [dict(weights) for weights in self._weights],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.loss, self.accuracy, test = state["loss"], state["accuracy"], state["test"]
        self.test = None if test is None else TestResult(int(test[0]), test[1], test[2])
        self._weights.clear()
        self._weights.extend({int(rank): float(w) for rank, w in weights.items()} for weights in state["weights"])

    def determinism(self, coordinator: Coordinator) -> tuple[bool, str | None]:
        """Say whether the same seed gives the same bits again, and if not, why."""
        policy = coordinator.policy
        if coordinator.has_changed:
            return False, coordinator.has_changed
        if not policy.is_sync and policy.workers > 1:
            return False, "each push is applied when it comes"
        if coordinator.left_out_rounds:
            return (
                False,
                f"{coordinator.left_out_rounds} rounds closed without a worker that was lost or late",
            )
        if policy.elastic:
            return False, "workers come and go as they like"
        if coordinator.has_left_early:
            return False, "a worker or validator left before the last step, when it chose to"
        if coordinator.predicted_rounds:
            return False, f"{coordinator.predicted_rounds} rounds closed after waiting in vain for a validator"
        return True, None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(pairs: Sequence[tuple[float | None, int]], otherwise: float | None) -> float | None:
    known = [(value, max(weight, 1)) for value, weight in pairs if value is not None]
    if not known:
        return otherwise
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
