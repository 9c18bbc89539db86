"""Shards and batches: who trains on what, the same on every machine and in every order of calls."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigurationError
from worker.batches import SEED_LIMIT, Shard, gather, hold_out
from worker.definitions import Dataset

ROOT = Path(__file__).parents[2]
PINNED_BATCH = [23, 67, 10, 22, 51, 53, 54, 68]
PINNED_TRUSTED = [33, 71, 42, 38, 66, 83, 35, 89, 17, 32]
SEEDS = st.integers(0, SEED_LIMIT - 1)


@st.composite
def partitions(draw):
    """(examples, shards, seed, trusted) that can be divided."""
    shards = draw(st.integers(1, 7))
    trusted = draw(st.integers(0, 20))
    return draw(st.integers(trusted + shards, trusted + 120)), shards, draw(SEEDS), trusted


@given(partitions())
def test_shards_are_disjoint_and_cover_all_but_the_trusted(partition):
    """Every example is trusted or in exactly one shard, and no shard is more than one larger than another."""
    n, shards, seed, trusted = partition
    trusted_ids, rest_ids = hold_out(n, trusted, seed)
    ids = [Shard.of(n, rank, shards, seed, trusted).ids for rank in range(shards)]
    assert len(trusted_ids) == trusted
    assert sorted(np.concatenate([trusted_ids, *ids]).tolist()) == list(range(n))
    assert sorted(rest_ids.tolist()) == sorted(np.concatenate(ids).tolist())
    sizes = [len(shard) for shard in ids]
    assert max(sizes) - min(sizes) <= 1


@given(partitions(), st.data())
def test_no_sample_comes_twice_in_a_pass(partition, data):
    """Over one pass of every worker the batches repeat no example and touch no trusted one."""
    n, shards, seed, trusted = partition
    batch_size = data.draw(st.integers(1, (n - trusted) // shards))
    pass_index = data.draw(st.integers(0, 10**9))
    trusted_ids, _ = hold_out(n, trusted, seed)
    taken = []
    for rank in range(shards):
        shard = Shard.of(n, rank, shards, seed, trusted)
        batches = shard.batches_per_pass(batch_size)
        assert batches == len(shard.ids) // batch_size
        for step in range(pass_index * batches, (pass_index + 1) * batches):
            taken += shard.batch_ids(step, batch_size).tolist()
    assert len(taken) == len(set(taken))
    assert set(taken).isdisjoint(trusted_ids.tolist())


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), SEEDS)
def test_any_order_of_steps_gives_the_batches_of_a_fresh_shard(steps, seed):
    """The cached pass changes nothing: a jump back or forth equals asking a shard that was never used."""
    used = Shard.of(50, 1, 2, seed, 3)
    for step in steps:
        fresh = Shard.of(50, 1, 2, seed, 3)
        assert used.batch_ids(step, 5).tolist() == fresh.batch_ids(step, 5).tolist()
        assert used.batch_ids(step, 5).tolist() == used.batch_ids(step, 5).tolist()


def test_the_batch_of_a_step_never_changes():
    """Pinned values: if this fails, old runs can no longer be replayed, and workers of two releases overlap."""
    shard = Shard.of(100, rank=0, shards=3, seed=1, trusted_examples=10)
    batch = shard.batch_ids(5, 8)
    assert batch.dtype == np.int64
    assert batch.tolist() == PINNED_BATCH
    assert hold_out(100, 10, 1)[0].tolist() == PINNED_TRUSTED


def test_another_process_draws_the_same_batch():
    """No state of this process (hash seed, earlier draws) enters into a batch."""
    np.random.default_rng().random(10)
    code = "from worker.batches import Shard; print(Shard.of(100, 0, 3, 1, 10).batch_ids(5, 8).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == str(PINNED_BATCH)


def test_seed_rank_and_pass_each_change_the_order():
    """Two ranks, two passes and two seeds take the examples in unlike orders."""

    def order(seed=1, rank=0, pass_index=0):
        shard = Shard.of(200, rank, 2, seed, 0)
        positions = {example: position for position, example in enumerate(shard.ids.tolist())}
        return [positions[example] for example in shard.batch_ids(pass_index, 100).tolist()]

    orders = [order(), order(seed=2), order(rank=1), order(pass_index=1), order(seed=SEED_LIMIT - 1)]
    assert len({tuple(one) for one in orders}) == len(orders)
    assert all(sorted(one) == list(range(100)) for one in orders)
    assert list(range(100)) not in orders


def test_orders_of_passes_look_random():
    """Over many passes each example comes first about equally often (chi-square far from both tails)."""
    shard = Shard.of(10, 0, 1, 7, 0)
    counts = np.bincount([shard.batch_ids(pass_index, 10)[0] for pass_index in range(2000)], minlength=10)
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert 1.15 < chi_square < 27.9  # 9 degrees of freedom: 0.1 % on either side


def test_the_remainder_of_a_pass_is_dropped_but_not_the_same_examples():
    """What does not fill a batch is left out of this pass and comes in another."""
    shard = Shard.of(7, 0, 1, 3, 0)
    seen = [set(np.concatenate([shard.batch_ids(2 * p, 3), shard.batch_ids(2 * p + 1, 3)])) for p in range(20)]
    assert all(len(one) == 6 for one in seen)
    assert set().union(*seen) == set(range(7))


def test_only_the_current_pass_is_kept():
    """Memory does not grow with the number of passes."""
    shard = Shard.of(10, 0, 1, 0, 0)
    for step in range(50):
        shard.batch_ids(step, 5)
    assert len(shard._orders) == 1


def test_ids_cannot_be_overwritten():
    """A caller that shuffles a batch in place is stopped, because it would change later batches."""
    shard = Shard.of(10, 0, 1, 0, 0)
    for ids in (shard.ids, shard.batch_ids(0, 5)):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 0


def test_batch_as_large_as_the_shard_is_the_limit():
    """The shard's size is a valid batch; one more is refused with both numbers."""
    shard = Shard.of(20, 1, 2, 0, 0)
    assert sorted(shard.batch_ids(9, 10).tolist()) == sorted(shard.ids.tolist())
    with pytest.raises(
        ConfigurationError, match=r"batch of 11 .* rank 1, which has 10 .*: lower --batch-size to 10"
    ):
        shard.batch_ids(0, 11)
    with pytest.raises(ConfigurationError, match="cannot have 0 examples"):
        shard.describe(0)


def test_a_negative_step_is_refused():
    """Step -1 would silently be the last batch of an earlier pass."""
    with pytest.raises(ValueError, match="step -1"):
        Shard.of(20, 0, 1, 0, 0).batch_ids(-1, 5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((10, 3, 3, 0, 0), "no shard for rank 3: with 3 shards, ranks go from 0 to 2"),
        ((10, 1, 1, 0, 0), "no shard for rank 1: with 1 shard, ranks go from 0 to 0"),
        ((10, -1, 3, 0, 0), "no shard for rank -1"),
        ((10, 0, 0, 0, 0), "0 shards"),
        ((10, 0, 1, 0, 10), "10 trusted examples cannot be held out of 10"),
        ((10, 0, 1, 0, -1), "-1 trusted"),
        ((10, 0, 3, 0, 8), "2 training examples cannot be divided into 3 shards"),
        ((10, 0, 1, -1, 0), "seed -1 is out of range"),
        ((10, 0, 1, SEED_LIMIT, 0), "out of range"),
    ],
)
def test_what_cannot_be_divided_is_refused(arguments, text):
    """Each bad argument is a configuration error that names the numbers."""
    with pytest.raises(ConfigurationError, match=text):
        Shard.of(*arguments)


def test_the_edges_that_can_be_divided():
    """One example per shard, and all but one example trusted, are allowed."""
    assert len(Shard.of(10, 2, 3, 0, 7).ids) == 1
    assert len(Shard.of(10, 0, 1, SEED_LIMIT - 1, 9).ids) == 1


def test_describe_says_share_batches_and_trusted():
    """The start-up line has the sizes that a person checks."""
    shard = Shard.of(1438, 1, 3, 1, 100)
    first = ", ".join(map(str, shard.ids[:3].tolist()))
    assert shard.describe(32) == (
        f"rank 1 of 3: 446 of 1,338 training examples, 13 batches of 32 a pass; first ids {first}; "
        "100 trusted examples held out"
    )
    assert (
        Shard.of(2, 0, 2, 1, 0).describe(1).startswith("rank 0 of 2: 1 of 2 training examples, 1 batch of 1 a pass")
    )
    assert "trusted" not in Shard.of(2, 0, 2, 1, 0).describe(1)


@given(st.integers(1, 60), st.integers(0, 9), SEEDS, st.data())
def test_own_data_is_taken_as_a_whole_once_in_a_pass(n, rank, seed, data):
    """No example is left to other ranks or held out, and the batch is a function of (seed, rank, step)."""
    shard, batch_size = Shard.own(n, rank, seed), data.draw(st.integers(1, n))
    assert sorted(shard.ids.tolist()) == list(range(n))
    steps = range(shard.batches_per_pass(batch_size))
    taken = [Shard.own(n, rank, seed).batch_ids(step, batch_size).tolist() for step in steps]
    assert taken == [shard.batch_ids(step, batch_size).tolist() for step in steps]
    flat = [example for batch in taken for example in batch]
    assert len(flat) == len(set(flat)) == n // batch_size * batch_size


def test_two_with_data_of_their_own_do_not_take_examples_in_step():
    """Data sets of one size at two ranks are taken in two orders, in the first pass and in later ones."""
    orders = {tuple(Shard.own(50, rank, 1).batch_ids(pass_, 50)) for rank in range(3) for pass_ in range(2)}
    assert len(orders) == 6


def test_the_shard_of_another_rank_is_of_the_same_data():
    """Of a common data set the other's share; of own data what the other would take of it."""
    shared, own = Shard.of(60, 1, 3, 5, 6), Shard.own(60, 1, 5)
    assert shared.of_rank(1) is shared and own.of_rank(1) is own
    assert shared.of_rank(2).batch_ids(3, 4).tolist() == Shard.of(60, 2, 3, 5, 6).batch_ids(3, 4).tolist()
    assert own.of_rank(2).batch_ids(3, 4).tolist() == Shard.own(60, 2, 5).batch_ids(3, 4).tolist()


def test_what_own_data_cannot_give_is_refused():
    """Neither other shards nor fewer workers would help, and none is spoken of."""
    with pytest.raises(ConfigurationError, match="seed -1 is out of range"):
        Shard.own(10, 0, -1)
    with pytest.raises(ConfigurationError) as caught:
        Shard.own(10, 4, 0).describe(11)
    assert str(caught.value) == (
        "a batch of 11 is larger than the own data of rank 4, which has 10 training examples: "
        "lower --batch-size to 10 or less or bring more data"
    )


def test_describe_says_that_data_is_its_own():
    shard = Shard.own(1000, 2, 1)
    first = ", ".join(map(str, shard.ids[:3].tolist()))
    assert shard.describe(32) == (
        f"rank 2: all 1,000 training examples of a data set of its own, 31 batches of 32 a pass; first ids {first}"
    )


def test_gather_copies_the_rows_of_the_batch():
    """Features and labels of the ids, contiguous, and independent of the data set's memory."""
    features = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    labels = np.arange(6, dtype=np.int32)
    dataset = Dataset(features, labels, features[:1], labels[:1])
    batch, batch_labels = gather(dataset, np.array([4, 0, 4]))
    assert batch.tolist() == [features[4].tolist(), features[0].tolist(), features[4].tolist()]
    assert batch_labels.tolist() == [4, 0, 4]
    assert (batch.dtype, batch_labels.dtype) == (np.uint8, np.int32)
    assert batch.flags.c_contiguous and batch_labels.flags.c_contiguous
    batch[:] = 0
    assert features[4].tolist() == [[16, 17], [18, 19]]
