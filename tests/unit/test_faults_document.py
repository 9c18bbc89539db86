"""docs/FAULTS.md and docs/CONSISTENCY.md show what there is: the code reads their faults and command lines."""

import re
import shlex
from pathlib import Path

import pytest

from protocol import fault_proxy
from protocol.errors import ExitCode
from protocol.frame_faults import Fault
from protocol.injection import GOES, Action, Plan, Point
from protocol.messages import Side
from ps.checkpoints.format import MANIFEST, NAME
from ps.settings.command_line import parse as parse_ps
from worker.command_line import parse as parse_worker

DOCS = Path(__file__).resolve().parents[2] / "docs"
FAULTS = (DOCS / "FAULTS.md").read_text()
CONSISTENCY = (DOCS / "CONSISTENCY.md").read_text()


def _section(heading: str) -> str:
    return FAULTS.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def _rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of tables, without headings."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [
        row for number, row in enumerate(rows) if "---" not in row[0] and "---" not in str(rows[number + 1 :][:1])
    ]


def _commands(text: str, program: str) -> list[list[str]]:
    """Return the arguments of all lines of code that start a program."""
    lines = text.replace("\\\n", "").splitlines()
    return [shlex.split(line.split(program, 1)[1], comments=True) for line in lines if line.startswith(program)]


def test_every_event_names_faults_that_its_side_has() -> None:
    events = [row for row in _rows(_section("What happens")) if len(row) == 7]
    assert len(events) >= 13
    seen: set[Point] = set()
    for event, reproduced, *_ in events:
        sides = {"W": Side.WORKER, "S": Side.SERVER}
        assert reproduced, event
        for whose, texts in re.findall(r"(W|S|proxy) ((?:`[^`]+`(?:, )?)+)", reproduced):
            for text in re.findall(r"`([^`]+)`", texts):
                if whose == "proxy":
                    Fault.parse(text)
                elif "@" in text:
                    (injection,) = Plan.parse([text], sides[whose]).injections
                    assert injection.action in GOES[injection.point][sides[whose]]
                    seen.add(injection.point)
    assert seen == set(Point), "each point reproduces something"


def test_the_table_of_points_is_the_codes() -> None:
    rows = [row for row in _rows(_section("Faults on purpose")) if len(row) == 4]
    told = {
        Point(point): (bool(worker), bool(server), set(goes.split(", ")))
        for points, worker, server, goes in rows
        for point in re.findall(r"`([^`]+)`", points)
    }
    assert told == {
        point: (Side.WORKER in sides, Side.SERVER in sides, {str(a) for side in sides for a in sides[side]})
        for point, sides in GOES.items()
    }
    assert {action for _, _, goes in told.values() for action in goes} == set(Action)


def test_faults_of_the_proxy_in_the_text_are_understood() -> None:
    texts = re.findall(r"`([a-z]+(?::[a-z0-9.]+)?@(?:push|values)[^`]*)`", FAULTS)
    assert len(texts) >= 6
    for text in texts:
        Fault.parse(text)


@pytest.mark.parametrize("text", [FAULTS, CONSISTENCY], ids=["FAULTS", "CONSISTENCY"])
def test_the_commands_are_read_by_the_programs(text: str) -> None:
    servers = _commands(text, "python -m ps") + _commands(text, "scripts/launch_ps.sh")
    serving = [words for words in servers if words[0].startswith("-")]
    assert serving
    for words in serving:
        parse_ps(words)
    for words in _commands(text, "scripts/launch_worker.sh"):
        parse_worker(words)
    for words in _commands(text, ".venv/bin/python -m protocol.fault_proxy"):
        assert fault_proxy.parse(words).faults


def test_the_exit_codes_are_all_told() -> None:
    told = {int(number) for number in re.findall(r"\b(\d+)\b", _section("Exit codes").split("`", 1)[0])}
    assert told == set(ExitCode)


def test_the_layout_on_the_disk_has_the_names_of_the_code() -> None:
    layout = _section("Checkpoints on the disk")
    assert f"    {MANIFEST} " in layout
    names = re.findall(r"DIR/(step-[^/. ]+)", layout)
    assert len(names) == 2
    assert all(NAME.fullmatch(name) for name in names)
