"""The store of an ensemble: whose gradient moves what, by which factor, against plain NumPy."""

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.ensemble import Answers, Weighting, as_member, side_views
from protocol.errors import LocalProtocolError
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.storage.member_store import MemberStore, MemberWeights
from ps.storage.optimizers import SGD, Adam
from ps.storage.store_config import NotFinite, StoreConfig

RANKS = 3
OURS = Manifest(
    (
        VariableSpec("kernel", (5, 3), "float64"),
        VariableSpec("shared/table", (7,), "float64"),
        VariableSpec("bias", (2,), "float32"),
        VariableSpec("mean", (3,), "float64", Kind.STATE),
        VariableSpec("shared/mean", (2,), "float64", Kind.STATE),
        VariableSpec("shared/count", (), "int64", Kind.STATE),
    )
)
SIDES = Answers(4, 3, "float64").push_sides(Weighting.BATCH)


def parts():
    """Rank 2 has a network of another size."""
    larger = Manifest((*OURS.variables, VariableSpec("extra", (100,), "float64")))
    return [Layout.of(as_member(larger if rank == 2 else OURS, rank), SIDES) for rank in range(RANKS)]


def random_arena(layout, seed):
    """Payload in which every variable is random, by the part's own layout."""
    random = np.random.default_rng(seed)
    arena = Arena.zeros(layout)
    for view in arena.views(writeable=True).values():
        view[...] = random.integers(1, 9, view.shape) if view.dtype.kind == "i" else random.normal(size=view.shape)
    return arena


@pytest.fixture
def made():
    """Return a function that makes a store with initial values; it is closed at the end."""
    stores = []

    def make(optimizer):
        store = MemberStore(parts(), StoreConfig(optimizer, slots=RANKS, threads=2))
        stores.append(store)
        for rank in (1, 0, 2):
            arena = random_arena(store.parts[rank], rank)
            assert store.initialise_part(rank, arena.buffer[: store.parts[rank].values_bytes]) is (rank == 2)
        return store

    yield make
    for store in stores:
        store.close()


def receive(store, rank, seed):
    """Let a push arrive in the row of a rank; return it by name."""
    arena = random_arena(store.parts[rank], seed)
    receiver = store.receiver(rank)
    receiver.restart()
    start = 0
    for end in receiver.block_ends:
        receiver.buffer[start:end] = arena.buffer[start:end].data
        receiver.received(end)
        start = end
    assert receiver.finish().finite
    return arena.views()


def copied(store):
    return {name: value.copy() for name, value in store.export().items()}


def test_initial_values_are_each_ranks_own_and_shared_ones_rank_0s(made):
    store = made(SGD())
    values = store.export()
    for rank in range(RANKS):
        mine = random_arena(store.parts[rank], rank).views()
        for name, value in mine.items():
            if not name.startswith("shared/") or rank == 0:
                np.testing.assert_array_equal(values[name], value, err_msg=name)
    assert store.current.step == 0


def test_a_part_is_what_its_rank_laid_out(made):
    store = made(SGD())
    for rank, part in enumerate(store.parts):
        payload = b"".join(store.part_of(store.current.buffer, rank))
        assert len(payload) == part.values_bytes
        buffer = Arena.zeros(part).buffer
        buffer[: part.values_bytes] = np.frombuffer(payload, np.uint8)
        for name, value in Arena(part, buffer).views().items():
            np.testing.assert_array_equal(value, store.export()[name], err_msg=name)


def test_a_round_by_gradient_descent(made):
    """Owned: own factor and step; shared: the sum; state: as it is, or the mean; integers: of the first."""
    store = made(SGD())
    before = copied(store)
    pushed = [receive(store, rank, 10 + rank) for rank in range(RANKS)]
    store.apply_members(MemberWeights([0, 1, 2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1.0, 2.0, 0.5]), 0.1)
    after = store.export()
    assert store.current.step == 1
    for rank, (weight, step) in enumerate([(0.5, 1.0), (0.3, 2.0), (0.2, 0.5)]):
        for name in ("kernel", "bias"):
            full = f"member_{rank}/{name}"
            expected = before[full] - 0.1 * step * weight * pushed[rank][full]
            np.testing.assert_allclose(after[full], expected, rtol=1e-6 if name == "bias" else 1e-13)
        mean = f"member_{rank}/mean"
        np.testing.assert_allclose(after[mean], before[mean] + pushed[rank][mean], rtol=1e-14)
    total = sum(w * p["shared/table"] for w, p in zip((0.5, 0.3, 0.2), pushed, strict=True))
    np.testing.assert_allclose(after["shared/table"], before["shared/table"] - 0.1 * total, rtol=1e-13)
    deltas = np.mean([p["shared/mean"] for p in pushed], axis=0)
    np.testing.assert_allclose(after["shared/mean"], before["shared/mean"] + deltas, rtol=1e-13)
    assert after["shared/count"] == pushed[0]["shared/count"]


def test_what_belongs_to_a_missing_member_stays(made):
    """To the bit, with its moments and its count of updates: when it is back, it goes on from there."""
    store, control = made(Adam()), made(Adam())
    for step in range(3):
        for rank in (0, 2):
            receive(store, rank, 20 + 3 * step + rank)
        before = copied(store)
        store.apply_members(MemberWeights([0, 2], [0.6, 0.4], [0.6, 0.4], [1.0, 1.0]), 0.1)
        after = store.export()
        for name in before:
            changed = not np.array_equal(before[name], after[name])
            assert changed is not name.startswith("member_1/"), name
    for each in (store, control):
        receive(each, 1, 99)
        each.apply_members(MemberWeights([1], [1.0], [1.0], [1.0]), 0.1)
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(
            store.export()[f"member_1/{name}"], control.export()[f"member_1/{name}"], err_msg="not its first update"
        )


def test_side_arrays_lie_in_the_row(made):
    store = made(SGD())
    arena = random_arena(store.parts[2], 1)
    side_views(store.parts[2], arena.buffer)["logits"][...] = 7.0
    receiver = store.receiver(2)
    receiver.buffer[:] = arena.buffer.data
    np.testing.assert_array_equal(side_views(store.parts[2], store.row(2))["logits"], np.full((4, 3), 7.0))


def test_memory_is_told_before_it_is_taken():
    config = StoreConfig(Adam(), slots=RANKS)
    layouts = parts()
    largest = max(part.payload_bytes for part in layouts)
    own = sum(part.values_bytes for part in layouts)
    assert RANKS * largest + 3 * own / 2 < MemberStore.bytes_for(layouts, config) <= RANKS * largest + 5 * own


def test_what_cannot_be_is_an_error(made):
    store = made(SGD())
    with pytest.raises(LocalProtocolError, match="at least one member"):
        store.apply_members(MemberWeights([], [], [], []), 0.1)
    with pytest.raises(LocalProtocolError, match="do not fill"):
        store.initialise_part(0, np.zeros(64, np.uint8))
    bad = random_arena(store.parts[0], 0)
    bad.views(writeable=True)["member_0/kernel"][...] = np.nan
    with pytest.raises(NotFinite, match="member_0/kernel"):
        store.initialise_part(0, bad.buffer[: store.parts[0].values_bytes])
