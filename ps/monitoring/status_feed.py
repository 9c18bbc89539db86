"""Follows a run for those who look at it, and has ready as bytes what they are shown. Pure: time is an argument.

The run's thread writes, the threads of the status server read `latest` and nothing else: they take no lock.
"""

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import CloseRound, Contribution, SkipRound
from ps.monitoring.history import HistoryView, RunHistory
from ps.monitoring.metrics import TestResult
from ps.monitoring.pace import Pace
from ps.monitoring.status import (
    NO_PAUSE,
    SCHEMA,
    CheckpointFacts,
    Figures,
    Pause,
    Pushed,
    Refusal,
    RunFacts,
    Status,
    plain,
    rounded,
    validator_rows,
    waiting,
    worker_rows,
)

if TYPE_CHECKING:
    from ps.checkpointing import Checkpointing
    from ps.closing import Closed
    from ps.record import Record
    from ps.settings.config import ServerConfig

PUBLISH_EVERY_S = 0.5
"""Shortest time between two states that are made ready; the page asks once a second."""

MOST_REFUSALS = 50
"""Last pushes that did not count whose reason is shown."""

MOST_TESTS = 500
"""Evaluator's reports that are kept; once there are so many, every second one is dropped."""

MOST_PUSHERS = 1024
"""Workers of whose pushes something is remembered: as many as there can be ranks."""

SHARE_DIGITS = 3
"""Significant digits of a share: more than a colour shows."""


@dataclass(frozen=True, eq=False)
class Taken:
    """What was copied of a run under its lock, to be made ready without it."""

    status: Status
    view: HistoryView
    tests: tuple[TestResult, ...]


@dataclass(frozen=True, eq=False)
class Published:
    """A state of the run, ready to be sent; nothing in it changes any more.

    Attributes:
        sequence: grows by 1 with each.
        status: the state.
        head: the JSON document up to the first point of its history.
        steps: the first step of each point, ascending.
        points: each as JSON.
    """

    sequence: int
    status: Status
    head: bytes
    steps: tuple[int, ...]
    points: tuple[bytes, ...]

    def document(self, since: int = 0) -> bytes:
        """Return the JSON document, of its history only the points that begin at step `since` or later."""
        return self.head + b",".join(self.points[bisect_left(self.steps, since) :]) + b"]}}\n"


class StatusFeed:
    """Remembers what the status page shows, and publishes it.

    Args:
        config: what the operator asked for.
        epoch: random number of this start.
        began: when the server started (monotonic seconds).

    Attributes:
        latest: the newest state; None before the first. May be read from any thread.
        history: of the run.
    """

    def __init__(self, config: "ServerConfig", epoch: int, began: float) -> None:
        self.latest: Published | None = None
        self.history = RunHistory()
        self._config = config
        self._epoch = epoch
        self._began = began
        self._taken_at: float | None = None
        self._pace = Pace(config.steps)
        self._pushed: dict[str, Pushed] = {}
        self._refusals: deque[Refusal] = deque(maxlen=MOST_REFUSALS)
        self._counted: dict[tuple[int, str], int] = {}
        self._tests: list[TestResult] = []
        self._points: list[bytes] = []
        self._generation = -1

    # ---- what happens ----------------------------------------------------------------------------------

    def round_closed(
        self, closing: CloseRound | SkipRound, closed: "Closed", names: Sequence[str], record: "Record", now: float
    ) -> None:
        """Take note of a closed round, after the record has; under the lock of the run's state.

        Args:
            closing: the round.
            closed: what became of it.
            names: who the contributions are from.
            record: has its figures already.
            now: monotonic seconds.
        """
        by_rank = dict(zip((c.rank for c in closing.contributions), names, strict=True))
        usable = [c for c in closing.contributions if not c.refused]
        shares = _shares(by_rank, closed.weights)
        metrics = record.metrics
        self.history.add(
            closing.step,
            metrics.loss if usable else None,
            metrics.accuracy if usable else None,
            sum(c.examples for c in usable),
            shares,
            now,
        )
        for contribution in closing.contributions:
            self._remember(by_rank[contribution.rank], contribution, shares)

    def _remember(self, name: str, contribution: Contribution, shares: Mapping[str, float]) -> None:
        before = self._pushed.pop(name, Pushed())
        reason = contribution.refused or before.reason
        self._pushed[name] = Pushed(shares.get(name, before.share), contribution.staleness, reason)
        if len(self._pushed) > MOST_PUSHERS:
            del self._pushed[next(iter(self._pushed))]

    # ---- what is shown ---------------------------------------------------------------------------------

    def take(
        self,
        course: Coordinator,
        record: "Record",
        checkpoints: "Checkpointing | None",
        now: float,
        time: float,
        outcome: str | None = None,
        pause: Pause = NO_PAUSE,
    ) -> Taken | None:
        """Copy the state of the run if it is time to, or if it has ended; under the lock of the run's state.

        Args:
            course: the run.
            record: its figures.
            checkpoints: what takes them, or None.
            now: monotonic seconds.
            time: seconds since 1970.
            outcome: how the run has ended, or None.
            pause: whether its course stands, and for how long it has stood.
        """
        if self._taken_at is not None and now - self._taken_at < PUBLISH_EVERY_S and outcome is None:
            return None
        self._taken_at = now
        self._follow_refusals(course)
        self._follow_tests(record.metrics.test)
        self._pace.at(course.step, now)
        test = record.metrics.test
        status = Status(
            schema=SCHEMA,
            epoch=f"{self._epoch:016x}",
            time=time,
            run=self._facts(course, record, now, outcome),
            figures=Figures(
                loss=record.metrics.loss,
                accuracy=record.metrics.accuracy,
                examples_per_s=record.metrics.examples_per_s(now),
                test_loss=None if test is None else test.loss,
                test_accuracy=None if test is None else test.accuracy,
                test_step=None if test is None else test.step,
            ),
            waiting=waiting(course, now - pause.stood_s, pause.reason),
            workers=worker_rows(course, record, self._pushed, now - pause.stood_s),
            validators=validator_rows(course),
            evaluators=len(course.registry.evaluators),
            checkpoints=CheckpointFacts(
                kept=checkpoints is not None,
                every=self._config.checkpoint_every,
                last_step=None if checkpoints is None else checkpoints.last_step,
                failures=0 if checkpoints is None else checkpoints.failures,
            ),
            refusals=tuple(self._refusals),
        )
        return Taken(status, self.history.view(), tuple(self._tests))

    def publish(self, taken: Taken | None) -> None:
        """Make ready what was taken; needs no lock, and is called by one thread only."""
        if taken is None:
            return
        sequence = 1 if self.latest is None else self.latest.sequence + 1
        view = taken.view
        if view.generation != self._generation:
            self._points, self._generation = [], view.generation
        if self._points:
            del self._points[-1]  # it may have grown
        self._points += _encoded(view, len(self._points))
        history = {
            "generation": view.generation,
            "stride": view.stride,
            "names": list(view.names),
            "tests": [[t.step, _number(t.loss), _number(t.accuracy)] for t in taken.tests],
        }
        document = {"sequence": sequence, **plain(taken.status), "history": history}
        head = _json(document)[:-2] + b',"points":['
        steps = tuple(view.steps.tolist())
        self.latest = Published(sequence, taken.status, head, steps, tuple(self._points))

    def _facts(self, course: Coordinator, record: "Record", now: float, outcome: str | None) -> RunFacts:
        config = self._config
        deterministic, reason = record.metrics.determinism(course)
        return RunFacts(
            phase=course.phase.value,
            outcome=outcome,
            step=course.step,
            steps=course.policy.steps,
            seconds=now - self._began,
            seconds_left=self._pace.left_s(course.step, now),
            mode=config.mode,
            consistency=config.consistency,
            aggregation=config.aggregation,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            resumed=course.is_resumed,
            deterministic=deterministic,
            deterministic_reason=reason,
            void_rounds=course.void_rounds,
            short_rounds=course.short_rounds,
            predicted_rounds=course.predicted_rounds,
            left_out_rounds=course.left_out_rounds,
        )

    def _follow_refusals(self, course: Coordinator) -> None:
        """Take note of pushes that have been counted as useless since the last time, and why."""
        members = course.registry.members
        counters = {"rejected": course.rejected, "stale": course.stale, "late": course.late}
        for kind, counter in counters.items():
            for rank, count in counter.items():
                more = count - self._counted.get((rank, kind), 0)
                self._counted[rank, kind] = count
                member = members.get(rank)
                if more <= 0 or member is None:
                    continue
                known = self._pushed.get(member.name, Pushed())
                reason = member.last_reason or (known.reason if kind == "rejected" else "")
                self._pushed[member.name] = Pushed(known.share, known.staleness, reason or known.reason)
                self._refusals.append(Refusal(course.step, member.name, kind, more, reason))

    def _follow_tests(self, test: TestResult | None) -> None:
        if test is None or (self._tests and self._tests[-1].step >= test.step):
            return
        if len(self._tests) >= MOST_TESTS:
            self._tests = self._tests[1::2]
        self._tests.append(test)


def _shares(names: Mapping[int, str], weights: Mapping[int, float]) -> dict[str, float]:
    """Return the weights of those present in fair shares, by name; empty if nothing was applied."""
    total = sum(weights.values())
    if total <= 0:
        return {}
    return {name: weights.get(rank, 0.0) * len(names) / total for rank, name in names.items()}


def _encoded(view: HistoryView, start: int) -> list[bytes]:
    """Return the points from index `start` on, each as JSON."""
    columns = (view.steps, view.rounds, view.loss, view.accuracy, view.examples_per_s, view.shares)
    points = zip(*(column[start:].tolist() for column in columns), strict=True)
    return [
        _json(
            [
                step,
                rounds,
                rounded(loss),
                rounded(accuracy),
                rounded(rate),
                [rounded(share, SHARE_DIGITS) for share in shares],
            ]
        )
        for step, rounds, loss, accuracy, rate, shares in points
    ]


def _number(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
