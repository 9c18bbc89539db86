"""What is said and kept of closed rounds: figures, trust, a line each in `rounds.jsonl`. Nobody waits for it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ps.closing import Closed, line_of
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import CloseRound, SkipRound
from ps.monitoring.metrics import Metrics
from ps.monitoring.trust import TrustLog
from ps.outcome import RoundLog
from ps.rules.rule import Explains

logger = logging.getLogger("weighmaster.ps")

SUMMARY_POINTS = 50
"""Points of each worker's history of weights in the summary; `rounds.jsonl` has every round."""


class Record:
    """The memory of a run's rounds.

    Attributes:
        metrics: figures for the progress line and the summary.
        trust: who counts how much, and since when.
    """

    def __init__(self, run_dir: Path) -> None:
        self.metrics = Metrics()
        self.trust = TrustLog()
        self._log = RoundLog(run_dir / "rounds.jsonl")
        self._fell_back = False

    def add(
        self, closing: CloseRound | SkipRound, closed: Closed, names: Sequence[str], rule: object, now: float
    ) -> None:
        """Take note of a closed round, and say what is worth saying of it.

        Args:
            closing: the round.
            closed: what became of it.
            names: who the contributions are from.
            rule: that judged it; in an ensemble one that was not asked.
            now: monotonic seconds.
        """
        self.metrics.round_closed(closing.contributions, closed.weights, now)
        late = closing.late if isinstance(closing, CloseRound) else ()
        self._log.write(line_of(closing.step, closing.contributions, closed, late))
        if isinstance(closing, SkipRound):
            return
        view, decision = closed.view, closed.decision

        def reason(name: str) -> str:
            if view is None:
                return "so the master weighs its answers"
            return rule.reasons(view, name) if isinstance(rule, Explains) else "so the rule decided"

        weights = [closed.weights.get(c.rank, 0.0) for c in closing.contributions]
        for sentence in self.trust.observe(closing.step, names, weights, reason):
            logger.warning("%s", sentence)
        if decision is not None and decision.fallback and not self._fell_back:
            self._fell_back = True
            logger.warning("round %d: %s; this is said once", closing.step, decision.fallback)

    def summary(self, coordinator: Coordinator, status: str, seconds: float) -> dict[str, Any]:
        """Return what became of the run, ready for JSON."""
        summary = self.metrics.summary(coordinator, status, seconds)
        summary["predicted_rounds"] = coordinator.predicted_rounds
        for worker in summary["workers"]:
            worker |= self._trust_of(worker["name"])
        summary["validators"] = [
            {"name": judge.name, "pushes": coordinator.pushes.get(number, 0)}
            for number, judge in sorted(coordinator.registry.validators.items())
        ]
        return summary

    def _trust_of(self, name: str) -> dict[str, Any]:
        points = self.trust.history().get(name, [])
        stride = -(-len(points) // SUMMARY_POINTS) or 1
        thinned = [points[at : at + stride] for at in range(0, len(points), stride)]
        return {
            "muted": name in self.trust.muted,
            "muted_rounds": self.trust.muted_rounds().get(name, 0),
            "weight_history": [[part[0][0], round(sum(w for _, w in part) / len(part), 4)] for part in thinned],
        }

    def state(self) -> dict[str, Any]:
        """Return what the summary of the whole run needs, as arrays and plain values; flushes the log of rounds.

        So that the log has every round before the checkpoint that this becomes part of.
        """
        self.flush()
        return {"metrics": self.metrics.state(), "trust": self.trust.state(), "fell_back": self._fell_back}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Take over what `state` returned, and drop from the log what came after.

        Args:
            state: as it was returned, or read from JSON.
            step: of the checkpoint: the next round's.
        """
        self.metrics.restore(state["metrics"])
        self.trust.restore(state["trust"])
        self._fell_back = bool(state["fell_back"])
        self._log.go_back(step)

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._log.flush()

    def close(self) -> None:
        """Close the log of rounds."""
        self._log.close()
