"""The time of a run's course stands while it is told to."""

from ps.coordination.course_clock import CourseClock


def test_it_stands_and_goes_on_where_it_stood():
    now = 100.0
    clock = CourseClock(lambda: now)
    assert (clock.now(), clock.stood_s) == (100.0, 0.0)
    clock.stand(True)
    now = 130.0
    clock.stand(True)
    assert (clock.now(), clock.stood_s) == (100.0, 30.0)
    clock.stand(False)
    now = 131.0
    clock.stand(False)
    assert (clock.now(), clock.stood_s) == (101.0, 30.0)
    clock.stand(True)
    now = 140.0
    assert (clock.now(), clock.stood_s) == (101.0, 39.0)
