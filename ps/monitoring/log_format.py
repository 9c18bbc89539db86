"""The server's log as JSON: a formatter, and a console whose progress is events too."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from protocol import log_lines
from protocol.log_lines import json_line, recognise
from ps.monitoring.console import PLAIN_LINE_S, Console
from ps.monitoring.log_events import EVENTS

FIELDS = "fields"
"""`logger.info(..., extra={"event": NAME, "fields": {...}})` names an event where it happens, and wins."""

PROGRESS = "progress"


class JsonFormatter(logging.Formatter):
    """Makes one line of JSON of each log record, its traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = record.getMessage()
        event, fields = recognise(message, EVENTS)
        event = getattr(record, "event", event)
        fields |= getattr(record, FIELDS, {})
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        return json_line(record.created, record.levelname.lower(), event, message, fields)


def formatter_of(log_format: str) -> logging.Formatter:
    """Return what makes lines of log records, for `--log-format text` or `json`."""
    return JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


class JsonConsole(Console):
    """A console whose every line is JSON: progress becomes an event every few seconds, and nothing is drawn."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        """Open the console.

        Args:
            total_steps: steps of the whole run.
            stream: where to write.
            clock: seconds since 1970, for the lines.
        """
        super().__init__(total_steps, stream, interactive=False)
        self._clock = clock
        self._steps = total_steps
        self._told_s: float | None = None
        self._untold: Mapping[str, object] | None = None

    def progress(
        self,
        step: int,
        loss: float | None,
        test_accuracy: float | None,
        examples_per_s: float | None,
        now_s: float,
    ) -> None:
        """Take note of how far the run is, and tell it when it is time to; arguments as `Console.progress`."""
        self._untold = {
            "step": step,
            "steps": self._steps,
            "loss": loss,
            "test_accuracy": test_accuracy,
            "examples_per_s": round(examples_per_s, 1)
            if examples_per_s and math.isfinite(examples_per_s)
            else None,
        }
        if self._told_s is None or now_s - self._told_s >= PLAIN_LINE_S:
            self._told_s = now_s
            self._tell()

    def close(self) -> None:
        """Tell the last progress if it was not told; again is harmless."""
        self._tell()
        super().close()

    def _tell(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            text = f"step {untold['step']}/{untold['steps']}"
            self.say(json_line(self._clock(), "info", PROGRESS, text, untold))


def open_console(total_steps: int, stream: TextIO, log_format: str) -> Console:
    """Return the console of a run, for `--log-format text` or `json`."""
    return JsonConsole(total_steps, stream) if log_format == "json" else Console(total_steps, stream)


def ended(when: float, status: str, reason: str, exit_code: int, step: int | None = None) -> str:
    """Return the last line of a run that did not end as it should, as JSON.

    Args:
        when: seconds since 1970.
        status: of the summary, such as `no_progress`.
        reason: the sentence.
        exit_code: of the process.
        step: at which it ended.
    """
    return log_lines.ended(when, reason, exit_code, {"status": status, "step": step})
