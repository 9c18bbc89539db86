"""The thinned history: means that stay exact, bounded memory, names that come and go."""

import math

import numpy as np
import pytest

from ps.monitoring.history import AWAY_STEPS, MOST_NAMES, MOST_POINTS, RunHistory
from tests.unit.resumed import written_and_read

NAN = math.nan


def filled(steps, workers=2, start=0):
    history = RunHistory()
    for step in range(start, start + steps):
        history.add(step, float(step), 0.5, 10, {f"w{n}": float(step % 4 == n) for n in range(workers)}, step * 0.5)
    return history


def test_few_steps_are_all_there():
    view = filled(5).view()
    assert view.stride == 1 and view.names == ("w0", "w1")
    assert view.steps.tolist() == [0, 1, 2, 3, 4] == view.loss.tolist()
    assert view.rounds.tolist() == [1] * 5 and view.accuracy.tolist() == [0.5] * 5
    assert math.isnan(view.examples_per_s[0]), "the first round has no duration"
    assert view.examples_per_s[1:].tolist() == [20.0] * 4
    assert view.shares.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0], [1, 0]]


def test_nothing_has_happened_yet():
    view = RunHistory().view()
    assert len(view.steps) == 0 and view.names == () and view.shares.shape == (0, 0)


@pytest.mark.parametrize("steps", [MOST_POINTS, MOST_POINTS + 1, 100_000])
def test_history_is_thinned_and_not_cut(steps):
    history = filled(steps)
    view = history.view()
    assert MOST_POINTS / 2 <= len(view.steps) <= MOST_POINTS
    assert view.steps[0] == 0 and view.steps[-1] + view.stride >= steps
    assert np.all(np.diff(view.steps) == view.stride) and view.stride.bit_count() == 1
    assert view.rounds.sum() == steps, "every round is in one point"
    assert np.all(view.rounds[:-1] == view.stride)
    means = [np.mean(range(first, first + count)) for first, count in zip(view.steps, view.rounds, strict=True)]
    assert view.loss.tolist() == means, "means of all rounds, not samples"
    if view.stride >= 4:
        assert view.shares[:-1].tolist() == [[0.25, 0.25]] * (len(means) - 1)
    assert np.allclose(view.examples_per_s[1:], 20.0)


def test_memory_is_that_of_the_points_and_names():
    history = filled(5 * MOST_POINTS, workers=3)
    sizes = {each.shape for each in (history._shares, history._present)}
    assert sizes == {(MOST_POINTS, 8)} and history._sums.shape == (MOST_POINTS, 7)


def test_generation_changes_with_earlier_points_only():
    history = filled(MOST_POINTS)
    before = history.view().generation
    assert filled(MOST_POINTS - 1).view().generation == before
    history.add(MOST_POINTS, 1.0, None, 1, {"new": 1.0}, 1e6)
    assert history.view().generation == before + 1


def test_what_is_not_known_spoils_no_mean():
    history = RunHistory()
    history.add(0, NAN, math.inf, 1, {}, 0.0)
    history.add(1, None, None, 1, {"a": 1.0}, 1.0)
    history.add(2, 4.0, 0.25, 1, {"b": 1.0}, 2.0)
    view = history.view()
    assert [math.isnan(x) for x in view.loss] == [True, True, False] and view.accuracy[2] == 0.25
    assert np.isnan(view.shares).tolist() == [[True, True], [False, True], [True, False]]


def test_absent_rounds_count_in_no_share():
    history = RunHistory()
    for step in range(MOST_POINTS + 2):
        history.add(step, 1.0, None, 1, {"a": 1.0, **({"b": 0.5} if step % 2 else {})}, float(step))
    assert history.stride == 2 and history.view().shares[3].tolist() == [1.0, 0.5]


def test_rounds_of_one_instant_do_not_divide_by_zero():
    history = RunHistory()
    for step in range(3):
        history.add(step, 1.0, None, 1, {}, 5.0)
    assert np.isnan(history.view().examples_per_s).all()


def test_a_new_name_takes_the_place_of_the_one_away_longest():
    history = RunHistory()
    for name in range(MOST_NAMES):
        history.add(name, 1.0, None, 1, {f"w{name}": 1.0}, float(name))
    generation = history.view().generation
    history.add(AWAY_STEPS - 1, 1.0, None, 1, {"early": 1.0}, 300.0)
    view = history.view()
    assert "early" not in view.names and view.generation == generation, "nobody was away for long: no room"
    history.add(MOST_NAMES + AWAY_STEPS, 1.0, None, 1, {"late": 1.0}, 301.0)
    view = history.view()
    assert view.names[0] == "late" and "w0" not in view.names and len(view.names) == MOST_NAMES
    assert view.generation == generation + 1 and math.isnan(view.shares[0][0])


def test_a_restored_history_goes_on_as_if_nothing_had_happened():
    whole, first, second = filled(2500), filled(1700), RunHistory()
    generation = first.view().generation
    second.restore(written_and_read(first.state()))
    assert second.view().generation > generation, "who knew the points of before asks anew"
    for step in range(1700, 2500):
        second.add(step, float(step), 0.5, 10, {f"w{n}": float(step % 4 == n) for n in range(2)}, step * 0.5)
    a, b = whole.view(), second.view()
    assert (a.stride, a.names) == (b.stride, b.names)
    for name in ("steps", "rounds", "loss", "accuracy", "shares"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert np.allclose(a.examples_per_s, b.examples_per_s, equal_nan=True)
