"""What goes wrong at the keyboard: one clear sentence each, the right exit code, and no traceback."""

import contextlib
import json
import os
import pickle
import socket
import struct
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.processes import ROOT

# Exit codes, as docs/RUNNING.md has them.
CONFIGURATION, REFUSED, LOST, DIVERGED, UNWRITABLE, NO_PROGRESS = 2, 3, 4, 5, 6, 7

TOKEN = "a-token-of-this-test-0123456789abcdef"
ONE_STEP = {"workers": 1, "steps": 1}
SGD = {"optimizer": "sgd", "learning_rate": 0.5}
NETWORKS = ROOT / "tests/integration/models/networks.py"


@pytest.fixture
def light(processes):
    """Return a function that starts a worker without TensorFlow; see `light_worker.py`."""

    def start(name, address, *options):
        return processes.python(name, "-m", "tests.integration.light_worker", address, *options)

    return start


@pytest.fixture
def worker(processes):
    """Return a function that starts `python -m worker`, for which there may be no server."""

    def start(*options, **environment):
        return processes.python("worker", "-m", "worker", "--threads", 1, *options, env=environment)

    return start


@pytest.fixture
def secret(tmp_path):
    """Return a function that writes a file, by default one that only its owner can read."""

    def write(name, text, mode=0o600):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, ["--host 0.0.0.0", "--token-file", "--insecure"]),
        ({"insecure": True, "token_file": "tokens"}, ["--insecure and --token-file exclude each other"]),
        ({"port": 65536}, ["--port must be at least 0 and at most 65535, not 65536"]),
        ({"momentum": 0.9}, ["--momentum works only with --optimizer sgd, not with --optimizer adam"]),
        ({"export": "nowhere/m.safetensors"}, ["--export", "directory nowhere is missing"]),
        ({"init": "none.safetensors"}, ["--init none.safetensors cannot be read"]),
        ({"bind": "::1"}, ["No such option '--bind'", "--help"]),
    ],
    ids=["no token", "two that exclude", "range", "two that do not go", "export", "init", "unknown"],
)
def test_a_server_that_cannot_be_meant_so(processes, options, words):
    """The sentence names the option, or both; nothing is started, and nothing else is said."""
    server = processes.server(**ONE_STEP | options)
    sentence = server.fails(CONFIGURATION, *words)
    assert server.log == sentence
    assert not server.port_file.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-size", 0), ["--batch-size must be from 1", "not 0"]),
        (("--role", "evaluator", "--rank", 1), ["--role evaluator and --rank exclude each other"]),
        (("--ps", "127.0.0.1"), ["'127.0.0.1' is not HOST:PORT"]),
        (("--model", "resnet"), ["--model must be mlp, cifar10_cnn or file.py:function, not 'resnet'"]),
        (("--dataset", "mine.py:load"), ["--dataset mine.py:load", "there is no file", "mine.py"]),
    ],
    ids=["range", "two that exclude", "address", "model", "no such file"],
)
def test_a_worker_that_cannot_be_meant_so(worker, options, words):
    """The same on the other side, before TensorFlow is imported."""
    started = worker(*options)
    sentence = started.fails(CONFIGURATION, *words)
    assert started.log == sentence


def test_a_port_in_use(processes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = processes.server(**ONE_STEP, port=port)
        server.fails(CONFIGURATION, f"cannot listen on 127.0.0.1:{port}: Address already in use", "--port")


def test_a_host_that_is_not_known(processes, light):
    """The server ends at once; a worker tries again until --connect-timeout, saying so."""
    server = processes.server(**ONE_STEP, host="no-such-host.invalid", insecure=True)
    client = light("worker", "no-such-host.invalid:5014", "--connect-timeout", 1)
    server.fails(CONFIGURATION, "cannot listen on no-such-host.invalid")
    client.fails(LOST, "no-such-host.invalid:5014 could not be reached for 1 s", "cannot be resolved")
    assert "waiting for the server at no-such-host.invalid:5014" in client.log


def test_token_files_that_others_can_read(processes, worker, secret):
    """Both sides refuse to use a secret that is none, and say how to mend it."""
    path = secret("tokens", f"* worker * {TOKEN}\n", mode=0o644)
    for started in (processes.server(**ONE_STEP, token_file=path), worker("--token-file", path)):
        sentence = started.fails(CONFIGURATION, str(path), "can be read by others", f"chmod 600 {path}")
        assert started.log == sentence


# ---- tokens --------------------------------------------------------------------------------------------


def test_tokens_that_do_not_fit(processes, light, secret):
    """A wrong one, none where one is needed, one of another name; then the right one trains."""
    path = secret("tokens", f"anna worker 0 {TOKEN}\n")
    server = processes.server(**ONE_STEP, token_file=path)
    wrong = light("wrong", server.address, "--rank", 0, "--token", TOKEN[::-1])
    none = light("none", server.address, "--rank", 0)
    other = light("other", server.address, "--name", "bertha", "--token", TOKEN)
    wrong.fails(REFUSED, server.address, "token was not accepted for this name, role and rank")
    none.fails(REFUSED, server.address, "asks for a token", "--token-file")
    other.fails(REFUSED, server.address, "token was not accepted for this name, role and rank")
    light("right", server.address, "--token", TOKEN).ends_with(0)
    server.ends_with(0)
    assert "failed the proof as worker 'bertha', rank auto" in server.log
    assert "failed the proof as worker '', rank 0" in server.log
    for secret_text in (TOKEN, TOKEN[::-1]):
        assert secret_text not in server.log + wrong.log + other.log


def test_a_token_for_a_server_that_has_none(processes, light):
    """A worker with a token wants proof of the server too."""
    server = processes.server(**ONE_STEP)
    client = light("worker", server.address, "--token", TOKEN)
    client.fails(REFUSED, server.address, "asks for no token", "--token-file")


# ---- the port ------------------------------------------------------------------------------------------

PREFIX = struct.Struct("<4sHHIQ")
HELLO, REFUSED_KIND, PUSH = 1, 7, 10

WHOLE_BYTES = 44
"""A header of this size needs no padding: with the prefix it makes 64 bytes."""


class _Evil:
    """Would leave a file behind wherever it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def strangers(evidence):
    """Return what strangers send, by name, and what the server says of it."""
    no_frame = "cut off: the peer does not speak this protocol"
    gave_up = "gave up before it had joined"
    return {
        "HTTP": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", f"{no_frame} .it began with b'GET / HT'"),
        "random bytes": (np.random.RandomState(3).bytes(500), no_frame),
        "a pickle": (pickle.dumps(_Evil(evidence)), no_frame),
        "a huge header": (PREFIX.pack(b"WMPS", 1, HELLO, 2**32 - 1, 0), "HELLO header of 4294967295 bytes; 4096"),
        "a huge payload": (
            PREFIX.pack(b"WMPS", 1, HELLO, 100, 2**64 - 1),
            "HELLO payload of 18446744073709551615 bytes",
        ),
        "no msgpack": (PREFIX.pack(b"WMPS", 1, HELLO, WHOLE_BYTES, 0) + b"\xc1" * WHOLE_BYTES, "cut off: "),
        "out of turn": (PREFIX.pack(b"WMPS", 1, PUSH, WHOLE_BYTES, 0), "cut off: .*PUSH in state 'await hello'"),
        "half a prefix": (b"WMPS\x01", gave_up),
        "nothing": (b"", gave_up),
    }


def answer_to(port, data):
    """Send bytes and hang up on our side; return all that the server says before it closes, and our port."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        answer = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            stranger.sendall(data)
            with contextlib.suppress(OSError):  # the server has hung up already; what it said is still to be read
                stranger.shutdown(socket.SHUT_WR)
            while piece := stranger.recv(4096):
                answer += piece
        return answer, stranger.getsockname()[1]


def test_strangers_at_the_port(processes, light, tmp_path):
    """Whatever they send, they are cut off with a line in the log, and training goes on as if they had not been."""
    server = processes.server(workers=2, steps=4, **SGD)
    first = light("first", server.address, "--rank", 0)
    first.says("joined as rank 0")
    for name, (data, said) in strangers(tmp_path / "unpickled").items():
        answer, port = answer_to(server.port, data)
        assert (name, answer) == (name, b"")
        server.says(rf"127\.0\.0\.1:{port} .*{said}")
    second = light("second", server.address, "--rank", 1)
    for started in (first, second, server):
        started.ends_with(0)
    first.says(r'\{"w": \[-3\.0, -3\.0, -3\.0\]\}')  # 4 steps of 0.5 times the mean of 1 and 2
    assert not (tmp_path / "unpickled").exists()
    assert server.errors == []


# ---- versions ------------------------------------------------------------------------------------------


def test_a_worker_of_another_version(processes, light):
    """The server tells it so, in a frame of its own version, logs it, and goes on."""
    server = processes.server(**ONE_STEP)
    answer, port = answer_to(server.port, PREFIX.pack(b"WMPS", 2, HELLO, WHOLE_BYTES, 0) + bytes(WHOLE_BYTES))
    magic, version, kind, header_bytes, payload_bytes = PREFIX.unpack(answer[: PREFIX.size])
    header = answer[PREFIX.size :][:header_bytes]
    assert (magic, version, kind, header_bytes, payload_bytes) == (b"WMPS", 1, REFUSED_KIND, len(header), 0)
    assert b"protocol version 2, this side version 1" in header
    light("worker", server.address).ends_with(0)
    server.ends_with(0)
    server.says(rf"127\.0\.0\.1:{port} refused: .*version 2, this side version 1")


@contextlib.contextmanager
def peer_that_answers(data):
    """Listen, and answer every connection with `data`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(60)
                    connection.recv(4096)
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()


def test_a_server_of_another_version(light):
    """The worker names the server and both versions, and does not try again."""
    with peer_that_answers(PREFIX.pack(b"WMPS", 2, 2, WHOLE_BYTES, 0) + bytes(WHOLE_BYTES)) as address:
        client = light("worker", address)
        client.fails(REFUSED, address, "protocol version 2", "version 1")
        assert "waiting" not in client.log


def test_something_else_at_the_address(light):
    """A web server at the port is named as what it is: not ours."""
    with peer_that_answers(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as address:
        light("worker", address).fails(LOST, address, "does not speak this protocol", "HTTP/1.1")


# ---- who may join --------------------------------------------------------------------------------------


def test_variables_that_differ(processes, light):
    """The first that differs is named with both views, and the round is as it was."""
    server = processes.server(workers=2, steps=2, **SGD)
    first = light("first", server.address, "--rank", 0, "--variables", '{"w": [3], "b": []}')
    first.says("joined as rank 0")
    shape = light("shape", server.address, "--rank", 1, "--variables", '{"w": [4], "b": []}')
    absent = light("absent", server.address, "--rank", 1, "--variables", '{"w": [3]}')
    double = ("--variables", '{"w": [3], "b": []}', "--dtype", "float64")
    dtype = light("dtype", server.address, "--rank", 1, *double)
    shape.fails(REFUSED, server.address, "'w'", "the server", "float32 [3]", "the worker", "float32 [4]")
    absent.fails(REFUSED, server.address, "'b'", "the server", "the worker")
    dtype.fails(REFUSED, server.address, "'w'", "float32 [3]", "float64 [3]")
    second = light("second", server.address, "--rank", 1, "--variables", '{"b": [], "w": [3]}')
    for started in (first, second, server):
        started.ends_with(0)
    server.says(r"refused \(manifest\)", times=3)
    values = server.values()
    assert values["w"].tolist() == [-1.5, -1.5, -1.5]  # 2 steps of 0.5 times the mean of 1 and 2
    assert values["b"].tolist() == -1.5


def test_a_rank_that_is_taken_and_one_that_is_not_there(processes, light):
    """Both live: the newcomer is refused and told who holds the rank; the holder does not notice."""
    server = processes.server(workers=2, steps=2, seed=5, heartbeat_interval=0.5)
    holder = light("holder", server.address, "--rank", 0, "--name", "anna")
    holder.says("joined as rank 0")
    newcomer = light("newcomer", server.address, "--rank", 0, "--name", "bertha")
    too_high = light("too high", server.address, "--rank", 2)
    other_seed = light("other seed", server.address, "--rank", 1, "--seed", 6)
    newcomer.fails(REFUSED, server.address, "rank 0 (anna)", "is alive and holds this rank", "--rank")
    too_high.fails(REFUSED, server.address, "rank 2 is not one of this run's ranks 0 to 1", "--rank")
    other_seed.fails(REFUSED, server.address, "--seed 6", "the server with 5")
    second = light("second", server.address, "--rank", 1, "--seed", 5)
    for started in (holder, second, server):
        started.ends_with(0)
    assert "lost" not in server.log
    holder.says("done at step 2 after 2 pushes")


# ---- nobody is there -----------------------------------------------------------------------------------


def test_nobody_comes(processes, light):
    """The ranks that are missing are named, to those that came as well."""
    server = processes.server(workers=3, steps=2, start_timeout=8)
    came = light("came", server.address, "--rank", 1)
    server.fails(NO_PROGRESS, "ranks 0 and 2 did not come within 8 s", "--start-timeout")
    came.fails(NO_PROGRESS, server.address, "ranks 0 and 2 did not come within 8 s")
    assert server.summary()["status"] == "no_progress"


def test_no_server(processes, light):
    """Nobody listens there, from some moment on or from the start."""
    server = processes.server(workers=2, steps=2)
    address = server.address
    left_alone = light("left alone", address, "--rank", 0, "--reconnect-timeout", 1)
    left_alone.says("joined as rank 0")
    server.kill()
    left_alone.fails(LOST, address, "could not be reached for 1 s", "Connection refused")
    left_alone.says("the connection to the server is lost")
    never = light("never", address, "--connect-timeout", 1)
    never.fails(LOST, address, "could not be reached for 1 s", "Connection refused")
    never.says(f"waiting for the server at {address}")


# ---- data and model ------------------------------------------------------------------------------------


def test_data_sets_that_are_missing_or_damaged(worker, tmp_path):
    """The sentence names the file, and where to get it or what to do."""
    for name in ("empty", "half", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "half/train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    (tmp_path / "damaged/cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8b not an archive at all")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut")
    cases = {
        ("cifar10", "empty"): ["cifar-10-binary.tar.gz", "not in", "/empty", "kriz", "--data-dir"],
        ("mnist", "half"): ["half/train-labels-idx1-ubyte.gz is missing", "get train-labels", "from http"],
        ("cifar10", "damaged"): ["damaged/cifar-10-binary.tar.gz", "is damaged", "fetch it again"],
        (f"npz:{tmp_path}/cut.npz", "empty"): ["cut.npz", "damaged", "fetch it again"],
        ("npz:none.npz", "empty"): ["none.npz is missing", "npz:"],
        ("mnist", "nowhere"): ["--data-dir", "/nowhere is not a folder"],
    }
    no_internet = {"https_proxy": "http://127.0.0.1:9", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = {
        case: worker("--dataset", case[0], "--data-dir", tmp_path / case[1], **no_internet) for case in cases
    }
    for case, words in cases.items():
        started[case].fails(CONFIGURATION, *words)


def test_models_that_are_wrong(worker):
    """The function is named, and the line, before anything is connected."""
    raising = worker("--model", f"{NETWORKS}:raising")
    number = worker("--model", f"{NETWORKS}:returning_a_number")
    raising.fails(CONFIGURATION, "'raising' raised KeyError: 'no such layer'", f"{NETWORKS}, line ")
    number.fails(CONFIGURATION, "the model's loss must be a tensor, not float")


def test_a_batch_that_is_larger_than_the_shard(processes):
    """The worker says how large it may be, and is lost to the server."""
    server = processes.server(**ONE_STEP, rejoin_timeout=0.5)
    started = processes.worker(server, batch_size=2000, threads=1)
    started.fails(CONFIGURATION, "a batch of 2,000 is larger than the shard of rank 0", "--batch-size")
    server.fails(NO_PROGRESS, "rank 0", "has not returned within 0.5 s")


def test_a_loss_that_is_not_finite(processes):
    """Ten void rounds end the run as diverged on all sides, and the sentence names the worker."""
    server = processes.server(workers=1, steps=100)
    started = processes.worker(server, model=f"{NETWORKS}:infinite_loss", threads=1)
    words = ("10 rounds in a row had nothing to apply", "rank 0", "not finite")
    server.fails(DIVERGED, "ended at step 10", *words)
    started.fails(DIVERGED, server.address, *words)
    started.says("the push of step 3 did not count: .*not finite")
    summary = server.summary()
    assert (summary["status"], summary["void_rounds"]) == ("diverged", 10)
    assert summary["workers"][0]["rejected"] == 10


def test_one_worker_of_two_with_a_loss_that_is_not_finite(processes, light):
    """It counts with weight 0 and is named; the other trains on."""
    server = processes.server(workers=2, steps=3, **SGD)
    good = light("good", server.address, "--rank", 0)
    bad = light("bad", server.address, "--rank", 1, "--name", "bertha", "--loss", "nan")
    for started in (good, bad, server):
        started.ends_with(0)
    server.says(r"rank 1 \(bertha\): push of step \d refused: the loss is nan", times=3)
    assert server.values()["w"].tolist() == [-1.5, -1.5, -1.5]


# ---- memory and files ----------------------------------------------------------------------------------


def test_too_little_memory(processes, light):
    """The server says what it needs and ends, before it has taken any; the worker is told as well."""
    server = processes.server(**ONE_STEP, max_memory="8M")
    client = light("worker", server.address, "--variables", '{"w": [1000000]}')
    server.fails(CONFIGURATION, "the model needs 24.0 MB", "--max-memory 8.4 MB")
    client.fails(REFUSED, server.address, "the model needs 24.0 MB")


def test_a_model_above_what_may_be_declared(processes, light):
    """A worker may not make the server allocate what it likes; the next one trains."""
    server = processes.server(**ONE_STEP, max_model_bytes="1M")
    big = light("big", server.address, "--variables", '{"w": [1000000]}')
    big.fails(REFUSED, server.address, "4000000 bytes", "--max-model-bytes")
    light("small", server.address).ends_with(0)
    server.ends_with(0)


def test_initial_values_that_do_not_fit(processes, light, tmp_path):
    """The first variable that differs is named; both sides end."""
    init = tmp_path / "init.safetensors"
    save_file({"w": np.zeros(4, np.float32)}, init)
    server = processes.server(**ONE_STEP, init=init)
    client = light("worker", server.address)
    server.fails(CONFIGURATION, f"--init {init} does not fit", "'w'")
    client.fails(REFUSED, server.address, "--init", "does not fit", "'w'")


@pytest.mark.parametrize("lost", ["export", "summary"])
def test_a_result_that_cannot_be_written_at_the_end(processes, light, tmp_path, lost):
    """The run was done, so the other result is there; the exit code is that of an unwritable file."""
    files = {"export": tmp_path / "export/m.safetensors", "summary": tmp_path / "summary/s.json"}
    for path in files.values():
        path.parent.mkdir()
    server = processes.server(**ONE_STEP, **SGD, **files)
    address = server.address
    files[lost].parent.rmdir()
    light("worker", address).ends_with(0)
    server.fails(UNWRITABLE, f"{files[lost]} cannot be written: No such file or directory")
    if lost == "export":
        assert json.loads(files["summary"].read_text())["status"] == "done"
    else:
        assert load_file(files["export"])["w"].tolist() == [-0.5] * 3
