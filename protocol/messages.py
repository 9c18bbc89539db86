"""Messages as frozen dataclasses that cannot hold what the protocol does not allow.

A field's type carries its limit (`Annotated[int, Between(0, 7)]`), and one check serves both directions: a bad
value of ours is a `ValueError` where it was made, one of the peer's becomes a `RemoteProtocolError` in `codec`.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

AUTO_RANK = -1
"""Asks the server for the lowest free rank; also the rank of those that have none (validators, evaluators)."""

NONCE_BYTES = 32
MAC_BYTES = 32
MAX_RANK = 65_535
MAX_NAME_CHARACTERS = 128
MAX_REASON_CHARACTERS = 4096

MAX_SECONDS = 1e8
"""Longest interval that may be agreed, three years: finite, so that no arithmetic on it can fail."""


class Side(StrEnum):
    """The two ends of a connection."""

    WORKER = "worker"
    SERVER = "server"


class Role(StrEnum):
    """What a client of the server is there for."""

    WORKER = "worker"
    VALIDATOR = "validator"
    EVALUATOR = "evaluator"


class RefusalCode(StrEnum):
    """Why the server said no; a refusal is never retried."""

    VERSION = "version"
    PROOF = "proof"
    TOKEN_REQUIRED = "token_required"
    RANK_TAKEN = "rank_taken"
    RANK_RANGE = "rank_range"
    FULL = "full"
    CODEC = "codec"
    SEED = "seed"
    MANIFEST = "manifest"
    TOO_LARGE = "too_large"


class Status(StrEnum):
    """How a run ended; the `status` of the summary."""

    DONE = "done"
    DIVERGED = "diverged"
    LOST = "lost"
    NO_PROGRESS = "no_progress"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


# ---- limits that field types carry ---------------------------------------------------------------------


@dataclass(frozen=True)
class Between:
    """An integer within [low, high]."""

    low: int
    high: int

    def __call__(self, value: Any) -> bool:
        """Say whether a value is allowed."""
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True)
class Printable:
    """Text of at most `characters`, all printable: no newline, no escape, nothing to inject into a log."""

    characters: int

    def __call__(self, value: Any) -> bool:
        """Say whether a value is allowed."""
        return isinstance(value, str) and len(value) <= self.characters and value.isprintable()


@dataclass(frozen=True)
class Octets:
    """Bytes, of one exact length or (`at_most`) up to it."""

    length: int
    at_most: bool = False

    def __call__(self, value: Any) -> bool:
        """Say whether a value is allowed."""
        if type(value) is not bytes:
            return False
        return len(value) <= self.length if self.at_most else len(value) == self.length


@dataclass(frozen=True)
class Words:
    """A tuple of at most `count` short printable texts."""

    count: int

    def __call__(self, value: Any) -> bool:
        """Say whether a value is allowed."""
        return isinstance(value, tuple) and len(value) <= self.count and all(map(Printable(32), value))


@dataclass(frozen=True)
class Number:
    """A float within [low, high], infinities included; NaN only where a worker must be able to report it."""

    low: float = -math.inf
    high: float = math.inf
    nan: bool = False

    def __call__(self, value: Any) -> bool:
        """Say whether a value is allowed."""
        return type(value) is float and (self.low <= value <= self.high or (self.nan and math.isnan(value)))


def _shown(value: Any) -> str:
    return repr(value[:80] if isinstance(value, (str, bytes)) else value)[:80]


U63 = Annotated[int, Between(0, 2**63 - 1)]
Flag = Annotated[bool, lambda value: type(value) is bool]
Rank = Annotated[int, Between(AUTO_RANK, MAX_RANK)]
Name = Annotated[str, Printable(MAX_NAME_CHARACTERS)]
Reason = Annotated[str, Printable(MAX_REASON_CHARACTERS)]
Nonce = Annotated[bytes, Octets(NONCE_BYTES)]
Seconds = Annotated[float, Number(0.0, MAX_SECONDS)]
Scalar = Annotated[float, Number(nan=True)]
Rows = Annotated[bytes, Octets(16 << 20, at_most=True)]
Count = Annotated[int, Between(0, 2**31 - 1)]
Digest = Annotated[bytes, Octets(16)]


class Kind(IntEnum):
    """Numbers of the messages on the wire; a number is never given to another message."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    SERVER_PROOF = 4
    OFFER = 5
    WELCOME = 6
    REFUSED = 7
    PULL = 8
    VALUES = 9
    PUSH = 10
    ASK_INITIAL = 11
    INITIAL = 12
    HEARTBEAT = 13
    REPORT = 14
    BYE = 15
    ENDED = 16
    LOGITS = 17
    WEIGHTS = 18
    TEST_LOGITS = 19


@dataclass(frozen=True)
class Message:
    """Base of all messages; checks every field against the limit in its type."""

    KIND: ClassVar[Kind]
    SENDER: ClassVar[Side | None]  # None: both sides

    def __post_init__(self) -> None:
        for name, allowed, optional in checks_of(type(self)):
            value = getattr(self, name)
            if not (optional and value is None) and not allowed(value):
                raise ValueError(f"{type(self).__name__}.{name} cannot be {_shown(value)}")


@dataclass(frozen=True)
class Hello(Message):
    """First frame of a connection: who wants to join. Carries no manifest and no secret."""

    KIND = Kind.HELLO
    SENDER = Side.WORKER
    name: Name
    host: Name
    rank: Rank
    role: Role
    incarnation: U63
    nonce: Nonce
    codecs: Annotated[tuple[str, ...], Words(8)] = ("raw",)


@dataclass(frozen=True)
class Challenge(Message):
    """The server's nonce, and whether it asks for a token."""

    KIND = Kind.CHALLENGE
    SENDER = Side.SERVER
    nonce: Nonce
    token_required: Flag


@dataclass(frozen=True)
class Proof(Message):
    """The worker's proof that it holds the token (zeros where none is asked for)."""

    KIND = Kind.PROOF
    SENDER = Side.WORKER
    mac: Annotated[bytes, Octets(MAC_BYTES)]


@dataclass(frozen=True)
class ServerProof(Message):
    """The server's proof that it holds the same token (zeros where none is asked for)."""

    KIND = Kind.SERVER_PROOF
    SENDER = Side.SERVER
    mac: Annotated[bytes, Octets(MAC_BYTES)]


@dataclass(frozen=True)
class Offer(Message):
    """What the worker holds: its manifest (rows as `Manifest.to_wire`), its thread count, its seed if given.

    The next four say what it answers with in ensemble mode, as `protocol.ensemble.Answers`; 0 and empty: nothing.
    `software` names all on which the last bits of a gradient depend, in words of the worker's own.
    """

    KIND = Kind.OFFER
    SENDER = Side.WORKER
    manifest: Rows
    threads: Annotated[int, Between(1, 4096)]
    seed: U63 | None = None
    examples: Count = 0
    classes: Count = 0
    logits_dtype: Name = ""
    test_examples: Count = 0
    software: Name = ""


@dataclass(frozen=True)
class Welcome(Message):
    """What was agreed: identity, the server's manifest, and all that a batch is a function of."""

    KIND = Kind.WELCOME
    SENDER = Side.SERVER
    epoch: U63
    step: U63
    steps: U63
    rank: Rank
    name: Name
    seed: U63
    threads: Annotated[int, Between(1, 4096)]
    workers: Count
    shards: Count
    mode: Name
    codec: Name
    heartbeat_interval: Seconds
    heartbeat_timeout: Seconds
    manifest: Rows
    weighting: Name = ""


@dataclass(frozen=True)
class Refusal(Message):
    """No, and why. The connection ends with it, and the worker does not try again."""

    KIND = Kind.REFUSED
    SENDER = Side.SERVER
    code: RefusalCode
    reason: Reason


@dataclass(frozen=True)
class Pull(Message):
    """Ask for values of a step that is at least `min_step`."""

    KIND = Kind.PULL
    SENDER = Side.WORKER
    min_step: U63


@dataclass(frozen=True)
class Values(Message):
    """Values of (epoch, step); the payload is the arena.

    Attributes:
        seq: the push that this answers; 0 answers a pull.
        applied: whether that push was taken into its round, where the rule may still give it weight 0.
        reason: why not, or empty.
        done: whether these are the final values.
    """

    KIND = Kind.VALUES
    SENDER = Side.SERVER
    epoch: U63
    step: U63
    seq: U63
    applied: Flag
    reason: Reason
    done: Flag


@dataclass(frozen=True)
class Push(Message):
    """A gradient computed at the values of (epoch, step); the payload is the arena.

    Attributes:
        seq: 1 for the first push of an incarnation, then one more for each; a retry keeps its number.
        loss: mean loss of the batch at those values, before the update.
        accuracy: likewise, or None.
        examples: size of the batch.
        labels: digest of the labels, in ensemble mode; else None.
    """

    KIND = Kind.PUSH
    SENDER = Side.WORKER
    epoch: U63
    step: U63
    seq: Annotated[int, Between(1, 2**63 - 1)]
    loss: Scalar | None
    accuracy: Scalar | None
    examples: Count
    labels: Digest | None = None


@dataclass(frozen=True)
class AskInitial(Message):
    """The server has no values yet and asks this one client for them."""

    KIND = Kind.ASK_INITIAL
    SENDER = Side.SERVER


@dataclass(frozen=True)
class Initial(Message):
    """Initial values; the payload is the arena."""

    KIND = Kind.INITIAL
    SENDER = Side.WORKER


@dataclass(frozen=True)
class Heartbeat(Message):
    """A sign of life; from the server also whom it waits for, in words (empty: nobody)."""

    KIND = Kind.HEARTBEAT
    SENDER = None
    waiting: Reason = ""


@dataclass(frozen=True)
class Report(Message):
    """An evaluator's measurement on the test set at the values of (epoch, step)."""

    KIND = Kind.REPORT
    SENDER = Side.WORKER
    epoch: U63
    step: U63
    loss: Scalar
    accuracy: Scalar | None
    examples: Count


@dataclass(frozen=True)
class Bye(Message):
    """The client leaves on purpose; the connection ends with it."""

    KIND = Kind.BYE
    SENDER = Side.WORKER


@dataclass(frozen=True)
class Ended(Message):
    """The run has ended otherwise than by its last step; the connection ends with it."""

    KIND = Kind.ENDED
    SENDER = Side.SERVER
    status: Status
    reason: Reason


@dataclass(frozen=True)
class Logits(Message):
    """A member's answers to its batch at the values of (epoch, step); the payload is logits and labels.

    Attributes:
        seq: of the push that will follow.
        labels: digest of the labels.
    """

    KIND = Kind.LOGITS
    SENDER = Side.WORKER
    epoch: U63
    step: U63
    seq: Annotated[int, Between(1, 2**63 - 1)]
    labels: Digest


@dataclass(frozen=True)
class Weights(Message):
    """What each example of that batch counts for this member; the payload is the weights."""

    KIND = Kind.WEIGHTS
    SENDER = Side.SERVER
    epoch: U63
    step: U63
    seq: Annotated[int, Between(1, 2**63 - 1)]


@dataclass(frozen=True)
class TestLogits(Message):
    """A member's answers to the test set at the values of (epoch, step); the payload is logits and labels."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    KIND = Kind.TEST_LOGITS
    SENDER = Side.WORKER
    epoch: U63
    step: U63


MESSAGES: dict[Kind, type[Message]] = {cls.KIND: cls for cls in Message.__subclasses__()}

_Check = tuple[str, Callable[[Any], bool], bool]
_checks: dict[type[Message], tuple[_Check, ...]] = {}


def checks_of(cls: type[Message]) -> tuple[_Check, ...]:
    """Return (field, predicate, may be None) for each field of a message class."""
    found = _checks.get(cls)
    if found is None:
        hints = get_type_hints(cls, include_extras=True)
        found = tuple((field.name, *_check_of(hints[field.name])) for field in dataclasses.fields(cls))
        _checks[cls] = found
    return found


def _check_of(hint: Any) -> tuple[Callable[[Any], bool], bool]:
    optional = type(None) in get_args(hint)
    if optional:
        hint = next(argument for argument in get_args(hint) if argument is not type(None))
    if get_origin(hint) is Annotated:
        return get_args(hint)[1], optional
    return (lambda value: isinstance(value, hint)), optional
