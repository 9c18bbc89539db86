import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.arena import Arena, aligned_empty
from protocol.errors import ConfigurationError, LocalProtocolError, NoProgress
from protocol.tensors import Kind, Layout, Manifest, SideSpec, VariableSpec
from ps.storage.optimizers import SGD, Adam
from ps.storage.receiver import BLOCK_BYTES
from ps.storage.store import Store
from ps.storage.store_config import NotFinite, StoreConfig

MIXED = Layout.of(
    Manifest(
        (
            VariableSpec("dense/kernel", (5, 3), "float32"),
            VariableSpec("dense/bias", (3,), "float32"),
            VariableSpec("precise", (7,), "float64"),
            VariableSpec("nothing", (0, 4), "float32"),
            VariableSpec("norm/mean", (3,), "float32", Kind.STATE),
            VariableSpec("norm/exact", (), "float64", Kind.STATE),
            VariableSpec("norm/count", (), "int64", Kind.STATE),
            VariableSpec("norm/ready", (2,), "bool", Kind.STATE),
        )
    ),
    [SideSpec("logits", (2, 5), "float32")],
)
"""Every kind of run, gaps after nearly all tensors, an empty tensor, and a side array."""

TRAINABLE = ("dense/kernel", "dense/bias", "precise")

THREE_BLOCKS = BLOCK_BYTES // 4 * 5 // 2
"""Elements of float32 that arrive in three blocks, the last of them half full."""


def flat_layout(elements, dtype="float32"):
    return Layout.of(Manifest((VariableSpec("flat", (elements,), dtype),)))


def random_arrays(layout, seed):
    random = np.random.default_rng(seed)
    arrays = {}
    for slot in layout.slots:
        spec = slot.spec
        if spec.dtype in ("float32", "float64"):
            arrays[spec.name] = np.asarray(random.standard_normal(spec.shape), spec.dtype)
        else:
            arrays[spec.name] = np.asarray(random.integers(0, 2, spec.shape), spec.dtype)
    return arrays


def packed(layout, arrays, size_bytes, gap=0):
    """Lay arrays out in a buffer whose other bytes are all `gap`."""
    buffer = aligned_empty(size_bytes)
    buffer[:] = gap
    if size_bytes >= layout.values_bytes:
        Arena(layout, buffer).fill(arrays)
    return buffer


def push(store, slot, arrays, gap=0):
    receiver = store.receiver(slot)
    receiver.buffer[:] = packed(store.layout, arrays, store.layout.payload_bytes, gap).data
    for end in receiver.block_ends:
        receiver.received(end)
    return receiver.finish()


def by_name(layout, version):
    return Arena(layout, np.frombuffer(version.buffer, np.uint8)).views()


def started(layout, values, **config):
    store = Store(layout, StoreConfig(**{"optimizer": SGD(), "slots": 4, "threads": 1, **config}))
    store.initialise(packed(layout, values, layout.values_bytes))
    return store


# ---- arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_constant_gradients_give_what_arithmetic_says_exactly(workers, dtype):
    layout = flat_layout(100, dtype)
    store = started(layout, {"flat": np.full(100, 3, dtype)})
    for step in range(1, 21):
        for rank in range(workers):
            push(store, rank, {"flat": np.full(100, rank + 1, dtype)})
        version = store.apply(range(workers), [1 / workers] * workers, None, 2.0**-5)
        assert version.step == step
    mean = (workers + 1) / 2
    np.testing.assert_array_equal(store.export()["flat"], 3 - 20 * 2.0**-5 * mean)


@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.9), Adam()], ids=repr)
@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(optimizer, threads):
    layout = flat_layout(600_000)  # more than the least that is shared among threads
    results = []
    for count in (1, threads):
        config = {"optimizer": optimizer, "threads": count, "clip_norm": 1.0, "ema_decay": 0.9}
        store = started(layout, random_arrays(layout, 1), **config)
        for step in range(2):
            for slot in range(3):
                push(store, slot, random_arrays(layout, 10 * step + slot))
            store.apply([0, 1, 2], [0.2, 0.3, 0.5], [1.0, 0.5, 1.0], 0.1)
        results.append((bytes(store.current.buffer), store.export()["flat"].tobytes()))
        store.close()
    assert results[0] == results[1]


def test_each_kind_of_variable_is_updated_by_its_own_rule():
    values = random_arrays(MIXED, 0)
    store = started(MIXED, values)
    pushes = [random_arrays(MIXED, seed) for seed in (1, 2, 3)]
    pushes[1]["norm/count"][...] = 41
    pushes[2]["norm/count"][...] = 43
    for slot, arrays in enumerate(pushes):
        push(store, slot, arrays)
    weights, factors, state_factors = [0.25, 0.75], [0.5, 1.0], [1.0, 0.125]
    new = by_name(MIXED, store.apply([1, 2], weights, factors, 0.5, state_factors))
    for name in TRAINABLE:
        total = sum(w * f * p[name] for w, f, p in zip(weights, factors, pushes[1:], strict=True))
        np.testing.assert_allclose(new[name], values[name] - 0.5 * total, rtol=1e-6, atol=1e-6)
    for name in ("norm/mean", "norm/exact"):
        total = sum(w * f * p[name] for w, f, p in zip(weights, state_factors, pushes[1:], strict=True))
        np.testing.assert_allclose(new[name], values[name] + total, rtol=1e-6, atol=1e-6)
    assert new["norm/count"] == 41
    np.testing.assert_array_equal(new["norm/ready"], pushes[1]["norm/ready"])


def test_float64_variables_are_computed_in_float64():
    layout = flat_layout(8, "float64")
    store = started(layout, {"flat": np.ones(8)})
    push(store, 0, {"flat": np.full(8, 1e-12)})
    store.apply([0], [1.0], None, 1.0)
    np.testing.assert_array_equal(store.export()["flat"], 1 - 1e-12)


def test_only_applied_rounds_count_as_updates_of_adam():
    layout = flat_layout(4)
    store = started(layout, {"flat": np.zeros(4, np.float32)}, optimizer=Adam())
    push(store, 0, {"flat": np.full(4, 5, np.float32)})
    store.skip()
    store.skip()
    version = store.apply([0], [1.0], None, 0.125)
    assert (version.step, store.updates) == (3, 1)
    # The first update of Adam is one learning rate long, which it is at t = 1 only.
    np.testing.assert_allclose(store.export()["flat"], -0.125, rtol=1e-5)


def test_a_void_round_keeps_the_values_and_counts_a_step():
    layout = flat_layout(4)
    store = started(layout, {"flat": np.arange(4, dtype=np.float32)})
    before = store.current
    after = store.skip()
    assert (before.step, after.step, store.current.step) == (0, 1, 1)
    assert bytes(after.buffer) == bytes(before.buffer)


def test_a_gradient_that_is_left_out_or_weighs_nothing_cannot_poison():
    values = random_arrays(MIXED, 0)
    good, bad = random_arrays(MIXED, 1), random_arrays(MIXED, 2)
    for name in (*TRAINABLE, "norm/mean", "norm/exact"):
        bad[name][...] = np.nan
    results = []
    for slots, weights in (([0], [1.0]), ([0, 1], [1.0, 0.0])):
        store = started(MIXED, values, clip_norm=0.5)
        push(store, 0, good)
        push(store, 1, bad)
        results.append(bytes(store.apply(slots, weights, None, 0.5).buffer))
    assert results[0] == results[1]
    assert np.isfinite(by_name(MIXED, store.current)["dense/kernel"]).all()


def test_weights_that_are_all_zero_apply_a_gradient_of_zero():
    values = random_arrays(MIXED, 0)
    store = started(MIXED, values, clip_norm=1.0)
    push(store, 0, random_arrays(MIXED, 1))
    new = by_name(MIXED, store.apply([0], [0.0], None, 0.5))
    for name in (*TRAINABLE, "norm/mean"):
        np.testing.assert_array_equal(new[name], values[name])


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0.01, 100))
@settings(max_examples=30)
def test_the_aggregate_is_scaled_down_to_the_norm_and_never_up(count, seed, clip_norm):
    values = {name: np.zeros_like(array) for name, array in random_arrays(MIXED, 0).items()}
    store = started(MIXED, values, slots=count, clip_norm=clip_norm)
    pushes = [random_arrays(MIXED, [seed, rank]) for rank in range(count)]
    for slot, arrays in enumerate(pushes):
        push(store, slot, arrays)
    weights = np.random.default_rng(seed).dirichlet(np.ones(count))
    new = by_name(MIXED, store.apply(range(count), weights, None, 1.0))
    mean = {name: sum(w * p[name] for w, p in zip(weights, pushes, strict=True)) for name in TRAINABLE}
    norm = math.sqrt(sum(float((array**2).sum()) for array in mean.values()))
    for name in TRAINABLE:
        np.testing.assert_allclose(new[name], -mean[name] * min(1, clip_norm / norm), rtol=1e-4, atol=1e-5)
    # Deltas of state are no gradients: the norm of the aggregate is not theirs.
    delta = sum(w * p["norm/mean"] for w, p in zip(weights, pushes, strict=True))
    np.testing.assert_allclose(new["norm/mean"], delta, rtol=1e-4, atol=1e-5)


def test_the_average_follows_its_definition_and_void_rounds_do_not_move_it():
    values = random_arrays(MIXED, 0)
    store = started(MIXED, values, ema_decay=0.75)
    average = {name: values[name].astype(np.float64) for name in TRAINABLE}
    for seed in range(5):
        push(store, 0, random_arrays(MIXED, seed))
        new = by_name(MIXED, store.apply([0], [1.0], None, 0.5))
        average = {name: 0.75 * average[name] + 0.25 * new[name] for name in TRAINABLE}
        store.skip()
    out = aligned_empty(MIXED.values_bytes)
    version = store.evaluation_values(out)
    assert version.step == 10
    evaluated, exported = by_name(MIXED, version), store.export()
    for name in TRAINABLE:
        np.testing.assert_allclose(evaluated[name], average[name], rtol=1e-5, atol=1e-6)
        assert np.abs(evaluated[name] - new[name]).max() > 0.1
    for name in values:
        expected = evaluated[name] if name in TRAINABLE else new[name]
        np.testing.assert_array_equal(evaluated[name], expected)
        np.testing.assert_array_equal(exported[name], expected)
        assert not exported[name].flags.writeable


def test_without_an_average_the_current_values_are_evaluated_and_exported():
    values = random_arrays(MIXED, 0)
    store = started(MIXED, values)
    out = aligned_empty(MIXED.values_bytes)
    assert bytes(store.evaluation_values(out).buffer) == bytes(store.current.buffer)
    for name, array in store.export().items():
        np.testing.assert_array_equal(array, values[name])
        assert array.dtype == values[name].dtype and array.shape == values[name].shape


def test_moments_are_found_by_name_and_variable():
    store = started(MIXED, random_arrays(MIXED, 0), optimizer=Adam(beta1=0.5, beta2=0.75), ema_decay=0.0)
    gradients = random_arrays(MIXED, 1)
    push(store, 0, gradients)
    store.apply([0], [1.0], None, 0.1)
    arrays = store.optimizer_arrays()
    assert list(arrays) == ["m", "v", "average"]
    for name in TRAINABLE:
        np.testing.assert_array_equal(arrays["m"][name], gradients[name] * np.float32(0.5))
        np.testing.assert_allclose(arrays["v"][name], gradients[name] ** 2 / 4, rtol=1e-6)
        np.testing.assert_array_equal(arrays["average"][name], store.export()[name])
        assert not arrays["m"][name].flags.writeable
    assert "norm/mean" not in arrays["m"]


def test_initialising_again_forgets_moments_average_and_steps():
    values, gradients = random_arrays(MIXED, 0), random_arrays(MIXED, 1)
    store = started(MIXED, values, optimizer=Adam(), ema_decay=0.5)
    push(store, 0, gradients)
    first = bytes(store.apply([0], [1.0], None, 0.1).buffer)
    average = store.export()["dense/kernel"].tobytes()
    store.apply([0], [1.0], None, 0.1)
    assert store.initialise(packed(MIXED, values, MIXED.values_bytes)).step == 0
    assert bytes(store.apply([0], [1.0], None, 0.1).buffer) == first
    assert store.export()["dense/kernel"].tobytes() == average


# ---- how gradients lie to each other -------------------------------------------------------------------


def trainable_vector(arrays):
    return np.concatenate([np.asarray(arrays[name], np.float64).reshape(-1) for name in TRAINABLE])


def measured_store(**config):
    """Return a store after one update, with gradients in three slots and two references, and all vectors."""
    store = started(MIXED, random_arrays(MIXED, 0), optimizer=SGD(0.9), references=2, **config)
    push(store, 0, random_arrays(MIXED, 99))
    store.apply([0], [1.0], None, 0.1)
    pushed = {row: random_arrays(MIXED, row) for row in (0, 1, 3, 4, 5)}
    for row, arrays in pushed.items():
        push(store, row, arrays, gap=255)
    return (
        store,
        {row: trainable_vector(arrays) for row, arrays in pushed.items()},
        trainable_vector(random_arrays(MIXED, 99)),
    )


@pytest.mark.parametrize("references", [(), (5,), (4, 5)])
@pytest.mark.parametrize("with_momentum", [False, True])
def test_inner_products_are_those_of_the_trainable_variables_in_the_order_asked_for(references, with_momentum):
    store, vectors, moment = measured_store()
    rows = [vectors[row] for row in (0, 1, 3, *references)] + [moment] * with_momentum
    expected = np.array(rows) @ np.array(rows).T
    products = store.comparison.inner_products([0, 1, 3], references, with_momentum)
    np.testing.assert_allclose(products, expected, rtol=1e-6)
    np.testing.assert_array_equal(products, products.T)
    assert products.dtype == np.float64


@pytest.mark.parametrize("references", [(), (5,), (4, 5)])
@pytest.mark.parametrize("with_momentum", [False, True])
def test_projections_are_those_on_references_moment_and_total(references, with_momentum):
    store, vectors, moment = measured_store()
    coefficients = [0.5, -0.25, 2.0]
    rows = np.array([vectors[row] for row in (0, 1, 3, *references)] + [moment] * with_momentum)
    rows = np.concatenate([rows, [coefficients @ rows[:3]]])
    found = store.comparison.projections([0, 1, 3], coefficients, references, with_momentum)
    np.testing.assert_allclose(found, rows @ rows[3:].T, rtol=1e-6)
    assert found.dtype == np.float64


def test_measurements_have_the_same_bits_for_any_number_of_threads():
    layout = flat_layout(600_000)  # more than the least that is shared among threads
    results = set()
    for threads in (1, 2, 3):
        store = started(layout, random_arrays(layout, 1), threads=threads, optimizer=Adam())
        for slot in range(4):
            push(store, slot, random_arrays(layout, slot))
        store.apply([0, 1], [0.5, 0.5], None, 0.1)
        products = store.comparison.inner_products([0, 1, 2, 3], with_momentum=True)
        projections = store.comparison.projections([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], with_momentum=True)
        store.apply_trimmed([0, 1, 2, 3], 1, 0.1)
        results.add((products.tobytes(), projections.tobytes(), bytes(store.current.buffer)))
        store.close()
    assert len(results) == 1


def test_measuring_changes_nothing():
    store, _, _ = measured_store()
    before = bytes(store.current.buffer), [bytes(store.receiver(row).buffer) for row in (0, 1, 3, 4, 5)]
    store.comparison.inner_products([0, 1, 3], [4, 5], True)
    store.comparison.projections([0, 1, 3], [1, 1, 1], [4, 5], True)
    assert (bytes(store.current.buffer), [bytes(store.receiver(row).buffer) for row in (0, 1, 3, 4, 5)]) == before


def test_there_is_a_first_moment_once_an_optimizer_that_keeps_one_has_made_an_update():
    for optimizer, kept in ((SGD(), False), (SGD(0.9), True), (Adam(), True)):
        store = started(MIXED, random_arrays(MIXED, 0), optimizer=optimizer)
        assert not store.has_momentum
        push(store, 0, random_arrays(MIXED, 1))
        store.apply([0], [1.0], None, 0.1)
        assert store.has_momentum == kept


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda store: store.comparison.inner_products([0, 6]), "none of number 6"),
        (lambda store: store.comparison.inner_products([0], [-1]), "none of number -1"),
        (lambda store: store.comparison.projections([0, 1], [1.0]), "one coefficient for each slot"),
        (lambda store: store.comparison.projections([0], [1.0], [6]), "none of number 6"),
        (lambda store: store.apply_trimmed([0, 1, 6], 1, 0.1), "none of number 6"),
        (lambda store: store.apply_trimmed([0, 1], 1, 0.1), "1 values cannot be trimmed at each end of 2"),
        (lambda store: store.apply_trimmed([], 0, 0.1), "cannot be trimmed"),
        (lambda store: store.apply_trimmed([0, 1, 2], 1, 0.1, [1.0]), "one state factor for each slot"),
    ],
)
def test_rows_that_do_not_exist_and_parts_that_do_not_match_are_our_own_mistake(ask, says):
    store, _, _ = measured_store()
    with pytest.raises(LocalProtocolError, match=says):
        ask(store)
    assert store.current.step == 1


def test_a_moment_that_no_optimizer_keeps_cannot_be_compared_with():
    store = started(MIXED, random_arrays(MIXED, 0))
    with pytest.raises(LocalProtocolError, match="keeps no first moment"):
        store.comparison.inner_products([0], with_momentum=True)
    with pytest.raises(LocalProtocolError, match="keeps no first moment"):
        store.comparison.projections([0], [1.0], with_momentum=True)


# ---- trimmed means -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "trim"), [([0], 0), ([0, 1, 2, 3], 0), ([3, 1, 2], 1), ([0, 1, 2, 3], 1)])
@pytest.mark.parametrize("state_factors", [None, [0.5, 1.0, 0.0, 0.25]])
def test_a_trimmed_mean_updates_as_that_gradient_would_and_is_added_to_state(slots, trim, state_factors):
    state_factors = state_factors and state_factors[: len(slots)]
    values = random_arrays(MIXED, 0)
    store = started(MIXED, values)
    pushes = {slot: random_arrays(MIXED, slot + 1) for slot in slots}
    for slot, arrays in pushes.items():
        push(store, slot, arrays)
    new = by_name(MIXED, store.apply_trimmed(slots, trim, 0.5, state_factors))
    for name in TRAINABLE:
        middle = np.sort([pushes[slot][name] for slot in slots], axis=0)[trim : len(slots) - trim]
        np.testing.assert_allclose(new[name], values[name] - 0.5 * middle.mean(axis=0), rtol=1e-5, atol=1e-6)
    for name in ("norm/mean", "norm/exact"):
        deltas = [f * pushes[slot][name] for slot, f in zip(slots, state_factors or [1.0] * 4, strict=False)]
        middle = np.sort(deltas, axis=0)[trim : len(slots) - trim]
        np.testing.assert_allclose(new[name], values[name] + middle.mean(axis=0), rtol=1e-5, atol=1e-6)
    for name in ("norm/count", "norm/ready"):
        np.testing.assert_array_equal(new[name], pushes[slots[0]][name])


def test_a_trimmed_mean_is_clipped_averaged_and_counted_as_any_gradient_is():
    """The median of three of which two are equal is one of these: the same bits as if it had come alone."""
    results = []
    for trimmed in (False, True):
        config = {"optimizer": Adam(), "clip_norm": 0.5, "ema_decay": 0.75}
        store = started(MIXED, random_arrays(MIXED, 0), **config)
        for step in range(3):
            for slot, seed in enumerate((7, 8 + step, 8 + step)):
                push(store, slot, random_arrays(MIXED, seed))
            version = store.apply_trimmed([0, 1, 2], 1, 0.1) if trimmed else store.apply([1], [1.0], None, 0.1)
        assert (version.step, store.updates) == (3, 3)
        new = by_name(MIXED, version)
        exported = store.export()
        results.append(b"".join(array[name].tobytes() for array in (new, exported) for name in TRAINABLE))
    assert results[0] == results[1]


# ---- what arrives --------------------------------------------------------------------------------------


def test_a_gradient_is_measured_over_the_trainable_variables_as_it_arrives():
    store = started(MIXED, random_arrays(MIXED, 0))
    arrays = random_arrays(MIXED, 1)
    check = push(store, 2, arrays)
    squares = sum(float((arrays[name].astype(np.float64) ** 2).sum()) for name in TRAINABLE)
    assert (check.finite, check.bad_variable) == (True, None)
    assert check.gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-12)
    squares = sum(float((arrays[name].astype(np.float64) ** 2).sum()) for name in ("norm/mean", "norm/exact"))
    assert check.state_norm == pytest.approx(math.sqrt(squares), rel=1e-12)


def test_the_norm_of_a_large_gradient_is_that_of_all_its_blocks():
    layout = flat_layout(THREE_BLOCKS + 1)
    store = started(layout, random_arrays(layout, 0))
    arrays = random_arrays(layout, 1)
    receiver = store.receiver(0)
    assert len(receiver.block_ends) == 3
    assert receiver.block_ends[-1] == layout.payload_bytes
    assert all(end % 64 == 0 for end in receiver.block_ends)
    squares = math.fsum(arrays["flat"].astype(np.float64) ** 2)
    assert push(store, 0, arrays).gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-12)


@pytest.mark.parametrize("name", [*TRAINABLE, "norm/mean", "norm/exact"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_and_named(name, value):
    store = started(MIXED, random_arrays(MIXED, 0))
    arrays = random_arrays(MIXED, 1)
    arrays[name].reshape(-1)[-1] = value
    check = push(store, 0, arrays)
    assert (check.finite, check.bad_variable) == (False, name)
    assert (check.gradient_norm, check.state_norm) == (math.inf, math.inf)


def test_the_first_of_several_bad_variables_is_named_in_layout_order():
    store = started(MIXED, random_arrays(MIXED, 0))
    arrays = random_arrays(MIXED, 1)
    for name in ("norm/mean", "precise", "dense/bias"):
        arrays[name][...] = np.nan
    assert push(store, 0, arrays).bad_variable == "dense/bias"


@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.9), Adam()], ids=repr)
def test_bytes_in_gaps_do_not_matter_and_gaps_of_values_stay_zero(optimizer):
    values, gradients = random_arrays(MIXED, 0), random_arrays(MIXED, 1)
    used = np.zeros(MIXED.values_bytes, bool)
    for slot in MIXED.slots:
        used[slot.offset : slot.end] = True
    results = []
    for gap in (0, 255):  # bytes of 255 are NaN in every floating dtype
        store = Store(MIXED, StoreConfig(optimizer, 1, 1, clip_norm=1.0, ema_decay=0.5))
        store.initialise(packed(MIXED, values, MIXED.values_bytes, gap))
        for _ in range(3):
            check = push(store, 0, gradients, gap)
            version = store.apply([0], [1.0], None, 0.1)
        evaluated = store.evaluation_values(aligned_empty(MIXED.values_bytes))
        results.append((check, bytes(version.buffer), bytes(evaluated.buffer)))
        for values_in in (version, evaluated):
            assert not np.frombuffer(values_in.buffer, np.uint8)[~used].any()
    assert results[0] == results[1]


def test_a_push_that_broke_off_leaves_nothing_behind_after_a_restart():
    layout = flat_layout(THREE_BLOCKS)
    store = started(layout, random_arrays(layout, 0))
    receiver = store.receiver(0)
    receiver.buffer[:] = b"\xff" * len(receiver.buffer)
    receiver.received(receiver.block_ends[0])
    receiver.restart()
    receiver.buffer[:] = packed(layout, {"flat": np.ones(THREE_BLOCKS, np.float32)}, layout.payload_bytes).data
    for end in receiver.block_ends:
        receiver.received(end)
    assert receiver.finish().gradient_norm == pytest.approx(math.sqrt(THREE_BLOCKS), rel=1e-15)


def test_blocks_out_of_turn_and_pushes_cut_short_are_our_own_mistake():
    layout = flat_layout(THREE_BLOCKS)
    receiver = Store(layout, StoreConfig(SGD(), 1)).receiver(0)
    with pytest.raises(LocalProtocolError, match="not where block 0"):
        receiver.received(receiver.block_ends[1])
    receiver.received(receiver.block_ends[0])
    with pytest.raises(LocalProtocolError, match="not where block 1"):
        receiver.received(receiver.block_ends[0])
    with pytest.raises(LocalProtocolError, match="2 blocks"):
        receiver.finish()


def test_initial_values_that_are_not_finite_are_refused_by_name_and_change_nothing():
    values = random_arrays(MIXED, 0)
    store = started(MIXED, values)
    bad = random_arrays(MIXED, 1)
    bad["norm/mean"][1] = np.inf
    with pytest.raises(NotFinite, match="'norm/mean'") as caught:
        store.initialise(packed(MIXED, bad, MIXED.values_bytes))
    assert caught.value.variable == "norm/mean"
    np.testing.assert_array_equal(store.export()["dense/kernel"], values["dense/kernel"])


def test_initial_values_of_another_size_are_refused():
    store = Store(MIXED, StoreConfig(SGD(), 1))
    with pytest.raises(LocalProtocolError, match=f"of 64 bytes do not fill the layout's {MIXED.values_bytes}"):
        store.initialise(np.zeros(64, np.uint8))


# ---- versions ------------------------------------------------------------------------------------------


def counting_store(**config):
    """Make a store whose values are -step after each applied round."""
    layout = flat_layout(4)
    store = started(layout, {"flat": np.zeros(4, np.float32)}, **{"grace_s": 0.0, **config})
    push(store, 0, {"flat": np.ones(4, np.float32)})
    return store, lambda: store.apply([0], [1.0], None, 1.0)


def first_value(version):
    return np.frombuffer(version.buffer, np.float32)[0]


def never():
    pytest.fail("a hold was cut off that blocks nobody")


def test_a_held_version_stays_as_it_is_while_rounds_go_on():
    store, apply = counting_store()
    with store.hold(never) as version:
        for _ in range(10):
            assert first_value(apply()) == -store.current.step
            assert (version.step, first_value(version)) == (0, 0.0)


def test_versions_are_read_only():
    store, _ = counting_store()
    with store.hold(None) as version, pytest.raises(TypeError, match="read-only"):
        version.buffer[0] = 1


def test_only_who_holds_the_oldest_version_is_cut_off_and_only_when_no_buffer_is_left():
    store, apply = counting_store()
    cut = []

    def holding(name):
        def cut_off():
            cut.append(name)
            holds[name].release()

        return store.hold(cut_off)

    holds = {}
    for name in ("oldest", "oldest too"):
        holds[name] = holding(name)
    apply()
    holds["middle"] = holding("middle")
    apply()
    holds["current"] = holding("current")
    assert cut == []
    assert first_value(apply()) == -3
    assert sorted(cut) == ["oldest", "oldest too"]
    assert [first_value(holds[name].version) for name in ("middle", "current")] == [-1, -2]


def test_a_hold_without_cut_off_is_spared_and_the_next_oldest_gives_way():
    store, apply = counting_store()
    cut = []
    checkpoint = store.hold(None)
    apply()
    reader = store.hold(lambda: (cut.append("reader"), reader.release()))
    apply()
    assert first_value(apply()) == -3
    assert cut == ["reader"]
    assert first_value(checkpoint.version) == 0


def waits_of_versions(monkeypatch):
    """Return an event that is set once an update waits for the release of a version."""
    waiting = threading.Event()

    class Watched(threading.Condition):
        def wait(self, timeout=None):
            waiting.set()  # under the lock, which a release has to take: it comes after the wait began
            return super().wait(timeout)

    monkeypatch.setattr("ps.storage.versions.threading", SimpleNamespace(Condition=Watched, Lock=threading.Lock))
    return waiting


def test_an_update_that_waits_goes_on_when_another_thread_releases_the_last_hold(monkeypatch):
    waiting = waits_of_versions(monkeypatch)
    store, apply = counting_store(release_timeout_s=3600.0)
    checkpoint = store.hold(None)
    apply()
    asked = []
    holds = [store.hold(lambda: asked.append(1)), store.hold(lambda: asked.append(2))]
    apply()

    def release():
        assert waiting.wait(60)
        for hold in holds:
            hold.release()

    other = threading.Thread(target=release)
    other.start()
    assert first_value(apply()) == -3
    other.join()
    assert sorted(asked) == [1, 2]
    assert first_value(checkpoint.version) == 0


def test_who_releases_in_the_time_of_grace_is_not_cut_off(monkeypatch):
    waiting = waits_of_versions(monkeypatch)
    store, apply = counting_store(grace_s=3600.0)
    oldest = store.hold(never)
    apply()
    middle = store.hold(never)
    apply()

    def release():
        assert waiting.wait(60)
        oldest.release()

    other = threading.Thread(target=release)
    other.start()
    assert first_value(apply()) == -3
    other.join()
    assert first_value(middle.version) == -1


def test_with_more_buffers_more_versions_are_held_before_anybody_is_cut_off():
    store, apply = counting_store(versions=5)
    holds = []
    for _ in range(4):
        holds.append(store.hold(never))
        apply()
    assert [first_value(hold.version) for hold in holds] == [0, -1, -2, -3]
    cut = []
    for hold in holds:
        hold.cut_off = lambda hold=hold: (cut.append(hold), hold.release())
    apply()
    assert cut == holds[:1]


def test_an_update_that_gets_no_buffer_ends_with_an_error_and_changes_nothing():
    store, apply = counting_store(release_timeout_s=0.01)
    checkpoint = store.hold(None)
    apply()
    stuck = store.hold(lambda: None)
    apply()
    with pytest.raises(NoProgress, match=r"steps \[0, 1\]"):
        apply()
    assert (store.current.step, store.updates, first_value(store.current)) == (2, 2, -2)
    stuck.release()
    assert first_value(apply()) == -3
    checkpoint.release()


def test_releasing_twice_does_not_release_the_hold_of_another():
    store, apply = counting_store()
    first, second = store.hold(never), store.hold(never)
    first.release()
    first.release()
    for _ in range(5):
        apply()
    assert first_value(second.version) == 0


def test_a_version_that_was_held_across_a_void_round_is_still_kept():
    store, apply = counting_store()
    hold = store.hold(never)
    store.skip()
    for _ in range(5):
        apply()
    assert (hold.version.step, first_value(hold.version)) == (0, 0.0)


def test_a_store_without_values_says_so():
    store = Store(MIXED, StoreConfig(SGD(), 1))
    for use in (lambda: store.current, lambda: store.hold(None), store.skip, store.export):
        with pytest.raises(LocalProtocolError, match="no values yet"):
            use()


# ---- size and configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        StoreConfig(SGD(), 1),
        StoreConfig(SGD(0.5), 3),
        StoreConfig(Adam(), 5, ema_decay=0.9),
        StoreConfig(SGD(), 2, references=3),
        StoreConfig(SGD(), 2, versions=6),
    ],
    ids=repr,
)
def test_the_memory_announced_is_the_memory_allocated(config, monkeypatch):
    allocated = []

    def counted(size_bytes):
        allocated.append(size_bytes)
        return aligned_empty(size_bytes)

    monkeypatch.setattr("ps.storage.store.aligned_empty", counted)
    monkeypatch.setattr("ps.storage.versions.aligned_empty", counted)
    store = Store(MIXED, config)
    assert sum(allocated) == Store.memory_bytes(MIXED, config)
    arrays = store.optimizer_arrays()
    assert len(arrays) == len(config.optimizer.moments) + (config.ema_decay is not None)


def test_rows_of_the_slab_start_at_cache_lines():
    store = Store(MIXED, StoreConfig(SGD(), 3))
    starts = [np.frombuffer(store.receiver(slot).buffer, np.uint8).ctypes.data for slot in range(3)]
    assert [start % 64 for start in starts] == [0, 0, 0]
    assert len({*starts}) == 3


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_that_cannot_be_computed_in_are_refused_naming_the_first_variable(dtype, kind):
    manifest = Manifest(
        (
            VariableSpec("fine", (2,), "float32"),
            VariableSpec("half", (2,), dtype, kind),
            VariableSpec("half too", (2,), dtype, kind),
        )
    )
    with pytest.raises(ConfigurationError, match=f"'half' is {dtype}"):
        Store(Layout.of(manifest), StoreConfig(SGD(), 1))


def test_a_model_without_variables_goes_through_a_round():
    layout = Layout.of(Manifest(()))
    store = Store(layout, StoreConfig(Adam(), 2, clip_norm=1.0, ema_decay=0.5))
    store.initialise(np.empty(0, np.uint8))
    assert push(store, 0, {}).gradient_norm == 0.0
    assert store.apply([0], [1.0], None, 0.1).step == 1
    assert store.export() == {}


@pytest.mark.parametrize(
    ("slots", "weights", "factors"),
    [([], [], None), ([0], [0.5, 0.5], None), ([0, 1], [0.5, 0.5], [1.0]), ([0, 1], [0.5, 0.5], [1.0, 1.0, 1.0])],
)
def test_a_round_whose_parts_do_not_match_is_our_own_mistake(slots, weights, factors):
    store = started(MIXED, random_arrays(MIXED, 0))
    with pytest.raises(LocalProtocolError, match="one weight and clip factor for each"):
        store.apply(slots, weights, factors, 0.1)
    with pytest.raises(LocalProtocolError, match="one weight and clip factor for each"):
        store.apply(slots, weights, None, 0.1, factors or [1.0, 1.0, 1.0])
    assert store.current.step == 0


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ({"slots": 0}, "slot"),
        ({"threads": 0}, "thread"),
        ({"references": -1}, "references"),
        ({"clip_norm": 0.0}, "clip"),
        ({"clip_norm": math.nan}, "clip"),
        ({"versions": 2}, "versions"),
        ({"ema_decay": 1.0}, "EMA"),
        ({"ema_decay": -0.1}, "EMA"),
    ],
)
def test_a_configuration_out_of_range_is_refused_and_named(numbers, names):
    with pytest.raises(ConfigurationError, match=names):
        StoreConfig(**{"optimizer": SGD(), "slots": 1, **numbers})
