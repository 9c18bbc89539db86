"""Log lines as JSON, one event a line, for programs that read logs. Pure: the time is an argument.

What happens is said in sentences, for people. A table of sentences gives each a short name that does not change
when its wording does, and picks out the fields that a program asks for.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

UNNAMED = "message"
"""The event of a sentence that no table knows."""

ENDED = "ended"
"""The event of a process that does not end as it should."""

NUMBERS = ("rank", "step", "steps", "workers", "port")
"""Fields that are whole numbers in JSON."""

MAX_MESSAGE_CHARACTERS = 4000
"""A longer sentence is cut: many that collect logs refuse lines above 8 or 16 KB, and a traceback fits."""

WHO = (
    r"(?:rank (?P<rank>\d+) \((?P<name>.*?)\)"
    r"|(?:an? )?(?P<role>worker|validator|evaluator)(?: (?P<other>.+?))?"
    r"|(?P<label>.+?))"
)
"""How sentences name a client: `rank 1 (name)`, `validator name`, `an evaluator`, or a name that says its role."""


@dataclass(frozen=True)
class Sentence:
    """A kind of sentence.

    Attributes:
        event: short stable name, lower case with underscores.
        pattern: matches the whole sentence; its named groups are fields. `other` and `label` become `name`.
        meaning: what it tells, for the documentation.
        advice: what to do about it, for the documentation; empty when nothing need be done.
        level: `info` or `warning`, where nobody gives one with the sentence.
    """

    event: str
    pattern: re.Pattern[str]
    meaning: str
    advice: str = ""
    level: str = "info"


def sentence(event: str, pattern: str, meaning: str, advice: str = "", level: str = "info") -> Sentence:
    """Make a row of a table of sentences; `WHO` in the pattern stands for a client."""
    return Sentence(event, re.compile(pattern.replace("WHO", WHO), re.DOTALL), meaning, advice, level)


def recognise(text: str, table: Sequence[Sentence]) -> tuple[str, dict[str, str | int]]:
    """Return the event of a sentence and the fields in it; the first row that matches decides.

    Args:
        text: what was said.
        table: the sentences of this program.
    """
    event, _, fields = _recognised(text, table)
    return event, fields


def _recognised(text: str, table: Sequence[Sentence]) -> tuple[str, str, dict[str, str | int]]:
    """Return the event, the level and the fields of a sentence."""
    for row in table:
        match = row.pattern.fullmatch(text)
        if match is not None:
            return row.event, row.level, _fields(match)
    return UNNAMED, "info", {}


def _fields(match: re.Match[str]) -> dict[str, str | int]:
    fields: dict[str, str | int] = {}
    for key, value in match.groupdict().items():
        if value is None:
            continue
        field = "name" if key in ("other", "label") else key
        fields[field] = int(value) if field in NUMBERS and value.isdecimal() else value
    return fields


def rfc3339(when: float) -> str:
    """Return seconds since 1970 as UTC with milliseconds, such as `2026-01-31T12:00:00.250Z`.

    Source: RFC 3339, section 5.6.
    """
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(when: float, level: str, event: str, message: str, fields: Mapping[str, object]) -> str:
    """Return one event as a line of ASCII, without the newline.

    Args:
        when: seconds since 1970.
        level: `info`, `warning` or `error`.
        event: short stable name.
        message: the sentence.
        fields: what else is known; None is left out, and a number that JSON does not have becomes null.
    """
    line: dict[str, object] = {"time": rfc3339(when), "level": level, "event": event, "message": _cut(message)}
    for name, value in fields.items():
        if value is not None and name not in line:
            line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(line, ensure_ascii=True, allow_nan=False, default=str)


def said(when: float, text: str, table: Sequence[Sentence], known: Mapping[str, object]) -> str:
    """Return a sentence as a line of JSON; what it says itself wins over what is `known` beforehand."""
    event, level, fields = _recognised(text, table)
    return json_line(when, level, event, text, {**known, **fields})


def ended(when: float, reason: str, exit_code: int, known: Mapping[str, object]) -> str:
    """Return the last line of a process that does not end as it should, as JSON.

    Args:
        when: seconds since 1970.
        reason: the sentence.
        exit_code: of the process.
        known: what else is known, such as `rank`.
    """
    return json_line(when, "error", ENDED, reason, {**known, "exit_code": int(exit_code)})


def asks_for_json(arguments: Sequence[str], variable: str | None) -> bool:
    """Return whether a program is to log in JSON, before its options are understood, or when they cannot be.

    Args:
        arguments: of its command line.
        variable: `WEIGHMASTER_LOG_FORMAT`, over which the command line wins.
    """
    asked = variable
    for position, word in enumerate(arguments):
        name, is_joined, value = word.partition("=")
        if name == "--log-format":
            asked = value if is_joined else next(iter(arguments[position + 1 :]), "")
    return asked == "json"


def _cut(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return f"{message[: MAX_MESSAGE_CHARACTERS - 4]} ..."
