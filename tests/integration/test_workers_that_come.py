"""`--workers auto` with real servers: as many as come are counted, get ranks, and train as with a fixed number."""

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import worker
from protocol.errors import PeerLost, Refused
from protocol.messages import Role
from protocol.tokens import Grant, append_grant

pytestmark = pytest.mark.timeout(180)

STEPS = 4
PATIENCE_S = 120.0

SGD = {"optimizer": "sgd", "learning_rate": 1.0, "steps": STEPS, "threads": 1}
LONG_S = 1e6
"""A wait that no test sits out."""


class Client:
    """One that trains in a thread of the test, so that several come within a moment.

    A worker pushes its rank + 1; an evaluator waits for the last values.
    """

    def __init__(self, pool, address, **options):
        self._heard = []
        self._changed = threading.Condition()
        self._ended = pool.submit(self._train, address, options)

    def _train(self, address, options):
        with worker.connect(address, {"w": np.zeros(3, np.float32)}, on_event=self._hear, **options) as server:
            update = server.pull(STEPS if options.get("role") == "evaluator" else 0)
            while not update.done:
                update = server.push({"w": np.full(3, server.rank + 1, np.float32)}, loss=1.0)
            return server.rank, server.welcome.workers, server.welcome.shards, update.values["w"].tolist()

    def _hear(self, text):
        with self._changed:
            self._heard.append(text)
            self._changed.notify_all()

    def hears(self, words):
        with self._changed:
            assert self._changed.wait_for(lambda: any(words in text for text in self._heard), PATIENCE_S)

    @property
    def result(self):
        return self._ended.result(PATIENCE_S)

    def fails(self, kind, words):
        with pytest.raises(kind, match=words):
            _ = self.result


@pytest.fixture
def clients():
    """Return a function that starts a client; they have ended when the test has."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda address, **options: Client(pool, address, **options)


def test_three_that_come_are_three_ranks_and_train_to_the_exact_values(processes, clients):
    server = processes.server(workers="auto", gather_timeout=2, **SGD)
    trained = [client.result for client in [clients(server.address) for _ in range(3)]]
    server.ends_with(0)
    assert sorted(rank for rank, *_ in trained) == [0, 1, 2]
    for _, workers, shards, values in trained:
        assert (workers, shards) == (3, 3)
        assert values == [-2.0 * STEPS] * 3, "each step takes the mean of 1, 2 and 3"
    assert server.values()["w"].tolist() == [-2.0 * STEPS] * 3
    summary = server.summary()
    assert [entry["rank"] for entry in summary["workers"]] == [0, 1, 2]
    assert (summary["status"], summary["deterministic"]) == ("done", True)
    assert "workers to come: auto" in server.log
    assert "no further worker has come: the run is for 3" in server.log


def test_neither_a_stranger_nor_an_evaluator_counts(processes, clients, tmp_path):
    tokens = tmp_path / "tokens"
    own = {}
    for role in (Role.WORKER, Role.EVALUATOR):
        own[role] = f"{role.value:-<43}"
        append_grant(tokens, Grant(None, role, None, own[role].encode()))
    server = processes.server(workers="auto", gather_timeout=2, token_file=tokens, **SGD)
    evaluator = clients(server.address, role="evaluator", token=own[Role.EVALUATOR])
    evaluator.hears("the start waits for the first worker")
    for token, words in ((None, "asks for a token"), ("f" * 43, "was not accepted")):
        with pytest.raises(Refused, match=words):
            worker.connect(server.address, {"w": np.zeros(3, np.float32)}, token=token)
    server.says("refused")
    assert "workers so far" not in server.log
    rank, workers, _, values = clients(server.address, token=own[Role.WORKER]).result
    assert (rank, workers, values) == (0, 1, [-1.0 * STEPS] * 3)
    assert evaluator.result == (-1, 1, 1, values)
    server.ends_with(0)
    assert [entry["rank"] for entry in server.summary()["workers"]] == [0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "Ctrl-C"])
def test_a_signal_ends_the_count_and_those_who_are_held_hear_of_it(processes, clients, number, code):
    server = processes.server(workers="auto", gather_timeout=LONG_S, **SGD)
    held = clients(server.address)
    server.says("workers so far: 1")
    server.send(number)
    held.fails(PeerLost, f"the server was stopped by {number.name}")
    server.fails(code, f"the run ended at step 0: the server was stopped by {number.name}")
    assert (server.summary()["status"], server.summary()["workers"]) == ("interrupted", [])


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_when_nobody_comes_it_ends_as_always(processes, log_format):
    server = processes.server(workers="auto", start_timeout=1, log_format=log_format, **SGD)
    if log_format == "text":
        server.fails(7, "no worker came within 1 s", "--start-timeout")
    else:
        server.ends_with(7)
        last = json.loads([line for line in server.log.splitlines() if line.startswith("{")][-1])
        assert (last["event"], last["exit_code"]) == ("ended", 7)
        assert "no worker came within 1 s" in last["message"] and "--start-timeout" in last["message"]
    assert server.summary()["status"] == "no_progress"


def test_what_needs_more_workers_than_have_come_is_told_to_them_too(processes, clients):
    server = processes.server(workers="auto", gather_timeout=0.5, quorum=3, **SGD)
    clients(server.address).fails(PeerLost, "--quorum 3 is more than there can be")
    server.fails(2, "--quorum 3 is more than there can be; it must be at most --workers, which is 1")


def test_a_server_that_cannot_be_made_after_the_count_ends_and_says_why(processes, clients):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = processes.server(workers="auto", gather_timeout=0.5, status_port=taken.getsockname()[1], **SGD)
        clients(server.address).fails(PeerLost, "status")
        server.fails(2, "--status-port")


def test_on_resume_the_number_is_that_of_the_checkpoint(processes, clients, tmp_path):
    kept = SGD | {"checkpoint_dir": tmp_path / "checkpoints", "resume": True}
    first = processes.server(workers="auto", gather_timeout=2, **kept)
    for client in [clients(first.address) for _ in range(2)]:
        assert client.result[1] == 2
    first.ends_with(0)
    second = processes.again(first, gather_timeout=LONG_S, steps=2 * STEPS)
    trained = [client.result for client in [clients(second.address) for _ in range(2)]]
    second.ends_with(0)
    assert "the checkpoint is of a run for 2 workers, and so is this one" in second.log
    assert "workers so far" not in second.log
    assert "with --workers" not in second.log, "their number has not changed"
    assert [values for *_, values in trained] == [[-1.5 * 2 * STEPS] * 3] * 2
