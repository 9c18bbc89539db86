"""What a mean counts when batches differ in size, over real processes."""

import pytest

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("mean_over", "mean"),
    [("examples", (1 * 1 + 2 * 3 + 3 * 6) / 10), ("workers", (1 + 2 + 3) / 3)],
    ids=["examples", "workers"],
)
def test_a_mean_counts_every_example_or_every_worker_the_same(processes, mean_over, mean):
    """Ranks 0 to 2 push 1, 2 and 3 of batches of 1, 3 and 6; SGD with rate 1 takes the mean off, in each step."""
    server = processes.server(workers=3, steps=4, optimizer="sgd", learning_rate=1, mean_over=mean_over)
    program = ("-m", "tests.integration.light_worker", server.address)
    workers = [
        processes.python(f"worker {rank}", *program, "--rank", rank, "--examples", examples)
        for rank, examples in enumerate((1, 3, 6))
    ]
    for started in (*workers, server):
        started.ends_with(0)
    assert server.values()["w"].tolist() == pytest.approx([-4 * mean] * 3, rel=1e-6)
    weights = [worker["weight"] for worker in server.summary()["workers"]]
    wanted = (0.1, 0.3, 0.6) if mean_over == "examples" else (1 / 3, 1 / 3, 1 / 3)
    assert weights == pytest.approx(wanted, rel=1e-6)
