"""The pure part of the benchmark of the status page: which drawing is that of a step, and what becomes of it."""

import random

import pytest

from benchmarks.page_delay import Delays, Drawing, applied_times, is_soon_enough, report
from benchmarks.processes import BenchmarkError
from benchmarks.tally import Tally
from benchmarks.tally_worker import Manner

S = 1_000_000_000


def delays(applied_s, drawings):
    return Delays([at * S for at in applied_s], [Drawing(points, at * S) for points, at in drawings]).seconds


def test_a_step_is_drawn_by_the_first_drawing_that_has_its_point():
    assert delays([10, 20, 30], [(1, 11), (2, 22), (3, 33)]) == [1, 2, 3]


def test_several_steps_may_be_drawn_at_once():
    assert delays([10, 11, 12, 20], [(0, 9), (3, 13), (4, 21)]) == [3, 2, 1, 1]


def test_a_drawing_without_a_new_point_counts_for_none():
    assert delays([10, 20], [(1, 11), (1, 12), (1, 21), (2, 24), (2, 25)]) == [1, 4]


def test_a_step_that_is_never_drawn_is_no_figure():
    with pytest.raises(BenchmarkError, match="step 1 was not drawn"):
        delays([10, 20], [(1, 11), (1, 21)])


def test_a_step_is_applied_when_the_first_worker_has_the_values_after_it():
    one = [{"step": step, "at_ns": at} for step, at in ((0, 1), (1, 12), (2, 21), (3, 30))]
    other = [{"step": step, "at_ns": at} for step, at in ((0, 2), (1, 11), (2, 22), (3, 31))]
    assert applied_times([*one, *other], 2) == [11, 21]


@pytest.mark.parametrize(("largest", "holds"), [(2.0, True), (2.001, False)])
def test_the_largest_decides(largest, holds):
    samples = [0.5] * 39 + [largest]
    assert is_soon_enough(samples) is holds
    assert report(samples).endswith(
        f"| 40 | 0.500 | 0.500 | {largest:.3f} |\n\nwithin 2 s: {'yes' if holds else 'no'}"
    )


def test_pauses_are_drawn_between_the_shortest_and_the_longest():
    chance = random.Random(0)

    def drawn(shortest, longest):
        manner = Manner(1, Tally(1, 1), shortest, longest, say_s=0.0, reconnect_timeout_s=1.0)
        return [manner.drawn_pause_s(chance) for _ in range(100)]

    assert set(drawn(0.5, 0.0)) == {0.5}
    pauses = drawn(0.1, 1.5)
    assert 0.1 <= min(pauses) < 0.2 and 1.0 < max(pauses) <= 1.5
