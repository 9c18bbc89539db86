"""What is remembered of a run: losses, weights, throughput and the summary."""

import json
import math

import pytest

from protocol.messages import Push, Role, Status
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import Contribution, Drop
from ps.coordination.members import Granted, Identity
from ps.coordination.policy import RunPolicy
from ps.monitoring.metrics import RATE_WINDOW_S, WEIGHT_ROUNDS, Metrics, TestResult
from tests.unit.resumed import written_and_read

NAN = float("nan")


def contribution(rank=0, loss=1.0, accuracy=0.5, examples=10, refused=""):
    return Contribution(rank, rank + 1, 1, loss, accuracy, examples, 1.0, refused)


def close(metrics, *contributions, now=0.0):
    usable = [c for c in contributions if not c.refused]
    metrics.round_closed(contributions, {c.rank: 1 / len(usable) for c in usable}, now)


def test_loss_and_accuracy_are_means_over_the_examples_of_usable_pushes():
    metrics = Metrics()
    assert metrics.loss is None and metrics.accuracy is None
    close(
        metrics,
        contribution(0, loss=1.0, accuracy=0.25, examples=30),
        contribution(1, loss=5.0, accuracy=0.75, examples=10),
        contribution(2, loss=NAN, accuracy=NAN, examples=1000, refused="the loss is nan"),
    )
    assert (metrics.loss, metrics.accuracy) == (2.0, 0.375)


def test_what_nobody_reports_stays_as_it_was():
    metrics = Metrics()
    close(metrics, contribution(loss=3.0, accuracy=0.5))
    close(metrics, contribution(loss=None, accuracy=None))
    assert (metrics.loss, metrics.accuracy) == (3.0, 0.5)
    close(metrics, contribution(0, loss=None), contribution(1, loss=7.0))
    assert metrics.loss == 7.0


def test_a_void_round_leaves_the_loss_and_counts_in_no_weight():
    metrics = Metrics()
    close(metrics, contribution(loss=3.0))
    metrics.round_closed([contribution(loss=NAN, refused="the loss is nan")], {}, 1.0)
    assert metrics.loss == 3.0 and metrics.weight(0) == 0.5


def test_the_weight_is_the_mean_over_the_last_rounds_and_absence_counts_0():
    metrics = Metrics()
    assert metrics.weight(0) == 0.0
    for _ in range(7):
        close(metrics, contribution(0))
    for _ in range(WEIGHT_ROUNDS - 5):
        close(metrics, contribution(0), contribution(1))
    assert metrics.weight(0) == pytest.approx((5 + 15 * 0.5) / 20)
    assert metrics.weight(1) == pytest.approx(15 * 0.5 / 20)
    assert metrics.weight(2) == 0.0


def test_throughput_is_taken_over_the_last_seconds():
    metrics = Metrics()
    assert metrics.examples_per_s(0.0) == 0.0
    close(metrics, contribution(examples=1_000_000), now=0.0)
    assert metrics.examples_per_s(0.0) == 0.0, "one round has no duration"
    for second in range(100, 105):
        close(metrics, contribution(examples=40), contribution(1, examples=10), now=float(second))
    assert metrics.examples_per_s(104.0) == 50.0
    assert metrics.examples_per_s(104.0 + RATE_WINDOW_S + 1) == 0.0, "nothing has happened for a while"
    assert len(metrics._examples) == 5, "what is too old is forgotten"


def test_rounds_within_one_instant_do_not_divide_by_zero():
    metrics = Metrics()
    close(metrics, contribution(), now=5.0)
    close(metrics, contribution(), now=5.0)
    assert math.isfinite(metrics.examples_per_s(5.0))


def test_a_report_of_an_older_step_never_replaces_a_newer_one():
    metrics = Metrics()
    metrics.tested(TestResult(5, 0.5, 0.8))
    metrics.tested(TestResult(4, 0.1, 0.9))
    assert metrics.test == TestResult(5, 0.5, 0.8)
    metrics.tested(TestResult(5, 0.4, 0.85))
    assert metrics.test == TestResult(5, 0.4, 0.85)


def test_a_restored_memory_has_all_but_the_throughput():
    metrics, other = Metrics(), Metrics()
    for step in range(WEIGHT_ROUNDS + 5):
        close(metrics, contribution(0, loss=step), contribution(1), now=float(step))
    metrics.tested(TestResult(3, NAN, None))
    state = written_and_read(metrics.state())
    close(metrics, contribution(1), now=99.0)  # what was given out does not follow
    other.restore(state)
    close(other, contribution(1), now=0.0)
    assert (other.loss, other.accuracy) == (metrics.loss, metrics.accuracy)
    assert [other.weight(rank) for rank in range(2)] == [metrics.weight(rank) for rank in range(2)]
    assert other.test is not None and (other.test.step, other.test.accuracy) == (3, None)
    assert math.isnan(other.test.loss)
    other.tested(TestResult(2, 0.5, 0.5))
    assert other.test.step == 3
    empty = Metrics()
    empty.restore(written_and_read(Metrics().state()))
    assert empty == Metrics()


# ---- the summary ---------------------------------------------------------------------------------------


def run_of_two():
    """One round of two workers, a repeated and a stale push of rank 1, then a refused one."""
    coordinator = Coordinator(RunPolicy(2, 5, 60, 60, 60, 60), epoch=1, now=0.0, has_values=True)
    for rank in range(2):
        identity = Identity(f"site-{rank}", "h", rank, Role.WORKER, rank)
        coordinator.joined(rank + 1, identity, Granted(rank, f"site-{rank}"), 2 + rank, 0.0)
    for rank, step, seq, loss in ((0, 0, 1, 1.0), (1, 0, 1, 1.0), (1, 0, 1, 1.0), (1, 9, 2, 1.0), (1, 1, 3, NAN)):
        push = Push(1, step, seq, loss, None, 8)
        decided = coordinator.push_begins(rank + 1, push)
        if isinstance(decided, Drop):
            coordinator.dropped(rank + 1, push, decided, 0.0)
        else:
            coordinator.push_arrived(rank + 1, push, 1.0, None, 0.0)
    return coordinator


def test_the_summary_has_all_counters_by_rank_and_is_json():
    coordinator, metrics = run_of_two(), Metrics()
    close(metrics, contribution(0, loss=0.25), contribution(1, loss=0.75))
    metrics.tested(TestResult(1, 0.5, 0.9))
    summary = metrics.summary(coordinator, Status.DONE, 12.34567)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["workers"] == [
        {
            "rank": 0,
            "name": "site-0",
            "weight": 0.5,
            "threads": 2,
            "software": "",
            "pushes": 1,
            "rejected": 0,
            "stale": 0,
            "late": 0,
            "duplicates": 0,
        },
        {
            "rank": 1,
            "name": "site-1",
            "weight": 0.5,
            "threads": 3,
            "software": "",
            "pushes": 2,
            "rejected": 1,
            "stale": 1,
            "late": 0,
            "duplicates": 1,
        },
    ]
    del summary["workers"]
    assert summary == {
        "status": "done",
        "steps": 1,
        "seconds": 12.346,
        "final_loss": 0.5,
        "final_accuracy": 0.5,
        "test_loss": 0.5,
        "test_accuracy": 0.9,
        "test_accuracy_step": 1,
        "deterministic": True,
        "deterministic_reason": None,
        "void_rounds": 0,
        "short_rounds": 0,
    }


def test_a_summary_of_nothing_and_of_numbers_that_json_does_not_know():
    coordinator = Coordinator(RunPolicy(1, 1, 1, 1, 1, 1), epoch=1, now=0.0)
    summary = Metrics().summary(coordinator, Status.NO_PROGRESS, 0.0)
    assert summary["final_loss"] is None and summary["test_accuracy"] is None and summary["workers"] == []
    metrics = Metrics(loss=math.inf, accuracy=NAN, test=TestResult(1, NAN, None))
    summary = metrics.summary(coordinator, Status.DONE, 0.0)
    assert summary["final_loss"] is summary["final_accuracy"] is summary["test_loss"] is None
    assert summary["test_accuracy"] is None and summary["test_accuracy_step"] == 1


def test_a_run_that_a_worker_left_early_is_not_called_deterministic():
    coordinator = Coordinator(RunPolicy(1, 1, 1, 1, 1, 1), epoch=1, now=0.0)
    assert Metrics().determinism(coordinator) == (True, None)
    coordinator.has_left_early = True
    deterministic, reason = Metrics().determinism(coordinator)
    assert not deterministic and "left before the last step" in reason
