"""The leak checks of conftest.py: each kind of leak fails the test that leaks."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from tests import conftest


def _outcome(monkeypatch: pytest.MonkeyPatch, leak: Callable[[], object]) -> str:
    """Run `leak` as a test under the fixture and return what the fixture says of it."""
    monkeypatch.setattr(conftest, "GRACE_S", 0.01)
    check = conftest.leaves_nothing_behind.__wrapped__()
    next(check)
    kept = leak()
    try:
        next(check)
    except pytest.fail.Exception as failure:
        return str(failure)
    except StopIteration:
        pass
    del kept
    return ""


def test_a_clean_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _outcome(monkeypatch, lambda: None) == ""


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_of_ours_that_goes_on_is_a_leak(monkeypatch: pytest.MonkeyPatch, daemon: bool) -> None:
    end = threading.Event()

    def wait_for_the_end() -> None:
        end.wait()

    thread = threading.Thread(target=wait_for_the_end, name="leaky", daemon=daemon)
    try:
        assert "thread leaky" in _outcome(monkeypatch, thread.start)
    finally:
        end.set()
        thread.join()


def test_a_daemon_thread_of_a_library_is_not_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    try:
        assert _outcome(monkeypatch, thread.start) == ""
    finally:
        end.set()
        thread.join()


def test_an_open_socket_is_a_leak_and_a_closed_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[socket.socket] = []
    assert "socket:" in _outcome(monkeypatch, lambda: left.append(socket.socket()))
    left.pop().close()
    assert _outcome(monkeypatch, lambda: socket.socket().close()) == ""


def test_a_child_process_is_a_leak_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "input()"]
    children: list[subprocess.Popen[bytes]] = []
    outcome = _outcome(monkeypatch, lambda: children.append(subprocess.Popen(command, stdin=subprocess.PIPE)))
    child = children[0]
    try:
        assert f"process {child.pid}" in outcome
        child.wait(timeout=10)
        assert not psutil.pid_exists(child.pid)
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
