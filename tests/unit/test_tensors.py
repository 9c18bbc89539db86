"""Manifest, layout and arena: what travels, where it lies, and what a hostile manifest cannot do."""

import math
import mmap
import tracemalloc
from pathlib import Path

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.arena import HUGE_PAGE_BYTES, Arena, aligned_empty, check_array
from protocol.errors import LocalProtocolError, ManifestMismatch, RemoteProtocolError
from protocol.tensors import (
    ALIGNMENT,
    FLOATING,
    ITEM_BYTES,
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_ROW_BYTES,
    MAX_VARIABLES,
    SHARED,
    SMALL_BYTES,
    Kind,
    Layout,
    Manifest,
    SideSpec,
    VariableSpec,
    numpy_dtype,
)

some_cases = settings(max_examples=60)
STATE, TRAINABLE = Kind.STATE, Kind.TRAINABLE


def spec(name, shape=(), dtype="float32", kind=TRAINABLE, owner=SHARED):
    return VariableSpec(name, shape, dtype, kind, owner)


def manifest(*specs):
    return Manifest(tuple(specs))


@st.composite
def specs(draw, name):
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    kinds = list(Kind) if dtype in FLOATING else [STATE]
    small, large = st.lists(st.integers(0, 30), max_size=3).map(tuple), st.just((1025, 1024))
    shape = draw(st.one_of(small, small, small, large))
    return VariableSpec(name, shape, dtype, draw(st.sampled_from(kinds)), draw(st.integers(-1, 2)))


@st.composite
def manifests(draw):
    names = draw(st.lists(st.text("abcäß/_0", min_size=1, max_size=8), unique=True, max_size=12))
    return Manifest(tuple(draw(specs(name)) for name in names))


# ---- what a variable may be ----------------------------------------------------------------------------


def test_a_name_on_both_sides_of_its_limit():
    spec("x" * MAX_NAME_BYTES)
    spec("ä" * (MAX_NAME_BYTES // 2))
    for name in ("", "x" * (MAX_NAME_BYTES + 1), "ä" * (MAX_NAME_BYTES // 2 + 1), "a\nb", "\x1b[0m", "\u202e"):
        with pytest.raises(ValueError, match="name must be"):
            spec(name)


def test_a_shape_on_both_sides_of_its_limit():
    spec("v", (1,) * MAX_DIMENSIONS)
    spec("v", (0, 2**60))
    for shape in ((1,) * (MAX_DIMENSIONS + 1), (-1,), (2, -3)):
        with pytest.raises(ValueError, match="not allowed"):
            spec("v", shape)


@pytest.mark.parametrize("shape", [(2**60 + 1,), (0, 2**64 - 1), (2**40, 0, 2**40), (2**64 - 1,) * MAX_DIMENSIONS])
def test_a_shape_that_numpy_could_not_hold_is_refused_even_when_it_is_empty(shape):
    """An empty tensor takes no bytes, so no limit on bytes would catch a size that cannot be a NumPy shape."""
    with pytest.raises(ValueError, match="too large"):
        spec("v", shape)


@pytest.mark.parametrize("dtype", ["object", "O", "str", "<f4", "float", "complex64", "float128", "", "S5", "int4"])
def test_only_listed_dtypes_travel(dtype):
    with pytest.raises(ValueError, match="cannot travel"):
        spec("v", dtype=dtype)


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - FLOATING))
def test_integers_are_never_trainable(dtype):
    spec("v", dtype=dtype, kind=STATE)
    with pytest.raises(ValueError, match="trainable variable cannot be"):
        spec("v", dtype=dtype)


@pytest.mark.parametrize(("owner", "fine"), [(-1, True), (0, True), (65_535, True), (-2, False), (65_536, False)])
def test_an_owner_is_a_rank_or_shared(owner, fine):
    if fine:
        assert spec("v", owner=owner).owner == owner
    else:
        with pytest.raises(ValueError, match="not a rank"):
            spec("v", owner=owner)


def test_sizes_are_exact_beyond_32_bits():
    big = spec("v", (2**31, 2**27), "float64")
    assert big.size == 2**58
    assert big.size_bytes == 2**61


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_the_table_of_item_sizes_is_numpys(dtype):
    assert numpy_dtype(dtype).itemsize == ITEM_BYTES[dtype]
    assert numpy_dtype(dtype).byteorder in "<|=", "tensors are little endian in memory, as on the wire"


def test_names_are_unique():
    with pytest.raises(ValueError, match="'a' is listed twice"):
        manifest(spec("a"), spec("b"), spec("a"))


def test_of_describes_arrays():
    arrays = {"w": np.zeros((2, 3), np.float32), "n": np.int64(3), "h": np.zeros(2, ml_dtypes.bfloat16)}
    assert Manifest.of(arrays, state=["n"]).variables == (
        spec("w", (2, 3)),
        spec("n", (), "int64", STATE),
        spec("h", (2,), "bfloat16"),
    )
    with pytest.raises(ValueError, match="'zz' is not among the variables"):
        Manifest.of(arrays, state=["zz"])
    with pytest.raises(ValueError, match="cannot travel"):
        Manifest.of({"o": np.array([object()])})


# ---- on the wire ---------------------------------------------------------------------------------------


@some_cases
@given(manifests())
def test_a_manifest_survives_the_trip(original):
    back = Manifest.from_wire(original.to_wire())
    assert back == original
    assert back.to_wire() == original.to_wire()


def test_rows_are_this_msgpack():
    rows = manifest(spec("w", (2, 300)), spec("n", (), "int64", STATE, 3)).to_wire()
    assert rows == (b"\x95\xa1w\x92\x02\xcd\x01\x2c\xa7float32\xa9trainable\xff\x95\xa1n\x90\xa5int64\xa5state\x03")


GOOD = ["w", [2], "float32", "trainable", -1]


def test_the_row_that_the_bad_ones_differ_from_is_good():
    assert Manifest.from_wire(msgpack.packb(GOOD)) == manifest(spec("w", (2,)))


@pytest.mark.parametrize(
    "row",
    [
        GOOD[:4],
        [*GOOD, 1],
        [b"w", *GOOD[1:]],
        ["w", 2, *GOOD[2:]],
        ["w", [2.0], *GOOD[2:]],
        ["w", [True], *GOOD[2:]],
        ["w", [-2], *GOOD[2:]],
        ["w", [[2]], *GOOD[2:]],
        ["w", [1] * (MAX_DIMENSIONS + 1), *GOOD[2:]],
        ["w", [2], "object", "trainable", -1],
        ["w", [2], "float32", "frozen", -1],
        ["w", [2], "int32", "trainable", -1],
        ["w", [2], "float32", "trainable", True],
        ["w", [2], "float32", "trainable", -2],
        ["w", [2], "float32", "trainable", 65_536],
        ["w", [2], "float32", "trainable", None],
        ["a\nb", *GOOD[1:]],
        ["", *GOOD[1:]],
        ["w", [0, 2**64 - 1], *GOOD[2:]],
        {"name": "w"},
        {},
        None,
        7,
        "w",
        msgpack.ExtType(4, b"1234"),
        msgpack.Timestamp(1, 0),
        [msgpack.ExtType(4, b""), *GOOD[1:]],
    ],
    ids=lambda row: repr(row)[:40],
)
def test_bad_rows_are_refused(row):
    with pytest.raises(RemoteProtocolError, match="manifest is not valid") as caught:
        Manifest.from_wire(msgpack.packb(row))
    assert len(str(caught.value)) < 300


def test_a_row_cut_short_is_refused():
    row = msgpack.packb(GOOD)
    for cut in range(1, len(row)):
        with pytest.raises(RemoteProtocolError):
            Manifest.from_wire(row + row[:cut])


def test_a_name_listed_twice_is_refused():
    with pytest.raises(RemoteProtocolError, match="listed twice"):
        Manifest.from_wire(msgpack.packb(GOOD) * 2)


def test_the_longest_row_fits_and_one_byte_over_the_limit_does_not():
    longest = VariableSpec(
        "x" * MAX_NAME_BYTES, (2**31,) + (1,) * (MAX_DIMENSIONS - 1), "bfloat16", TRAINABLE, 65_535
    )
    assert Manifest.from_wire(manifest(longest).to_wire()) == manifest(longest)
    for size, message in ((MAX_ROW_BYTES, "not \\[name"), (MAX_ROW_BYTES + 1, "row 1 is too long")):
        row = b"\xda" + (size - 3).to_bytes(2, "big") + b"x" * (size - 3)
        with pytest.raises(RemoteProtocolError, match=message):
            Manifest.from_wire(row)


def test_too_many_variables_are_refused():
    with pytest.raises(ValueError, match="100001 variables"):
        Manifest((spec("v"),) * (MAX_VARIABLES + 1))


def nested(depth):
    return b"\x90" if depth == 0 else b"\x9f" + nested(depth - 1) * 15


MEGABYTES = 1 << 20
BOMBS = {
    "a tree of empty lists in one row": lambda: b"\x9f" + nested(5) * 15 + b"\x90" * 4_000_000,
    "sixteen million rows": lambda: b"\x90" * (16 << 20),
    "good rows, then sixteen million": lambda: msgpack.packb(GOOD) + b"\x90" * (15 << 20),
    "lists sixteen million deep": lambda: b"\x91" * (16 << 20),
    "one long text": lambda: b"\xdb\x00\xf0\x00\x00" + b"x" * (15 << 20),
    "a list that promises four billion": lambda: b"\xdd\xff\xff\xff\xff" + b"\x90" * (15 << 20),
    "a map that promises four billion": lambda: b"\xdf\xff\xff\xff\xff" + b"\x90" * (15 << 20),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_manifests_cost_no_more_than_their_own_size(bomb):
    """Sixteen million empty lists would be a gigabyte of Python objects; a copy of the bytes is all they get."""
    rows = BOMBS[bomb]()
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            Manifest.from_wire(rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * MEGABYTES


# ---- comparison ----------------------------------------------------------------------------------------

A = spec("a", (2, 3))
REST = (spec("b"), spec("n", (), "int64", STATE))
OURS = manifest(A, *REST)


def test_the_order_of_variables_is_of_no_account():
    OURS.check_same_variables(Manifest(OURS.variables[::-1]), "the server", "the worker")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (manifest(*REST), "'a' differs: the server has float32 [2, 3] trainable, the worker has no such variable"),
        (manifest(A, *REST, spec("z")), "'z' differs: the server has no such variable, the worker has float32 []"),
        (
            manifest(spec("a", (3, 2)), *REST),
            "the server has float32 [2, 3] trainable, the worker has float32 [3, 2]",
        ),
        (manifest(spec("a", (2, 3), "float64"), *REST), "the worker has float64 [2, 3] trainable"),
        (manifest(spec("a", (2, 3), "float32", STATE), *REST), "the worker has float32 [2, 3] state"),
        (manifest(spec("a", (2, 3), owner=1), *REST), "the worker has float32 [2, 3] trainable of rank 1"),
        (manifest(spec("z"), spec("b", (9,)), spec("a", (9,)), spec("n")), "variable 'a' differs"),
    ],
    ids=["missing", "extra", "shape", "dtype", "kind", "owner", "first of several, in our order"],
)
def test_a_mismatch_names_the_first_variable_with_both_views(theirs, message):
    with pytest.raises(ManifestMismatch) as caught:
        OURS.check_same_variables(theirs, "the server", "the worker")
    assert message in str(caught.value)


# ---- layout --------------------------------------------------------------------------------------------


def test_layout_order():
    """Owner, then kind, then dtype in the order of the table, then small before large, then manifest order."""
    large = SMALL_BYTES // 4
    scrambled = manifest(
        spec("owned", owner=0),
        spec("state float32", (), "float32", STATE),
        spec("state bool", (), "bool", STATE),
        spec("state int64", (), "int64", STATE),
        spec("float64", (), "float64"),
        spec("large one", (large,)),
        spec("small one"),
        spec("large two", (large,)),
        spec("small two"),
        spec("bfloat16", (), "bfloat16"),
        spec("float16", (), "float16"),
    )
    layout = Layout.of(scrambled)
    assert [slot.spec.name for slot in layout.slots] == [
        "small one", "small two", "large one", "large two", "float64", "float16", "bfloat16",
        "state float32", "state int64", "state bool", "owned",
    ]  # fmt: skip
    assert [(run.owner, run.kind, run.dtype) for run in layout.runs] == [
        (SHARED, TRAINABLE, "float32"), (SHARED, TRAINABLE, "float64"), (SHARED, TRAINABLE, "float16"),
        (SHARED, TRAINABLE, "bfloat16"), (SHARED, STATE, "float32"), (SHARED, STATE, "int64"),
        (SHARED, STATE, "bool"), (0, TRAINABLE, "float32"),
    ]  # fmt: skip
    assert [run.dtype for run in layout.runs_of(STATE)] == ["float32", "int64", "bool"]


def test_a_layout_with_numbers():
    """Offsets worked out by hand: each tensor starts at a multiple of 64, and the last gap counts."""
    layout = Layout.of(
        manifest(spec("a", (17,)), spec("b", (16,)), spec("c"), spec("n", (), "int64", STATE)),
        sides=(SideSpec("logits", (3, 10), "float32"),),
    )
    assert [(slot.spec.name, slot.offset, slot.end) for slot in layout.slots] == [
        ("a", 0, 68),
        ("b", 128, 192),
        ("c", 192, 196),
        ("n", 256, 264),
    ]
    assert [(slot.offset, slot.end) for slot in layout.sides] == [(320, 440)]
    assert (layout.values_bytes, layout.payload_bytes) == (320, 448)
    assert [(run.start, run.small_end, run.end) for run in layout.runs] == [(0, 256, 256), (256, 320, 320)]


def test_small_ends_exactly_at_its_limit():
    """One element below `SMALL_BYTES` is small and lies in front; exactly `SMALL_BYTES` is large."""
    below, at = SMALL_BYTES // 4 - 1, SMALL_BYTES // 4
    layout = Layout.of(manifest(spec("at", (at,)), spec("below", (below,))))
    (run,) = layout.runs
    assert [slot.spec.name for slot in layout.slots] == ["below", "at"]
    assert (run.start, run.small_end, run.end) == (0, SMALL_BYTES, 2 * SMALL_BYTES)


def test_runs_of_large_or_of_small_variables_only():
    (large,) = Layout.of(manifest(spec("v", (SMALL_BYTES,)))).runs
    assert large.small_end == large.start == 0
    (small,) = Layout.of(manifest(spec("v", (5,)))).runs
    assert small.small_end == small.end == 64


def test_scalars_and_empty_tensors():
    """A scalar takes one element; an empty tensor takes none and shares its offset with the next."""
    layout = Layout.of(manifest(spec("none", (0, 5)), spec("scalar"), spec("none again", (3, 0))))
    assert [(slot.offset, slot.size_bytes) for slot in layout.slots] == [(0, 0), (0, 4), (64, 0)]
    assert layout.values_bytes == 64
    views = Arena.zeros(layout).views()
    assert (views["none"].shape, views["scalar"].shape, views["none again"].shape) == ((0, 5), (), (3, 0))


@pytest.mark.parametrize("empty", [manifest(), manifest(spec("none", (0,)))])
def test_a_layout_of_nothing_is_empty_and_still_an_arena(empty):
    layout = Layout.of(empty)
    assert layout.values_bytes == layout.payload_bytes == layout.gap_bytes.size == 0
    assert len(Arena.zeros(layout).views()) == len(empty.variables)


@some_cases
@given(manifests(), st.lists(st.integers(0, 40), max_size=2))
def test_tensors_are_aligned_disjoint_and_cover_the_arena_with_the_gaps(some, side_sizes):
    """Every byte of the payload belongs to exactly one tensor or to a gap shorter than the alignment."""
    layout = Layout.of(some, [SideSpec(str(n), (n,), "float32") for n in side_sizes])
    used = np.zeros(layout.payload_bytes, np.uint8)
    for slot in (*layout.slots, *layout.sides):
        assert slot.offset % ALIGNMENT == 0
        used[slot.offset : slot.end] += 1
    used[layout.gap_bytes] += 1
    assert (used == 1).all()
    assert layout.values_bytes % ALIGNMENT == layout.payload_bytes % ALIGNMENT == 0
    tensors = sum(slot.size_bytes for slot in (*layout.slots, *layout.sides))
    assert layout.payload_bytes - tensors == layout.gap_bytes.size < ALIGNMENT * (len(layout.slots) + 3)


@some_cases
@given(manifests())
def test_a_layout_is_a_pure_function_of_the_manifest(some):
    """Both sides compute the same offsets: also from the wire, and whatever was computed before."""
    assert Layout.of(some) == Layout.of(Manifest.from_wire(some.to_wire()))


@some_cases
@given(manifests())
def test_runs_partition_the_variables_in_order(some):
    layout = Layout.of(some)
    assert [slot for run in layout.runs for slot in run.slots] == list(layout.slots)
    end = 0
    for run in layout.runs:
        assert run.start == end <= run.small_end <= (end := run.end)
        for slot in run.slots:
            assert (slot.spec.owner, slot.spec.kind, slot.spec.dtype) == (run.owner, run.kind, run.dtype)
            small = slot.size_bytes < SMALL_BYTES
            assert (
                (run.start <= slot.offset and slot.end <= run.small_end) if small else slot.offset >= run.small_end
            )
    assert end == layout.values_bytes
    assert set(layout.by_name) == {variable.name for variable in some.variables}


# ---- arena ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, 1 << 16])
def test_buffers_are_aligned_and_exactly_as_long(size):
    buffer = aligned_empty(size)
    assert buffer.nbytes == size
    assert size == 0 or buffer.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize(
    "size", [HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES + 7]
)
def test_buffers_on_both_sides_of_a_huge_page_are_the_same_to_their_user(size):
    """Aligned, exactly as long, flat bytes to write, each with memory of its own, and alive as long as any view."""
    buffers = [aligned_empty(size) for _ in range(2)]
    for number, buffer in enumerate(buffers, 1):
        assert (buffer.nbytes, buffer.dtype, buffer.ndim) == (size, np.uint8, 1)
        assert buffer.ctypes.data % ALIGNMENT == 0
        assert buffer.flags.writeable and buffer.flags.c_contiguous
        buffer[:] = number
    tail = buffers[0][-5:]
    del buffers[0], buffer
    assert tail.tolist() == [1] * 5
    assert buffers[0][0] == buffers[0][-1] == 2


def mapping_of(buffer):
    """Permissions and flags of the memory where a buffer lies, as the kernel tells them."""
    permissions = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(edge, 16) for edge in words[0].split("-"))
            permissions = words[1] if start <= buffer.ctypes.data < end else None
        elif words[0] == "VmFlags:" and permissions is not None:
            return permissions, words[1:]
    raise AssertionError("the buffer lies nowhere")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages on this system")
def test_large_buffers_are_private_and_on_huge_pages():
    """Memory that is shared gets none, whatever is asked for, and a forked process would write into it."""
    permissions, flags = mapping_of(aligned_empty(HUGE_PAGE_BYTES))
    assert permissions == "rw-p"
    assert "hg" in flags


def test_large_buffers_do_without_huge_pages_where_there_are_none(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    buffer = aligned_empty(HUGE_PAGE_BYTES)
    buffer[:] = 1
    assert buffer.nbytes == HUGE_PAGE_BYTES


def test_an_arena_needs_a_buffer_that_fits():
    layout = Layout.of(manifest(spec("v", (40,))))
    assert layout.values_bytes == 192
    Arena(layout, aligned_empty(192))
    with pytest.raises(LocalProtocolError, match="191 bytes cannot hold 192"):
        Arena(layout, aligned_empty(191))
    for bad in (aligned_empty(300)[1:], aligned_empty(256).reshape(2, 128), aligned_empty(256).view(np.int8)):
        with pytest.raises(LocalProtocolError, match="flat uint8 buffer"):
            Arena(layout, bad)


ARRAYS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(-1.5, np.float32),
    "n": np.array([1, 2], np.int64),
}


def test_filled_values_come_back_and_gaps_stay_zero():
    layout = Layout.of(Manifest.of(ARRAYS, state=["n"]))
    arena = Arena.zeros(layout)
    arena.fill(ARRAYS)
    for name, view in arena.views().items():
        np.testing.assert_array_equal(view, ARRAYS[name])
        assert view.dtype == ARRAYS[name].dtype
        assert not view.flags.writeable
        assert np.shares_memory(view, arena.buffer) or view.size == 0
    assert not arena.buffer[layout.gap_bytes].any()
    assert arena.buffer[layout.by_name["w"].offset :][:24].tobytes() == ARRAYS["w"].astype("<f4").tobytes()


def test_views_can_be_written_when_asked_for():
    arena = Arena.zeros(Layout.of(Manifest.of(ARRAYS, state=["n"])))
    arena.views(writeable=True)["w"][1, 2] = 7.0
    assert arena.views()["w"][1, 2] == 7.0
    with pytest.raises(ValueError, match="read-only"):
        arena.views()["w"][0, 0] = 1.0


def test_a_run_is_one_flat_array_with_its_gaps():
    layout = Layout.of(Manifest.of(ARRAYS, state=["n"]))
    arena = Arena.zeros(layout)
    arena.fill(ARRAYS)
    run = arena.run_view(layout.runs[0])
    assert run.dtype == np.float32
    assert run.shape == (32,)
    assert run.sum() == 15.0 - 1.5


def test_fill_takes_big_endian_and_strided_arrays():
    """What an array looks like in memory is its owner's affair; what it holds is copied."""
    layout = Layout.of(manifest(spec("v", (3,))))
    for array in (np.array([1, 2, 3], ">f4"), np.arange(6, dtype=np.float32)[1:6:2] / 2 + 0.5):
        arena = Arena.zeros(layout)
        arena.fill({"v": array})
        np.testing.assert_array_equal(arena.views()["v"], [1, 2, 3])


def test_bfloat16_travels_as_its_raw_bits():
    """1.0 is 0x3f80 in bfloat16, NaN keeps its bits, and nothing is rounded on the way."""
    values = np.array([1.0, -2.0, np.nan, 3.140625], ml_dtypes.bfloat16)
    arena = Arena.zeros(Layout.of(Manifest.of({"h": values})))
    arena.fill({"h": values})
    assert arena.buffer[:4].tobytes() == bytes.fromhex("803f00c0")
    view = arena.views()["h"]
    assert view.dtype == np.uint16
    assert view.tobytes() == values.tobytes()
    np.testing.assert_array_equal(view.view(ml_dtypes.bfloat16).astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": None}, "variable 'w' is missing"),
        ({"x": np.zeros(1)}, "variable 'x' is not in the manifest"),
        ({"w": np.zeros((3, 2), np.float32)}, "variable 'w' must be float32 [2, 3], not float32 [3, 2]"),
        ({"w": np.zeros((2, 3))}, "variable 'w' must be float32 [2, 3], not float64 [2, 3]"),
        ({"b": np.zeros(1, np.float32)}, "variable 'b' must be float32 [], not float32 [1]"),
        ({"n": np.zeros(2, np.uint64)}, "variable 'n' must be int64 [2], not uint64 [2]"),
    ],
)
def test_fill_refuses_what_differs_and_names_it(change, message):
    """No broadcasting and no conversion: the wrong array is an error, never a silent repair."""
    arena = Arena.zeros(Layout.of(Manifest.of(ARRAYS, state=["n"])))
    arrays = {name: array for name, array in {**ARRAYS, **change}.items() if array is not None}
    with pytest.raises(ManifestMismatch) as caught:
        arena.fill(arrays)
    assert str(caught.value) == message


def test_a_side_array_is_checked_likewise():
    side = SideSpec("logits", (2, 3), "float32")
    check_array(side, np.zeros((2, 3), np.float32))
    assert side.size_bytes == math.prod((2, 3)) * 4
    with pytest.raises(ManifestMismatch, match="'logits' must be float32"):
        check_array(side, np.zeros((2, 4), np.float32))


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@pytest.mark.parametrize("wanted", ITEM_BYTES)
def test_arrays_of_the_right_dtype_pass_whatever_object_describes_it(wanted):
    """NumPy has one object for each plain dtype, but not for all that are equal to it."""
    for dtype in (dtype_of(wanted), np.dtype(dtype_of(wanted).type), dtype_of(wanted).newbyteorder("=")):
        check_array(spec("v", (2,), wanted, STATE), np.zeros(2, dtype))
    copied = np.dtype(wanted if wanted != "bfloat16" else ml_dtypes.bfloat16, metadata={"made": "elsewhere"})
    assert copied is not dtype_of(wanted)
    check_array(spec("v", (2,), wanted, STATE), np.zeros(2, copied))


@pytest.mark.parametrize("wanted", ITEM_BYTES)
def test_arrays_of_any_other_dtype_are_refused(wanted):
    """Each of the dtypes that travel against each other, and some that never do."""
    others = [dtype_of(name) for name in ITEM_BYTES if name != wanted]
    for dtype in (*others, np.dtype("complex64"), np.dtype("S4"), np.dtype("datetime64[s]"), np.dtype(object)):
        with pytest.raises(ManifestMismatch, match=f"'v' must be {wanted}"):
            check_array(spec("v", (2,), wanted, STATE), np.zeros(2, dtype))


def test_the_shape_is_checked_whatever_the_dtype():
    for shape in ((), (3,), (2, 1), (1, 2)):
        with pytest.raises(ManifestMismatch, match=r"must be float32 \[2\]"):
            check_array(spec("v", (2,)), np.zeros(shape, np.float32))
