"""What a validator computes on: the examples that no worker has, in batches that are a function of (seed, step)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigurationError
from worker.batches import OWN_TRUSTED_BATCH, SEED_LIMIT, Shard, TrustedBatches, hold_out

PINNED = [17, 83, 66]


@given(st.integers(0, SEED_LIMIT - 1), st.integers(1, 30), st.integers(1, 5), st.integers(0, 10**12))
def test_no_worker_trains_on_what_a_validator_sees(seed, trusted, shards, step):
    """The batch lies among the trusted examples, which are in no shard."""
    batches = TrustedBatches.of(80, trusted, None, seed)
    ids = batches.batch_ids(step).tolist()
    assert sorted(ids) == sorted(hold_out(80, trusted, seed)[0].tolist())
    for rank in range(shards):
        assert set(ids).isdisjoint(Shard.of(80, rank, shards, seed, trusted).ids.tolist())


@given(st.integers(0, SEED_LIMIT - 1), st.integers(1, 20), st.integers(0, 10**12))
def test_a_batch_size_draws_so_many_of_them_without_repetition(seed, batch_size, step):
    """Another object draws the same for the same step, in any order of calls."""
    batches = TrustedBatches.of(80, 20, batch_size, seed)
    ids = batches.batch_ids(step)
    assert ids.dtype == np.int64
    assert len(set(ids.tolist())) == batch_size
    assert set(ids.tolist()) <= set(batches.ids.tolist())
    batches.batch_ids(step + 1)
    assert batches.batch_ids(step).tolist() == ids.tolist()
    assert TrustedBatches.of(80, 20, batch_size, seed).batch_ids(step).tolist() == ids.tolist()


def test_steps_and_seeds_draw_unlike_batches_and_all_come():
    batches = TrustedBatches.of(80, 20, 5, 1)
    drawn = [tuple(batches.batch_ids(step).tolist()) for step in range(40)]
    assert len(set(drawn)) == 40
    assert set().union(*drawn) == set(batches.ids.tolist())
    assert tuple(TrustedBatches.of(80, 20, 5, 2).batch_ids(0).tolist()) != drawn[0]


def test_the_batch_of_a_step_never_changes():
    """Pinned: if this fails, a validator of another release draws other batches."""
    assert TrustedBatches.of(100, 10, 3, 1).batch_ids(5).tolist() == PINNED


def test_a_data_set_of_its_own_is_trusted_as_a_whole():
    """With nothing held out all examples may come, in batches of a hundred, or all at once when there are fewer."""
    large = TrustedBatches.of(250, 0, None, 3)
    assert len(large.batch_ids(0)) == OWN_TRUSTED_BATCH
    assert set().union(*(large.batch_ids(step).tolist() for step in range(30))) == set(range(250))
    small = TrustedBatches.of(40, 0, None, 3)
    assert sorted(small.batch_ids(9).tolist()) == list(range(40))
    assert len(TrustedBatches.of(40, 0, 7, 3).batch_ids(9)) == 7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((80, 20, 21, 0), "cannot have 21 examples, because 20 are trusted: give --batch-size 1 to 20"),
        ((80, 20, 0, 0), "cannot have 0 examples"),
        ((80, 80, None, 0), "80 trusted examples cannot be held out of 80"),
        ((0, 0, None, 0), "cannot be held out of 0"),
        ((80, -1, None, 0), "-1 trusted"),
        ((80, 20, None, SEED_LIMIT), "out of range"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, text):
    with pytest.raises(ConfigurationError, match=text):
        TrustedBatches.of(*arguments)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step -1"):
        TrustedBatches.of(80, 20, None, 0).batch_ids(-1)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_ids_cannot_be_overwritten(batch_size):
    batches = TrustedBatches.of(80, 20, batch_size, 0)
    for ids in (batches.ids, batches.batch_ids(0)):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 0


def test_describe_says_what_is_trusted():
    """The start-up line has the sizes, and whose promise it is that no worker has the examples."""
    held_out = TrustedBatches.of(1438, 100, None, 1)
    first = ", ".join(map(str, held_out.ids[:3].tolist()))
    assert held_out.describe() == (
        "validator: batches of 100 from 100 trusted examples, which no worker with this seed and data trains on; "
        f"first ids {first}"
    )
    assert (
        "batches of 9 from all 40 training examples, which no worker may"
        in TrustedBatches.of(40, 0, 9, 1).describe()
    )
