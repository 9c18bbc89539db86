"""State of the server's parts as JSON, with its arrays beside it; what is read equals what was written.

JSON's own values stand for themselves. All else is an object with one key that begins with `$`:

    {"$array": "3/rule/kernel"}       an array, by its name in the file of tensors
    {"$scalar": ["float32", "0000803f"]}  a NumPy scalar: dtype, bytes in hex
    {"$float": "nan"}                 a float that JSON does not have
    {"$bytes": "AAE="}                bytes in base64
    {"$dict": [[3, "x"], ...]}        a dict with a key that is a number or begins with `$`
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from ps.checkpoints.tensor_files import TAGS, numpy_type


def encode_state(state: Mapping[str, Any]) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """Return state as JSON in ASCII, and its arrays by name.

    Args:
        state: dicts (keys: str or int), lists and tuples, nested as you like, of str, int, float, bool, None,
            bytes, NumPy arrays and scalars.

    Raises:
        LocalProtocolError: naming the place of a value of another type.
    """
    arrays: dict[str, NDArray[Any]] = {}
    plain = _encoded(state, "", arrays)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n", arrays


def decode_state(text: bytes, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return what `encode_state` was given, except that tuples come back as lists; dicts keep their order.

    Raises:
        ValueError: it is not such a text, or an array is missing; the text says which.
    """
    state = _decoded(json.loads(text, parse_constant=_no_constant), arrays)
    if not isinstance(state, dict):
        raise ValueError("it is not an object")
    return state


def _encoded(value: Any, place: str, arrays: dict[str, NDArray[Any]]) -> Any:
    match value:
        case str():
            return value
        case bytes():
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        case np.ndarray() if value.dtype.name in TAGS:
            name = f"{len(arrays)}{place}"  # the number makes it unique whatever keys hold
            arrays[name] = value
            return {"$array": name}
        case np.generic() if value.dtype.name in TAGS:  # before float: float64 is one of those too
            return {"$scalar": [value.dtype.name, value.tobytes().hex()]}
        case None | int():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case list() | tuple():
            return [_encoded(item, f"{place}/{index}", arrays) for index, item in enumerate(value)]
        case Mapping():
            return _encoded_dict(value, place, arrays)
    kind = value.dtype if isinstance(value, np.ndarray | np.generic) else type(value).__name__
    raise LocalProtocolError(f"state{place} is of type {kind}, which a checkpoint cannot hold")


def _encoded_dict(value: Mapping[Any, Any], place: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise LocalProtocolError(f"state{place} has the key {key!r}, which is neither text nor a whole number")
    pairs = [(key, _encoded(item, f"{place}/{key}", arrays)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def _decoded(plain: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(plain, list):
        return [_decoded(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if not any(key.startswith("$") for key in plain):
        return {key: _decoded(item, arrays) for key, item in plain.items()}
    if len(plain) == 1:
        match plain:
            case {"$array": str(name)} if name in arrays:
                return arrays[name]
            case {"$scalar": [str(dtype), str(data)]}:
                return np.frombuffer(bytes.fromhex(data), numpy_type(dtype))[0]
            case {"$float": "nan" | "inf" | "-inf" as text}:
                return float(text)
            case {"$bytes": str(text)}:
                return base64.b64decode(text, validate=True)
            case {"$dict": list(pairs)} if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                return {key: _decoded(item, arrays) for key, item in pairs}
    raise ValueError(f"{json.dumps(plain):.100} is no value, or an array that is missing")


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
