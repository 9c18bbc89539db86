"""Messages to headers and back: a flat msgpack map of the message's fields, and nothing else."""

import dataclasses
from enum import StrEnum
from typing import Any, get_type_hints

import msgpack

from protocol.errors import RemoteProtocolError
from protocol.frames import MAX_HEADER_MANIFEST
from protocol.messages import MESSAGES, Kind, Message

MAX_FIELDS = 32
MAX_WORDS = 8


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
    fields = _unpack(header, cls.__name__)
    names = _field_types(cls)
    if fields.keys() != names.keys():
        odd = sorted(map(str, fields.keys() ^ names.keys()))[0]
        raise RemoteProtocolError(f"the peer sent a {cls.__name__} with a missing or unknown field {odd!r:.40}")
    try:
        for name, (enum, is_tuple) in names.items():
            if enum is not None:
                fields[name] = enum(fields[name])
            elif is_tuple and isinstance(fields[name], list):
                fields[name] = tuple(fields[name])
        return cls(**fields)
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"the peer sent an invalid {cls.__name__}: {error}") from error


def _unpack(header: bytes, what: str) -> dict[Any, Any]:
    try:
        fields = msgpack.unpackb(
            header,
            strict_map_key=True,
            max_array_len=MAX_WORDS,
            max_map_len=MAX_FIELDS,
            max_ext_len=0,
            max_str_len=MAX_HEADER_MANIFEST,
            max_bin_len=MAX_HEADER_MANIFEST,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"the peer sent a {what} whose header is not msgpack: {error!r:.120}") from error
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"the peer sent a {what} whose header is not a map")
    return fields


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
