"""Faults on purpose, as text: what happens to whom, at which point of which step. Pure.

kill@mid-push,rank=1,step=3      delay:2@before-apply,step=10; cut@mid-reply      kill@mid-checkpoint,part=rename

`protocol.injector` carries them out.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from protocol.errors import ConfigurationError
from protocol.messages import MAX_SECONDS, Side

MAX_NUMBER = 10**15
"""A rank or step above it would never come: it is a slip of the hand."""


class Point(StrEnum):
    """Where in a step something can happen.

    The step of a point is that of the values at which a gradient was computed; of a reply that of the values in
    it; of a checkpoint its own.
    """

    BEFORE_PUSH = "before-push"
    MID_PUSH = "mid-push"  # half of the payload has been sent; on the server: received
    AFTER_PUSH = "after-push"  # sent, and the reply not read
    MID_REPLY = "mid-reply"  # half of the values have been received; on the server: sent
    BEFORE_APPLY = "before-apply"
    AFTER_APPLY = "after-apply"  # before any reply
    MID_CHECKPOINT = "mid-checkpoint"


class Part(StrEnum):
    """Where in the middle of a checkpoint."""

    FILE = "file"  # after the first file of tensors
    MANIFEST = "manifest"  # before the manifest
    RENAME = "rename"  # before the directory gets its name
    PARENT = "parent"  # after that, before the parent directory is on the disk


class Action(StrEnum):
    """What can happen."""

    KILL = "kill"
    STOP = "stop"
    DELAY = "delay"
    CUT = "cut"
    DUPLICATE = "duplicate"
    HALF_CLOSE = "half-close"
    DROP = "drop"


DOES: Mapping[Action, str] = {
    Action.KILL: "this process gets SIGKILL",
    Action.STOP: "this process gets SIGSTOP, and goes on with SIGCONT",
    Action.DELAY: "this thread waits for so many seconds",
    Action.CUT: "the connection is closed in the middle of the frame",
    Action.DUPLICATE: "the push is sent a second time",
    Action.HALF_CLOSE: "the sending side of the connection is shut",
    Action.DROP: "the connection is closed between two frames",
}
"""What each action means."""

_PROCESS = (Action.KILL, Action.STOP, Action.DELAY)
_WITHIN = (*_PROCESS, Action.CUT, Action.HALF_CLOSE)
_BETWEEN = (*_PROCESS, Action.DROP, Action.HALF_CLOSE)

GOES: Mapping[Point, Mapping[Side, Sequence[Action]]] = {
    Point.BEFORE_PUSH: {Side.WORKER: _BETWEEN},
    Point.MID_PUSH: {Side.WORKER: _WITHIN, Side.SERVER: _WITHIN},
    Point.AFTER_PUSH: {Side.WORKER: (*_BETWEEN, Action.DUPLICATE)},
    Point.MID_REPLY: {Side.WORKER: _WITHIN, Side.SERVER: _WITHIN},
    Point.BEFORE_APPLY: {Side.SERVER: _PROCESS},
    Point.AFTER_APPLY: {Side.SERVER: _PROCESS},
    Point.MID_CHECKPOINT: {Side.SERVER: _PROCESS},
}
"""Which points a side has, and which actions go with each."""

_TEXT = re.compile(r"(?P<action>[^:@,]+)(?::(?P<seconds>[^@,]*))?@(?P<point>[^:@,]+)(?:,(?P<conditions>[^@]*))?")
_CONDITIONS = ("rank", "step", "part")

Name = TypeVar("Name", bound=StrEnum)


@dataclass(frozen=True)
class Injection:
    """One fault; it fires once, the first time that all it names is met.

    Attributes:
        action: what happens.
        point: where.
        seconds: of a delay.
        rank: to whom; None: to any.
        step: at which step; None: at any.
        part: of a checkpoint; None: the first.
    """

    action: Action
    point: Point
    seconds: float = 0.0
    rank: int | None = None
    step: int | None = None
    part: Part | None = None

    def meets(self, point: Point, rank: int | None, step: int | None, part: Part | None) -> bool:
        """Say whether it fires here; a rank or step that is None is unknown, and met by no number."""
        return (
            self.point is point
            and self.rank in (None, rank)
            and self.step in (None, step)
            and self.part in (None, part)
        )

    def describe(self, rank: int | None = None, step: int | None = None, part: Part | None = None) -> str:
        """Return what happens where, as `kill at mid-push, rank 1, step 3`; what is not given is as asked for."""
        words = [f"{self.action}:{self.seconds:g}" if self.action is Action.DELAY else str(self.action)]
        words[0] += f" at {self.point}"
        for name, met, asked in (("part", part, self.part), ("rank", rank, self.rank), ("step", step, self.step)):
            value = asked if met is None else met
            words += [] if value is None else [f"{name} {value}"]
        return ", ".join(words)


@dataclass(frozen=True)
class Plan:
    """All faults that a process is to meet."""

    injections: tuple[Injection, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str], side: Side | None = None) -> "Plan":
        """Read `ACTION[:SECONDS]@POINT[,rank=R][,step=S][,part=P]`, several in one text separated by `;`.

        Args:
            texts: as given with `--inject`.
            side: whose faults they are; None: of either.

        Raises:
            ConfigurationError: a text cannot be understood, or names what does not go together.
        """
        pieces = (piece.strip() for text in texts for piece in text.split(";"))
        return cls(tuple(_injection(piece, side) for piece in pieces if piece))

    @property
    def announcement(self) -> str:
        """What a process says of its faults at its start; empty when it has none."""
        if not self.injections:
            return ""
        return f"faults will be injected: {'; '.join(injection.describe() for injection in self.injections)}"


NOTHING: Final = Plan()


def _injection(text: str, side: Side | None) -> Injection:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _wrong(text, "is not ACTION[:SECONDS]@POINT[,rank=R][,step=S], as in kill@mid-push,rank=1,step=3")
    action, point = _named(text, Action, match["action"]), _named(text, Point, match["point"])
    if side is not None and side not in GOES[point]:
        theirs = [known for known, sides in GOES.items() if side in sides]
        raise _wrong(text, f"names no point of a {side}; those are {_listed(theirs)}")
    sides = GOES[point] if side is None else [side]
    going = [known for known in Action if any(known in GOES[point][whose] for whose in sides)]
    if action not in going:
        raise _wrong(text, f"does not go together: with {point} go {_listed(going)}")
    given = _conditions(text, point, match["conditions"] or "")
    return Injection(
        action,
        point,
        _seconds(text, action, match["seconds"]),
        _number(text, "rank", given.get("rank")),
        _number(text, "step", given.get("step")),
        _named(text, Part, given["part"]) if "part" in given else None,
    )


def _conditions(text: str, point: Point, conditions: str) -> dict[str, str]:
    taken = [name for name in _CONDITIONS if name != ("rank" if point is Point.MID_CHECKPOINT else "part")]
    given: dict[str, str] = {}
    for condition in filter(None, conditions.split(",")):
        name, _, value = (piece.strip() for piece in condition.partition("="))
        if name not in taken or name in given:
            raise _wrong(text, f"says {condition!r}: with {point} go {_listed(taken)}, each once, as in step=3")
        given[name] = value
    return given


def _seconds(text: str, action: Action, given: str | None) -> float:
    if action is not Action.DELAY:
        if given is not None:
            raise _wrong(text, f"gives {action} a number: only delay takes one, its seconds")
        return 0.0
    try:
        seconds = float(given or "")
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise _wrong(text, f"needs the delay's seconds, above 0 and at most {MAX_SECONDS:g}, as in delay:2")
    return seconds


def _number(text: str, name: str, given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and int(given) <= MAX_NUMBER):
        raise _wrong(text, f"has a {name} that is no number from 0")
    return int(given)


def _named(text: str, kind: type[Name], name: str) -> Name:
    try:
        return kind(name.strip())
    except ValueError:
        what = kind.__name__.lower()
        raise _wrong(text, f"names no {what} that is known; known are {_listed(list(kind))}") from None


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _wrong(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"--inject {text!r} {why}")
