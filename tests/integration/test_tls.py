"""Runs over TLS: who is refused and in which words, and that a run with it has the bits of one without.

Most servers here run in this process, with sockets of their own; clients are those of `worker.connect`.
"""

import contextlib
import io
import logging
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import ps.connections.session
import worker
from protocol.errors import PeerLost, Refused
from protocol.messages import Role, Status
from protocol.tokens import Grant
from ps.monitoring.console import Console
from ps.server import ParameterServer
from ps.settings.config import ServerConfig
from tests.unit.authority import Authority

PATIENCE_S = 60.0
TOKEN = "correct-horse-battery-staple"
INITIAL = {"kernel": np.zeros((40, 30), np.float32), "bias": np.zeros(30, np.float32)}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server_files(authority):
    return authority.issue("server")


@pytest.fixture
def serving(tmp_path, monkeypatch, caplog):
    """Start a server in this process, with certificate and key `issued` or without TLS."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "weighmaster.ps")

    @contextlib.contextmanager
    def start(issued=None, grants=(), **options) -> Iterator[SimpleNamespace]:
        files = {} if issued is None else pair(issued)
        common = {"workers": 1, "steps": 2, "port": 0, "threads": 1, "heartbeat_interval": 0.2}
        config = ServerConfig(**common | files | options)
        server = ParameterServer(
            config, Console(config.steps, io.StringIO(), interactive=False), epoch=5, grants=grants
        )
        listener = server.listen()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.run, listener)
            try:
                yield SimpleNamespace(server=server, port=listener.address.port, address=str(listener.address))
            finally:
                server.stop(Status.INTERRUPTED, "the test is over")
                running.result(PATIENCE_S)

    return start


def train(address, rank=0, **options):
    """Take part until the end with gradients that depend on the values; return the last of these."""
    rng = np.random.default_rng(rank)
    with worker.connect(address, INITIAL, rank=rank, reconnect_timeout=PATIENCE_S, **options) as server:
        update = server.pull()
        while not update.done:
            gradients = {
                name: (rng.standard_normal(value.shape) + value).astype(np.float32)
                for name, value in update.values.items()
            }
            update = server.push(gradients, loss=1.0)
        return {name: value.copy() for name, value in update.values.items()}


def pair(issued):
    """Options of a client's certificate."""
    return {"tls_cert": issued.certificate, "tls_key": issued.key}


def said(caplog, pattern):
    """Whether the server's log has a line that matches."""
    return any(re.search(pattern, record.getMessage()) for record in caplog.records)


# ---- a run ---------------------------------------------------------------------------------------------


@pytest.fixture
def plain_values(serving):
    with serving(workers=2, steps=5) as run, ThreadPoolExecutor(1) as pool:
        other = pool.submit(train, run.address, 1)
        values = train(run.address)
        other.result(PATIENCE_S)
    return values


@pytest.mark.parametrize("inject", [None, "cut@mid-push,step=2", "cut@mid-reply,step=3"])
def test_a_run_over_tls_has_the_bits_of_one_without(serving, authority, server_files, plain_values, inject):
    """Also when a connection is cut in mid-frame: the worker comes back, by TLS."""
    told = []
    tls = {"tls_ca": authority.file}
    with serving(server_files, workers=2, steps=5) as run, ThreadPoolExecutor(1) as pool:
        other = pool.submit(train, run.address, 1, **tls)
        values = train(run.address, inject=inject, on_event=told.append, **tls)
        other.result(PATIENCE_S)
    for name, plain in plain_values.items():
        np.testing.assert_array_equal(values[name], plain)
    assert any("is lost" in text for text in told) == (inject is not None)


def test_heartbeats_keep_a_worker_that_waits(serving, authority, server_files):
    """Its thread receives while another sends; without beats it would be lost before it has heard three times."""
    waits, waited = [], threading.Event()

    def told(text):
        waits.append(text)
        if sum("wait" in text for text in waits) >= 12:
            waited.set()

    options = {"workers": 2, "heartbeat_interval": 0.05, "heartbeat_timeout": 0.5, "steps": 2}
    with serving(server_files, **options) as run, ThreadPoolExecutor(1) as pool:
        first = pool.submit(train, run.address, 0, tls_ca=authority.file, on_event=told)
        assert waited.wait(PATIENCE_S)
        train(run.address, 1, tls_ca=authority.file)
        first.result(PATIENCE_S)
        assert not any("is lost" in text for text in waits)


def test_token_pin_and_client_certificate_go_together(serving, authority, server_files, caplog):
    mine = authority.issue("worker", is_client=True)
    grants = (Grant(None, Role.WORKER, None, TOKEN.encode()),)
    files = pair(mine)
    with serving(server_files, grants, tls_ca=authority.file) as run:
        pin = server_files.digest.hex()
        with pytest.raises(Refused, match="the token was not accepted"):
            train(run.address, token=TOKEN[::-1], tls_fingerprint=pin, **files)
        train(run.address, token=TOKEN, tls_fingerprint=pin, **files)
    assert said(caplog, "failed the proof as worker")


def test_the_proof_covers_the_certificate(serving, authority, server_files, monkeypatch):
    """Whoever relays, with a certificate of his own, a client that was told to trust him proves nothing."""
    grants = (Grant(None, Role.WORKER, None, TOKEN.encode()),)
    with serving(server_files, grants) as run:
        monkeypatch.setattr(run.server.config.tls, "certificate", bytes(32))
        with pytest.raises(Refused, match="the token was not accepted"):
            train(run.address, token=TOKEN, tls_ca=authority.file)


# ---- who is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("issue", "sentence", "in_log"),
    [
        ({"first_day": -3, "last_day": -1}, "has expired: renew it there, or set the clock", "it has expired"),
        ({"first_day": 1, "last_day": 3}, "is not valid yet: set the clocks", "it is not valid yet"),
        ({"hosts": ("elsewhere.example",)}, "is not for 127.0.0.1: call the server by a name", "not for this name"),
        ({"is_client": True}, "cannot be trusted: unsu[a-z]+ certificate purpose", "not made for this use"),
    ],
    ids=["expired", "not yet valid", "wrong name", "wrong use"],
)
def test_a_certificate_that_is_not_good_is_refused_at_once(serving, authority, caplog, issue, sentence, in_log):
    with serving(authority.issue("bad", **issue)) as run:
        with pytest.raises(Refused, match=sentence) as refused:
            train(run.address, tls_ca=authority.file)
        assert f"the certificate of the server at 127.0.0.1:{run.port}" in str(refused.value)
    assert said(caplog, f"cut off: it does not accept this server's certificate: .*{in_log}")


@pytest.mark.parametrize("name", ["another authority", "test authority"])
def test_an_authority_that_is_not_known(serving, server_files, tmp_path, caplog, name):
    """One of the same name is not the same."""
    with serving(server_files) as run, pytest.raises(Refused, match="is not of an authority in --tls-ca"):
        train(run.address, tls_ca=Authority(tmp_path / "other", name).file)
    assert said(caplog, "cut off: .*it is not of the authority that is known there")


def test_a_fingerprint_that_differs_names_the_one_that_is_there(serving, server_files):
    sentence = f"another fingerprint.*{server_files.digest.hex()}"
    with serving(server_files) as run, pytest.raises(Refused, match=sentence):
        train(run.address, tls_fingerprint="00:" * 31 + "00")


def test_a_plain_client_at_a_tls_port(serving, authority, server_files, caplog):
    with serving(server_files) as run:
        with pytest.raises(Refused, match="refused: this server speaks TLS only: give --tls-ca"):
            train(run.address)
        train(run.address, tls_ca=authority.file)
    assert said(caplog, "cut off: it speaks no TLS, and this server has a --tls-cert")


def test_a_tls_client_at_a_plain_port(serving, authority, caplog):
    """It is told at once, and never goes on without."""
    with serving() as run:
        with pytest.raises(Refused, match="speaks no TLS: start it with --tls-cert and --tls-key"):
            train(run.address, tls_ca=authority.file)
        train(run.address)
    assert said(caplog, "cut off: .*it speaks TLS, and this server has no --tls-cert")


def test_client_certificates(serving, authority, server_files, tmp_path, caplog):
    old = authority.issue("old", first_day=-3, last_day=-1, is_client=True)
    strange = Authority(tmp_path / "other", "another authority").issue("worker", is_client=True)
    unknown = "it is not of the authority that is known there"
    cases = (
        ({}, "it is missing", "it shows no client certificate"),
        (pair(strange), unknown, "its client certificate is not of an authority in --tls-ca"),
        (pair(old), "it has expired", "its client certificate has expired"),
    )
    with serving(server_files, tls_ca=authority.file) as run:
        for files, sentence, _ in cases:
            asks = f"asks for a client certificate, and that of this side was refused: {sentence}"
            with pytest.raises(Refused, match=asks):
                train(run.address, tls_ca=authority.file, **files)
        mine = authority.issue("mine", is_client=True)
        train(run.address, tls_ca=authority.file, **pair(mine))
    assert [in_log for _, _, in_log in cases if not said(caplog, f"cut off: {in_log}")] == []


def test_by_name_and_by_ipv6(serving, authority, server_files):
    with serving(server_files, host="127.0.0.1") as run:
        train(f"localhost:{run.port}", tls_ca=authority.file)
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(server_files, host="::1") as run:
        train(run.address, tls_ca=authority.file)


def test_a_server_that_goes_during_the_handshake_is_called_again(authority):
    """A port that closes at once is no refusal: the server may be starting."""
    told = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        calling = pool.submit(train, address, tls_ca=authority.file, connect_timeout=0.5, on_event=told.append)
        for _ in range(2):
            listener.accept()[0].close()
        listener.close()
        with pytest.raises(PeerLost, match="could not be reached"):
            calling.result(PATIENCE_S)
    assert told


# ---- strangers -----------------------------------------------------------------------------------------


def test_handshakes_that_stall_hold_nobody_and_end(serving, authority, server_files, monkeypatch, caplog):
    """As many as are let in at once, but for one."""
    with serving(server_files, steps=3) as run, contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(socket.create_connection(("127.0.0.1", run.port))) for _ in range(31)]
        for stranger in stalled[::2]:
            stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
        train(run.address, tls_ca=authority.file)
    monkeypatch.setattr(ps.connections.session, "HANDSHAKE_S", 0.01)
    with serving(server_files) as run, socket.create_connection(("127.0.0.1", run.port), PATIENCE_S) as stranger:
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert said(caplog, "gave up before it had joined: .*(silent|too few bytes)")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff" + bytes(70_000)])
def test_strangers_at_a_tls_port(serving, authority, server_files, caplog, data):
    with serving(server_files) as run:
        with socket.create_connection(("127.0.0.1", run.port), PATIENCE_S) as stranger:
            stranger.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        train(run.address, tls_ca=authority.file)
    assert said(caplog, "cut off: it speaks no TLS that can be understood")


# ---- the programs --------------------------------------------------------------------------------------


def test_both_programs_over_tls_and_without(processes, authority, server_files, tmp_path):
    """Certificate, client certificate and token by their options, and the same bits as without all of them."""
    mine = authority.issue("program", is_client=True)
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(f"* worker * {TOKEN}\n")
    files = {"tls_ca": authority.file, "token_file": token_file}
    run = {"workers": 1, "steps": 3}
    work = {"model": "mlp", "dataset": "digits", "threads": 1}
    plain = processes.server(**run)
    first = processes.worker(plain, rank=0, **work)
    secret = processes.server(**run, **files, **pair(server_files))
    second = processes.worker(secret, rank=0, **work, **files, **pair(mine))
    for process in (first, second, plain, secret):
        process.ends_with(0)
    without, with_tls = plain.values(), secret.values()
    assert without.keys() == with_tls.keys() and len(without) > 0
    for name, value in without.items():
        np.testing.assert_array_equal(with_tls[name], value)


def test_a_wrong_file_is_a_sentence_and_exit_code_2(processes, authority, server_files, tmp_path):
    other = tmp_path / "other.key"
    other.touch(mode=0o644)
    server = processes.server(workers=1, steps=1, tls_cert=server_files.certificate, tls_key=other)
    server.fails(2, "--tls-key", "can be read by others", "chmod 600")
    client = processes.python("worker", "-m", "worker", "--tls-ca", tmp_path / "nothing")
    client.fails(2, "--tls-ca", "cannot be read", "No such file")
