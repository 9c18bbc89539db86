"""Messages to headers and back: a flat msgpack map of the message's fields, and nothing else."""

import dataclasses
from collections.abc import Container, Iterable, Iterator
from enum import StrEnum
from typing import Any, get_origin, get_type_hints

import msgpack

from protocol.errors import RemoteProtocolError
from protocol.messages import MAX_REASON_CHARACTERS, MESSAGES, Kind, Message

MAX_FIELDS = 32
MAX_WORDS = 8
MAX_KEY_BYTES = 64

MAX_VALUE_BYTES = 4 * MAX_REASON_CHARACTERS + 5
"""Encoded size of any field but a manifest: the longest text, at four bytes a character."""

BINARY = range(0xC4, 0xC7)
"""First bytes of msgpack binaries, the only values that cannot grow when they are decoded."""

SHORT_HEADER = 1024
"""Headers up to this size are decoded at once: the worst of them takes 120 KB."""

Pairs = Iterable[tuple[Any, Any]]


def encode_header(message: Message) -> bytes:
    """Return the header of a message."""
    fields = {name: getattr(message, name) for name in _shape_of(type(message)).names}
    packed: bytes = msgpack.packb(fields)
    return packed


def decode_header(kind: int, header: bytes) -> Message:
    """Rebuild the message of a header.

    The map must hold exactly the fields of the message. Extension types (timestamps too), nesting beyond a list
    of words, and any wrong type or range are refused.

    Raises:
        RemoteProtocolError: for anything that is not a valid message of this kind.
    """
    cls = MESSAGES.get(Kind(kind)) if kind in Kind._value2member_map_ else None
    if cls is None:
        raise RemoteProtocolError(f"the peer sent a message of unknown kind {kind}")
    shape = _shape_of(cls)
    fields = _unpack(header, cls.__name__, shape.names)
    if len(fields) < len(shape.names):
        missing = next(name for name in shape.names if name not in fields)
        raise RemoteProtocolError(f"the peer sent a {cls.__name__} without the field {missing!r}")
    try:
        for name, enum in shape.enums.items():
            fields[name] = enum(fields[name])
        for name in shape.tuples:
            if isinstance(fields[name], list):
                fields[name] = tuple(fields[name])
        return cls(**fields)
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"the peer sent an invalid {cls.__name__}: {error}") from error


def _unpack(header: bytes, what: str, names: Container[str]) -> dict[str, Any]:
    try:
        return _fields(memoryview(header), names)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        text = f"{type(error).__name__} {error}"[:120]  # never repr: msgpack's errors carry all of the input
        raise RemoteProtocolError(f"the peer sent a {what} whose header is not valid: {text}") from error


def _fields(header: memoryview, names: Container[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in _short_pairs(header) if len(header) <= SHORT_HEADER else _long_pairs(header):
        if not isinstance(key, str) or key not in names:
            raise ValueError(f"unknown field {key!r}")
        if key in fields:
            raise ValueError(f"field {key!r} comes twice")
        if isinstance(value, tuple):
            raise ValueError(f"a map or an extension in {key!r}")
        fields[key] = value
    return fields


def _short_pairs(header: memoryview) -> Pairs:
    """Decode a map at once; maps within it become tuples, which nothing else does but extensions."""
    pairs = msgpack.unpackb(
        header,
        object_pairs_hook=tuple,
        strict_map_key=True,
        max_array_len=MAX_WORDS,
        max_map_len=MAX_FIELDS,
        max_ext_len=0,
    )
    if not isinstance(pairs, tuple):
        raise ValueError("no map")
    return pairs


def _long_pairs(header: memoryview) -> Iterator[tuple[Any, Any]]:
    """Decode a map piece by piece, each measured before it is decoded, since nested lists grow fiftyfold."""
    walker = msgpack.Unpacker(max_buffer_size=len(header))
    walker.feed(header)
    count = walker.read_map_header()
    if count > MAX_FIELDS:
        raise ValueError(f"{count} fields are more than {MAX_FIELDS}")
    for _ in range(count):
        yield _next(walker, header, MAX_KEY_BYTES), _next(walker, header, MAX_VALUE_BYTES)
    if walker.tell() != len(header):
        raise ValueError("bytes after the map")


def _next(walker: Any, header: memoryview, limit: int) -> Any:
    start = walker.tell()
    walker.skip()
    piece = header[start : walker.tell()]
    if len(piece) > limit and piece[0] not in BINARY:
        raise ValueError(f"a field of {len(piece)} bytes")
    return msgpack.unpackb(piece, strict_map_key=True, max_array_len=MAX_WORDS, max_map_len=0, max_ext_len=0)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the codec has to know of a kind of message.

    Attributes:
        names: of the fields, in order, as keys for quick look-ups.
        enums: those that are one of a few words, with their type.
        tuples: those that are lists on the wire.
    """

    names: dict[str, None]
    enums: dict[str, type[StrEnum]]
    tuples: tuple[str, ...]


_shapes: dict[type[Message], _Shape] = {}


def _shape_of(cls: type[Message]) -> _Shape:
    if cls not in _shapes:
        _shapes[cls] = _make_shape(cls)
    return _shapes[cls]


def _make_shape(cls: type[Message]) -> _Shape:
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    enums = {
        name: hints[name] for name in names if isinstance(hints[name], type) and issubclass(hints[name], StrEnum)
    }
    return _Shape(dict.fromkeys(names), enums, tuple(name for name in names if get_origin(hints[name]) is tuple))
