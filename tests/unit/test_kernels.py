import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.storage import kernels
from ps.storage.optimizers import SGD, Adam, AdamW
from ps.storage.thread_team import ThreadTeam, pieces

DTYPES = ("float32", "float64")
OPTIMIZERS = (Adam(), AdamW(weight_decay=0.1), SGD(), SGD(0.9), SGD(0.9, nesterov=True))
COUNT = 9_001
"""Elements: more than two blocks of every dtype, and not a whole number of them."""


def problem(dtype, slots, moments, count=COUNT):
    random = np.random.default_rng(3)
    rows = random.standard_normal((slots, count + 32)).astype(dtype)
    old = random.standard_normal(count).astype(dtype)
    state = np.abs(random.standard_normal((moments, count))).astype(dtype)
    return rows, old, state


def weighted_sum(rows, column, slots, weights, count):
    total = np.zeros(count, rows.dtype)
    for slot, weight in zip(slots, weights, strict=True):
        total = total + weight * rows[slot, column : column + count]
    return total


def numpy_update(optimizer, total, old, moments, scalars):
    """Write each kernel's formula in NumPy, in the order of operations of its docstring."""
    if optimizer.kernel == "sgd":
        return old - scalars[1] * total, moments
    if optimizer.kernel == "momentum":
        a = moments[0] * scalars[1] + total
        return old - (total * scalars[2] + a * scalars[3]), a[None]
    m = moments[0] + (total - moments[0]) * scalars[2]
    v = moments[1] + (total * total - moments[1]) * scalars[3]
    return old * scalars[5] - (m * scalars[1]) / (np.sqrt(v) + scalars[4]), np.stack([m, v])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_an_update_has_the_bits_of_numpy_and_stays_in_its_range(dtype, optimizer):
    rows, old, moments = problem(dtype, 3, len(optimizer.moments))
    slots, weights = np.array([2, 0, 1]), np.array([0.2, 0.3, 0.5], dtype)
    scalars = np.array([0.125, *optimizer.scalars(3, 0.01)], dtype)
    average = old + old
    new = np.full(COUNT, 7, dtype)
    total = weighted_sum(rows, 16, slots, weights, COUNT)
    value, state = numpy_update(optimizer, total, old, moments, scalars)
    start, stop = 5, COUNT - 3
    moved, averaged = moments.copy(), average.copy()
    arguments = (rows, 16, slots, weights, old, new, moved, averaged, scalars, start, stop)
    kernels.UPDATES[optimizer.kernel](*arguments)
    inside = slice(start, stop)
    np.testing.assert_array_equal(new[inside], value[inside])
    np.testing.assert_array_equal(moved[:, inside], state[:, inside])
    np.testing.assert_array_equal(averaged[inside], (average + scalars[0] * (value - average))[inside])
    for changed, before in ((new, np.full(COUNT, 7, dtype)), (moved, moments), (averaged, average)):
        np.testing.assert_array_equal(changed[..., :start], before[..., :start])
        np.testing.assert_array_equal(changed[..., stop:], before[..., stop:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", range(12))
def test_gradients_are_summed_in_the_order_of_the_slots_whatever_their_number(dtype, count):
    rows, old, _ = problem(dtype, 12, 0)
    slots = np.random.default_rng(count).permutation(12)[:count]
    weights = np.linspace(0.1, 0.9, count).astype(dtype)
    new = np.empty_like(old)
    kernels.add_weighted(rows, 16, slots, weights, old, new, 0, COUNT)
    np.testing.assert_array_equal(new, old + weighted_sum(rows, 16, slots, weights, COUNT))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_weighted_sum_is_that_of_what_is_applied(dtype):
    rows, _, _ = problem(dtype, 3, 0)
    slots, weights = np.array([0, 2]), np.array([0.25, 0.75], dtype)
    total = weighted_sum(rows, 16, slots, weights, COUNT).astype(np.float64)[4:8_000]
    squares = kernels.weighted_sum_of_squares(rows, 16, slots, weights, 4, 8_000)
    assert squares == pytest.approx(math.fsum(total**2), rel=1e-13)


@given(st.lists(st.floats(width=32), max_size=200))
def test_a_sum_of_squares_is_exact_to_rounding_and_finite_exactly_when_all_values_are(values):
    array = np.array(values, np.float32)
    squares = kernels.sum_of_squares(array)
    if np.isfinite(array).all():
        assert squares == pytest.approx(math.fsum(float(value) ** 2 for value in array), rel=1e-13)
    else:
        assert not math.isfinite(squares)


def test_a_sum_of_squares_does_not_lose_small_values_among_many():
    array = np.full(1 << 20, 1e-4, np.float32)
    array[0] = 1e2  # its square drowns the others in float32
    exact = 1e4 + (array.size - 1) * float(np.float32(1e-4)) ** 2
    assert kernels.sum_of_squares(array) == pytest.approx(exact, rel=1e-10, abs=0)


@pytest.mark.parametrize("update", kernels.UPDATES)
def test_nothing_is_compiled_after_the_warm_up(update):
    kernels.warm_up(update, DTYPES)
    used = (kernels.UPDATES[update], kernels.add_weighted, kernels.sum_of_squares)
    before = [len(kernel.signatures) for kernel in used]
    for dtype in DTYPES:
        rows, old, moments = problem(dtype, 2, 2, count=64)
        sums = (rows, 16, np.array([0, 1]), np.ones(2, dtype))
        kernels.UPDATES[update](*sums, old, old.copy(), moments, old[:0], np.ones(8, dtype), 0, 64)
        kernels.add_weighted(*sums, old, old.copy(), 0, 64)
        kernels.sum_of_squares(rows[0][3:9])
    assert [len(kernel.signatures) for kernel in used] == before


def test_updates_are_compiled_without_fast_math_and_let_other_threads_run():
    for kernel in (*kernels.UPDATES.values(), kernels.add_weighted, kernels.weighted_sum_of_squares):
        assert not kernel.targetoptions["fastmath"]
        assert kernel.targetoptions["nogil"]
    assert kernels.sum_of_squares.targetoptions["fastmath"] == {"reassoc", "contract"}


PROGRAM = """
import numpy as np
from ps.storage import kernels
kernels.warm_up("sgd", DTYPES)
assert kernels.sum_of_squares(np.ones(3, np.float32)) == 3
"""


@pytest.mark.parametrize("spoil", ["no folder for the cache", "cache that cannot be written"])
def test_kernels_work_where_the_cache_cannot_be_kept(spoil, tmp_path):
    house = Path(kernels.__file__).parents[2]
    for package in ("ps", "protocol"):
        shutil.copytree(house / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    program = PROGRAM.replace("DTYPES", "()")  # compiles little: that it can be imported is the question
    if spoil == "no folder for the cache":  # neither beside the module nor in the home folder, even for root
        (tmp_path / "ps" / "storage" / "__pycache__").write_text("a file")
        (tmp_path / "home").write_text("a file")
        environment |= {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    else:
        program = (
            "import numba.core.caching as caching\n"
            "def full(*arguments): raise OSError(28, 'No space left on device')\n"
            "caching.IndexDataCacheFile.save = full\n" + PROGRAM.replace("DTYPES", "['float32']")
        )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr


@given(st.integers(0, 10**8))
def test_pieces_cover_a_run_once_and_start_at_cache_lines(elements):
    ranges = pieces(elements)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])][: len(ranges)]
    assert not ranges or ranges[-1][1] == elements
    assert all(start % 64 == 0 and start < stop for start, stop in ranges)
    assert len(ranges) <= 8


@pytest.mark.parametrize("threads", [1, 3])
def test_a_team_runs_each_call_once_and_passes_on_what_is_raised(threads):
    done = []
    team = ThreadTeam(threads)

    def fail():
        raise ArithmeticError("of a piece")

    try:
        team.run([lambda i=i: done.append(i) for i in range(50)], elements=10**6)
        assert sorted(done) == list(range(50))
        with pytest.raises(ArithmeticError, match="of a piece"):
            team.run([fail], elements=10**6)
    finally:
        team.close()
