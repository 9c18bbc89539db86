"""A flood of strangers costs a bounded number of lines, and the log says how many it lacks."""

import logging

import pytest

from ps.connections.stranger_log import BURST_LINES, LINES_PER_S, StrangerLog


@pytest.fixture
def flooded(caplog):
    """A log that has had all its lines at second 0, and more; its clock, and what was written since."""
    now = [0.0]
    log = StrangerLog(lambda: now[0])
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        for number in range(BURST_LINES + 50):
            log.say(logging.WARNING, f"stranger {number}")
        assert caplog.messages == [f"stranger {number}" for number in range(BURST_LINES)]
        caplog.clear()
        yield log, now, caplog


def test_after_a_flood_a_line_is_written_now_and_then_and_says_how_many_are_missing(flooded):
    log, now, caplog = flooded
    now[0] += 1 / LINES_PER_S
    log.say(logging.INFO, "one more")
    log.say(logging.INFO, "and another")
    assert caplog.messages == ["lines on connections that have not joined were left out: 50", "one more"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_when_it_is_over_everything_is_written_again(flooded):
    log, now, caplog = flooded
    now[0] += 10 * BURST_LINES / LINES_PER_S
    for number in range(BURST_LINES + 1):
        log.say(logging.INFO, f"later {number}")
    assert caplog.messages[1:] == [f"later {number}" for number in range(BURST_LINES)]
