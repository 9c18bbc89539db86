"""What a round's staleness does to its learning rate, and which gradients of validators a checkpoint must hold."""

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.tensors import Layout, Manifest, VariableSpec
from ps.closing import RoundCloser
from ps.coordination.instructions import CloseRound, Contribution
from ps.rules.aggregation import CosineTrust, Krum, Mean
from ps.storage.optimizers import SGD
from ps.storage.schedules import Constant
from ps.storage.store import Store
from ps.storage.store_config import StoreConfig

LAYOUT = Layout.of(Manifest((VariableSpec("flat", (4,), "float64"),)))


@pytest.fixture
def store():
    store = Store(LAYOUT, StoreConfig(SGD(), slots=3, references=2, threads=1))
    store.initialise(np.zeros(LAYOUT.values_bytes, np.uint8))
    arena = Arena.zeros(LAYOUT)
    arena.fill({"flat": np.ones(4)})
    for row in range(5):
        receiver = store.receiver(row)
        receiver.buffer[:] = arena.buffer.data
        for end in receiver.block_ends:
            receiver.received(end)
    return store


def push(rank, staleness, refused=""):
    return Contribution(rank, rank, 1, 1.0, None, 8, 2.0, refused, staleness=staleness)


@pytest.mark.parametrize(
    ("discount", "staleness", "factor"),
    [
        (0.0, [7], 1.0),
        (0.5, [0], 1.0),
        (0.5, [3], 0.5),
        (1.0, [1], 0.5),
        (1.0, [0, 4, 1], 0.2),
    ],
)
def test_the_learning_rate_falls_with_the_oldest_gradient(store, discount, staleness, factor):
    closer = RoundCloser(Mean(), Constant(0.25), staleness_discount=discount)
    closer.close(store, CloseRound(0, tuple(map(push, range(3), staleness))), [f"w{i}" for i in staleness])
    np.testing.assert_allclose(store.export()["flat"], -0.25 * factor, rtol=1e-15)


def test_the_staleness_of_what_is_refused_counts_for_nothing(store):
    closer = RoundCloser(Mean(), Constant(0.25), staleness_discount=1.0)
    closer.close(store, CloseRound(0, (push(0, 0), push(1, 99, "no"))), ["a", "b"])
    np.testing.assert_array_equal(store.export()["flat"], -0.25)


def test_a_checkpoint_holds_the_gradients_that_later_rounds_are_compared_with(store):
    closer = RoundCloser(CosineTrust(), Constant(0.25))
    assert closer.references == ()
    everyone = (push(0, 0), push(1, 0))
    closer.close(store, CloseRound(0, everyone, (3, 4)), ["a", "b"])
    closer.close(store, CloseRound(1, everyone), ["a", "b"])
    assert closer.references == (3, 4)
    closer.reference_arrives(3)
    assert closer.references == (4,)
    blind = RoundCloser(Krum(0), Constant(0.25))
    blind.close(store, CloseRound(0, everyone, (3, 4)), ["a", "b"])
    assert blind.references == ()


def test_they_move_with_the_rows_of_validators(store):
    closer = RoundCloser(CosineTrust(), Constant(0.25))
    closer.close(store, CloseRound(0, (push(0, 0), push(1, 0)), (3, 4)), ["a", "b"])
    for moved, room, rows in ((0, None, (3, 4)), (2, range(5, 7), (5, 6)), (-1, range(2, 3), (2,))):
        other = RoundCloser(CosineTrust(), Constant(0.25))
        other.restore(closer.state(), moved, room)
        assert other.references == rows
