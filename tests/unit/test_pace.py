"""The time left is reckoned from the last half minute, and not from the start."""

from ps.monitoring.pace import SAMPLES, Pace


def test_it_is_unknown_until_a_step_has_taken_some_time():
    pace = Pace(100)
    assert pace.left_s(0, 5.0) is None
    pace.at(10, 5.0)
    assert pace.left_s(10, 9.0) is None
    assert pace.left_s(11, 5.0) is None
    assert pace.left_s(20, 10.0) == 80 * 0.5
    assert pace.left_s(100, 50.0) == 0.0


def test_a_slow_start_is_forgotten():
    pace = Pace(1000)
    pace.at(0, 0.0)
    for second in range(100, 100 + SAMPLES):
        pace.at(2 * (second - 100), float(second))
        pace.at(0, second + 0.5)  # sooner than a second after the last: not noted
    assert pace.left_s(58, 129.0) == (1000 - 58) / 2
