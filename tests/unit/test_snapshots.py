"""Snapshots of a store: what they hold while rounds go on, and what is refused when they are put back."""

import numpy as np
import pytest

from protocol.arena import Arena, aligned_empty
from protocol.errors import LocalProtocolError, ManifestMismatch
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.storage.optimizers import SGD, Adam
from ps.storage.store import Store
from ps.storage.store_config import NotFinite, StoreConfig
from tests.unit.resumed import copied

LAYOUT = Layout.of(
    Manifest(
        (
            VariableSpec("kernel", (5, 3), "float32"),
            VariableSpec("a/bias", (), "float64"),
            VariableSpec("nothing", (0, 4), "float32"),
            VariableSpec("mean", (3,), "float32", Kind.STATE),
            VariableSpec("ready", (2,), "bool", Kind.STATE),
        )
    )
)
LARGE = Layout.of(
    Manifest((VariableSpec("flat", (700_001,), "float32"), VariableSpec("flat too", (9,), "float64")))
)


@pytest.fixture
def made():
    """Return a function that makes a store; its threads end with the test."""
    stores = []

    def make(layout=LAYOUT, **config):
        options = {"optimizer": Adam(), "slots": 2, "references": 2, "checkpoints": True, "ema_decay": 0.9}
        stores.append(Store(layout, StoreConfig(**(options | config))))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def receive(store, row, seed):
    receiver = store.receiver(row)
    arena = Arena.zeros(store.layout)
    for view in arena.views(writeable=True).values():
        view[...] = np.random.default_rng([seed, view.size]).normal(size=view.shape)
    receiver.buffer[:] = arena.buffer.data
    for end in receiver.block_ends:
        receiver.received(end)


def trained(store, rounds=3):
    store.initialise(np.zeros(store.layout.values_bytes, np.uint8))
    for step in range(rounds):
        for row in (0, 1, 2, 3):
            receive(store, row, 10 * step + row)
        store.apply([0, 1], [0.5, 0.5], None, 0.1)
    return store


def test_a_snapshot_names_everything_and_stays_while_rounds_go_on(made):
    store = trained(made())
    before = {**store.export()}  # the average, where there is one
    snapshot = store.snapshot([3])
    assert (snapshot.step, snapshot.updates) == (3, 3)
    assert snapshot.tensors["values"].keys() == {"kernel", "a/bias", "nothing", "mean", "ready"}
    trained_ones = ("kernel", "a/bias", "nothing")
    expected = {f"{moment}/{name}" for moment in ("m", "v", "average") for name in trained_ones}
    assert snapshot.tensors["optimizer"].keys() == expected
    assert snapshot.tensors["references"].keys() == {f"3/{name}" for name in trained_ones}
    for name in trained_ones:
        np.testing.assert_array_equal(snapshot.tensors["optimizer"][f"average/{name}"], before[name])
    kept = copied(snapshot.tensors)
    for step in range(4):
        receive(store, 0, 99)
        receive(store, 3, 98 + step)
        store.apply([0], [1.0], None, 0.1)
    for group, tensors in snapshot.tensors.items():
        for name, array in tensors.items():
            assert array.tobytes() == kept[group][name].tobytes(), name
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    assert kept["values"]["kernel"].tobytes() != store.export()["kernel"].tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_large_arrays_are_copied_whole_by_any_number_of_threads(made, threads):
    store = trained(made(LARGE, threads=threads), 1)
    snapshot = store.snapshot([2])
    arrays = store.optimizer_arrays()
    for name in ("flat", "flat too"):
        for moment in ("m", "v", "average"):
            np.testing.assert_array_equal(snapshot.tensors["optimizer"][f"{moment}/{name}"], arrays[moment][name])
    row = Arena(LARGE, np.frombuffer(store.receiver(2).buffer, np.uint8)).views()
    for name, view in row.items():
        np.testing.assert_array_equal(snapshot.tensors["references"][f"2/{name}"], view)


def test_the_buffer_is_made_once_as_announced_and_used_again(made, monkeypatch):
    allocated = []

    def counted(size_bytes):
        allocated.append(size_bytes)
        return aligned_empty(size_bytes)

    for module in ("store", "versions", "snapshots"):
        monkeypatch.setattr(f"ps.storage.{module}.aligned_empty", counted)
    for config in ({}, {"optimizer": SGD(0.9), "ema_decay": None, "versions": 5}, {"checkpoints": False}):
        allocated.clear()
        store = trained(made(**config))
        for _ in range(3 if store.config.checkpoints else 0):
            store.snapshot([2, 3]).release()
        assert sum(allocated) == Store.memory_bytes(LAYOUT, store.config)


def test_two_snapshots_at_once_are_our_own_mistake(made):
    store = trained(made())
    first = store.snapshot()
    with pytest.raises(LocalProtocolError, match="before the last one was released"):
        store.snapshot()
    first.release()
    second = store.snapshot()
    first.release()  # of a snapshot that is no more: the second stays
    with pytest.raises(LocalProtocolError, match="before the last one was released"):
        store.snapshot()
    second.release()
    with pytest.raises(LocalProtocolError, match=r"row 1 .* is no validator's"):
        store.snapshot([1])
    store.snapshot().release()
    with pytest.raises(LocalProtocolError, match="no room for one"):
        trained(made(checkpoints=False)).snapshot()


def test_a_snapshot_is_never_cut_off_and_its_release_lets_the_version_go(made):
    store = trained(made(grace_s=0.0))
    snapshot = store.snapshot()
    cut = []
    holds = []
    for step in range(3):
        holds.append(store.hold(lambda step=step: (cut.append(step), holds[step].release())))
        receive(store, 0, step)
        store.apply([0], [1.0], None, 0.1)
    assert cut == [1]  # the oldest beside the snapshot's own version, which that of step 0 is too
    snapshot.release()
    holds[0].release()
    holds[2].release()
    for _ in range(3):
        store.apply([0], [1.0], None, 0.1)
    assert cut == [1]


def restored(store, kept, **changes):
    return store.restore(kept.step, kept.updates, copied(kept.tensors), **changes)


def test_what_is_restored_is_what_was_kept(made):
    old, new = trained(made()), made()
    snapshot = old.snapshot([2, 3])
    for row in range(4):
        new.receiver(row).buffer[:] = b"\xff" * LAYOUT.payload_bytes
    version = restored(new, snapshot)
    assert (version.step, new.current.step, new.updates) == (3, 3, 3)
    assert bytes(version.buffer) == bytes(old.current.buffer)
    again = new.snapshot([2, 3])
    for group, tensors in snapshot.tensors.items():
        assert list(tensors) == list(again.tensors[group])
        for name, array in tensors.items():
            assert array.tobytes() == again.tensors[group][name].tobytes(), name
    products = [store.comparison.inner_products([], [2, 3], True).tobytes() for store in (old, new)]
    assert products[0] == products[1]


def test_references_move_with_the_number_of_workers_and_go_where_there_is_no_room(made):
    snapshot = trained(made()).snapshot([2, 3])
    more, fewer = made(slots=5), made(slots=1, references=1)
    restored(more, snapshot, moved_rows=3)
    restored(fewer, snapshot, moved_rows=-1)
    kept = snapshot.tensors["references"]
    for store, rows in ((more, {5: 2, 6: 3}), (fewer, {1: 2})):
        again = store.snapshot(list(rows)).tensors["references"]
        for row, before in rows.items():
            np.testing.assert_array_equal(again[f"{row}/kernel"], kept[f"{before}/kernel"])


def changed(kept, group, name, array):
    tensors = copied(kept.tensors)
    tensors[group].pop(name, None)
    if array is not None:
        tensors[group][name] = array
    return tensors


@pytest.mark.parametrize(
    ("group", "name", "array", "words"),
    [
        ("values", "kernel", None, r"its values, 'kernel' is missing, and here it is float32 \[5, 3\]"),
        ("values", "kernel", np.zeros((5, 4), np.float32), r"'kernel' is float32 \[5, 4\]"),
        ("values", "ready", np.zeros(2, np.uint8), r"'ready' is uint8 \[2\], and here it is bool \[2\]"),
        ("values", "more", np.zeros(1), r"'more' is float64 \[1\], and here it is missing"),
        ("optimizer", "v/a/bias", np.zeros((), np.float32), r"its optimizer, 'v/a/bias' is float32 \[\]"),
        ("optimizer", "average/kernel", None, "'average/kernel' is missing"),
        ("references", "3/kernel", None, "its references, '3/kernel' is missing"),
        ("references", "kernel", np.zeros(1), "'kernel', which names no row"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(made, group, name, array, words):
    kept, store = trained(made()).snapshot([3]), trained(made(), 1)
    before = bytes(store.current.buffer), store.snapshot()
    before[1].release()
    with pytest.raises(ManifestMismatch, match=words):
        store.restore(kept.step, kept.updates, changed(kept, group, name, array))
    assert (bytes(store.current.buffer), store.current.step, store.updates) == (before[0], 1, 1)


def test_values_that_are_not_finite_are_refused_and_moments_are_not_looked_at(made):
    kept, store = trained(made()).snapshot(), trained(made(), 1)
    before = bytes(store.current.buffer)
    with pytest.raises(NotFinite, match="'mean'"):
        store.restore(3, 3, changed(kept, "values", "mean", np.full(3, np.nan, np.float32)))
    assert (bytes(store.current.buffer), store.current.step) == (before, 1)
    huge = np.full((5, 3), np.inf, np.float32)
    store.restore(3, 3, changed(kept, "optimizer", "v/kernel", huge))
    np.testing.assert_array_equal(store.optimizer_arrays()["v"]["kernel"], huge)
