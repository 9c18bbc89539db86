import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from ps.storage import reductions

DTYPES = ("float32", "float64")
COUNT = 2 * reductions.BLOCK_BYTES // 4 + 77
"""Elements: more than two blocks of every dtype, and not a whole number of them."""

COLUMN = 16
START, STOP = 5, COUNT - 3


def problem(dtype, slots, seed=3):
    random = np.random.default_rng(seed)
    rows = random.standard_normal((slots, COUNT + 32)).astype(dtype)
    moments = random.standard_normal((2, COUNT)).astype(dtype)
    return rows, moments


def vectors(rows, slots, moments):
    """Return what is compared, in float64 [n, range]."""
    inside = rows[slots, COLUMN + START : COLUMN + STOP]
    return np.concatenate([inside, moments[:, START:STOP]]).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("count", range(9))
def test_a_gram_matrix_is_that_of_the_range_whatever_the_number_of_rows(count, moment, dtype):
    rows, moments = problem(dtype, 10)
    slots = np.random.default_rng(count).permutation(10)[:count]
    out = np.full((count + moment, count + moment), 100.0)
    reductions.gram(rows, COLUMN, slots, moments[:moment], START, STOP, out)
    compared = vectors(rows, slots, moments[:moment])
    np.testing.assert_allclose(np.triu(out - 100.0), np.triu(compared @ compared.T), rtol=1e-10, atol=1e-9)
    np.testing.assert_array_equal(np.tril(out, -1), np.tril(np.full_like(out, 100.0), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("summands", [0, 1, 3, 4, 9])
@pytest.mark.parametrize(("references", "moment"), [(0, 0), (1, 0), (1, 1), (2, 1), (4, 1)])
def test_projections_are_those_on_the_last_vectors_and_on_the_total(summands, references, moment, dtype):
    rows, moments = problem(dtype, 14)
    slots = np.random.default_rng(summands).permutation(14)[: summands + references]
    coefficients = np.linspace(-0.3, 0.9, summands)
    few = references + moment + 1
    out = np.zeros((summands + few, few))
    reductions.project(rows, COLUMN, slots, moments[:moment], coefficients, START, STOP, out)
    compared = vectors(rows, slots, moments[:moment])
    compared = np.concatenate([compared, [coefficients @ compared[:summands]]])
    np.testing.assert_allclose(out, compared @ compared[summands:].T, rtol=1e-10, atol=1e-9)


def test_inner_products_do_not_lose_small_values_among_many():
    rows = np.full((2, 1 << 20), 1e-4, np.float32)
    rows[:, 0] = 1e2  # its square drowns the others in float32
    out = np.zeros((2, 2))
    reductions.gram(rows, 0, np.array([0, 1]), rows[:0], 0, rows.shape[1], out)
    exact = 1e4 + (rows.shape[1] - 1) * float(np.float32(1e-4)) ** 2
    assert out[0, 1] == pytest.approx(exact, rel=1e-10, abs=0)
    assert out[0, 0] == pytest.approx(exact, rel=1e-10, abs=0)


# ---- the trimmed mean ------------------------------------------------------------------------------------


def trimmed(rows, slots, trim, start=START, stop=STOP):
    """Run the kernel and return what it wrote."""
    count = len(slots)
    network = reductions.selection_network(count, trim)
    share = np.full(1, 1 / (count - 2 * trim), rows.dtype)
    reductions.trimmed_mean(rows, COLUMN, np.array(slots), network, trim, share, start, stop)
    return rows[slots[0], COLUMN + start : COLUMN + stop]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "trim"),
    [(count, trim) for count in range(1, 10) for trim in range((count + 1) // 2)] + [(17, 3), (64, 31), (130, 0)],
)
def test_a_trimmed_mean_is_the_mean_of_the_sorted_middle(count, trim, dtype):
    rows, _ = problem(dtype, count + 1)
    before = rows.copy()
    slots = np.random.default_rng(count).permutation(count + 1)[:count]
    middle = np.sort(before[slots, COLUMN + START : COLUMN + STOP], axis=0)[trim : count - trim]
    result = trimmed(rows, slots, trim)
    assert result.dtype == dtype
    if len(middle) == 1:
        np.testing.assert_array_equal(result, middle[0])
    tolerance = count * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(result, middle.astype(np.float64).mean(axis=0), rtol=tolerance, atol=tolerance)
    rows[slots[0], COLUMN + START : COLUMN + STOP] = before[slots[0], COLUMN + START : COLUMN + STOP]
    np.testing.assert_array_equal(rows, before)  # nothing else was written


def test_a_trimmed_mean_has_the_same_bits_in_any_order_of_the_rows():
    rows, _ = problem("float32", 5)
    results = [trimmed(rows.copy(), list(order), 1).tobytes() for order in itertools.permutations(range(5))]
    assert len(set(results)) == 1


@pytest.mark.parametrize("count", [2, 5])
def test_the_largest_values_do_not_overflow_a_trimmed_mean(count):
    rows = np.full((count, COUNT + 32), np.finfo(np.float32).max)
    result = trimmed(rows, list(range(count)), 0)
    np.testing.assert_allclose(result, rows[-1, : result.size], rtol=1e-6)


def test_values_that_are_far_apart_are_told_apart_exactly():
    rows = np.zeros((5, COUNT + 32), np.float32)
    rows[:, COLUMN : COLUMN + COUNT] = np.array([[1e30], [-1e30], [3.0], [-0.0], [1e-40]], np.float32)
    np.testing.assert_array_equal(trimmed(rows, [0, 1, 2, 3, 4], 2), np.float32(1e-40))


@pytest.mark.parametrize(("count", "trim"), [(n, trim) for n in range(1, 12) for trim in range((n + 1) // 2)])
def test_a_network_puts_every_wanted_value_where_it_belongs(count, trim):
    """A network that is right for all inputs of zeros and ones is right for all inputs (the 0-1 principle)."""
    values = np.array(list(itertools.product([0, 1], repeat=count)))
    wanted = np.sort(values, axis=1)[:, trim : count - trim]
    for low, high in reductions.selection_network(count, trim):
        assert low < high
        pair = values[:, [low, high]]
        values[:, low], values[:, high] = pair.min(axis=1), pair.max(axis=1)
    np.testing.assert_array_equal(values[:, trim : count - trim], wanted)


@given(st.integers(12, 100), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_large_networks_sort_too(count, seed):
    random = np.random.default_rng(seed)
    trim = int(random.integers(0, (count + 1) // 2))
    values = random.permutation(count).tolist()
    for low, high in reductions.selection_network(count, trim).tolist():
        values[low], values[high] = sorted((values[low], values[high]))
    assert values[trim : count - trim] == list(range(trim, count - trim))


def test_a_median_takes_fewer_comparisons_than_a_sort():
    assert [len(reductions.selection_network(count, 0)) for count in (1, 2, 3, 4, 5, 8)] == [0, 1, 3, 5, 9, 19]
    assert len(reductions.selection_network(64, 31)) < 450 < len(reductions.selection_network(64, 0)) < 550


@pytest.mark.parametrize(("count", "trim"), [(0, 0), (2, 1), (5, 3), (5, -1)])
def test_a_trim_that_leaves_nothing_is_our_own_mistake(count, trim):
    with pytest.raises(LocalProtocolError, match="cannot be trimmed"):
        reductions.selection_network(count, trim)


# ---- how they are compiled -------------------------------------------------------------------------------


def test_nothing_is_compiled_after_the_warm_up():
    kernels = (reductions.gram, reductions.project, reductions.trimmed_mean)
    reductions.warm_up(DTYPES)
    before = [len(kernel.signatures) for kernel in kernels]
    for dtype in DTYPES:
        rows, moments = problem(dtype, 3)
        for moment in (0, 1):
            out, some = np.zeros((5, 5)), moments[:moment]
            reductions.gram(rows, COLUMN, np.array([0, 2]), some, START, STOP, out)
            reductions.project(rows, COLUMN, np.array([0, 2]), some, np.ones(2), START, STOP, out)
        trimmed(rows, [0, 1, 2], 1)
    assert [len(kernel.signatures) for kernel in kernels] == before


def test_only_inner_products_are_compiled_with_fast_math_and_all_let_other_threads_run():
    for kernel in (reductions.gram, reductions.project, reductions.trimmed_mean):
        assert kernel.targetoptions["nogil"]
        assert not kernel.targetoptions["fastmath"]
    for kernel in (reductions._tile, reductions._corner, reductions._strip, reductions._dot):
        assert kernel.targetoptions["fastmath"] == {"reassoc", "contract"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_products_only(value):
    rows, moments = problem("float32", 4)
    rows[1, COLUMN + 100] = value
    out = np.zeros((4, 4))
    reductions.gram(rows, COLUMN, np.arange(4), moments[:0], START, STOP, out)
    upper = np.triu(np.ones((4, 4), bool))
    spoilt = np.zeros((4, 4), bool)
    spoilt[1, :] = spoilt[:, 1] = True
    assert np.isfinite(out[upper & ~spoilt]).all()
    assert not np.isfinite(out[upper & spoilt]).any()
