"""The console: one live line on a terminal, few plain lines elsewhere; time is handed in."""

import io
import os
import threading

import pytest

from ps.monitoring.console import PLAIN_LINE_S, REDRAW_S, Console


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class BrokenPipe(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_line_says_step_loss_accuracy_speed_and_time_left() -> None:
    stream = io.StringIO()
    console = Console(300, stream)
    console.progress(0, None, None, None, now_s=100.0)
    console.progress(120, 0.3124, 0.943, 12_400.4, now_s=108.0)
    assert stream.getvalue().splitlines() == [
        "step 0/300",
        "step 120/300  loss 0.312  test accuracy 0.943  12,400 examples/s  0:12 left",
    ]


def test_what_is_not_known_or_over_is_not_shown() -> None:
    """No speed before two rounds have told of one, and no time left when there is nothing left to do."""
    stream = io.StringIO()
    console = Console(10, stream)
    console.progress(0, None, None, 0.0, now_s=0.0)
    console.progress(10, 0.5, None, 320.0, now_s=PLAIN_LINE_S)
    assert stream.getvalue().splitlines() == ["step 0/10", "step 10/10  loss 0.500  320 examples/s"]


def test_hours_are_shown_and_time_left_is_of_the_recent_pace() -> None:
    stream = io.StringIO()
    console = Console(100_000, stream)
    for second in range(0, 400, 5):
        steps = second if second < 200 else 200 + (second - 200) * 10
        console.progress(steps, None, None, None, now_s=float(second))
    # 97,850 steps at the recent 10 a second, though it was 1 a second at first.
    assert stream.getvalue().splitlines()[-1] == "step 2150/100000  2:43:05 left"


def test_plain_lines_come_at_most_every_five_seconds_and_the_last_always() -> None:
    stream = io.StringIO()
    console = Console(1000, stream)
    for tick in range(50):
        console.progress(tick, 1.0, None, None, now_s=tick * 0.25)
    before = stream.getvalue().splitlines()
    assert len(before) == int(49 * 0.25 / PLAIN_LINE_S) + 1
    console.close()
    console.close()
    after = stream.getvalue().splitlines()
    assert len(after) == len(before) + 1
    assert after[-1].startswith("step 49/1000")


def test_closing_does_not_repeat_a_line_that_was_shown() -> None:
    stream = io.StringIO()
    console = Console(10, stream)
    console.progress(10, None, None, None, now_s=0.0)
    console.close()
    assert stream.getvalue() == "step 10/10\n"


def test_a_terminal_gets_one_line_that_is_drawn_over() -> None:
    stream = Terminal()
    console = Console(4, stream)
    console.progress(1, None, None, None, now_s=0.0)
    console.progress(2, None, None, None, now_s=REDRAW_S / 2)
    console.progress(3, None, None, None, now_s=REDRAW_S)
    console.close()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "\rstep 1/4" in text
    assert "step 2/4" not in text
    assert "\rstep 3/4" in text


def test_a_remark_stands_above_the_live_line() -> None:
    stream = Terminal()
    console = Console(4, stream)
    console.progress(1, None, None, None, now_s=0.0)
    console.say("worker 2 is back")
    console.close()
    assert "\rworker 2 is back\n" in stream.getvalue()
    assert stream.getvalue().index("worker 2") < stream.getvalue().rindex("step 1/4")


@pytest.mark.parametrize("interactive", [False, True])
def test_control_characters_of_a_remark_are_escaped(interactive: bool) -> None:
    stream = io.StringIO()
    console = Console(4, stream, interactive)
    console.say("name \x1b[2J\r\nü")
    console.close()
    assert "name \\x1b[2J\\r\\nü\n" in stream.getvalue()


@pytest.mark.parametrize("interactive", [False, True])
def test_a_reader_that_has_gone_does_not_end_the_run(interactive: bool) -> None:
    console = Console(4, BrokenPipe(), interactive)
    console.progress(1, None, None, None, now_s=0.0)
    console.say("nobody hears")
    console.close()


def test_a_terminal_that_does_not_know_its_width_shows_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()  # made without a size
    try:
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            monkeypatch.setattr("sys.stdout", stream)
            console = Console(4, stream)
            console.progress(3, None, None, None, now_s=0.0)
            console.close()
            assert b"step 3/4" in os.read(reader, 4096)
    finally:
        monkeypatch.undo()
        os.close(reader)


def test_a_live_line_starts_no_thread() -> None:
    before = threading.active_count()
    console = Console(4, Terminal())
    console.progress(1, None, None, None, now_s=0.0)
    assert threading.active_count() == before
    console.close()
