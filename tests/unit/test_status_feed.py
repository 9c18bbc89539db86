"""What is published of a run: the schema, finite numbers, what is new since a step, who is in which state."""

import dataclasses
import json
import math

import pytest

from ps.monitoring.history import MOST_POINTS
from ps.monitoring.metrics import TestResult
from ps.monitoring.status import SCHEMA, Status, WorkerState, plain, rounded
from ps.monitoring.status_feed import MOST_REFUSALS, MOST_TESTS, PUBLISH_EVERY_S
from tests.unit.course import Client
from tests.unit.status_run import TIME, Watched

NAN = math.nan


def document(watched, since=0, **options):
    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    return json.loads(watched.publish(**options).document(since), parse_constant=refuse)


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_the_document_has_every_field_of_the_schema(watched):
    watched.start().round([0.5, 0.5])
    data = document(watched)
    assert data["schema"] == SCHEMA and data["sequence"] == 1 and data["time"] == TIME
    assert set(data) == {field.name for field in dataclasses.fields(Status)} | {"sequence", "history"}
    assert set(data["history"]) == {"generation", "stride", "names", "tests", "points"}
    assert data["history"]["points"] == [[0, 1, 1.0, 0.5, None, [1.0, 1.0]]]
    assert data["epoch"] == f"{watched.course.epoch:016x}"


def test_a_run_that_nobody_has_joined_can_be_shown(watched):
    data = document(watched)
    assert data["run"]["phase"] == "gathering" and data["run"]["seconds_left"] is None
    assert data["waiting"] == {
        "sentence": "the start waits for ranks 0 and 1 since 1 s",
        "ranks": [0, 1],
        "seconds": 1,
    }
    assert [(w["state"], w["name"], w["seconds"]) for w in data["workers"]] == [("awaited", "", None)] * 2
    assert data["figures"]["loss"] is None and data["history"]["points"] == []


def test_numbers_that_are_none_become_null(watched):
    watched.start().round([0.5, 0.5])
    metrics = watched.record.metrics
    metrics.loss, metrics.accuracy, metrics.test = NAN, math.inf, TestResult(1, -math.inf, None)
    figures = document(watched)["figures"]
    assert [figures[name] for name in ("loss", "accuracy", "test_loss", "test_accuracy")] == [None] * 4


def test_counts_and_weights_are_those_of_the_run(watched):
    watched.start()
    for _ in range(4):
        watched.round([0.96, 0.04])
    watched.round([1.0, 0.0], [2.0, NAN])
    first, second = document(watched)["workers"]
    assert (first["pushes"], first["rejected"], first["weight"], first["share"]) == (5, 0, 0.968, 2.0)
    assert (second["pushes"], second["rejected"], second["weight"], second["share"]) == (5, 1, 0.032, 0.0)
    assert (second["muted"], second["muted_rounds"], second["last_reason"]) == (True, 5, "the loss is nan")
    assert not first["muted"] and first["last_reason"] == ""


def test_each_kind_of_refusal_is_told_with_its_reason(watched):
    watched.start().round([1.0, 0.0], [1.0, NAN])
    watched.publish()
    watched.run.push(watched.clients[0], step=0)
    watched.run.push(watched.clients[0], step=0)
    refusals = document(watched)["refusals"]
    assert refusals == [
        {"step": 1, "name": "site-1", "kind": "rejected", "count": 1, "reason": "the loss is nan"},
        {
            "step": 1,
            "name": "site-0",
            "kind": "stale",
            "count": 2,
            "reason": "the push is of step 0, the round is 1",
        },
    ]
    assert document(watched)["refusals"] == refusals, "what was told is not told again"


def test_refusals_and_tests_are_bounded(watched):
    watched.start()
    for step in range(MOST_TESTS + 100):
        watched.run.push(watched.clients[0], step=77)
        watched.record.metrics.tested(TestResult(step, 1.0, 0.5))
        data = document(watched)
    assert len(data["refusals"]) == MOST_REFUSALS
    tests = data["history"]["tests"]
    assert MOST_TESTS / 2 <= len(tests) <= MOST_TESTS and tests[-1] == [MOST_TESTS + 99, 1.0, 0.5]


def test_states_of_workers(tmp_path):
    watched = Watched(tmp_path, workers=4).start()
    watched.run.lose(watched.clients[1], "it has not been heard of")
    watched.run.bye(watched.clients[2])
    watched.course.registry.members[3].on_probation = True
    states = [(w["state"], w["lost_reason"]) for w in document(watched)["workers"]]
    lost = "it has not been heard of"
    assert states == [("here", ""), ("lost", lost), ("left", ""), ("probation", "")]
    watched.course.registry.members[0].late_rounds = 1
    assert watched.publish().status.workers[0].state is WorkerState.LATE


def test_whom_a_round_waits_for_and_since_when(watched):
    watched.start()
    watched.run.push(watched.clients[0])
    watched.run.now += 4
    assert document(watched)["waiting"] == {
        "sentence": "round 0 waits for rank 1 since 5 s",
        "ranks": [1],
        "seconds": 5.0,
    }


def test_a_validator_is_no_worker(tmp_path):
    from protocol.messages import Role

    watched = Watched(tmp_path)
    watched.course.registry.validator_slots = 1
    watched.start()
    watched.run.join(Client(2, Role.VALIDATOR))
    data = document(watched)
    assert len(data["workers"]) == 2
    assert data["validators"] == [{"name": "site-2", "host": "host-2", "connected": True, "pushes": 0}]


def test_only_what_is_new_is_sent_and_it_joins_on(watched):
    watched.start()
    for _ in range(5):
        watched.round([0.5, 0.5])
    known = document(watched)["history"]["points"]
    for _ in range(3):
        watched.round([0.5, 0.5])
    since = known[-1][0]
    fresh = document(watched, since)["history"]["points"]
    assert [point[0] for point in fresh] == [4, 5, 6, 7]
    assert known[:-1] + fresh == document(watched)["history"]["points"]
    assert document(watched, 10**14)["history"]["points"] == []


def test_the_last_point_grows_and_all_change_with_the_generation(watched):
    watched.start()
    for step in range(MOST_POINTS + 1):
        watched.feed.history.add(step, 1.0, None, 1, {"a": 1.0}, float(step))
        if step % 100 == 0:
            before = document(watched)["history"]
    after = document(watched)["history"]
    assert before["generation"] == after["generation"] == 1
    assert after["points"][-1][:2] == [MOST_POINTS, 1]
    watched.feed.history.add(MOST_POINTS + 1, 3.0, None, 1, {"a": 1.0}, MOST_POINTS + 1.0)
    assert document(watched)["history"]["points"][-1][:3] == [MOST_POINTS, 2, 2.0]


def test_64_workers_after_100_000_steps_fit_into_half_a_megabyte(tmp_path):
    watched = Watched(tmp_path, workers=64).start()
    watched.round([1 / 64] * 64)
    shares = {f"site-{rank}": 0.123456 * rank for rank in range(64)}
    for step in range(1, 100_000, 7):  # the points are as many, whoever closed the rounds between
        watched.feed.history.add(step, 0.123456, 0.123456, 640, shares, watched.run.now + step)
    whole = watched.publish().document()
    points = json.loads(whole)["history"]["points"]
    assert 500 <= len(points) <= MOST_POINTS and len(points[-1][5]) == 64
    assert len(whole) < 500_000


def test_states_are_made_ready_no_more_often_than_said(watched):
    feed, run = watched.feed, watched.run
    assert feed.take(watched.course, watched.record, None, run.now, TIME) is not None
    soon = run.now + PUBLISH_EVERY_S - 0.01
    assert feed.take(watched.course, watched.record, None, soon, TIME) is None
    assert feed.take(watched.course, watched.record, None, soon, TIME, "done") is not None, "the end is always told"
    assert feed.latest is None
    feed.publish(None)
    assert feed.latest is None


def test_what_was_published_does_not_change(watched):
    watched.start().round([0.5, 0.5])
    published = watched.publish()
    before = published.document()
    for _ in range(10):
        watched.round([0.9, 0.1])
    later = watched.publish()
    assert published.document() == before != later.document()
    assert later.sequence == published.sequence + 1


def test_time_left_follows_the_pace(watched):
    watched.start()
    for _ in range(50):
        watched.round([0.5, 0.5], seconds=0.5)
        watched.publish(wait=0.5)
    assert document(watched)["run"]["seconds_left"] == pytest.approx(950, rel=0.05)


def test_nothing_of_files_and_tokens_is_shown(tmp_path):
    watched = Watched(
        tmp_path / "run", token_file=tmp_path / "secret-tokens", checkpoint_dir=tmp_path / "kept", seed=987654
    )
    watched.start().round([0.5, 0.5])
    whole = watched.publish().document().decode()
    for hidden in (str(tmp_path), "secret-tokens", "987654", "token"):
        assert hidden not in whole


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.1234567, 0.123457), (123456.7, 123457.0), (1234567.8, 1234568.0), (NAN, None), (-math.inf, None)],
)
def test_numbers_are_short(value, shown):
    assert rounded(value) == shown


def test_only_plain_values_are_shown():
    assert plain((True, None, 3, WorkerState.LOST)) == [True, None, 3, "lost"]
    with pytest.raises(TypeError):
        plain({"a": 1})
