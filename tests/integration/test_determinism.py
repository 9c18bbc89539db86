"""The same seed gives the same bits, however slow each worker is, and also when one is killed and started again."""

import pytest

from tests.integration.processes import ROOT, Processes

pytestmark = pytest.mark.timeout(180)
"""Each test starts TensorFlow several times, which takes a minute on a machine that is busy."""

SLOW_MLP = f"{ROOT / 'tests/integration/models/networks.py'}:slow_mlp"
WORKERS, STEPS, SEED = 3, 12, 11
KILLED_AT = 5


def start(processes, seed=SEED, killed=None):
    """Start a server and workers that are slow at random; one may kill itself in the midst of a step."""
    server = processes.server(workers=WORKERS, steps=STEPS, seed=seed)
    workers = {rank: start_worker(processes, server, rank, killed == rank) for rank in range(WORKERS)}
    return server, workers


def start_worker(processes, server, rank, is_killed=False):
    command = ("-m", "worker", "--ps", server.address, "--rank", rank, "--threads", 1, "--model", SLOW_MLP)
    env = {"KILLED_AT_CALL": str(KILLED_AT)} if is_killed else None
    return processes.python(f"worker {rank}", *command, "--name", f"worker-{rank}", env=env)


def exported(server, workers):
    """Wait for the end; return the bytes of the exported file."""
    for started in (*workers.values(), server):
        started.ends_with(0)
    assert server.summary()["deterministic"] is True
    return server.export.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the exported bytes of a run in which nothing happens."""
    processes = Processes(tmp_path_factory.mktemp("undisturbed"))
    try:
        return exported(*start(processes))
    finally:
        processes.close()


def test_two_runs_of_the_same_seed_are_equal_to_the_bit(processes, undisturbed):
    """Each worker sleeps 0 to 50 ms in every step, drawn anew, so pushes arrive in another order each time."""
    assert exported(*start(processes)) == undisturbed


@pytest.mark.long
def test_another_seed_gives_other_bits(processes, undisturbed):
    """Else the tests here would prove nothing."""
    assert exported(*start(processes, seed=SEED + 1)) != undisturbed


def test_a_worker_that_is_killed_and_started_again_changes_no_bit(processes, undisturbed):
    """It is killed by SIGKILL while it computes a step; the others wait for its return."""
    server, workers = start(processes, killed=1)
    assert workers[1].ends() == -9
    server.says(r"rank 1 \(worker-1\) is lost: .* closed the connection")
    workers[1] = start_worker(processes, server, rank=1)
    assert exported(server, workers) == undisturbed
    server.says(r"rank 1 \(worker-1\) on \S+ has returned")
    summary = server.summary()
    assert [worker["pushes"] for worker in summary["workers"]] == [STEPS] * WORKERS
    assert (summary["void_rounds"], summary["short_rounds"]) == (0, 0)
    workers[0].says(rf"waiting: round {KILLED_AT - 1} waits for rank 1 since .*rank 1 lost, may return within")


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(5))
def test_many_runs_are_equal_to_the_bit(processes, undisturbed, attempt):
    """With luck, a wrong order of sums would pass once; not always."""
    server, workers = start(processes, killed=attempt % WORKERS)
    assert workers[attempt % WORKERS].ends() == -9
    workers[attempt % WORKERS] = start_worker(processes, server, rank=attempt % WORKERS)
    assert exported(server, workers) == undisturbed
