"""Files of tensors: the same bits come back, and the library of the format reads and writes them too."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from protocol.errors import LocalProtocolError
from ps.checkpoints import tensor_files

HOSTILE = [
    "a/b/c",
    "../../etc/passwd",
    "/root",
    ".",
    "..",
    "ü ∑ 🦙",
    "a\\b",
    '"',
    "{}",
    "__metadata__",
    "__metadata__~",
]


def of_every_dtype():
    random = np.random.default_rng(3)
    arrays = {}
    for name in tensor_files.TAGS:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        items = random.integers(0, 2 if name == "bool" else 256, (7, 3 * dtype.itemsize), np.uint8).view(dtype)
        arrays |= {
            name: items,
            f"{name} 0-d": items[0, 0].reshape(()),
            f"{name} empty": items[:0],
            f"{name} c": items.T,
        }
    return arrays


def file_of(tensors):
    return np.frombuffer(b"".join(tensor_files.encode(tensors)), np.uint8)


def assert_same_bits(left, right):
    assert list(left) == list(right)
    for name, array in left.items():
        assert array.dtype == right[name].dtype and array.shape == right[name].shape, name
        assert array.tobytes() == right[name].tobytes(), name


def test_all_dtypes_and_shapes_come_back_bit_by_bit():
    arrays = of_every_dtype()
    assert_same_bits(arrays, tensor_files.decode(file_of(arrays)))


def test_every_tensor_is_aligned_to_its_items():
    for name, array in tensor_files.decode(_at_64(file_of(of_every_dtype()))).items():
        assert array.flags.aligned, name


def _at_64(file):
    raw = np.empty(file.size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + file.size] = file
    return raw[start : start + file.size]


def test_big_endian_and_strided_arrays_come_back_equal():
    arrays = {"big": np.arange(5, dtype=">f4"), "strided": np.arange(10)[::2], "column": np.ones((3, 2), order="F")}
    back = tensor_files.decode(file_of(arrays))
    assert {name: array.tolist() for name, array in arrays.items()} == {n: a.tolist() for n, a in back.items()}


def test_nothing_is_copied():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    _, data = tensor_files.encode({"x": array})
    array[1, 2] = 77.0
    assert np.frombuffer(data, np.float32)[5] == 77.0


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_comes_back(name):
    arrays = {name: np.arange(3), "other": np.ones(2)}
    assert_same_bits(arrays, tensor_files.decode(file_of(arrays)))


def test_all_names_together_stay_apart():
    arrays = {name: np.full(2, index) for index, name in enumerate(HOSTILE)}
    assert_same_bits(arrays, tensor_files.decode(file_of(arrays)))


def test_the_library_reads_our_files(tmp_path):
    arrays = {n: a for n, a in of_every_dtype().items() if not n.startswith("bfloat16")} | {"ü/..": np.arange(3)}
    (tmp_path / "file").write_bytes(file_of(arrays))
    read = load_file(tmp_path / "file")
    assert_same_bits(arrays, {name: read[name] for name in arrays})


def test_we_read_the_librarys_files(tmp_path):
    arrays = {"a": np.arange(3.0), "b/c": np.array(True), "d": np.empty((0, 4), np.int16)}
    save_file(arrays, tmp_path / "file", {"format": "np"})
    read = tensor_files.decode(np.fromfile(tmp_path / "file", np.uint8))
    assert_same_bits(arrays, {name: read[name] for name in arrays})


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([None]), np.ones(2, complex), np.zeros(2, "M8[s]")])
def test_other_dtypes_are_not_written(array):
    with pytest.raises(LocalProtocolError, match=r"'x' is of dtype .*not written"):
        tensor_files.encode({"x": array})


def _with_header(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + data, np.uint8)


def _entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def test_the_header_of_the_following_cases_is_good_as_it_is():
    assert tensor_files.decode(_with_header(_entry()))["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (np.empty(0, np.uint8), "header does not fit"),
        (np.full(8, 255, np.uint8), "header does not fit"),
        (np.frombuffer((9).to_bytes(8, "little") + b"{}", np.uint8), "header does not fit"),
        (_with_header(b"[1]"), "not a table"),
        (_with_header(b"{"), "Expecting"),
        (_with_header(b"\xff\xff"), "decode"),
        (_with_header({"x": 3}), "'x' is not valid"),
        (_with_header(_entry(dtype="F31")), "'F31', which is not a dtype"),
        (_with_header(_entry(dtype="object")), "'object', which is not a dtype"),
        (_with_header(_entry(shape=[3])), "'x' is not valid"),
        (_with_header(_entry(shape=[-2])), "'x' is not valid"),
        (_with_header(_entry(shape=[True, 2])), "'x' is not valid"),
        (_with_header(_entry(shape=[1 << 62, 1 << 62])), "'x' is not valid"),
        (_with_header(_entry(data_offsets=[4, 12])), "'x' is not valid"),
        (_with_header(_entry(data_offsets=[8, 0])), "'x' is not valid"),
        (_with_header(_entry(data_offsets=[-8, 0])), "'x' is not valid"),
        (_with_header(_entry(), b"\0" * 9), "do not add up"),
        (_with_header({}), "do not add up"),
    ],
)
def test_what_is_no_such_file_is_told(file, complaint):
    with pytest.raises(ValueError, match=complaint):
        tensor_files.decode(file)


def test_bfloat16_without_its_package_is_told(monkeypatch):
    file = file_of({"x": np.ones(2, ml_dtypes.bfloat16)})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ValueError, match="pip install ml_dtypes"):
        tensor_files.decode(file)
