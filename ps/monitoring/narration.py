"""What a run says while it lasts: the progress line, and for whom it waits."""

import logging

from ps.coordination.coordinator import Coordinator
from ps.coordination.policy import Phase
from ps.monitoring.console import Console
from ps.monitoring.metrics import Metrics

logger = logging.getLogger("weighmaster.ps")

WAITING_S = 10.0
"""How often the operator is told for whom the run waits."""


class Narration:
    """Speaks to the operator; times are monotonic seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waits_at: tuple[Phase, int] | None = None
        self._waiting_said_at = 0.0

    def progress(self, course: Coordinator, metrics: Metrics, now: float) -> None:
        """Redraw the progress line."""
        test = metrics.test
        accuracy = test.accuracy if test else None
        self._console.progress(course.step, metrics.loss, accuracy, metrics.examples_per_s(now), now)

    def whom_we_wait_for(self, course: Coordinator, waiting: str, now: float) -> None:
        """Say for whom the run waits, if it has waited for a while; `waiting` is empty when it does not."""
        if not waiting:
            self._waits_at = None
            return
        at = (course.phase, course.step)
        if at != self._waits_at:  # each round waits for somebody at some time; what counts is one that stays open
            self._waits_at, self._waiting_said_at = at, now
        if now - self._waiting_said_at >= WAITING_S:
            self._waiting_said_at = now
            logger.info("%s", waiting)
