"""What is said of workers whose weights change, and what is kept of the weights."""

import pytest

from ps.monitoring import trust
from ps.monitoring.trust import History, TrustLog
from tests.unit.resumed import written_and_read


def told(log, shares, start=0, reason=lambda name: f"because of {name}"):
    """Observe rounds of two workers in which 'b' has the given parts of a fair share."""
    said = []
    for step, share in enumerate(shares, start):
        said += log.observe(step, ["a", "b"], [1 - share / 2, share / 2], reason)
    return said


def test_a_muted_worker_is_named_once_with_the_reason():
    log = TrustLog()
    assert told(log, [1.0] * 10 + [0.0] * 40) == ["step 12: worker 'b' is muted: because of b"]
    assert log.muted == ("b",)
    assert log.muted_rounds() == {"a": 0, "b": 40}


def test_a_short_dip_is_not_worth_a_sentence():
    log = TrustLog()
    assert told(log, ([1.0] * 5 + [0.0] * (trust.PATIENCE - 1)) * 20) == []
    assert log.muted == ()


def test_a_worker_is_trusted_again_only_well_above_the_point_where_it_was_muted():
    log = TrustLog()
    told(log, [0.0] * 5)
    assert told(log, [0.4] * 100, 5) == []
    assert log.muted == ("b",)
    assert told(log, [0.6] * 10, 105) == ["step 110: worker 'b' is trusted again: because of b"]
    assert log.muted == ()


def test_a_worker_that_flickers_is_soon_left_in_peace():
    said = told(TrustLog(), ([1.0] * 10 + [0.0] * 10) * 100)
    assert 2 <= len(said) <= 4


def test_a_marked_change_is_said_when_it_has_lasted():
    said = told(TrustLog(), [1.0] * 60 + [0.3] * 100)
    assert len(said) == 1
    assert "worker 'b' now counts 0.5 times as much as the most trusted, after 1.0 times: because of b" in said[0]


def test_who_gains_what_another_lost_is_not_spoken_of():
    said = told(TrustLog(), [1.0] * 60 + [0.0] * 100)
    assert [sentence for sentence in said if "'a'" in sentence] == []


def test_reasons_are_asked_for_only_where_something_is_said():
    asked = []

    def reason(name):
        asked.append(name)
        return "so"

    told(TrustLog(), [1.0] * 50 + [0.0] * 50, reason=reason)
    assert asked == ["b"]


def test_a_void_round_says_nothing_of_anybody():
    log = TrustLog()
    for step in range(20):
        assert log.observe(step, ["a", "b"], [0.0, 0.0], str) == []
    assert log.muted == ()
    assert log.muted_rounds() == {"a": 0, "b": 0}
    assert log.history()["a"][5] == (5, 0.0)


def test_shares_are_fair_shares_of_those_present():
    log = TrustLog()
    names = [f"w{i}" for i in range(50)]
    for step in range(20):
        assert log.observe(step, names, [0.02] * 50, str) == []
    assert log.muted == ()


@pytest.mark.parametrize("rounds", [1, 1999, 2000, 2001, 50_000])
def test_history_is_bounded_and_keeps_the_mean(rounds):
    history = History()
    weights = [(step * 7 % 11) / 11 for step in range(rounds)]
    for step, weight in enumerate(weights):
        history.add(step, weight)
    points = history.points()
    assert len(points) <= trust.MOST_POINTS
    assert len(points) >= min(rounds, trust.MOST_POINTS // 2)
    assert [step for step, _ in points] == list(range(0, rounds, history.stride))
    lengths = [min(history.stride, rounds - step) for step, _ in points]
    mean = sum(length * weight for length, (_, weight) in zip(lengths, points, strict=True)) / rounds
    assert mean == pytest.approx(sum(weights) / rounds)


def test_histories_of_names_long_gone_are_dropped():
    log = TrustLog()
    for step in range(trust.MOST_NAMES + 50):
        log.observe(step, ["stays", f"guest {step}"], [0.5, 0.5], str)
    assert len(log.history()) == trust.MOST_NAMES + 2
    assert len(log.history()["stays"]) == trust.MOST_NAMES + 50
    assert "guest 0" not in log.history()


def test_a_restored_log_goes_on_as_if_nothing_had_happened():
    shares = [1.0] * 60 + [0.0] * 10 + [1.0] * 30 + [0.4] * 5300
    for stop in (1, 61, 69, 75, 100, 4500):
        whole, first, second = TrustLog(), TrustLog(), TrustLog()
        said = told(whole, shares)
        before = told(first, shares[:stop])
        state = written_and_read(first.state())
        told(first, shares[stop:])  # what was given out does not follow
        second.restore(state)
        assert before + told(second, shares[stop:], stop) == said
        assert second.history() == whole.history()
        assert (second.muted, second.muted_rounds()) == (whole.muted, whole.muted_rounds())


def test_a_restored_log_forgets_whom_it_would_have_forgotten(monkeypatch):
    monkeypatch.setattr(trust, "MOST_NAMES", 2)
    logs = [TrustLog(), TrustLog()]
    for name in ("c", "a", "b", "d"):
        logs[0].observe(0, [name], [1.0], str)
    logs[1].restore(written_and_read(logs[0].state()))
    for log in logs:
        log.observe(1, ["c", "z"], [1.0, 1.0], str)
    assert list(logs[0].history()) == list(logs[1].history())
