"""Real models on real data over real sockets."""

import io
import tarfile

import numpy as np
import pytest

from tests.integration.processes import ROOT

pytestmark = pytest.mark.timeout(180)
"""Each test starts TensorFlow several times, which takes a minute on a machine that is busy."""

NETWORKS = ROOT / "tests/integration/models/networks.py"

LATE = {"evaluators": 1, "drain_timeout": 120}
"""On a busy machine the evaluator may come when the last step is over: the server is told to expect it."""

MLP = {
    "hidden1/kernel": (64, 256),
    "hidden1/bias": (256,),
    "hidden2/kernel": (256, 128),
    "hidden2/bias": (128,),
    "logits/kernel": (128, 10),
    "logits/bias": (10,),
}


@pytest.fixture
def evaluator(processes):
    """Return a function that starts an evaluator for a server."""

    def start(server, *options):
        command = ("-m", "worker", "--ps", server.address, "--role", "evaluator", "--threads", 1)
        return processes.python("evaluator", *command, *options)

    return start


def shapes(server):
    return {name: value.shape for name, value in server.values().items()}


def test_two_workers_and_an_evaluator_learn_digits(processes, evaluator):
    """In few steps; the accuracy in the summary is that of the final values, and those are there by name."""
    server = processes.server(workers=2, steps=80, learning_rate=0.003, **LATE)
    workers = [processes.worker(server, rank=rank, batch_size=64, threads=1) for rank in range(2)]
    observer = evaluator(server, "--evaluate-every", 40)
    for started in (*workers, observer, server):
        started.ends_with(0)
    summary = server.summary()
    assert (summary["status"], summary["steps"], summary["test_accuracy_step"]) == ("done", 80, 80)
    assert summary["test_accuracy"] >= 0.93
    assert f"step 80: test loss {summary['test_loss']:.4f}" in observer.log
    assert (summary["void_rounds"], summary["short_rounds"], summary["deterministic"]) == (0, 0, True)
    assert [worker["pushes"] for worker in summary["workers"]] == [80, 80]
    assert shapes(server) == MLP
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in server.values().values())
    first_ids = {worker.says(r"\d+ training examples, .* first ids ([\d, ]+)")[1] for worker in workers}
    assert len(first_ids) == 2  # each has a shard of its own


def test_a_dry_run_needs_no_server(processes):
    """It prints the manifest with offsets, and the bytes per step."""
    worker = processes.python("worker", "-m", "worker", "--dry-run", "--ps", "no-such-host.invalid:5014")
    worker.ends_with(0)
    worker.says("model mlp on digits: 6 variables, ")
    for name in MLP:
        worker.says(rf"  {name} +float32 \[.* at byte \d+")
    worker.says(r"every variable can be fed; 203,\d{3} bytes go each way per step")


def test_a_keras_model_of_the_users_with_state_and_dropout(processes, evaluator):
    """Batch statistics are state: they travel, move towards the data, and are what the evaluator measures with."""
    options = ("--model", f"{NETWORKS}:normalised", "--dataset", f"{NETWORKS}:blobs")
    own = dict(zip(("model", "dataset"), options[1::2], strict=True))
    server = processes.server(workers=2, steps=60, learning_rate=0.02, **LATE)
    workers = [processes.worker(server, **own, batch_size=20, trusted_examples=0, threads=1) for _ in range(2)]
    observer = evaluator(server, *options)
    for started in (*workers, observer, server):
        started.ends_with(0)
    assert server.summary()["test_accuracy"] >= 0.93
    values = server.values()
    assert set(values) == {
        *("hidden/kernel", "hidden/bias", "out/kernel", "out/bias"),
        *("norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"),
    }
    assert values["norm/moving_mean"].max() > 0.1  # it began as 0, and ReLU's output is positive
    assert abs(values["norm/moving_variance"] - 1).max() > 0.1  # it began as 1
    for worker in workers:
        assert "remark" not in worker.log


def test_cifar10_cnn_on_a_small_archive(processes, tmp_path):
    """The archive is read as it is, and the convolutional network takes two steps on it."""
    records = np.random.RandomState(1).randint(0, 256, (6, 20, 3073), np.uint8)
    records[:, :, 0] = np.arange(20) % 10
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, part in zip(names, records, strict=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = part.nbytes
            archive.addfile(member, io.BytesIO(part.tobytes()))
    server = processes.server(workers=2, steps=2)
    data = {"model": "cifar10_cnn", "dataset": "cifar10", "data_dir": tmp_path}
    workers = [processes.worker(server, **data, batch_size=8, trusted_examples=4, threads=1) for _ in range(2)]
    for started in (*workers, server):
        started.ends_with(0)
    workers[0].says("48 of 96 training examples")
    kernels = {name: shape for name, shape in shapes(server).items() if name.endswith("kernel")}
    assert kernels == {
        "conv1/kernel": (5, 5, 3, 64),
        "conv2/kernel": (5, 5, 64, 64),
        "local3/kernel": (2304, 384),
        "local4/kernel": (384, 192),
        "softmax_linear/kernel": (192, 10),
    }
    assert np.isfinite(server.summary()["final_loss"])
