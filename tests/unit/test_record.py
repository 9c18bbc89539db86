"""What is kept of rounds across a restart: the summary tells of the whole run, and each round is logged once."""

import json
import logging

import numpy as np
import pytest

from ps.closing import Closed, line_of
from ps.coordination.instructions import CloseRound, Contribution, SkipRound
from ps.outcome import RoundLog
from ps.record import Record
from ps.rules.aggregation import Mean
from ps.rules.rule import Decision
from tests.unit.judged_rounds import round_view
from tests.unit.resumed import written_and_read


def pushes(*ranks, refused=""):
    return tuple(Contribution(rank, rank, 1, 1.0, 0.5, 8, 1.0, refused) for rank in ranks)


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# ---- the log of rounds ---------------------------------------------------------------------------------


def test_a_line_names_who_was_late():
    line = line_of(3, pushes(0, 2), Closed(weights={0: 0.5, 2: 0.5}), [1, 3])
    assert line == {"step": 3, "ranks": [0, 2], "refused": [], "late": [1, 3], "weights": {"0": 0.5, "2": 0.5}}


def log_of(path, text):
    path.write_bytes(text)
    return RoundLog(path)


def lines(*steps):
    return b"".join(b'{"step":%d,"ranks":[0]}\n' % step for step in steps)


def test_a_run_that_begins_replaces_what_another_has_left(tmp_path):
    path = tmp_path / "rounds.jsonl"
    log = log_of(path, lines(*range(10)))
    log.close()
    assert steps_in(path) == list(range(10)), "it has not begun yet"
    for step in range(3):
        log.write({"step": step})
        log.close()
    assert steps_in(path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (lines(*range(10)), [0, 1, 2, 3]),
        (lines(0, 1, 2), [0, 1, 2]),
        (lines(4, 5, 6), []),
        (b"", []),
        (lines(*range(6)) + b'{"step":6,"ran', [0, 1, 2, 3]),
        (lines(0, 1, 2) + b'{"step":3}', [0, 1, 2, 3]),  # whole, but for its end of line
        (lines(*range(8), 0, 1, 2), [0, 1, 2]),  # another run in the same directory
        (lines(0, 1, 2, 3, 4, 2, 3, 4, 5), [0, 1, 2, 3]),
        (lines(0, 1) + b'nonsense\n{"step":"x"}\n[1]\n{"steps":1}\n\xff\n' + lines(2, 3, 4), [0, 1, 2, 3]),
    ],
)
def test_rounds_that_come_again_are_dropped_and_each_step_is_there_once(tmp_path, text, kept):
    path = tmp_path / "rounds.jsonl"
    log = log_of(path, text)
    log.go_back(4)
    assert steps_in(path) == kept
    for step in range(4, 6):
        log.write({"step": step})
    log.close()
    assert steps_in(path) == [*kept, 4, 5]
    assert [entry.name for entry in tmp_path.iterdir()] == ["rounds.jsonl"]


def test_where_there_is_no_log_none_is_made(tmp_path):
    RoundLog(tmp_path / "rounds.jsonl").go_back(3)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_put_right_is_left_alone_and_that_is_said(tmp_path, monkeypatch, caplog):
    path = tmp_path / "rounds.jsonl"
    log = log_of(path, lines(0, 1, 2, 3))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ps.outcome.os.fsync", full)
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        log.go_back(2)
        log.write({"step": 2})
        log.close()
    assert "No space left on device" in caplog.text
    assert steps_in(path) == [0, 1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["rounds.jsonl"]


# ---- the record ----------------------------------------------------------------------------------------


class Muting:
    """Mutes the second of two from round 3 on, and falls back in every round."""

    def __init__(self, record):
        self.record = record

    def round(self, step):
        weights = [0.5, 0.5] if step < 3 else [1.0, 0.0]
        closed = closed_with(step, weights)
        self.record.add(CloseRound(step, pushes(0, 1), late=(2,)), closed, ("good", "bad"), self, float(step))


def closed_with(step, weights):
    view = round_view(step, np.ones((2, 3)), names=("good", "bad"))
    decision = Decision(np.array(weights), np.ones(2), fallback="too short")
    return Closed(view, decision, {rank: weight for rank, weight in enumerate(weights) if weight})


def test_what_was_said_is_not_said_again_and_what_was_counted_counts_on(tmp_path, caplog):
    first = Record(tmp_path)
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        for step in range(10):
            Muting(first).round(step)
    assert caplog.text.count("'bad' is muted") == caplog.text.count("this is said once") == 1
    state = written_and_read(first.state())
    assert steps_in(tmp_path / "rounds.jsonl") == list(range(10)), "the log must not be behind a checkpoint"
    for step in range(10, 15):  # it goes on for a while, and is killed
        Muting(first).round(step)
    first.close()
    caplog.clear()
    second = Record(tmp_path)
    second.restore(state, 10)
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        for step in range(10, 20):
            Muting(second).round(step)
        second.add(SkipRound(20, pushes(0, refused="the loss is nan")), Closed(), ("good",), None, 20.0)
    assert caplog.text == ""
    second.close()
    assert steps_in(tmp_path / "rounds.jsonl") == list(range(21))
    assert second.trust.muted == ("bad",)
    assert second.trust.muted_rounds() == {"good": 0, "bad": 17}
    assert [step for step, _ in second.trust.history()["bad"]] == list(range(20))
    assert second.metrics.loss == 1.0


def test_the_weights_of_an_ensembles_members_are_kept_and_spoken_of_too(tmp_path, caplog):
    """A round of theirs has no view and no decision: no rule was asked."""
    record = Record(tmp_path)
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        for step in range(10):
            closed = Closed(weights={0: 0.96, 2: 0.04})
            record.add(CloseRound(step, pushes(0, 2)), closed, ("good", "bad"), Mean(), float(step))
    record.close()
    assert record.trust.history()["bad"] == [(step, 0.04) for step in range(10)]
    assert len(caplog.messages) == 1
    assert "worker 'bad' is muted: so the master weighs its answers" in caplog.text
