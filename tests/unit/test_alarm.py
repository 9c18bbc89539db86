"""When a run looks so bad that a validator should be asked sooner."""

import json
import math

import numpy as np
import pytest

from ps.rules import alarm as module
from ps.rules.alarm import FIELDS, Alarm, changed
from ps.rules.ledger import Ledger


def after(alarm, losses, log_lengths=None, validated=False):
    """Observe rounds and return whether the alarm was raised after each."""
    raised = []
    for index, loss in enumerate(losses):
        alarm.observe(loss, 0.0 if log_lengths is None else log_lengths[index], validated)
        raised.append(alarm.raised)
    return raised


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_rising_loss_is_noticed_whatever_its_size_and_sign(scale, sign):
    # Negative losses are those of likelihoods.
    alarm = Alarm()
    assert not any(after(alarm, [sign * scale] * 50))
    assert after(alarm, [sign * scale + 2.0 * scale] * 5)[-1]


def test_a_falling_noisy_loss_raises_nothing():
    generator = np.random.default_rng(1)
    falling = 2.3 * np.exp(-np.arange(400) / 60) * generator.lognormal(0.0, 0.3, 400)
    assert not any(after(Alarm(), falling, generator.normal(0.0, 0.15, 400)))


def test_a_loss_near_zero_may_double():
    alarm = Alarm()
    after(alarm, [2.0] * 30 + [0.0] * 300)
    assert not any(after(alarm, [0.01, 0.02, 0.03, 0.02]))


def test_gradients_that_grow_at_once_are_noticed_at_once():
    alarm = Alarm()
    after(alarm, [1.0] * 30)
    assert after(alarm, [1.0], [math.log(2.5)]) == [True]


def test_growth_over_many_rounds_is_usual():
    assert not any(after(Alarm(), [1.0] * 300, np.linspace(0.0, math.log(50.0), 300)))


def test_the_first_rounds_are_never_alarming():
    assert not any(after(Alarm(), [1.0, 9.0] * (module.FIRST_ROUNDS // 2), [0.0, 5.0] * module.FIRST_ROUNDS))


def test_an_alarm_ends_with_a_validation_that_finds_nothing_or_after_some_rounds():
    validated, waiting = Alarm(), Alarm()
    for alarm in (validated, waiting):
        after(alarm, [1.0] * 30)
        assert after(alarm, [1.0], [2.0]) == [True]
    assert after(validated, [1.0], validated=True) == [False]
    assert after(waiting, [1.0] * module.LASTS) == [True] * (module.LASTS - 1) + [False]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_passed_over(loss):
    alarm = Alarm()
    after(alarm, [1.0] * 30)
    before = alarm.state()
    alarm.observe(loss, 0.0, False)
    assert alarm.state() == before


def test_a_restored_alarm_goes_on():
    alarm, other = Alarm(), Alarm()
    after(alarm, [1.0] * 30 + [5.0] * 3)
    other.restore(json.loads(json.dumps(alarm.state())))
    assert alarm.raised
    assert after(alarm, [1.0] * 20) == after(other, [1.0] * 20)


def lengths_until_changed(lengths):
    """Return the round in which a worker with these lengths counts as changed, or None."""
    ledger = Ledger(FIELDS)
    rows = ledger.rows(("a",))
    for step, length in enumerate(lengths):
        if changed(ledger, rows, np.array([length])).any():
            return step
    return None


def test_a_worker_whose_gradients_suddenly_grow_has_changed_after_some_rounds():
    assert lengths_until_changed([1.0] * 20 + [3.0] * 20) == 19 + module.ODD_ROUNDS
    assert lengths_until_changed([0.0] * 20 + [1.0] * 20) == 19 + module.ODD_ROUNDS


@pytest.mark.parametrize(
    "lengths",
    [
        [5.0] * 50,
        [1.0, 1.0, 3.0, 3.0] * 20,
        np.geomspace(1.0, 20.0, 300),
        np.geomspace(9.0, 0.1, 300),
        [3.0, 0.0] * 9,
    ],
)
def test_a_worker_that_always_was_so_or_grows_slowly_has_not_changed(lengths):
    assert lengths_until_changed(lengths) is None


def test_a_change_is_noticed_once():
    ledger = Ledger(FIELDS)
    rows = ledger.rows(("a", "b"))
    noticed = [changed(ledger, rows, np.array([1.0, 1.0 if step < 20 else 4.0])) for step in range(60)]
    assert np.sum(noticed, axis=0).tolist() == [0, 1]
