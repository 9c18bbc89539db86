"""The shell scripts, read and not run: syntax, shellcheck, and the options that they name."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from protocol.extras import installing
from ps.settings.combinations import MAX_WORKERS
from ps.settings.command_line import build_command as build_ps
from worker.command_line import build_command as build_worker

ROOT = Path(__file__).resolve().parents[2]
SOURCED = ROOT / "scripts/environment.sh"
STARTED = [*(path for path in sorted((ROOT / "scripts").glob("*.sh")) if path != SOURCED), ROOT / ".ci/run"]
TRAIN = (ROOT / "scripts/train.sh").read_text()
HELP = TRAIN.split("<<'TEXT'\n", 1)[1].split("\nTEXT\n", 1)[0]
ITS_OWN = {"--supervise", "--worker-inject"}
"""Options of train.sh that no program has."""


def _names(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


PS = build_ps(lambda _: 0, lambda _: 0)
PS_OPTIONS, TOKEN_OPTIONS = _names(PS), _names(PS.commands["token"])
WORKER_OPTIONS = _names(build_worker(lambda _: 0))


def test_the_scripts_are_there() -> None:
    names = {path.name for path in STARTED}
    assert {"train.sh", "launch_ps.sh", "launch_worker.sh", "test.sh", "check.sh", "run"} <= names


@pytest.mark.parametrize("path", [SOURCED, *STARTED], ids=lambda path: path.name)
def test_bash_can_read_it(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)


@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.name)
def test_it_can_be_started_and_stops_at_an_error(path: Path) -> None:
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines


@pytest.mark.parametrize("kind", ["core", "worker", "dev"])
def test_no_option_of_the_server_lacks_what_it_needs(kind: str) -> None:
    """Every environment that the scripts make has the metrics and TensorBoard's writer; train.sh's is `worker`."""
    program = f"source {SOURCED}; _extras {kind}"
    told = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(told.strip("[]\n").split(","))
    assert named <= set(groups)
    needs = {need for name in named for need in groups[name]}
    if "dev" in named:
        (whole,) = groups["dev"]
        named = set(re.split(r"[\[\],]", whole)[1:-1])
        needs = {need for name in named for need in groups[name]}
    assert needs >= {*groups["metrics"], *groups["tensorboard"]}
    assert (kind == "core") != (needs >= set(groups["datasets"]))


def test_what_is_advised_is_a_group_that_there_is() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [path for folder in ("protocol", "ps", "worker") for path in (ROOT / folder).rglob("*.py")]
    advised = {name for path in files for name in re.findall(r"installing\('(\w+)'\)", path.read_text())}
    assert advised == {"datasets", "metrics", "tensorboard", "tensorflow"}
    assert advised <= set(groups)
    for name in advised:
        assert f"'weighmaster[{name}]'" in installing(name)
        assert f".venv/bin/pip install -e '.[{name}]'" in installing(name)


def test_shellcheck_finds_nothing() -> None:
    beside_python = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    command = [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", *map(str, (SOURCED, *STARTED))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.stdout == ""
    assert found.returncode == 0


def test_train_names_no_option_that_the_programs_do_not_have() -> None:
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TRAIN.replace("--help", "")))
    assert used >= ITS_OWN
    assert used - ITS_OWN <= PS_OPTIONS | WORKER_OPTIONS | TOKEN_OPTIONS
    assert not ITS_OWN & (PS_OPTIONS | WORKER_OPTIONS)


def test_train_hands_each_option_to_a_program_that_has_it() -> None:
    """What train.sh keeps for the workers, they have; all else of theirs is the server's too, or set by it."""
    case = re.search(r"--workers \| --steps[^)]*\)", TRAIN)
    assert case is not None
    of_the_server = {"--workers", "--steps", "--run-dir", "--mode", "--aggregation", "--checkpoint-dir", "--inject"}
    assert of_the_server <= PS_OPTIONS
    assert "--inject" in WORKER_OPTIONS, "which --worker-inject is passed as"
    kept = set(re.findall(r"--[a-z-]+", case[0])) - of_the_server - ITS_OWN
    assert kept == {
        "--fault",
        "--model",
        "--dataset",
        "--data-dir",
        "--batch-size",
        "--trusted-examples",
        "--evaluate-every",
        "--connect-timeout",
        "--reconnect-timeout",
    }
    assert kept <= WORKER_OPTIONS
    assert not kept & PS_OPTIONS


def test_train_allows_as_many_workers_as_the_server() -> None:
    assert re.findall(r"^most_workers=(\d+)", TRAIN, re.MULTILINE) == [str(MAX_WORKERS)]
    assert f"workers, 1 to {MAX_WORKERS} " in HELP


def test_the_help_of_train_says_where_each_option_goes() -> None:
    """What it takes has a line or is in an example; what it refuses is named as refused, and nothing else is."""
    cases = re.findall(r"^ +((?:--[a-z-]+(?:=\*)? \| )[^)]*)\)$", TRAIN, re.MULTILINE)
    refused, separate, joined = (set(re.findall(r"--[a-z-]+", case)) for case in cases)
    assert separate == joined
    described = set(re.findall(r"^  (--[a-z-]+)", HELP, re.MULTILINE))
    told_in_words = {"--checkpoint-dir", "--inject"}
    assert all(f"{option} " in HELP for option in told_in_words)
    assert separate | {"--legacy-keras", "--supervise"} == described | told_in_words
    told = re.search(r"Refused, because[^;]*; [^.]*\.", HELP)
    assert told is not None
    assert set(re.findall(r"--[a-z-]+", told[0])) == refused
    assert refused <= PS_OPTIONS | WORKER_OPTIONS


def test_the_checks_look_at_our_own_folders_only() -> None:
    """A file that a user keeps in the checkout fails no check; all our Python code is looked at."""
    check = (ROOT / "scripts/check.sh").read_text()
    found = re.search(r"python_files=\(([^)]*)\)", check)
    assert found is not None
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(found[1].split()) == folders
    assert not re.search(r"-m ruff .*\.$", check, re.MULTILINE)


# ---- how all are ended: the script's own functions, with processes and time that are made up ------------


def _stopped(checkpoint_dir: str, server_takes: int, again_after: int = 10_000) -> tuple[int, list[str]]:
    """Stop a server that takes so many tenths of a second, and a worker; return those gone by, and what is sent.

    Args:
        checkpoint_dir: where checkpoints are kept, or empty.
        server_takes: tenths of a second until the server has ended.
        again_after: the tenth in which a second Ctrl-C comes.
    """
    start = TRAIN.index("# Waits at most $1 tenths")
    functions = TRAIN[start : TRAIN.index("# Tells whether the server has listened")]
    lines = [
        *("set -euo pipefail", "declare -A running=([11]=server [12]=worker-0)", "ps_pid=11", "ticks=0"),
        f"checkpoint_dir='{checkpoint_dir}'",
        "say() { :; }; wait() { :; }",
        f"alive() {{ [ $1 = 11 ] && ((ticks < {server_takes})); }}",
        f"pause() {{ ((++ticks != {again_after})) || builtin kill -s INT $$; }}",
        'kill() { if [ "$1" = -s ]; then echo "$2 ${!#}"; else echo "${1#-} ${!#}"; fi; }',
        functions,
        *("stop_all INT", 'echo "$ticks"'),
    ]
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    *sent, ticks = done.stdout.splitlines()
    return int(ticks), sent


def test_ctrl_c_waits_for_the_last_checkpoint() -> None:
    assert _stopped("ckpt", 400)[0] == 400
    assert _stopped("ckpt", 3)[0] == 3


def test_ctrl_c_ends_all_within_five_seconds_where_nothing_is_written() -> None:
    ticks, sent = _stopped("", 400)
    assert ticks < 50
    assert sent[0] == "INT -11"
    assert "KILL -11" in sent


def test_a_checkpoint_that_never_ends_is_not_waited_for_for_ever() -> None:
    ticks, sent = _stopped("ckpt", 100_000)
    assert 1200 < ticks < 1250
    assert "KILL -11" in sent


@pytest.mark.parametrize("checkpoint_dir", ["ckpt", ""])
def test_a_second_ctrl_c_kills(checkpoint_dir: str) -> None:
    ticks, sent = _stopped(checkpoint_dir, 100_000, again_after=15)
    assert ticks == 15
    assert {"KILL -11", "KILL -12"} <= set(sent)


# ---- what --supervise starts again: the script's own functions, run on made-up ends -----------------------


def _supervised(*ends: tuple[int, int], supervise: str = "yes") -> list[str]:
    """Let worker-1 end with these (code, tick); return what is said, and `+pause` or `no` for each decision."""
    start = TRAIN.index("most_restarts=10")
    functions = TRAIN[start : TRAIN.index("start_what_is_due()")]
    lines = [
        *("set -euo pipefail", f"supervise='{supervise}'", 'say() { echo "$*"; }', functions),
        *(
            f"tick={tick}; started_at[worker-1]={tick - lived}; "
            f"if starts_again worker-1 {code}; then echo +$((due[worker-1] - tick)); else echo no; fi"
            for tick, (code, lived) in enumerate(ends, 1000)
        ),
    ]
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


LONG = 51
"""Ticks of more than 10 seconds, of five to the second."""


@pytest.mark.parametrize("code", [0, 1, 2, 3, 5, 6, 7, 130, 143])
def test_an_end_on_purpose_or_by_a_mistake_is_final(code: int) -> None:
    assert _supervised((code, LONG)) == ["no"]


@pytest.mark.parametrize(
    ("code", "how"),
    [(4, "ended with exit code 4"), (137, "was killed by SIGKILL"), (139, "was killed by SIGSEGV")],
)
def test_what_is_killed_or_loses_its_peer_is_started_again(code: int, how: str) -> None:
    assert _supervised((code, LONG)) == [f"worker-1 {how}: started again (1 of 10)", "+0"]
    assert _supervised((code, LONG), supervise="") == ["no"]


def test_quick_deaths_are_followed_by_longer_and_longer_pauses() -> None:
    said = _supervised(*[(137, 10)] * 6, (137, LONG), (137, 10))
    assert [int(line) / 5 for line in said[1::2]] == [1, 2, 4, 8, 10, 10, 0, 1]
    assert said[2] == "worker-1 was killed by SIGKILL: started again in 2 s (2 of 10)"


def test_the_tenth_restart_is_the_last() -> None:
    said = _supervised(*[(137, LONG)] * 11)
    assert said[18:20] == ["worker-1 was killed by SIGKILL: started again (10 of 10)", "+0"]
    assert said[20:] == [
        "worker-1 was killed by SIGKILL, and has been started again 10 times: it is given up.",
        "no",
    ]
