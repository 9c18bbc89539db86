"""How a worker's process begins: what it calls itself, and that a signal which comes early is one sentence."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest

import worker.__main__
from protocol.errors import Interrupted
from worker import command_line
from worker.command_line import PROGRAM, STARTED_AS, build_command, execute, invocation

ROOT = Path(__file__).resolve().parents[2]

WHILE_IMPORTING = """
import importlib.abc, os, signal, sys
from worker.__main__ import main

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), SIGNAL)
            try:
                for _ in range(1000):  # the handler runs between two of these
                    pass
            except Exception:  # as libraries do round an import that is optional
                pass

assert MODULE not in sys.modules
sys.meta_path.insert(0, Interrupts())
sys.exit(main(["--dry-run"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("module", ["worker.command_line", "numpy", "worker.job", "tensorflow"])
def test_a_signal_while_modules_are_imported_is_one_sentence(number: int, module: str) -> None:
    """No traceback, and nothing that is being imported can swallow it."""
    program = f"MODULE = {module!r}\nSIGNAL = {int(number)}\n{WHILE_IMPORTING}"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.stderr == f"weighmaster-worker: interrupted by {signal.Signals(number).name}\n"
    assert ended.returncode == 128 + number
    said = "loading TensorFlow, which takes some seconds\n" if module == "tensorflow" else ""
    assert ended.stdout[len("12:34:56 ") :] == said


def test_next_to_nothing_is_imported_before_signals_are_dealt_with() -> None:
    program = "import sys, worker.__main__; print(*(name for name in sys.modules if '.' not in name))"
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert not {"numpy", "msgpack", "click", "cloup", "sklearn", "tensorflow"} & set(shown.stdout.split())


def test_what_the_package_offers_is_there_when_it_is_asked_for() -> None:
    """The names load late; one that does not exist is an error like any other."""
    assert set(worker.__all__) <= set(dir(worker))
    assert worker.connect.__module__ == "worker.joining"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = worker.nonsense


def test_both_modules_give_the_program_one_name() -> None:
    assert worker.__main__.PROGRAM == PROGRAM


@pytest.mark.parametrize(
    ("script", "path", "words"),
    [
        ("", "/somewhere/worker/__main__.py", "python -m worker"),
        ("", "/somewhere/bin/weighmaster-worker", "weighmaster-worker"),
        ("scripts/launch_worker.sh", "/somewhere/worker/__main__.py", "scripts/launch_worker.sh"),
    ],
    ids=["module", "command", "script"],
)
def test_advice_names_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, path: str, words: str
) -> None:
    """The command `weighmaster-worker` is not on the path of whoever works in a checkout."""
    monkeypatch.setenv(STARTED_AS, script)
    monkeypatch.setattr(command_line.sys, "argv", [path])
    assert invocation() == words
    assert execute(build_command(lambda _: 0), ["--nonsense"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("weighmaster-worker: ")
    assert error.endswith(f"See `{words} --help`.")
    assert execute(build_command(lambda _: 0), ["--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: {words} [OPTIONS]")


def test_the_scripts_tell_what_was_typed() -> None:
    """What the environment is to say is spelled alike on both sides."""
    for name in ("launch_worker.sh", "train.sh"):
        assert f"export {STARTED_AS}=" in (ROOT / "scripts" / name).read_text()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            'raise ImportError("Traceback:\\n...\\nImportError: libx.so.2: cannot open\\n\\n")',
            "TensorFlow is installed but cannot be loaded: ImportError: ImportError: libx.so.2: cannot open",
        ),
        (
            "import numpy; numpy.no_such",
            "TensorFlow is installed but cannot be loaded: AttributeError: module 'numpy'",
        ),
        ("raise TypeError", "TensorFlow is installed but cannot be loaded: TypeError: no message"),
        ("import no_such_module", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import keras_of_mine", "cannot be loaded: ModuleNotFoundError: No module named 'keras_of_mine'"),
        ("raise ModuleNotFoundError('x', name='keras')", "needs TensorFlow, and keras is not installed"),
    ],
)
def test_a_tensorflow_that_does_not_load_is_one_sentence(tmp_path: Path, module: str, words: str) -> None:
    (tmp_path / "tensorflow.py").write_text(module)
    done = subprocess.run(
        [sys.executable, "-m", "worker", "--dry-run"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("handler", [worker.__main__._interrupt, worker.__main__._leave])
def test_a_second_signal_does_not_break_into_the_leave_that_the_first_one_takes(
    monkeypatch: pytest.MonkeyPatch, handler: Callable[[int, FrameType | None], None]
) -> None:
    def ends(interrupted: Interrupted) -> None:
        raise interrupted

    monkeypatch.setattr(worker.__main__, "_exit", ends)
    monkeypatch.setattr(worker.__main__.threading, "Timer", Mock())
    both = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in both]
    try:
        with pytest.raises(Interrupted, match="interrupted by SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
        for number in both:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        for number, earlier in zip(both, before, strict=True):
            signal.signal(number, earlier)


def test_why_a_worker_ends_is_said_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In JSON an event like any other, in text a sentence on standard error."""
    monkeypatch.setattr(worker.__main__, "_log_format", "text")  # it is put back at the end
    for log_format in ("json", "text"):
        options = ["--token-file", str(tmp_path / "none"), "--log-format", log_format]
        assert execute(build_command(worker.__main__.run), options) == 2
        shown = capsys.readouterr()
        if log_format == "json":
            line = json.loads(shown.out)
            assert (line["event"], line["level"], line["exit_code"]) == ("ended", "error", 2)
            assert shown.err == ""
        else:
            assert (shown.out, shown.err) == ("", f"weighmaster-worker: {line['message']}\n")


def test_a_signal_is_said_in_the_log(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(worker.__main__.os, "_exit", codes.append)
    for log_format in ("json", "text"):
        monkeypatch.setattr(worker.__main__, "_log_format", log_format)
        worker.__main__._leave(signal.SIGTERM, None)
        shown = capfd.readouterr()
        if log_format == "json":
            line = json.loads(shown.out)
            assert (line["event"], line["message"], line["exit_code"]) == ("ended", "interrupted by SIGTERM", 143)
            assert shown.err == ""
        else:
            assert (shown.out, shown.err) == ("", "weighmaster-worker: interrupted by SIGTERM\n")
    assert codes == [143, 143]
