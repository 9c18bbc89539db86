"""What the fault proxy does to which frame, as text: `ACTION[:ARGUMENT]@KIND[,number=N][,way=WAY]`. Pure.

cut:half@push,number=3      delay:2@values,number=5      blackhole:20@push,number=4,way=up
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeVar

from protocol.errors import ConfigurationError
from protocol.messages import MAX_SECONDS, MESSAGES, Kind, Side

MAX_NUMBER = 10**12
"""A frame of a greater number would not come in a lifetime: it is a slip of the hand."""


class Way(StrEnum):
    """Direction of the bytes."""

    UP = "up"  # from the worker to the server
    DOWN = "down"


class Action(StrEnum):
    """What can happen to a frame."""

    CUT = "cut"
    DELAY = "delay"
    DOUBLE = "double"
    HOLD = "hold"
    SWALLOW = "swallow"
    BLACKHOLE = "blackhole"


class Part(StrEnum):
    """How much of a frame passes before the connection is cut; a number of bytes says it, too."""

    START = "start"
    HEADER = "header"
    HALF = "half"
    LAST = "last"


WAYS = {"up": (Way.UP,), "down": (Way.DOWN,), "both": (Way.UP, Way.DOWN)}

KINDS = {kind.name.lower().replace("_", "-"): kind for kind in Kind}
"""Kinds of frames as a user writes them."""

GRAMMAR = re.compile(r"([a-z]+)(?::([^@,]+))?@([a-z-]+)((?:,[a-z]+=[^,=]*)*)")

FORM = "ACTION[:ARGUMENT]@KIND[,number=N], as in cut:half@push,number=3"

E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class Fault:
    """Something that happens once, to the `number`-th frame of a kind, counted from 0 over all connections.

    Attributes:
        text: as it was written, for reports.
        action: what happens.
        kind: of the frame.
        number: which of them.
        part: cut: how much passes before, or so many bytes.
        seconds: delay: how long; blackhole: until it heals, None is never; else None.
        ways: blackhole: what is swallowed.
    """

    text: str
    action: Action
    kind: Kind
    number: int = 0
    part: Part | int = Part.HALF
    seconds: float | None = None
    ways: tuple[Way, ...] = (Way.UP, Way.DOWN)

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read a fault.

        Raises:
            ConfigurationError: it is no fault, or its parts do not go together; the text says what would go.
        """
        text = text.strip()
        match = GRAMMAR.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"{text!r} is not a fault: write {FORM}")
        action = _one_of(Action, match[1], text)
        if match[3] not in KINDS:
            raise ConfigurationError(
                f"{match[3]!r} in {text!r} is not a kind of frame; there are {', '.join(KINDS)}"
            )
        kind = KINDS[match[3]]
        if action is Action.HOLD and MESSAGES[kind].SENDER is not Side.WORKER:
            ours = [name for name, other in KINDS.items() if MESSAGES[other].SENDER is Side.WORKER]
            raise ConfigurationError(f"hold goes with frames of workers only ({', '.join(ours)}), not {text!r}")
        part, seconds = _argument(action, match[2], text)
        number, ways = _settings(action, match[4], text)
        return cls(text, action, kind, number, part, seconds, ways)

    def passes_bytes(self, header_end: int, size: int) -> int:
        """Return how many bytes of a frame pass before it is cut.

        Args:
            header_end: bytes before the payload.
            size: bytes of the whole frame.
        """
        match self.part:
            case Part.START:
                return 0
            case Part.HEADER:
                return header_end
            case Part.HALF:
                return size // 2
            case Part.LAST:
                return size - 1
            case count:
                return min(count, size)


def _one_of(words: type[E], word: str, text: str) -> E:
    try:
        return words(word)
    except ValueError as error:
        there_are = ", ".join(str(member.value) for member in words)
        raise ConfigurationError(f"{word!r} in {text!r} is not known; there are {there_are}") from error


def _argument(action: Action, argument: str | None, text: str) -> tuple[Part | int, float | None]:
    """Return what stands behind the colon, as (part of a cut, seconds)."""
    if action is Action.CUT:
        if argument is not None and re.fullmatch(r"[0-9]{1,18}", argument):
            return int(argument), None
        return (Part.HALF if argument is None else _one_of(Part, argument, text)), None
    if action in (Action.DELAY, Action.BLACKHOLE):
        if argument is None and action is Action.DELAY:
            raise ConfigurationError(f"{text!r} does not say how long: write the seconds, as in delay:2@push")
        return Part.HALF, None if argument is None else _seconds(argument, text)
    if argument is not None:
        raise ConfigurationError(f"{action.value} takes no argument: write {action.value}@..., not {text!r}")
    return Part.HALF, None


def _seconds(argument: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", argument) or float(argument) > MAX_SECONDS:
        raise ConfigurationError(f"{argument!r} in {text!r} is not a number of seconds, such as 2 or 0.5")
    return float(argument)


def _settings(action: Action, settings: str, text: str) -> tuple[int, tuple[Way, ...]]:
    """Return what stands behind the kind, as (number, ways)."""
    number, ways = 0, WAYS["both"]
    names = set()
    for setting in settings.split(",")[1:]:
        name, value = setting.split("=")
        if name in names:
            raise ConfigurationError(f"{name} stands twice in {text!r}: leave one out")
        names.add(name)
        if name == "number":
            if not re.fullmatch(r"[0-9]{1,13}", value) or int(value) > MAX_NUMBER:
                raise ConfigurationError(f"{value!r} in {text!r} is not the number of a frame; count from 0")
            number = int(value)
        elif name == "way" and action is Action.BLACKHOLE:
            if value not in WAYS:
                raise ConfigurationError(f"{value!r} in {text!r} is not a way; there are {', '.join(WAYS)}")
            ways = WAYS[value]
        else:
            allowed = "number and way" if action is Action.BLACKHOLE else "number"
            raise ConfigurationError(f"{name!r} in {text!r} does not go with {action.value}, only {allowed}")
    return number, ways


class FrameFaults:
    """Counts frames, and says which fault strikes. Not for several threads at once.

    Attributes:
        seen: frames of each kind so far.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.seen: dict[Kind, int] = {}
        self._faults: dict[tuple[Kind, int], Fault] = {}
        for fault in faults:
            other = self._faults.setdefault((fault.kind, fault.number), fault)
            if other is not fault:
                raise ConfigurationError(
                    f"{other.text!r} and {fault.text!r} strike the same frame: give one of them another number"
                )

    def strike(self, kind: Kind) -> Fault | None:
        """Count a frame; return the fault that strikes it, if any."""
        number = self.seen.get(kind, 0)
        self.seen[kind] = number + 1
        return self._faults.get((kind, number))
