"""How the server's process begins: what it calls itself, and that a signal which comes early is one sentence."""

import io
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ps.__main__
from protocol.errors import ConfigurationError, ExitCode
from protocol.injector import NONE
from protocol.log_lines import recognise
from ps.monitoring.console import Console
from ps.monitoring.log_events import EVENTS
from ps.settings import command_line
from ps.settings.command_line import PROGRAM, STARTED_AS, build_command, execute, invocation
from ps.settings.config import ServerConfig
from tests.unit.authority import Authority

ROOT = Path(__file__).resolve().parents[2]

WHILE_IMPORTING = """
import importlib.abc, os, signal, sys
from ps.__main__ import main

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
sys.exit(main(["--workers", "1", "--steps", "1", "--port", "0", "--run-dir", RUN_DIR]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("module", ["ps.settings.command_line", "numpy", "ps.server"])
def test_a_signal_while_modules_are_imported_is_one_sentence(tmp_path: Path, number: int, module: str) -> None:
    """No traceback, and nothing that is being imported can swallow it."""
    names = {"MODULE": module, "SIGNAL": int(number), "RUN_DIR": str(tmp_path / "run")}
    program = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + WHILE_IMPORTING
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.stderr == f"weighmaster-ps: interrupted by {signal.Signals(number).name}\n"
    assert (ended.returncode, ended.stdout) == (128 + number, "")
    assert not (tmp_path / "run").exists()


def test_next_to_nothing_is_imported_before_signals_are_dealt_with() -> None:
    program = "import sys, ps.__main__; print(*(name for name in sys.modules if '.' not in name))"
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert not {"numpy", "numba", "msgpack", "click", "cloup", "tqdm"} & set(shown.stdout.split())


def test_both_modules_give_the_program_one_name() -> None:
    assert ps.__main__.PROGRAM == PROGRAM


@pytest.mark.parametrize(
    ("script", "path", "words"),
    [
        ("", "/somewhere/ps/__main__.py", "python -m ps"),
        ("", "/somewhere/bin/weighmaster-ps", "weighmaster-ps"),
        ("scripts/launch_ps.sh", "/somewhere/ps/__main__.py", "scripts/launch_ps.sh"),
    ],
    ids=["module", "command", "script"],
)
def test_advice_names_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, path: str, words: str
) -> None:
    """The command `weighmaster-ps` is not on the path of whoever works in a checkout."""
    monkeypatch.setenv(STARTED_AS, script)
    monkeypatch.setattr(command_line.sys, "argv", [path])
    assert invocation() == words
    for arguments, advice in (
        (["--nonsense"], f"See `{words} --help`."),
        *(([name, "--nonsense"], f"See `{words} {name} --help`.") for name in ("token", "inspect", "export")),
    ):
        assert execute(build_command(*[lambda _: 0] * 4), arguments) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("weighmaster-ps: ")
        assert error.endswith(advice)
    assert execute(build_command(lambda _: 0, lambda _: 0), ["--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: {words} [OPTIONS]")


def test_the_scripts_tell_what_was_typed() -> None:
    """What the environment is to say is spelled alike on both sides."""
    for name in ("launch_ps.sh", "launch_worker.sh", "train.sh"):
        assert f"export {STARTED_AS}=" in (ROOT / "scripts" / name).read_text()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_bad_end_is_said_once(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = command_line.parse(["--steps", "1", "--workers", "1", "--log-format", log_format])
    ps.__main__._say_ended(config, "the run ended", "no_progress", ExitCode.NO_PROGRESS, 3)
    shown = capsys.readouterr()
    if log_format == "text":
        assert (shown.out, shown.err) == ("", "weighmaster-ps: the run ended\n")
    else:
        line = json.loads(shown.out)
        assert (line["event"], line["status"], line["exit_code"], line["step"]) == ("ended", "no_progress", 7, 3)
        assert shown.err == ""


# ---- what is looked at before anybody is let in --------------------------------------------------------


def prepare(**options: Any) -> ServerConfig:
    config = ServerConfig(workers=1, steps=1, port=0, **options)
    with ps.__main__._prepared(config, Console(1, io.StringIO(), interactive=False), NONE) as prepared:
        return prepared.config


def test_results_may_lie_in_a_run_directory_that_is_yet_to_be_made(tmp_path: Path) -> None:
    run = tmp_path / "out"
    prepare(run_dir=run, export=run / "m.safetensors", summary=run / "s.json", port_file=run / "port")
    assert run.is_dir()


@pytest.mark.parametrize("option", ["export", "summary", "port_file"])
def test_who_is_refused_for_a_file_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, option: str
) -> None:
    with pytest.raises(ConfigurationError, match="is missing or cannot be written"):
        prepare(run_dir=tmp_path / "out", **{option: tmp_path / "nowhere" / "file.safetensors"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("within", ["out", "."], ids=["run directory", "elsewhere"])
def test_a_directory_in_the_place_of_a_result_is_refused(tmp_path: Path, within: str) -> None:
    (tmp_path / within / "m.safetensors").mkdir(parents=True)
    (tmp_path / within).chmod(0o700)
    with pytest.raises(ConfigurationError, match="is a directory"):
        prepare(run_dir=tmp_path / "out", export=tmp_path / within / "m.safetensors")


def test_that_the_package_for_tensorboard_is_missing_is_told_before_the_server_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboardX", "tensorboardX.event_file_writer", "tensorboardX.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'weighmaster\[tensorboard\]'"):
        prepare(run_dir=tmp_path / "out", tensorboard=tmp_path / "board")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize(
    ("page", "warned"),
    [
        ({"status_port": 0, "status_host": "0.0.0.0"}, True),
        ({"status_port": 0, "status_host": "127.0.0.1"}, False),
        ({}, False),
    ],
    ids=["everywhere", "loopback", "no page"],
)
def test_tokens_that_travel_to_the_status_page_in_the_clear_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, page: dict[str, Any], warned: bool, tls: bool
) -> None:
    """TLS of the port for workers is none of the page's."""
    issued = Authority(tmp_path).issue("server")
    files: dict[str, Any] = {"tls_cert": issued.certificate, "tls_key": issued.key} if tls else {}
    config = ServerConfig(workers=1, steps=1, token_file=tmp_path / "tokens", **page, **files)
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        ps.__main__._warn_of_exposure(config)
    said = [record for record in caplog.records if "status page" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"] * warned
    assert all(recognise(record.getMessage(), EVENTS)[0] == "exposed" for record in said)
