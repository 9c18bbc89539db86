"""How long a run still takes, by the pace of its last half minute. Pure: time is an argument."""

from collections import deque

SAMPLES = 30
"""So many are remembered, at most one a second."""


class Pace:
    """Remembers when a run was at which step.

    Args:
        total_steps: at which it ends.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)

    def at(self, step: int, now_s: float) -> None:
        """Take note of how far the run is; often is harmless."""
        if not self._samples or now_s - self._samples[-1][0] >= 1.0:
            self._samples.append((now_s, step))

    def left_s(self, step: int, now_s: float) -> float | None:
        """Return the seconds that are left, or None while there is no pace to go by."""
        if not self._samples:
            return None
        then_s, then_step = self._samples[0]
        if step <= then_step or now_s <= then_s:
            return None
        return (self._total_steps - step) * (now_s - then_s) / (step - then_step)
