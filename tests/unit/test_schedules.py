import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigurationError
from ps.storage.schedules import Constant, Cosine, ExponentialDecay, WarmUp


def test_constant_is_the_same_at_every_step():
    assert [Constant(0.25)(step) for step in (0, 1, 10**9)] == [0.25] * 3


def test_exponential_decay_has_its_rate_after_each_period_and_falls_between():
    schedule = ExponentialDecay(0.5, decay_steps=10, decay_rate=0.25)
    assert [schedule(step) for step in (0, 5, 10, 20)] == [0.5, 0.25, 0.125, 0.03125]


def test_staircase_holds_the_rate_within_a_period():
    schedule = ExponentialDecay(0.5, decay_steps=10, decay_rate=0.5, staircase=True)
    assert [schedule(step) for step in (0, 9, 10, 19, 20)] == [0.5, 0.5, 0.25, 0.25, 0.125]


def test_cosine_starts_at_the_rate_is_half_way_in_the_middle_and_stays_at_its_final_share():
    schedule = Cosine(0.5, decay_steps=100, final_share=0.5)
    assert schedule(0) == 0.5
    assert schedule(50) == pytest.approx(0.375, abs=1e-15)
    assert schedule(100) == schedule(10**6) == 0.25


@given(st.integers(1, 1000), st.integers(0, 2000))
def test_cosine_never_rises(decay_steps, step):
    schedule = Cosine(1.0, decay_steps)
    assert schedule(step + 1) <= schedule(step)


def test_warm_up_ramps_from_above_zero_to_the_start_of_what_follows():
    schedule = WarmUp(ExponentialDecay(1.0, decay_steps=1, decay_rate=0.5), steps=3)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Constant(0.0), "learning rate"),
        (lambda: Constant(math.nan), "learning rate"),
        (lambda: Constant(math.inf), "learning rate"),
        (lambda: ExponentialDecay(-1.0, 1, 0.5), "learning rate"),
        (lambda: ExponentialDecay(0.1, 0, 0.5), "decay steps"),
        (lambda: ExponentialDecay(0.1, 1, 0.0), "decay rate"),
        (lambda: ExponentialDecay(0.1, 1, 1.01), "decay rate"),
        (lambda: Cosine(0.1, 0), "decay steps"),
        (lambda: Cosine(0.1, 1, 1.5), "final share"),
        (lambda: Cosine(0.1, 1, math.nan), "final share"),
        (lambda: WarmUp(Constant(0.1), 0), "warm-up steps"),
    ],
)
def test_a_number_out_of_range_is_refused_and_named(make, names):
    with pytest.raises(ConfigurationError, match=names):
        make()
