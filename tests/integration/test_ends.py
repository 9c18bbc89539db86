"""How runs begin and end: who waits for whom, and that everybody leaves when it is time."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.integration.processes import ROOT

pytestmark = pytest.mark.timeout(180)
"""Some tests start TensorFlow twice, which takes a minute on a machine that is busy."""

AT_ONCE_S = 20.0
"""A signal ends a process within 5 s; a busy machine is given more. The measured time is in the report."""

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
LOST = 4

MODELS = ROOT / "tests/integration/models"


@pytest.fixture
def light(processes):
    """Return a function that starts a worker without TensorFlow; see `light_worker.py`."""

    def start(name, address, *options):
        return processes.python(name, "-m", "tests.integration.light_worker", address, *options)

    return start


@pytest.fixture
def seconds(record_property):
    """Return a function that waits for processes to end, and says how long that took since `began`."""

    def measure(began, *started):
        for process in started:
            process.ends()
        took = time.monotonic() - began
        record_property("seconds", took)
        print(f"---- ended within {took:.2f} s")
        return took

    return measure


def free_port():
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def nobody_listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# ---- the beginning -------------------------------------------------------------------------------------


def test_ranks_are_handed_out_each_once(processes, light):
    """With --rank auto, three workers get ranks 0 to 2; all end by themselves, and the port is free again."""
    server = processes.server(workers=3, steps=4, optimizer="sgd", learning_rate=1)
    port = server.port
    assert server.port_file.read_text() == f"{port}\n"
    workers = [light(f"worker {number}", server.address) for number in range(3)]
    for started in (*workers, server):
        started.ends_with(0)
    assert sorted(worker.says(r"joined as rank (\d)")[1] for worker in workers) == ["0", "1", "2"]
    assert nobody_listens(server.port)
    assert server.values()["w"].tolist() == [-8.0] * 3  # 4 steps of the mean of 1, 2 and 3
    server.says("done: 4 steps")
    summary = server.summary()
    assert (summary["status"], summary["steps"], summary["deterministic"]) == ("done", 4, True)
    assert [worker["pushes"] for worker in summary["workers"]] == [4, 4, 4]


def test_a_worker_may_come_before_the_server(processes):
    """It waits, saying so; address and rank come from TF_CONFIG, all else from the environment on both sides."""
    port = free_port()
    cluster = {"ps": [f"127.0.0.1:{port}"], "chief": ["a:1"], "worker": ["b:1"]}
    environment = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}),
        "WEIGHMASTER_MODEL": f"{MODELS / 'networks.py'}:normalised",
        "WEIGHMASTER_DATASET": f"{MODELS / 'networks.py'}:blobs",
        "WEIGHMASTER_BATCH_SIZE": "7",
        "WEIGHMASTER_TRUSTED_EXAMPLES": "0",
        "WEIGHMASTER_THREADS": "1",
    }
    worker = processes.python("worker 1", "-m", "worker", env=environment)
    chief = processes.python("worker 0", "-m", "worker", "--rank", 0, env=environment)
    for waiting in (worker, chief):
        waiting.says(rf"waiting for the server at 127\.0\.0\.1:{port}, \d+ s left: nobody answers")
    options = dict.fromkeys(("port", "workers", "steps"))  # left out of the command line
    env = {"WEIGHMASTER_PORT": str(port), "WEIGHMASTER_WORKERS": "2", "WEIGHMASTER_STEPS": "3"}
    server = processes.server(env=env, **options)
    for started in (worker, chief, server):
        started.ends_with(0)
    worker.says(rf"connected to the server at 127\.0\.0\.1:{port}")
    worker.says("rank 1 of 2: 120 of 240 training examples, 17 batches of 7 a pass")
    chief.says("rank 0 of 2: 120 of 240 training examples")
    assert server.port == port
    assert server.summary()["steps"] == 3


def test_a_terminal_shows_one_live_line(light, tmp_path):
    """It is drawn over and over in place, and left where the run ended."""
    files = ("--port", 0, "--port-file", tmp_path / "port", "--run-dir", tmp_path)
    options = ("--workers", 1, "--steps", 3, "--start-timeout", 60, *files)
    command = [sys.executable, "-m", "ps", *map(str, options)]
    ours, theirs = pty.openpty()
    with contextlib.closing(os.fdopen(ours, "rb", buffering=0)) as screen:
        server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
        os.close(theirs)
        try:
            shown = b""
            while b"listening on" not in shown:
                shown += screen.read(4096)
            worker = light("worker", f"127.0.0.1:{(tmp_path / 'port').read_text().strip()}")
            with contextlib.suppress(OSError):  # the end of the stream, as a terminal's other end has it
                while piece := screen.read(4096):
                    shown += piece
            worker.ends_with(0)
            assert server.wait(60) == 0
        finally:
            server.kill()
            server.wait()
    screens = shown.decode().splitlines()
    assert [line for line in screens if line.startswith("step 3/3  loss 1.000")], screens
    assert b"\rstep 3/3" in shown
    assert b"\nstep 3/3" not in shown
    assert "done: 3 steps" in shown.decode()


# ---- the end -------------------------------------------------------------------------------------------


def test_a_worker_that_joins_a_finished_run_is_done_at_once(processes, light, tmp_path):
    """While the server still waits for the goodbye of another, a third one comes and gets the final values."""
    goodbye = tmp_path / "goodbye"
    server = processes.server(workers=2, steps=3)
    lingering = light("lingering", server.address, "--rank", 0, "--linger", goodbye)
    light("first", server.address, "--rank", 1).ends_with(0)
    lingering.says("done at step 3 after 3 pushes")
    late = light("late", server.address, "--rank", 1)
    late.ends_with(0)
    late.says("done at step 3 after 0 pushes")
    goodbye.touch()
    for started in (lingering, server):
        started.ends_with(0)
    assert server.summary()["status"] == "done"
    assert "did not take leave" not in server.log


def test_who_does_not_take_leave_is_named(processes, light, tmp_path):
    """The server does not wait longer than --drain-timeout for a goodbye, and the run is done all the same."""
    server = processes.server(workers=2, steps=1, drain_timeout=1)
    lingering = light("lingering", server.address, "--rank", 1, "--linger", tmp_path / "never")
    light("first", server.address, "--rank", 0).ends_with(0)
    server.ends_with(0)
    server.says("rank 1 did not take leave")
    assert server.summary()["status"] == "done"
    lingering.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_while_goodbyes_are_awaited_costs_no_result(processes, light, seconds, tmp_path, number):
    """All steps are made: the values are exported, the summary says done, and the exit code is 0."""
    server = processes.server(workers=2, steps=1, optimizer="sgd", learning_rate=1, drain_timeout=120)
    lingering = light("lingering", server.address, "--rank", 1, "--linger", tmp_path / "never")
    light("first", server.address, "--rank", 0).ends_with(0)
    lingering.says("done at step 1")
    began = time.monotonic()
    server.send(number)
    assert seconds(began, server) < AT_ONCE_S
    server.ends_with(0)
    server.says("rank 1 did not take leave")
    assert (server.summary()["status"], server.summary()["steps"]) == ("done", 1)
    assert server.values()["w"].tolist() == [-1.5] * 3
    lingering.kill()


def test_an_evaluator_that_comes_late_measures_the_final_values(processes):
    """The run is over before it has started; with --evaluators 1 the end waits for it all the same."""
    networks = MODELS / "networks.py"
    data = {"model": f"{networks}:normalised", "dataset": f"{networks}:blobs", "threads": 1}
    server = processes.server(workers=1, steps=2, evaluators=1, drain_timeout=120)
    processes.worker(server, **data).ends_with(0)
    evaluator = processes.worker(server, role="evaluator", **data)
    for started in (evaluator, server):
        started.ends_with(0)
    summary = server.summary()
    assert (summary["status"], summary["test_accuracy_step"]) == ("done", 2)
    assert 0 <= summary["test_accuracy"] <= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_to_the_server_ends_all(processes, light, seconds, number):
    """The workers are told, with the reason; nobody waits for what is missing; the port is free."""
    server = processes.server(workers=3, steps=100)
    workers = [light(f"worker {rank}", server.address, "--rank", rank) for rank in (0, 2)]
    for worker in workers:
        worker.says("the start waits for rank 1 since")
    began = time.monotonic()
    server.send(number)
    assert seconds(began, server, *workers) < AT_ONCE_S
    server.fails(INTERRUPTED[number], f"the server was stopped by {number.name}")
    for worker in workers:
        worker.fails(LOST, server.address, f"the server was stopped by {number.name}")
    assert nobody_listens(server.port)
    assert server.summary()["status"] == "interrupted"


def test_a_signal_to_a_server_that_starts(processes, seconds):
    """Also at the moment at which it begins to listen, when there is nobody to tell."""
    server = processes.server(workers=1, steps=1)
    server.says("listening")
    began = time.monotonic()
    server.send(signal.SIGINT)
    assert seconds(began, server) < AT_ONCE_S
    server.fails(130, "by SIGINT")


def test_a_signal_to_a_worker_in_a_run(processes, seconds):
    """It leaves at once; the server takes it for lost, says so, and waits; another of that rank goes on."""
    options = {"model": f"{MODELS / 'networks.py'}:slow_mlp", "threads": 1, "rank": 0, "name": "anna"}
    server = processes.server(workers=1, steps=40)
    worker = processes.worker(server, **options)
    server.says("initial values came from")
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert seconds(began, worker) < AT_ONCE_S
    worker.fails(143, "interrupted by SIGTERM")
    server.says(r"rank 0 \(anna\) is lost: .*; it may return within 120 s")
    second = processes.worker(server, **options)
    for started in (second, server):
        started.ends_with(0)
    server.says(r"rank 0 \(anna\) on \S+ has returned")
    assert server.summary()["steps"] == 40


@pytest.mark.parametrize("function", ["asleep", "deaf"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_to_a_worker_in_the_users_code(processes, seconds, function, number):
    """Also while code of the user's runs, and even when it does not let itself be interrupted."""
    worker = processes.python("worker", "-m", "worker", "--dataset", f"{MODELS / 'stuck.py'}:{function}")
    worker.says("loading")
    began = time.monotonic()
    worker.send(number)
    assert seconds(began, worker) < AT_ONCE_S
    worker.fails(INTERRUPTED[number], f"interrupted by {number.name}")
