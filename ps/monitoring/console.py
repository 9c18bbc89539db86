"""What the operator sees of a run: one live line on a terminal, plain lines elsewhere."""

import os
import threading
from typing import TextIO

from tqdm import tqdm

from ps.monitoring.pace import Pace

REDRAW_S = 0.1
"""Shortest time between two drawings of the live line: faster than the eye needs."""

PLAIN_LINE_S = 5.0
"""Shortest time between two plain lines: a log of a long run stays readable."""

UNKNOWN_WIDTH = 120
"""Columns to use on a terminal that does not tell its width."""


class _Line(tqdm):  # type: ignore[misc]
    """A live line that starts no monitor thread and holds no lock of other processes."""

    monitor_interval = 0


_Line.set_lock(threading.RLock())


class Console:
    """Shows progress and remarks on one stream; safe to call from any thread, and cheap to call often.

    A stream that breaks (a closed pipe) ends the showing and never the run.
    """

    def __init__(self, total_steps: int, stream: TextIO, interactive: bool | None = None) -> None:
        """Open the console.

        Args:
            total_steps: steps of the whole run.
            stream: where to write.
            interactive: draw one live line; None: when `stream` is a terminal.
        """
        self._total_steps = total_steps
        self._stream = stream
        self._lock = threading.Lock()
        self._pace = Pace(total_steps)
        self._shown_s: float | None = None
        self._shown = self._latest = ""
        self._broken = False
        self._line: _Line | None = None
        if stream.isatty() if interactive is None else interactive:
            size = {"dynamic_ncols": True} if _has_width(stream) else {"ncols": UNKNOWN_WIDTH, "nrows": 20}
            # The delay keeps it from drawing an empty line before the first progress.
            self._line = _Line(file=stream, bar_format="{desc}", delay=1e-9, **size)

    def progress(
        self,
        step: int,
        loss: float | None,
        test_accuracy: float | None,
        examples_per_s: float | None,
        now_s: float,
    ) -> None:
        """Take note of how far the run is, and show it when it is time to.

        Args:
            step: closed rounds.
            loss: of the last round; None: not known yet.
            test_accuracy: in [0, 1]; None: no evaluator has reported.
            examples_per_s: of all workers together; None or 0: not known yet, or not any more.
            now_s: a monotonic clock, in seconds.
        """
        with self._lock:
            self._pace.at(step, now_s)
            pause_s = PLAIN_LINE_S if self._line is None else REDRAW_S
            due = self._shown_s is None or now_s - self._shown_s >= pause_s
            parts = [f"step {step}/{self._total_steps}"]
            if loss is not None:
                parts.append(f"loss {loss:.3f}")
            if test_accuracy is not None:
                parts.append(f"test accuracy {test_accuracy:.3f}")
            if examples_per_s:
                parts.append(f"{examples_per_s:,.0f} examples/s")
            left_s = self._pace.left_s(step, now_s)
            if left_s is not None and step < self._total_steps:
                parts.append(f"{_duration(left_s)} left")
            self._latest = "  ".join(parts)
            if due:
                self._shown_s = now_s
                self._show()

    def say(self, text: str) -> None:
        """Write one line above the live line; control characters are escaped."""
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        with self._lock:
            self._write(line)

    def close(self) -> None:
        """Show the last progress if it was not shown, and leave the live line; again is harmless."""
        with self._lock:
            if self._latest != self._shown:
                self._show()
            if self._line is not None and not self._broken:
                try:
                    self._line.close()
                except OSError:
                    self._break()
            self._line = None

    def _show(self) -> None:
        self._shown = self._latest
        if self._line is None:
            self._write(self._latest)
        elif not self._broken:
            try:
                self._line.set_description_str(self._latest)
            except OSError:
                self._break()

    def _write(self, line: str) -> None:
        if self._broken:
            return
        try:
            if self._line is None:
                self._stream.write(f"{self._encodable(line)}\n")
                self._stream.flush()
            else:
                _Line.write(self._encodable(line), file=self._stream)
        except OSError:
            self._break()

    def _encodable(self, line: str) -> str:
        """Escape what the stream's encoding does not have: a peer's name must not end the run."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return line.encode(encoding, "backslashreplace").decode(encoding)

    def _break(self) -> None:
        self._broken = True
        if self._line is not None:
            self._line.disable = True  # else its finaliser would write again


def _has_width(stream: TextIO) -> bool:
    """Tell whether a terminal knows its width; in one of width 0, as some programs make, all would be cut."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return False


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
