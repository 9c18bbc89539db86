"""A client that shares no code with us joins a real server, trains, and leaves: the document is enough."""

import ast
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest

from tests.integration import plain_client

ROOT = Path(__file__).parents[2]
CLIENT = Path(plain_client.__file__)
TOKEN = "plain-client-token-0123456789"
LEARNING_RATE = 0.5
TIMEOUT_S = 60


def start_server(directory, *options):
    port_file = directory / "port"
    command = [sys.executable, "-m", "ps", "--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)]
    command += ["--workers", "1", "--steps", "3", "--optimizer", "sgd", "--learning-rate", str(LEARNING_RATE)]
    command += ["--run-dir", str(directory / "run"), *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHMASTER_")}
    with (directory / "server.log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment), port_file


def port_of(server, port_file):
    deadline = time.monotonic() + TIMEOUT_S
    while not port_file.exists():
        assert time.monotonic() < deadline, "the server does not listen"
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the server ended with {server.wait(0.05)} before it listened")
    return port_file.read_text().strip()


def run_client(port, *token):
    return subprocess.run(
        [sys.executable, "-I", str(CLIENT), port, *token], capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_the_client_imports_nothing_of_ours():
    """Else it would prove nothing."""
    tree = ast.parse(CLIENT.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == {"hashlib", "hmac", "json", "msgpack", "os", "socket", "struct", "sys"}


@pytest.mark.parametrize("with_token", [True, False], ids=["with a token", "without tokens"])
def test_a_plain_client_trains_and_leaves(tmp_path, with_token):
    """The values that come back are those of plain SGD, bit for bit, and both processes end with 0."""
    options, token = [], []
    if with_token:
        token_file = tmp_path / "tokens"
        token_file.touch(mode=0o600)
        token_file.write_text(f"# name role rank token\nplain worker 0 {TOKEN}\n")
        options, token = ["--token-file", str(token_file)], [TOKEN]
    summary_file = tmp_path / "summary.json"
    server, port_file = start_server(tmp_path, "--summary", str(summary_file), *options)
    try:
        client = run_client(port_of(server, port_file), *token)
        assert client.returncode == 0, client.stderr + (tmp_path / "server.log").read_text()
        assert server.wait(TIMEOUT_S) == 0, (tmp_path / "server.log").read_text()
    finally:
        server.kill()
        server.wait()
    said = json.loads(client.stdout)

    welcome, answers = said["welcome"], said["answers"]
    assert (welcome["rank"], welcome["name"], welcome["steps"]) == (0, "plain", 3)
    assert bytes.fromhex(welcome["manifest"]) == b"".join(map(msgpack.packb, plain_client.ROWS))
    expected = [plain_client.INITIAL_VALUES]
    for gradient in plain_client.GRADIENTS:  # all are dyadic, so float32 arithmetic is exact
        expected.append([value - LEARNING_RATE * g for value, g in zip(expected[-1], gradient, strict=True)])
    assert [answer["values"] for answer in answers] == expected
    assert [answer["step"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["seq"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["applied"] for answer in answers] == [False, True, True, True]
    assert [answer["done"] for answer in answers] == [False, False, False, True]
    summary = json.loads(summary_file.read_text())
    assert (summary["status"], summary["steps"]) == ("done", 3)


def test_a_wrong_token_is_refused_and_the_server_goes_on(tmp_path):
    """The same answer for every failure of the proof; the right token is welcome afterwards."""
    token_file = tmp_path / "tokens"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    server, port_file = start_server(tmp_path, "--token-file", str(token_file))
    try:
        port = port_of(server, port_file)
        refused = run_client(port, TOKEN[::-1])
        assert refused.returncode == 1
        assert "'code': 'proof'" in refused.stderr
        assert run_client(port, TOKEN).returncode == 0
        assert server.wait(TIMEOUT_S) == 0, (tmp_path / "server.log").read_text()
    finally:
        server.kill()
        server.wait()
    log = (tmp_path / "server.log").read_text()
    assert TOKEN not in log
    assert TOKEN[::-1] not in log
