"""A state on its way through the files of a checkpoint, and with parts of it left out; for tests of resuming."""

import json

import numpy as np


def written_and_read(value):
    """Return a state as it comes back from files: lists for tuples, text for keys, arrays as arrays."""
    return read(json.loads(json.dumps(plain(value))))


def plain(value):
    match value:
        case np.ndarray():
            return {"array": value.tolist(), "dtype": value.dtype.name, "shape": list(value.shape)}
        case bytes():
            return {"bytes": value.hex()}
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    assert value is None or isinstance(value, str | int | float), f"{value!r} cannot be written"
    return value


def read(value):
    match value:
        case {"array": items, "dtype": dtype, "shape": shape}:
            return np.array(items, dtype).reshape(shape)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case dict():
            return {key: read(item) for key, item in value.items()}
        case list():
            return [read(item) for item in value]
    return value


def copied(tensors):
    return {group: {name: view.copy() for name, view in part.items()} for group, part in tensors.items()}


def leaves(state, place=()):
    """Yield the place of everything in a state that is neither a dict nor a list of states."""
    if isinstance(state, dict):
        for key, item in state.items():
            yield from leaves(item, (*place, key))
    else:
        yield place


def at(state, place):
    for key in place:
        state = state[key]
    return state


def without(state, place, fresh):
    """Return a copy of a state in which one part is as in a server that has just started."""
    changed = json.loads(json.dumps(plain(state)))
    parent = at(changed, place[:-1])
    parent[place[-1]] = plain(at(fresh, place))
    return read(changed)
