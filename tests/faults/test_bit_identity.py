"""The exported weights after any sequence of crashes are those of a run to which nothing happened, to the bit."""

import random

import numpy as np
import pytest

from tests.faults.supervision import run_through
from tests.integration.processes import Processes

WORKERS, STEPS = 3, 300
PATIENCE = {"start_timeout": 100, "rejoin_timeout": 60, "drain_timeout": 60}

RULES = {
    "mean": {"aggregation": "mean"},
    "master": {"aggregation": "master", "validator_every": 3},
}

WORKER_POINTS = ("before-push", "mid-push", "after-push", "mid-reply")
SERVER_POINTS = ("mid-push", "mid-reply", "before-apply", "after-apply")
PARTS = ("file", "manifest", "rename", "parent")


def options_of(rule, directory):
    """Return the server's options, with a directory of checkpoints and the secret of the validated rounds."""
    options = PATIENCE | {"workers": WORKERS, "steps": STEPS, "checkpoint_every": 7} | RULES[rule]
    if rule == "master":
        secret = directory / "rounds-secret"
        secret.write_text("a secret")
        options["validator_seed_file"] = secret
    return options | {"checkpoint_dir": directory / "kept"}


def clients_of(processes, rule, faults):
    """Return all workers with their faults, and a validator where there is to be one."""

    def client(words):
        def start(address, fault):
            inject = ["--inject", fault] if fault else []
            name = " ".join(words)
            return processes.python(name, "-m", "tests.faults.learning_worker", address, *words, *inject)

        return start

    workers = {f"rank {rank}": (client(["--rank", str(rank)]), faults.get(rank, [])) for rank in range(WORKERS)}
    return workers | ({"validator": (client(["--role", "validator"]), [])} if rule == "master" else {})


def draw_kills(seed, count, of_server):
    """Draw at which points of which steps whom a SIGKILL meets, as faults of the server and of each rank."""
    draw = random.Random(seed)
    # A checkpoint that is still being written delays the next one: which step that has is not known before.
    kills = {"server": [f"kill@mid-checkpoint,part={draw.choice(PARTS)}"]}
    steps = sorted(draw.sample(range(31, STEPS - 5, 3), count - 1))
    servers = set(draw.sample(steps, of_server - 1))
    for step in steps:
        whose, points = ("server", SERVER_POINTS) if step in servers else (draw.randrange(WORKERS), WORKER_POINTS)
        kills.setdefault(whose, []).append(f"kill@{draw.choice(points)},step={step}")
    return kills


@pytest.fixture(scope="module", params=RULES)
def undisturbed(request, tmp_path_factory):
    """Return a rule, and the exported bytes of its run when nothing happens and no checkpoint is kept."""
    directory = tmp_path_factory.mktemp("undisturbed")
    processes = Processes(directory)
    try:
        options = options_of(request.param, directory) | {"checkpoint_dir": None, "checkpoint_every": None}
        server = run_through(processes, options, [], clients_of(processes, request.param, {}))
        assert server.summary()["deterministic"] is True
        return request.param, server.export.read_bytes()
    finally:
        processes.close()


def assert_nothing_was_lost(server, steps=STEPS):
    summary = server.summary()
    assert (summary["status"], summary["steps"], summary["deterministic"]) == ("done", steps, True)
    assert (summary["void_rounds"], summary["short_rounds"]) == (0, 0)
    assert [worker["pushes"] for worker in summary["workers"]] == [steps] * len(summary["workers"])
    assert [line["step"] for line in server.rounds()] == list(range(steps))


TRIALS = [0, *(pytest.param(trial, marks=pytest.mark.long) for trial in range(1, 10))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trial", TRIALS)
def test_ten_kills_of_server_and_workers_change_no_bit(processes, tmp_path, undisturbed, trial):
    rule, expected = undisturbed
    kills = draw_kills(f"{rule} {trial}", count=10, of_server=3 + trial % 3)
    print(kills)
    clients = clients_of(processes, rule, kills)
    server = run_through(processes, options_of(rule, tmp_path), kills["server"], clients)
    assert_nothing_was_lost(server)
    assert server.export.read_bytes() == expected


# ---- TensorFlow ----------------------------------------------------------------------------------------


def tensorflow_clients(processes, words, faults):
    """Return two workers of ours with their faults."""

    def client(rank):
        def start(address, fault):
            command = ["-m", "worker", "--ps", address, "--rank", rank, "--threads", 1, *words]
            command += ["--name", f"worker-{rank}", *(["--inject", fault] if fault else [])]
            return processes.python(f"worker {rank}", *command)

        return start

    return {f"rank {rank}": (client(rank), faults if rank == 1 else []) for rank in range(2)}


def small_images(path):
    """Save a data set of the shape of CIFAR-10."""
    draw = np.random.default_rng(1)
    images, labels = draw.integers(0, 256, (120, 32, 32, 3), np.uint8), np.arange(120) % 10
    kinds = {"train": slice(0, 100), "test": slice(100, 120)}
    parts = {f"{kind}_features": images[part] for kind, part in kinds.items()}
    np.savez(path, **parts, **{f"{kind}_labels": labels[part] for kind, part in kinds.items()})
    return f"npz:{path}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["mlp", "cifar10_cnn"])
def test_a_kill_of_the_server_and_one_of_a_worker_change_no_bit_of_a_tensorflow_model(processes, tmp_path, model):
    steps = 20 if model == "mlp" else 5
    words = ["--model", model, "--batch-size", 16 if model == "mlp" else 4]
    if model != "mlp":
        words += ["--dataset", small_images(tmp_path / "images.npz"), "--trusted-examples", 4]
    options = PATIENCE | {"workers": 2, "steps": steps}
    undisturbed = run_through(processes, options, [], tensorflow_clients(processes, words, []))
    kept = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every": 2}
    clients = tensorflow_clients(processes, words, ["kill@mid-push,step=1"])
    server = run_through(processes, options | kept, [f"kill@after-apply,step={steps - 2}"], clients)
    assert_nothing_was_lost(server, steps)
    assert server.export.read_bytes() == undisturbed.export.read_bytes()


# ---- an ensemble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["batch", "sample"])
def test_a_kill_of_the_server_and_one_of_a_member_change_no_bit_of_an_ensemble(processes, tmp_path, weighting):
    def member(rank):
        def start(address, fault):
            command = ("-m", "tests.faults.failing_member", fault or "", address, rank, "--shared")
            return processes.python(f"member {rank}", *command)

        return start

    options = PATIENCE | {"workers": WORKERS, "steps": 12, "mode": "ensemble", "aggregation": "master"}
    options |= {"learning_rate": 0.05, "weighting": weighting}
    clients = {f"rank {rank}": (member(rank), []) for rank in range(WORKERS)}
    undisturbed = run_through(processes, options, [], clients)
    clients["rank 1"] = (member(1), ["kill@mid-push,step=4"])
    kept = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every": 2}
    server = run_through(processes, options | kept, ["kill@before-apply,step=8"], clients)
    assert_nothing_was_lost(server, 12)
    assert server.export.read_bytes() == undisturbed.export.read_bytes()
