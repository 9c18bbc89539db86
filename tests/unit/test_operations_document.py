"""docs/OPERATIONS.md tells every option, variable, event and exit code that there is, and nothing else."""

import configparser
import contextlib
import fnmatch
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from protocol.errors import ExitCode
from protocol.frames import VERSION
from protocol.log_lines import recognise
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.build import store_config
from ps.checkpoints import format as checkpoint_format
from ps.connections.doorstep import MAX_UNPROVEN, MAX_WAITING
from ps.monitoring import log_events, tensorboard
from ps.monitoring.metrics import Metrics, TestResult
from ps.monitoring.status_server import Limits
from ps.settings import command_line as ps_command
from ps.settings.command_line import parse as parse_ps
from ps.storage.store import Store
from tests.unit.operations_tables import PAGE, TABLES, between, server_command, worker_command_of, written_anew
from worker.command_line import parse as parse_worker

ROOT = PAGE.parents[1]
TEXT = PAGE.read_text()


def _section(heading: str) -> str:
    return TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_the_tables_are_those_of_the_code() -> None:
    assert written_anew(TEXT) == TEXT, "run `python -m tests.unit.operations_tables`"


@pytest.mark.parametrize("name", list(TABLES))
def test_a_row_that_is_missing_is_noticed(name: str) -> None:
    match = between(name).search(TEXT)
    assert match is not None
    rows = match[2].splitlines()
    assert written_anew(TEXT.replace("\n".join(rows[-2:]), rows[-1])) == TEXT


@pytest.mark.parametrize("command", [server_command(), worker_command_of()], ids=["server", "worker"])
def test_every_option_has_a_row_and_a_variable(command: object) -> None:
    options = [option for option in command.params if option.name not in ("version", "help")]  # type: ignore[attr-defined]
    assert len(options) > 15
    for option in options:
        assert f"`{option.opts[0]}`" in TEXT
        assert f"`{option.envvar}`" in TEXT


def test_every_variable_that_the_code_reads_is_told() -> None:
    read: set[str] = set()
    for folder in ("protocol", "ps", "worker", "scripts"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.sh")]:
            read |= set(re.findall(r"\b(?:WEIGHMASTER|TF|NUMBA)_[A-Z][A-Z_]+[A-Z]\b", path.read_text()))
    read -= {"TF_SECTION"}
    assert len(read) > 5
    assert {name for name in read if f"`{name}`" not in TEXT} == set()


def test_the_variables_of_compose_are_told() -> None:
    used = set()
    for path in ROOT.glob("docker-compose*.yml"):
        used |= set(re.findall(r"\$\{([A-Z_]+)", path.read_text()))
    told = {
        name
        for row in _section("By compose").splitlines()
        if row[:1] == "|"
        for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])
    }
    assert used == told


def test_what_compose_and_systemd_set_are_options() -> None:
    known = {option.envvar for command in (server_command(), worker_command_of()) for option in command.params}
    files = [*ROOT.glob("docker-compose*.yml"), *(ROOT / "scripts" / "systemd").iterdir()]
    used = {name for path in files for name in re.findall(r"\bWEIGHMASTER_[A-Z_]+", path.read_text())}
    assert len(used) > 15
    assert used <= known


def test_the_exit_codes_are_all_told() -> None:
    rows = [row.split("|")[1] for row in _section("Exit codes").splitlines() if row[:1] == "|"]
    told = {int(number) for row in rows for number in re.findall(r"\d+", row)}
    assert told == {int(code) for code in ExitCode} | {137}


def test_what_is_started_again_is_what_the_units_start_again() -> None:
    again = set()
    for row in _section("Exit codes").splitlines():
        if row.endswith("| yes |"):
            again |= {int(number) for number in re.findall(r"\d+", row.split("|")[1])}
    for path in (ROOT / "scripts" / "systemd").glob("*.service"):
        unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
        unit.optionxform = str  # type: ignore[assignment]
        unit.read(path)
        never = {int(code) for code in unit["Service"]["RestartPreventExitStatus"].split()}
        assert {int(code) for code in ExitCode} - never - {0} | {137} == again
        assert unit["Service"]["Restart"] == "on-failure"


def _models_needed(consistency: str, workers: int, validators: int, ema: bool, checkpoints: bool) -> float:
    options = ["--steps", "9", "--workers", str(workers), "--consistency", consistency]
    if validators:
        options += ["--validators", str(validators), "--aggregation", "evidence"]
    options += ["--ema-decay", "0.9"] if ema else []
    options += ["--checkpoint-dir", "ckpt"] if checkpoints else []
    layout = Layout.of(Manifest((VariableSpec("w", (1 << 20,), "float32", Kind.TRAINABLE),)))
    return Store.memory_bytes(layout, store_config(parse_ps(options))) / layout.values_bytes


@pytest.mark.parametrize(
    ("consistency", "validators"), [("sync", 0), ("sync", 1), ("sync", 3), ("async", 0), ("ssp", 0)]
)
def test_how_large_is_the_store_that_the_code_makes(consistency: str, validators: int) -> None:
    """The rules of the page, in models, against what the server computes before it allocates."""
    row = next(row for row in _section("How large").splitlines() if row.startswith("| memory of the server"))
    assert "(W + V + 5) times the model, with `async` and `ssp` (2 W + 4) times" in row
    assert "A moving average adds 1 model; checkpoints add 2 + V, and 1 more with a moving average." in row
    for workers, ema, checkpoints in itertools.product((1, 4), (False, True), (False, True)):
        models = workers + validators + 5 if consistency == "sync" else 2 * workers + 4
        models += ema + checkpoints * (2 + validators + ema)
        needed = _models_needed(consistency, workers, validators, ema, checkpoints)
        assert needed == pytest.approx(models, rel=0.01)


def test_how_many_files_is_what_the_code_allows() -> None:
    rows = {row.split("|")[1].strip(): row for row in _section("How large").splitlines() if row.startswith("|")}
    beyond = 3 * MAX_UNPROVEN + MAX_WAITING
    files = rows["open files of the server"]
    assert f"up to {beyond} (3 for each of {MAX_UNPROVEN}, 1 for each of {MAX_WAITING} that wait)" in files
    assert f"up to {Limits().connections};" in files
    assert f"{(1024 - beyond - Limits().connections - 40) // 3 // 10 * 10} clients" in files


UNITS = {
    "weighmaster-ps": "weighmaster-ps.service",
    "weighmaster-worker@0": "weighmaster-worker@.service",
}


def _unit(name: str) -> tuple[configparser.ConfigParser, str]:
    text = (ROOT / "scripts" / "systemd" / UNITS[name]).read_text().replace("%i", "0")
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string(text)
    return unit, text


def test_what_a_unit_needs_is_there_before_it_is_started() -> None:
    """As the page gives the commands: directories, files of variables, tokens, and then the start."""
    blocks = re.findall(r"```\n(.*?)```", _section("By systemd"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    for name in UNITS:
        before = lines[: lines.index(f"systemctl enable --now {name}")]
        made = {line.split()[-1] for line in before if line.startswith("install ")}
        _, text = _unit(name)
        (variables,) = re.findall(r"^EnvironmentFile=(/.*)$", text, re.MULTILINE)
        assert variables in made
        assert f"editor {variables}" in before
        given = text + (ROOT / "scripts" / "systemd" / Path(variables).name).read_text()
        (token,) = re.findall(r"\bWEIGHMASTER_TOKEN_FILE=(\S+)", given)
        assert token in made
        for path in {token, variables}:
            made_before = [line.split()[-1] for line in before[: [token in line for line in before].index(True)]]
            assert str(Path(path).parent) in made_before
        for line in before:
            if line.split()[-1:] == [token]:
                assert "-m 0600 -o weighmaster -g weighmaster" in line, "it must be the user's, and nobody else's"


def test_a_worker_under_systemd_is_who_its_token_says() -> None:
    """A token is of one name and rank: each instance has a file of its own, as the page makes them."""
    _, text = _unit("weighmaster-worker@0")
    assert (
        "WEIGHMASTER_RANK=0 WEIGHMASTER_NAME=site-0 WEIGHMASTER_TOKEN_FILE=/etc/weighmaster/worker-0.token" in text
    )
    assert "--name site-$rank --rank $rank --file site-$rank.token" in TEXT
    assert "site-0.token /etc/weighmaster/worker-0.token" in TEXT


def test_a_worker_under_systemd_never_gives_its_server_up() -> None:
    worker, _ = _unit("weighmaster-worker@0")
    assert worker["Unit"]["StartLimitIntervalSec"] == "0", "no limit of starts"
    assert int(worker["Service"]["RestartSec"]) >= 30, "and no haste either"
    server, _ = _unit("weighmaster-ps")
    assert (server["Unit"]["StartLimitIntervalSec"], server["Unit"]["StartLimitBurst"]) == ("600", "5")


def test_a_backup_has_whole_checkpoints_of_this_history_alone() -> None:
    (pattern,) = re.findall(r"rsync -a --include='([^']*)/\*\*\*'", TEXT)
    name = checkpoint_format.directory_name(20, 0x0123456789ABCDEF)
    assert fnmatch.fnmatchcase(name, pattern)
    others = [f"{name}.abandoned", f"{name}.2.abandoned", f".{name}.writing", f".{name}.removing", "lock"]
    assert not any(fnmatch.fnmatchcase(other, pattern) for other in others)


def _commands(program: str) -> list[list[str]]:
    text = TEXT.replace("\\\n", " ")
    found = re.findall(rf"{re.escape(program)} (--[^`\n\"]*)", text)
    return [[word.replace("$rank", "0") for word in shlex.split(line)] for line in found]


def test_the_commands_are_read_by_the_programs() -> None:
    servers = [words for words in _commands("scripts/launch_ps.sh") if words != ["--help"]]
    workers = [words for words in _commands("scripts/launch_worker.sh") if words != ["--help"]]
    assert len(servers) >= 1
    assert len(workers) >= 3
    for words in servers:
        parse_ps(words)
    for words in workers:
        parse_worker(words)


def test_tokens_are_made_as_it_says() -> None:
    asked: list[ps_command.TokenRequest] = []
    command = ps_command.build_command(lambda _: 0, lambda request: asked.append(request) or 0)
    for line in re.findall(r"scripts/launch_ps.sh token ([^;\n]*)", TEXT):
        words = [word.replace("$rank", "1") for word in shlex.split(line)]
        assert ps_command.execute(command, ["token", *words]) == 0
    assert [(request.name, request.role, request.rank) for request in asked] == [
        ("site-1", "worker", 1),
        ("judge", "evaluator", None),
    ]


def test_nothing_is_called_that_no_script_has_made() -> None:
    by_hand = _section("Several machines, by hand") + _section("By ssh")
    for program in re.findall(r"(?:^|do|exec|&&) *(\S+/\S+)", by_hand, re.MULTILINE):
        if not program.startswith(("#", "[", "`")):
            assert os.access(ROOT / program, os.X_OK), program


SSH = """#!/usr/bin/env bash
printf '%s\\n' "$$ $*" >>"$ASKED"
if [[ "$*" == *"--rank 2"* ]]; then
    until [ "$(wc -l <"$ASKED")" = 3 ]; do :; done
    kill -s INT "$PPID"
fi
exec sleep 600
"""
"""Stands for ssh: notes what it is to do and holds on; the last one is the user, who types Ctrl-C."""


def test_ctrl_c_ends_all_that_the_script_with_ssh_has_started(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```\n(#!/usr/bin/env bash\n.*?)```", _section("By ssh"), re.DOTALL)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}
    script = subprocess.Popen(["bash", "-c", recipe], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        script.wait(60)
        asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
        assert sorted(words[1:3] for words in asked) == [["-tt", f"node{rank}"] for rank in range(3)]
        for words in asked:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed = psutil.Process(int(words[0]))
                while killed.status() != psutil.STATUS_ZOMBIE:  # gone in a moment
                    pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait(60)


def test_the_versions_are_those_of_the_code() -> None:
    assert f"the wire protocol, which is {VERSION}." in TEXT
    assert f"Checkpoints have a version of their own, {checkpoint_format._VERSION}." in TEXT


def test_the_line_that_is_shown_is_one_that_is_written() -> None:
    (line,) = [json.loads(line) for line in TEXT.splitlines() if line.startswith('{"time"')]
    event, fields = recognise(line["message"], log_events.EVENTS)
    assert line["event"] == event
    assert {**line, **fields} == line


def test_the_events_to_alert_on_exist() -> None:
    names = re.findall(r"`([a-z_]+)`", _section("Log lines").split("Alert on:", 1)[1].split(".", 1)[0])
    assert len(names) > 5
    assert set(names) <= {row.event for row in log_events.EVENTS}


def test_the_scalars_for_tensorboard_are_told() -> None:
    metrics = Metrics(loss=1.0, accuracy=1.0)
    metrics._examples.extend([(0.0, 1), (1.0, 1)])
    written = tensorboard.round_scalars(metrics, 0.1, {"NAME": 1.0}, 1.0)
    written |= tensorboard.report_scalars(TestResult(1, 1.0, 1.0))
    assert set(re.findall(r"`([a-z_]+(?:/NAME)?)`", _section("TensorBoard").split("of each worker", 1)[0])) == set(
        written
    )
    assert f"first {tensorboard.ALL_KEPT:,} rounds" in TEXT


def test_links_lead_somewhere() -> None:
    for name in ("OPERATIONS.md", "SECURITY.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (PAGE.parent / name).read_text()):
            assert (PAGE.parent / target).exists(), target
