"""Who calls in the moment in which a run ends is told, instead of trying until his patience is over.

The server runs in this process, so that the moment lasts as long as the test likes: a caller that never says hello
keeps it open.
"""

import io
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import ps.connections.door
import worker
from protocol.errors import NoProgress, PeerLost
from protocol.messages import Status
from ps.monitoring.console import Console
from ps.server import ParameterServer
from ps.settings.config import ServerConfig

VARIABLES = {"w": np.zeros(3, np.float32)}
PATIENCE_S = 60.0


@contextmanager
def ending(tmp_path, monkeypatch, end):
    """Run a server until `end(server, address)` has ended the run, and hold it there."""
    monkeypatch.setattr(ps.connections.door, "FAREWELL_S", PATIENCE_S)
    config = ServerConfig(workers=1, steps=1, port=0, run_dir=tmp_path)
    server = ParameterServer(config, Console(1, io.StringIO(), interactive=False), epoch=5)
    listener = server.listen()
    address, finishes = str(listener.address), []
    accepted, start = threading.Event(), server._door._start

    def start_session(*caller):
        start(*caller)
        accepted.set()

    monkeypatch.setattr(server._door, "_start", start_session)
    running = threading.Thread(target=lambda: finishes.append(server.run(listener)), name="server")
    running.start()
    with socket.create_connection((listener.address.host, listener.address.port)):
        try:
            assert accepted.wait(PATIENCE_S)
            end(server, address)
            assert server._ended.wait(PATIENCE_S)
            yield SimpleNamespace(address=address, finishes=finishes)
        finally:
            server.stop(Status.FAILED, "the test is over")
    running.join(PATIENCE_S)
    assert not running.is_alive()


@pytest.mark.parametrize(
    ("status", "error"), [(Status.INTERRUPTED, PeerLost), (Status.NO_PROGRESS, NoProgress)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("role", ["worker", "evaluator"])
def test_of_a_run_that_ended_early_he_hears_why(tmp_path, monkeypatch, status, error, role):
    """And whoever comes so late defines no variables any more."""
    with ending(tmp_path, monkeypatch, lambda server, _: server.stop(status, "it had to be")) as run:
        with pytest.raises(error, match="ended the run: it had to be"):
            worker.connect(run.address, VARIABLES, role=role)
        assert not run.finishes, "it still says goodbye"
    assert run.finishes[0].status is status


def test_of_a_run_that_is_done_he_gets_the_final_values(tmp_path, monkeypatch):
    def finish(_, address):
        with worker.connect(address, VARIABLES) as first:
            first.pull()
            assert first.push({"w": np.ones(3, np.float32)}, loss=1.0).done

    with ending(tmp_path, monkeypatch, finish) as run:
        with worker.connect(run.address, VARIABLES) as late:
            update = late.pull()
        assert update.done and update.step == 1
        assert not run.finishes, "it still says goodbye"
    assert run.finishes[0].status is Status.DONE
