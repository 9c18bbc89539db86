"""Messages to headers and back: a flat msgpack map of the message's fields, and nothing else."""

import dataclasses
from collections.abc import Container
from enum import StrEnum
from typing import Any, get_type_hints

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


def encode_header(message: Message) -> bytes:
    """Return the header of a message."""
    fields = {}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        fields[field.name] = value.value if isinstance(value, StrEnum) else value
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
    names = _field_types(cls)
    fields = _unpack(header, cls.__name__, names)
    for name in names:
        if name not in fields:
            raise RemoteProtocolError(f"the peer sent a {cls.__name__} without the field {name!r}")
    try:
        for name, (enum, is_tuple) in names.items():
            if enum is not None:
                fields[name] = enum(fields[name])
            elif is_tuple and isinstance(fields[name], list):
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
    """Decode a flat map; each key and value is measured before it is decoded, since nested lists grow fiftyfold."""
    walker = msgpack.Unpacker(max_buffer_size=max(len(header), 1))
    walker.feed(header)
    count = walker.read_map_header()
    if count > MAX_FIELDS:
        raise ValueError(f"{count} fields are more than {MAX_FIELDS}")
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = _next(walker, header, MAX_KEY_BYTES)
        if key in fields:
            raise ValueError(f"field {key!r} comes twice")
        if not isinstance(key, str) or key not in names:
            raise ValueError(f"unknown field {key!r}")
        fields[key] = _next(walker, header, MAX_VALUE_BYTES)
    if walker.tell() != len(header):
        raise ValueError("bytes after the map")
    return fields


def _next(walker: Any, header: memoryview, limit: int) -> Any:
    start = walker.tell()
    walker.skip()
    piece = header[start : walker.tell()]
    if len(piece) > limit and piece[0] not in BINARY:
        raise ValueError(f"a field of {len(piece)} bytes")
    return msgpack.unpackb(piece, strict_map_key=True, max_array_len=MAX_WORDS, max_map_len=0, max_ext_len=0)


_FieldTypes = dict[str, tuple[type[StrEnum] | None, bool]]
_types: dict[type[Message], _FieldTypes] = {}


def _field_types(cls: type[Message]) -> _FieldTypes:
    found = _types.get(cls)
    if found is None:
        hints = get_type_hints(cls)
        found = {}
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            enum = hint if isinstance(hint, type) and issubclass(hint, StrEnum) else None
            found[field.name] = (enum, field.name == "codecs")
        _types[cls] = found
    return found
