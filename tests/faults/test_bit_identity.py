"""The exported weights after any sequence of crashes are those of a run to which nothing happened, to the bit."""

import random

import numpy as np
import pytest

from tests.faults.supervision import run_through
from tests.integration.processes import ROOT, Processes

WORKERS, STEPS = 3, 300
PATIENCE = {"start_timeout": 100, "rejoin_timeout": 60, "drain_timeout": 60}

RULES = {
    "mean": {"aggregation": "mean"},
    "master": {"aggregation": "master", "validator_every": 3},
}

WORKER_POINTS = ("before-push", "mid-push", "after-push", "mid-reply")
SERVER_POINTS = ("mid-push", "mid-reply", "before-apply", "after-apply", "mid-checkpoint")
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
    steps = sorted(draw.sample(range(10, STEPS - 10, 3), count))
    servers = set(draw.sample(range(count), of_server))
    kills = {}
    for number, step in enumerate(steps):
        if number in servers:
            point = draw.choice(SERVER_POINTS)
            # A checkpoint that is still being written delays the next one: which step that has is not known before.
            where = f"part={draw.choice(PARTS)}" if point == "mid-checkpoint" else f"step={step}"
            kills.setdefault("server", []).append(f"kill@{point},{where}")
        else:
            rank = draw.randrange(WORKERS)
            kills.setdefault(rank, []).append(f"kill@{draw.choice(WORKER_POINTS)},step={step}")
    return kills


@pytest.fixture(scope="module", params=RULES)
def undisturbed(request, tmp_path_factory):
    """Return a rule, and the exported bytes of its run when nothing happens and no checkpoint is kept."""
    directory = tmp_path_factory.mktemp("undisturbed")
    processes = Processes(directory)
    try:
        options = options_of(request.param, directory) | {"checkpoint_dir": None}
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
