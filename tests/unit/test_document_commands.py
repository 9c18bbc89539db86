"""Every command in a block of code, on any page, is understood by the program that it starts."""

import re
import shlex
from pathlib import Path

import pytest

from protocol import fault_proxy
from ps.settings.command_line import build_command as build_ps
from ps.settings.command_line import parse as parse_ps
from tests.unit.test_scripts import ITS_OWN, PS_OPTIONS, WORKER_OPTIONS
from worker.command_line import parse as parse_worker

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

PROGRAM = re.compile(
    r"(?P<program>scripts/\w+\.sh|weighmaster-(?:ps|worker)(?= )|(?:\S*/)?python -m (?:ps|worker|protocol\.\w+)\b)"
    r"(?P<rest>[^\"\n]*)"
)
OPERATORS = {";", "&", "&&", "|", ">", "<", ")", ">&", "||"}


def blocks(text: str) -> list[str]:
    """Return the blocks of code of a page, fenced or indented; long lines are joined."""
    found = re.findall(r"^( *)```\w*\n(.*?)^\1```|^\n((?: {4}\S[^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    return ["".join(parts[1:]).replace("\\\n", " ") for parts in found]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return each program that a page starts in a block of code, with its arguments."""
    found = []
    for line in "\n".join(blocks(text)).splitlines():
        words = line.strip()
        if words.startswith(("weighmaster", "Usage:", "systemctl", "journalctl", "install ", "#")):
            continue  # what a program says, or a file that is named
        for match in PROGRAM.finditer(words):
            lexer = shlex.shlex(match["rest"].replace("$rank", "0"), posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            arguments: list[str] = []
            for word in lexer:
                if word in OPERATORS:
                    break
                arguments.append(word)
            found.append((match["program"], [word for word in arguments if word != "..."]))
    return found


def understood(program: str, arguments: list[str]) -> None:
    """Let a program read its arguments, and do nothing."""
    name = program.rpartition("/")[2]
    if name == "launch_ps.sh" or program.endswith("-m ps"):
        if arguments[:1] and not arguments[0].startswith("-"):
            if arguments[0] in ("inspect", "export"):
                Path(arguments[1]).mkdir(parents=True)
            build_ps(*[lambda _: 0] * 4).main(arguments, standalone_mode=False)
        elif arguments != ["--help"]:
            parse_ps(arguments)
    elif name == "launch_worker.sh" or program.endswith("-m worker"):
        if arguments != ["--help"]:
            parse_worker(arguments)
    elif program.endswith("protocol.fault_proxy"):
        assert fault_proxy.parse(arguments).faults
    elif name == "train.sh":
        options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert options <= PS_OPTIONS | WORKER_OPTIONS | ITS_OWN
    else:
        assert (ROOT / "scripts" / name).exists(), program


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program, arguments in commands(page.read_text()):
        understood(program, arguments)


def test_commands_are_found_wherever_they_stand() -> None:
    text = (
        "```\nfor r in 0; do scripts/launch_ps.sh token --rank $rank --file a; done  # so\n```\n"
        '   ```\n   ssh x "cd y && exec scripts/launch_worker.sh --rank 1 \\\n --ps h:1" >log 2>&1 &\n   ```\n\n'
        "    .venv/bin/python -m ps --steps 3 ...\n\nprose `scripts/launch_ps.sh --no-code`\n"
    )
    assert commands(text) == [
        ("scripts/launch_ps.sh", ["token", "--rank", "0", "--file", "a"]),
        ("scripts/launch_worker.sh", ["--rank", "1", "--ps", "h:1"]),
        (".venv/bin/python -m ps", ["--steps", "3"]),
    ]
    found = [command for page in PAGES for command in commands(page.read_text())]
    assert len(found) > 35


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_says_which_python(page: Path) -> None:
    """The scripts bring their own; any other command names the environment, or the page says how to enter it."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    if ". .venv/bin/activate" not in text:
        assert re.findall(r"(?<!\.venv/bin/)\bpython -m \S+", text) == []
