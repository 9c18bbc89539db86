"""State as JSON with arrays beside it: what comes back equals what went in."""

import json
import math
from enum import IntEnum, StrEnum

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from protocol.errors import LocalProtocolError
from ps.checkpoints.state_codec import decode_state, encode_state


def there_and_back(state):
    return decode_state(*encode_state(state))


def same(left, right):
    """Compare as a restored server would: types, NaN, the sign of zero, and the bits of arrays count."""
    if isinstance(left, np.ndarray | np.generic):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and [*map(repr, left)] == [*map(repr, right)]
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return (
            type(right) is float
            and (left == right or (left != left and right != right))
            and (math.copysign(1, left) == math.copysign(1, right) or left != left)
        )
    return type(left) is type(right) and left == right


_keys = st.text(max_size=5) | st.integers() | st.sampled_from(["$array", "$dict", "$", "a/b", "..", "1"])
_scalars = st.sampled_from([np.float64(0.1), np.float32("nan"), np.int64(-3), np.bool_(True), np.uint8(7)])
_dtypes = st.sampled_from(["<f4", "<f8", "<i8", "bool", "u1"])
_shapes = st.sampled_from([(), (0,), (3,), (2, 0), (2, 2)])
_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | _scalars
    | arrays(
        st.sampled_from(["<f4", "<f8", "<i8", "bool", "u1"]), st.sampled_from([(), (0,), (3,), (2, 0), (2, 2)])
    )
)
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(st.dictionaries(_keys, _values, max_size=5))
def test_what_comes_back_equals_what_went_in(state):
    assert same(state, there_and_back(state))


def test_numbers_that_json_does_not_have():
    state = {"a": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1 << 127], "b": np.float32("-inf")}
    text, arrays_ = encode_state(state)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert same(state, decode_state(text, arrays_))


def test_keys_keep_their_type_and_order():
    back = there_and_back({"ranks": {3: "c", 1: "a", "1": "text"}, "z": 1, "a": 2})
    assert list(back["ranks"].items()) == [(3, "c"), (1, "a"), ("1", "text")]
    assert list(back) == ["ranks", "z", "a"]


def test_arrays_at_the_same_path_stay_apart():
    state = {"a/b": np.array([1]), "a": {"b": np.array([2])}, 5: np.array([3]), "5": np.array([4])}
    assert same(state, there_and_back(state))


def test_bfloat16_comes_back():
    state = {"array": np.arange(3).astype(ml_dtypes.bfloat16), "scalar": ml_dtypes.bfloat16(1.5)}
    assert same(state, there_and_back(state))


def test_a_generators_state_goes_on_with_the_same_numbers():
    for bits in (np.random.PCG64(3), np.random.Philox(3), np.random.MT19937(3), np.random.SFC64(3)):
        random = np.random.Generator(bits)
        random.random(5)
        state = there_and_back({"random": bits.state})["random"]
        expected = random.random(5).tolist()
        bits.state = state
        assert random.random(5).tolist() == expected


def test_names_of_choices_come_back_as_text_and_numbers():
    kind = StrEnum("Kind", {"ADAM": "adam"})
    code = IntEnum("Code", {"SIX": 6})
    assert there_and_back({"kind": kind.ADAM, "code": code.SIX, kind.ADAM: 1}) == {
        "kind": "adam",
        "code": 6,
        "adam": 1,
    }


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"a": {"b": [0, {1, 2}]}}, "state/a/b/1 is of type set"),
        ({"a": object()}, "state/a is of type object"),
        ({"a": 1j}, "state/a is of type complex"),
        ({"a": np.array([None])}, "state/a is of type object"),
        ({"a": np.complex64(1)}, "state/a is of type complex64"),
        ({"a": {(1, 2): 3}}, r"state/a has the key \(1, 2\)"),
        ({"a": {True: 3}}, "state/a has the key True"),
        ({"a": {None: 3}}, "state/a has the key None"),
    ],
)
def test_what_cannot_be_held_is_named_by_its_place(state, complaint):
    with pytest.raises(LocalProtocolError, match=complaint):
        encode_state(state)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"a": NaN}',
        '{"a": {"$array": "missing"}}',
        '{"a": {"$array": 3}}',
        '{"a": {"$scalar": ["float32", "00"]}}',
        '{"a": {"$scalar": ["object", "00"]}}',
        '{"a": {"$scalar": ["float32", "xy"]}}',
        '{"a": {"$float": "1.0"}}',
        '{"a": {"$bytes": "*"}}',
        '{"a": {"$dict": [[1]]}}',
        '{"a": {"$unknown": 1}}',
        '{"a": {"$bytes": "", "b": 1}}',
    ],
)
def test_what_is_not_such_a_text_is_refused(text):
    with pytest.raises(ValueError):
        decode_state(text.encode(), {})
