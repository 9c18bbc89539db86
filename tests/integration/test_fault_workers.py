"""Workers that misbehave on purpose, and validators, as real processes against a real server."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import worker as weighmaster
from tests.integration.processes import ROOT
from tests.integration.test_training import MLP

pytestmark = pytest.mark.timeout(180)
"""Most tests start TensorFlow several times, which takes a minute on a machine that is busy."""

LIGHT_WORKER = ROOT / "tests/integration/light_worker.py"


def weights(server):
    return {worker["rank"]: worker["weight"] for worker in server.summary()["workers"]}


def test_a_validator_mutes_a_worker_that_turns_its_sign(processes):
    """One of three pushes -3 times its gradient, which outweighs the other two in a mean; the model learns anyway.

    The validator computes on the trusted examples, one push a round, and the summary shows whom the server trusts.
    """
    server = processes.server(workers=3, validators=1, steps=100, learning_rate=0.003, aggregation="evidence")
    common = {"batch_size": 64, "threads": 1}
    honest = [processes.worker(server, rank=rank, **common) for rank in range(2)]
    bad = processes.worker(server, rank=2, fault="sign_flip", **common)
    validator = processes.worker(server, role="validator", threads=1)
    for started in (*honest, bad, validator, server):
        started.ends_with(0)
    bad.says(r"MISBEHAVING ON PURPOSE \(--fault sign_flip\): this worker pushes its gradient with the sign turned")
    bad.says(r"done at step 100, after misbehaving on purpose \(--fault sign_flip\)")
    assert not any("purpose" in other.log for other in (*honest, validator, server))
    validator.says("validator: batches of 100 from 100 trusted examples")
    assert "did not count" not in validator.log
    summary = server.summary()
    assert (summary["status"], summary["steps"], summary["void_rounds"]) == ("done", 100, 0)
    assert summary["final_accuracy"] > 0.8
    trust = weights(server)
    assert trust[2] < 0.02
    assert min(trust[0], trust[1]) > 0.3


def test_a_worker_that_pushes_nan_is_refused_in_every_round(processes):
    """The fault does happen, as the server's count of refusals says, and the run ends well without it."""
    server = processes.server(workers=2, steps=5)
    honest = processes.worker(server, rank=0, threads=1)
    bad = processes.worker(server, rank=1, threads=1, fault="nan")
    for started in (honest, bad, server):
        started.ends_with(0)
    bad.says("did not count: the gradient of .* is not finite", times=5)
    summary = server.summary()
    assert (summary["status"], summary["void_rounds"], summary["short_rounds"]) == ("done", 0, 5)
    assert [worker["rejected"] for worker in summary["workers"]] == [0, 5]
    assert all(np.isfinite(value).all() for value in server.values().values())


def test_those_who_collude_push_minus_the_gradient_of_another_process(processes, tmp_path):
    """Ranks 1 and 2 push minus half of what rank 0 pushes, from the same batch: in the mean nothing is left of it.

    Without momentum the values then stay what they were, at a learning rate that would move them far.
    """
    draw = np.random.RandomState(3)
    initial = {name: (0.1 * draw.standard_normal(shape)).astype(np.float32) for name, shape in MLP.items()}
    save_file(initial, tmp_path / "initial.safetensors")
    options = {"optimizer": "sgd", "learning_rate": 1.0, "init": tmp_path / "initial.safetensors"}
    server = processes.server(workers=3, steps=2, aggregation="mean", **options)
    faults = (None, "colluding:0.5", "colluding:0.5")
    started = [processes.worker(server, rank=rank, fault=fault, threads=1) for rank, fault in enumerate(faults)]
    for process in (*started, server):
        process.ends_with(0)
    assert server.summary()["void_rounds"] == 0
    for name, value in server.values().items():
        np.testing.assert_allclose(value, initial[name], atol=1e-6)


def test_a_validator_of_any_framework(processes):
    """Over `worker.connect`: it gives the initial values, and is asked once for every round that is validated."""
    server = processes.server(
        workers=2, validators=1, steps=6, aggregation="cosine_trust", optimizer="sgd", learning_rate=0.5
    )
    workers = [
        processes.python(f"worker {rank}", LIGHT_WORKER, server.address, "--rank", rank) for rank in range(2)
    ]
    initial = np.full(3, 5.0, np.float32)
    steps = []
    with weighmaster.connect(server.address, {"w": initial}, role="validator", name="judge") as peer:
        assert peer.rank == -1
        update = peer.pull()
        assert update.values["w"].tolist() == initial.tolist(), "the workers' own initial values are zeros"
        while not update.done:
            steps.append(update.step)
            update = peer.push({"w": np.ones(3, np.float32)}, loss=1.0, examples=10)
            assert update.applied
    assert steps == list(range(6))
    for started in (*workers, server):
        started.ends_with(0)
    assert server.values()["w"].max() < 5.0, "the workers' gradients were applied"


def test_a_validator_is_asked_only_in_rounds_that_the_server_draws(processes, tmp_path):
    """With one round in four on average: always the first, not all others, and the last values all the same."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"thirty-two bytes that are secret")
    secret.chmod(0o600)
    server = processes.server(
        workers=1, steps=40, aggregation="evidence", validator_every=4, validator_seed_file=secret
    )
    lonely = processes.python("worker 0", LIGHT_WORKER, server.address, "--rank", 0)
    steps = []
    with weighmaster.connect(server.address, {"w": np.zeros(3, np.float32)}, role="validator") as peer:
        update = peer.pull()
        while not update.done:
            steps.append(update.step)
            update = peer.push({"w": np.ones(3, np.float32)}, examples=1)
    assert steps[0] == 0
    assert 3 < len(steps) < 25
    assert (update.done, update.step) == (True, 40)
    for started in (lonely, server):
        started.ends_with(0)
