"""What careless and hostile clients tried against real servers: each is answered, and the run's result is right."""

import os
import resource
import signal
import socket
import sys
from contextlib import ExitStack

import numpy as np
import pytest

import worker
from protocol.errors import LocalProtocolError, PeerLost, Refused
from ps.outcome import write_whole
from tests.faults.runs import assert_done, light, serve

WEIGHTS = {"w": np.zeros(3, np.float32)}


def push_ones(address, scale=1.0, **options):
    """Train to the end with constant gradients; return the last step."""
    with worker.connect(address, WEIGHTS, **options) as server:
        update = server.pull()
        while not update.done:
            update = server.push({"w": np.full(3, scale, np.float32)}, loss=1.0)
        return update.step


def test_a_worker_that_is_turned_away_defines_no_variables(processes):
    server = serve(processes, workers=1, steps=2)
    with pytest.raises(Refused, match="rank 7 is not one of"):
        worker.connect(server.address, {"wrong": np.zeros(5)}, rank=7)
    light(processes, server.address, 0, workers=1).ends_with(0)
    assert_done(server, workers=1, steps=2)


def test_a_worker_without_variables_is_refused_and_the_next_one_defines_them(processes):
    server = serve(processes, workers=1, steps=2)
    with pytest.raises(Refused, match="no variables"):
        worker.connect(server.address, {})
    light(processes, server.address, 0, workers=1).ends_with(0)
    assert_done(server, workers=1, steps=2)


def test_two_workers_of_one_name_are_told_to_change_the_name(processes):
    server = serve(processes, workers=2, steps=2, heartbeat_interval=0.3)
    with worker.connect(server.address, WEIGHTS, name="twin"), pytest.raises(Refused, match="give another --name"):
        worker.connect(server.address, WEIGHTS, name="twin")


def test_a_name_that_the_log_cannot_encode_does_not_end_the_run(processes):
    server = serve(processes, workers=1, steps=2, env={"PYTHONIOENCODING": "ascii"})
    light(processes, server.address, 0, "--name", "wörker", workers=1).ends_with(0)
    assert_done(server, workers=1, steps=2)
    server.says(r"rank 0 \(w\\xf6rker\) on .* has joined")


def test_a_server_short_of_descriptors_serves_again_when_there_are_some(processes):
    server = serve(processes, workers=1, steps=2)
    address = (server.address.split(":")[0], server.port)
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (20, hard))
    with ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(socket.create_connection(address))
        server.says("the server cannot take more connections")
    light(processes, server.address, 0, workers=1).ends_with(0)
    assert_done(server, workers=1, steps=2)


def test_values_that_overflow_in_the_last_round_are_no_success(processes):
    server = serve(processes, workers=1, steps=2, learning_rate=1e38)
    assert push_ones(server.address, scale=1e30) == 2
    sentence = server.fails(5, "the final values of 'w' are not finite", "--learning-rate")
    assert sentence
    assert server.summary()["status"] == "diverged"
    assert not server.export.exists()


def test_a_closed_connection_is_not_opened_again_by_a_call(processes):
    server = serve(processes, workers=1, steps=2)
    client = worker.connect(server.address, WEIGHTS)
    client.pull()
    client.close()
    with pytest.raises(LocalProtocolError, match="was closed"):
        client.pull()


def test_a_worker_asked_for_initial_values_hears_that_the_run_has_ended(processes):
    server = serve(processes, workers=2, steps=2)
    with ExitStack() as opened:
        first, second = (opened.enter_context(worker.connect(server.address, WEIGHTS, rank=r)) for r in range(2))
        server.says("all workers are there: 2")
        server.send(signal.SIGTERM)
        server.ends_with(143)
        for client in (first, second):
            with pytest.raises(PeerLost, match="ended the run: the server was stopped by SIGTERM"):
                client.pull()


def test_the_summary_is_written_when_nobody_reads_the_output(processes, tmp_path):
    command = (
        f"{sys.executable} -m ps --port 0 --workers 1 --steps 1 --start-timeout 0.3 --run-dir {tmp_path} "
        "2>&1 | true; exit ${PIPESTATUS[0]}"
    )
    processes.command("shell", "bash", "-c", command).ends_with(7)
    assert '"status": "no_progress"' in (tmp_path / "summary.json").read_text()


def test_a_signal_after_the_end_does_not_make_a_failure_of_it(processes):
    server = serve(processes, workers=1, steps=2, drain_timeout=0.1)
    client = worker.connect(server.address, WEIGHTS)
    try:
        update = client.pull()
        while not update.done:
            update = client.push({"w": np.ones(3, np.float32)})
        server.says("did not take leave after the last step")  # the connection is still open: the server lingers
        server.send(signal.SIGTERM)
        server.ends_with(0)
    finally:
        client.close(goodbye=False)
    assert server.summary()["status"] == "done"


def test_a_run_directory_that_cannot_hold_the_summary_is_refused_at_the_start(processes, tmp_path):
    (tmp_path / "summary.json").mkdir()
    server = serve(processes, workers=1, steps=2, run_dir=tmp_path, summary=None)
    server.fails(2, "--run-dir", "is a directory")


def test_what_a_killed_process_of_the_same_number_left_does_not_stop_a_result(tmp_path):
    (tmp_path / f".final.{os.getpid()}").write_bytes(b"half")
    write_whole(tmp_path / "final", b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("final", b"whole")]
