"""Files of tensors in the safetensors format: arrays to buffers and back, nothing copied.

A file is the length of the header (8 bytes, little endian), the header (JSON: name to dtype, shape and place), and
the data (https://github.com/huggingface/safetensors, "Format"). The library writes it too, but neither tells the
checksum of what it wrote nor reads and checks in one pass.
"""

import importlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from protocol.tensors import ALIGNMENT

TAGS: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What the format calls each dtype; others are not written."""

_NAMES = {tag: name for name, tag in TAGS.items()}
_LENGTH_BYTES = 8
_RESERVED = "__metadata__"
"""The one name that the format keeps for itself. A tensor of this name gets a `~` more in the file."""


def encode(tensors: Mapping[str, NDArray[Any]]) -> list[memoryview]:
    """Return the contents of a file of tensors: its header, then the memory of the arrays themselves.

    Only arrays that are not contiguous in C order, or not little endian, are copied. The data begins at a multiple
    of 64 bytes, larger items first, so that every tensor is aligned to its items.

    Args:
        tensors: arrays of any shape (empty and 0-d too) by name; dtypes of `TAGS`.

    Raises:
        LocalProtocolError: an array of another dtype.
    """
    arrays = {name: _plain(name, array) for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    places: dict[str, list[int]] = {}
    end = 0
    for name in order:
        places[name] = [end, end + arrays[name].nbytes]
        end += arrays[name].nbytes
    header = {
        _escaped(name): {"dtype": TAGS[a.dtype.name], "shape": list(a.shape), "data_offsets": places[name]}
        for name, a in arrays.items()
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    start = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return [memoryview(start), *(arrays[name].reshape(-1).view(np.uint8).data for name in order)]


def decode(file: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file by name, in the order of its header, as views.

    Args:
        file: the whole contents, [bytes].

    Raises:
        ValueError: it is not a file of tensors; the text says why.
    """
    header_end = _LENGTH_BYTES + int.from_bytes(file[:_LENGTH_BYTES].tobytes(), "little")
    if not _LENGTH_BYTES < header_end <= file.size:
        raise ValueError("its header does not fit into it")
    header = json.loads(file[_LENGTH_BYTES:header_end].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    data = file[header_end:]
    tensors = {_unescaped(n): _tensor(data, n, entry) for n, entry in header.items() if n != _RESERVED}
    if sum(tensor.nbytes for tensor in tensors.values()) != data.size:
        raise ValueError("its tensors do not add up to its length")
    return tensors


def numpy_type(name: str) -> np.dtype[Any]:
    """Return the dtype of that name, of `TAGS`.

    Raises:
        ValueError: there is no such dtype, or it needs a package that is not there.
    """
    if name not in TAGS:
        raise ValueError(f"it holds {name!r}, which is not a dtype of checkpoints")
    if name != "bfloat16":
        return np.dtype(name).newbyteorder("<")
    try:  # the package belongs to TensorFlow: a server without it holds bfloat16 as its raw bits
        bfloat16: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return bfloat16
    except ModuleNotFoundError as error:
        raise ValueError("it holds bfloat16, which needs `pip install ml_dtypes`") from error


def _plain(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.name not in TAGS:
        raise LocalProtocolError(f"tensor {name!r} is of dtype {array.dtype.name}, which is not written to files")
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    return np.asarray(little, order="C")


def _tensor(data: NDArray[np.uint8], name: str, entry: object) -> NDArray[Any]:
    match entry:
        case {"dtype": str(tag), "shape": list(shape), "data_offsets": [int(start), int(end)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            dtype = numpy_type(_NAMES.get(tag, tag))
            if 0 <= start <= end <= data.size and end - start == math.prod(shape) * dtype.itemsize:
                return data[start:end].view(dtype).reshape(shape)
    raise ValueError(f"the entry of its tensor {name!r} is not valid")


def _escaped(name: str) -> str:
    return f"{name}~" if name.rstrip("~") == _RESERVED else name


def _unescaped(name: str) -> str:
    return name[:-1] if name.rstrip("~") == _RESERVED else name
