"""What becomes of a change of state that is far too long, over real processes."""

import json

import pytest

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("aggregation", "change"), [("clipped_mean", (1 + 1 + 1.5) / 3), ("median", 1.0), ("mean", 1e20 / 3)]
)
def test_a_change_of_state_counts_a_bounded_part_or_what_it_is(processes, aggregation, change):
    """Ranks 0 and 1 change the statistics by 1 in each step, rank 2 by 1e20, with an ordinary gradient."""
    server = processes.server(workers=3, steps=4, optimizer="sgd", aggregation=aggregation)
    program = ("-m", "tests.integration.light_worker", server.address, "--state", "norm/mean", "--gradient", 1)
    program += ("--variables", json.dumps({"w": [3], "norm/mean": [2]}))
    workers = [
        processes.python(f"worker {rank}", *program, "--rank", rank, "--change", pushed)
        for rank, pushed in enumerate((1, 1, 1e20))
    ]
    for started in (*workers, server):
        started.ends_with(0)
    assert server.values()["norm/mean"].tolist() == pytest.approx([4 * change] * 2, rel=1e-5)
