"""What a worker's process does with its options, as far as no TensorFlow is needed."""

from dataclasses import replace

import pytest

from protocol.messages import Welcome
from worker.config import WorkerConfig
from worker.job import ranks_known, shard_of

WELCOME = Welcome(
    epoch=1,
    step=0,
    steps=9,
    rank=2,
    name="w",
    seed=5,
    threads=1,
    workers=3,
    shards=3,
    mode="shared",
    codec="raw",
    heartbeat_interval=1.0,
    heartbeat_timeout=3.0,
    manifest=b"",
)


def test_a_worker_takes_its_share_of_common_data_and_all_of_its_own() -> None:
    share = shard_of(WorkerConfig(trusted_examples=10), 100, WELCOME)
    assert (len(share.ids), share.trusted_examples) == (30, 10)
    own = shard_of(WorkerConfig(own_data=True), 100, WELCOME)
    assert (len(own.ids), own.trusted_examples, own.rank) == (100, 0, 2)


@pytest.mark.parametrize(
    ("own_data", "workers", "shards", "rank", "ranks"),
    [(False, 3, 3, 2, 3), (False, 5, 3, 2, 3), (False, 0, 4, 2, 4), (True, 3, 1, 2, 3), (True, 0, 2, 6, 7)],
)
def test_the_ranks_whose_batches_a_fault_may_ask_for(
    own_data: bool, workers: int, shards: int, rank: int, ranks: int
) -> None:
    """Those that have a shard; of own data every rank takes something, this one in any case."""
    agreed = replace(WELCOME, workers=workers, shards=shards, rank=rank)
    assert ranks_known(WorkerConfig(own_data=own_data), agreed) == ranks
