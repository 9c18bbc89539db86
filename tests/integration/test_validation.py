"""Validators over real processes: who they judge, when they are asked, and what becomes of a run without them."""

import json
from pathlib import Path

import pytest

LIGHT = Path(__file__).with_name("light_worker.py")
RATE = 0.125
GOOD, BAD = 2.0, -2.0


def start(processes, steps, **options):
    return processes.server(workers=2, steps=steps, optimizer="sgd", learning_rate=RATE, **options)


def light(processes, server, gradient, **options):
    words = [f"--{name}={value}" for name, value in options.items()]
    name = options.get("role", f"worker {options.get('rank')}")
    return processes.python(name, LIGHT, server.address, f"--gradient={gradient}", *words)


def rounds_of(server):
    lines = (server.port_file.parent / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("rule", ["cosine_trust", "evidence", "master"])
def test_a_worker_that_points_away_from_the_validator_counts_nothing(processes, rule):
    """The good worker's gradient is the validator's, so the values are those of the good worker alone, exactly."""
    server = start(processes, 16, aggregation=rule, validator_every=1)
    clients = [
        light(processes, server, GOOD, rank=0),
        light(processes, server, BAD, rank=1),
        light(processes, server, GOOD, role="validator"),
    ]
    for process in (*clients, server):
        process.ends_with(0)
    assert (server.values()["w"] == -RATE * GOOD * 16).all()
    assert [worker["weight"] for worker in server.summary()["workers"]] == [1.0, 0.0]
    assert [line["weights"] for line in rounds_of(server)] == [{"0": 1.0}] * 16
    assert all(line["validated"] for line in rounds_of(server))
    assert server.summary()["deterministic"]


def test_only_drawn_rounds_are_validated_and_the_others_close_without_the_validator(processes, tmp_path):
    seed = tmp_path / "rounds-secret"
    seed.write_text("a secret")
    logs = []
    for _ in range(2):
        server = start(processes, 60, aggregation="evidence", validator_every=10, validator_seed_file=seed)
        judge = light(processes, server, GOOD, role="validator")
        clients = [light(processes, server, g, rank=r) for r, g in ((0, GOOD), (1, BAD))]
        for process in (judge, *clients, server):
            process.ends_with(0)
        logs.append([line["step"] for line in rounds_of(server) if line.get("validated")])
        assert f"after {len(logs[-1])} pushes" in judge.log
    assert logs[0] == logs[1]
    assert logs[0][0] == 0 and 1 < len(logs[0]) < 20


def test_a_run_that_is_to_be_validated_waits_for_the_validator(processes):
    server = start(processes, 2, aggregation="evidence", validator_every=1, start_timeout=8)
    clients = [light(processes, server, GOOD, rank=rank) for rank in (0, 1)]
    server.fails(7, "a validator did not come within 8 s")
    for process in clients:
        process.fails(7, "a validator did not come within 8 s")


def test_a_rule_without_a_validator_refuses_one(processes):
    server = start(processes, 2, aggregation="mean")
    clients = [light(processes, server, GOOD, rank=rank) for rank in (0,)]
    clients[0].says("joined")
    judge = light(processes, server, GOOD, role="validator")
    judge.fails(3, "its aggregation rule asks for none")


def test_a_run_goes_on_without_a_validator_that_has_died_and_says_that_it_is_not_deterministic(processes):
    server = start(processes, 12, aggregation="evidence", validator_every=1, round_timeout=1)
    judge = light(processes, server, GOOD, **{"role": "validator", "die-after": 4})
    clients = [light(processes, server, g, rank=r) for r, g in ((0, GOOD), (1, BAD))]
    assert judge.ends() == 1
    for process in (*clients, server):
        process.ends_with(0)
    assert [line.get("validated", False) for line in rounds_of(server)] == [True] * 4 + [False] * 8
    assert [line["weights"] for line in rounds_of(server)] == [{"0": 1.0}] * 12, "trust is remembered"
    summary = server.summary()
    assert not summary["deterministic"] and "validator" in summary["deterministic_reason"]
