"""The matrix of faults over real processes: each point of a step, on each side, in each mode.

`TABLE` says what must be true; docs/FAULTS.md tells it at more length.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import pytest

from protocol.injection import GOES, Action, Point
from protocol.messages import Side
from tests.faults.scenes import ASYNC, MODES, SSP, VICTIM, WAIT, Mode, Scene
from tests.integration.processes import ROOT


class Outcome(StrEnum):
    """What must be true afterwards."""

    SAME = "same bits"
    OUT = "left out until it returns"
    COUNTS = "counts; then left out"
    NOT_APPLIED = "not applied; others go on"
    ONCE = "applied once; others go on"
    AGAIN = "done again from the checkpoint"
    AT_MOST_ONCE = "counts at most once"
    EACH_ONCE = "applied once"


SAME = Outcome.SAME
BEFORE = (SAME, Outcome.OUT, Outcome.OUT, Outcome.NOT_APPLIED, Outcome.NOT_APPLIED)
AFTER = (SAME, Outcome.COUNTS, Outcome.COUNTS, Outcome.ONCE, Outcome.ONCE)
RESUMED = (SAME, SAME, Outcome.AGAIN, Outcome.AGAIN, Outcome.AGAIN)
REPEATED = (SAME, Outcome.AT_MOST_ONCE, Outcome.AT_MOST_ONCE, Outcome.EACH_ONCE, Outcome.EACH_ONCE)

TABLE: dict[str, tuple[Outcome, ...]] = {
    "worker killed at `before-push`": BEFORE,
    "worker killed at `mid-push`": BEFORE,
    "worker killed at `after-push`": AFTER,
    "worker killed at `mid-reply`": AFTER,
    "server killed at `mid-push`": RESUMED,
    "server killed at `mid-reply`": RESUMED,
    "server killed at `before-apply`": RESUMED,
    "server killed at `after-apply`": RESUMED,
    "server killed at `mid-checkpoint`": RESUMED,
    "worker stopped at `before-push`": BEFORE,
    "connection broken or delayed by the worker": REPEATED,
    "connection broken or delayed by the server": REPEATED,
}
"""What must be true of each event in each mode, in the order of `MODES`."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    row: str
    mode: Mode
    outcome: Outcome

    @property
    def point(self) -> Point:
        return Point(self.row.split("`")[1])


CELLS = [
    Cell(row, mode, outcome)
    for row, outcomes in TABLE.items()
    for mode, outcome in zip(MODES, outcomes, strict=True)
]


def cells(beginning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    chosen = [cell for cell in CELLS if cell.row.startswith(beginning)]
    names = [f"{cell.row.replace('`', '')} - {cell.mode.name}" for cell in chosen]
    return pytest.mark.parametrize("cell", chosen, ids=names)


twenty_times = pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 20))]
)


# ---- the table -----------------------------------------------------------------------------------------


def test_the_table_has_each_point_on_each_side():
    killed = {(Side(row.split()[0]), Point(row.split("`")[1])) for row in TABLE if " killed at " in row}
    assert killed == {(side, point) for point, sides in GOES.items() for side in sides}


def test_the_page_tells_what_each_row_comes_to():
    """Each fault of the table is in one row of the page, and `same` stands where it is tested."""
    page = ROOT / "docs" / "FAULTS.md"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    assert ["event", "reproduced by", *(mode.name for mode in MODES)] in [
        [cell.replace("`", "") for cell in line] for line in lines
    ]
    rows = [line for line in lines if len(line) == 2 + len(MODES)]
    for row, outcomes in TABLE.items():
        if "`" not in row:
            continue
        side, verb, _, point = row.replace("`", "").split()
        action = {"killed": "kill", "stopped": "stop"}[verb]
        told = [line for line in rows if re.search(rf"{side[0].upper()} .*`{action}@{point}[`,]", line[1])]
        assert len(told) == 1, f"the page has {len(told)} rows for {row}"
        assert outcomes[0] is SAME and told[0][2].endswith("same"), row


# ---- a worker ------------------------------------------------------------------------------------------


def step_of(cell: Cell) -> int:
    """Return the step that the point has in the third turn, for rank 1."""
    is_later = cell.point in (Point.MID_REPLY, Point.MID_CHECKPOINT)
    return cell.mode.turned + is_later


@cells("worker killed")
@twenty_times
def test_a_killed_worker_that_is_started_again(processes, cell, attempt):
    scene, step = Scene(processes, cell.mode), step_of(cell)
    scene.open(to_victim=f"kill@{cell.point},step={step}")
    scene.turn()
    scene.turn()
    # Its push closes the round that it gets the values of; a quorum has closed before the third push.
    partners = [0] if cell.point is Point.MID_REPLY and cell.mode.is_sync else []
    scene.push(*partners, VICTIM)
    scene.dies(scene.workers[VICTIM], f"kill at {cell.point}, rank {VICTIM}, step {step}")
    scene.server.says(rf"rank {VICTIM} \(worker-{VICTIM}\) is lost")
    scene.answered(*partners)
    if partners and cell.mode.quorum is not None:
        scene.push(2)
        scene.answered(2)
    returns(cell, scene, is_answered=bool(partners))


@cells("worker stopped")
@twenty_times
def test_a_stopped_worker_that_goes_on(processes, cell, attempt):
    scene = Scene(processes, cell.mode)
    scene.open(f"stop@{cell.point},step={step_of(cell)}", heartbeat_interval=0.3, heartbeat_timeout=2)
    scene.turn()
    scene.turn()
    scene.push(VICTIM)
    stopped = scene.workers[VICTIM]
    stopped.says(f"^injected: stop at {cell.point}, rank {VICTIM}, step {step_of(cell)}$")
    scene.server.says(rf"rank {VICTIM} \(worker-{VICTIM}\) is lost: nothing was heard of 127\.0\.0\.1:\d+ for \d s")
    returns(cell, scene, is_answered=False, stopped=stopped)


def returns(cell: Cell, scene: Scene, is_answered: bool, stopped=None) -> None:
    """Let the others go on alone where they may, bring the lost worker back, and check the end."""
    alone = 3 if not cell.mode.is_sync else 2 - is_answered if cell.mode.leaves_out else 0
    for _ in range(alone):
        scene.others_push()
    lines_then = scene.mode.turned + (cell.outcome is Outcome.ONCE) + alone
    if stopped is not None:
        stopped.send(signal.SIGCONT)
        scene.server.says(rf"rank {VICTIM} \(worker-{VICTIM}\) on \S+ has returned")
    else:
        scene.start(VICTIM, slot=cell.mode.workers).says(f"joined as rank {VICTIM}")
    scene.go()
    scene.ends_well()
    both, without = [0, VICTIM], [rank for rank in range(cell.mode.workers) if rank != VICTIM]
    ranks = scene.ranks()
    match cell.outcome:
        case Outcome.SAME:
            scene.is_same()
        case Outcome.OUT:
            assert ranks[:4] == [both, both, without, without]
        case Outcome.COUNTS:
            assert ranks[:2] == [both, both] and VICTIM in ranks[2] and ranks[3] == without
        case Outcome.NOT_APPLIED:
            assert ranks[:lines_then] == [[0], [1], [0], [1], [0], [0], [0]]
        case Outcome.ONCE:
            assert ranks[:lines_then] == [[0], [1], [0], [1], [1], [0], [0], [0]]
    if cell.mode.name == "sync, shrink":
        assert ranks[4:] == [both], "it takes part again"
    if cell.mode.name == "ssp":
        scene.is_bounded(since=lines_then)


# ---- the server ----------------------------------------------------------------------------------------

PARTS = dict(zip((mode.name for mode in MODES), ("manifest", "rename", "parent", "file", "rename"), strict=True))


@cells("server killed")
@twenty_times
def test_a_killed_server_that_is_started_again(processes, tmp_path, cell, attempt):
    step, part = step_of(cell), PARTS[cell.mode.name]
    whose = f",rank={VICTIM}" if cell.point in (Point.MID_PUSH, Point.MID_REPLY) else ""
    whose += f",part={part}" if cell.point is Point.MID_CHECKPOINT else ""
    kept = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every": 1}
    scene = Scene(processes, cell.mode)
    scene.open(inject=f"kill@{cell.point}{whose},step={step}", **kept)
    scene.turn()
    scene.turn()
    scene.push(*(scene.workers if cell.mode is WAIT else [0, VICTIM] if cell.mode.is_sync else [VICTIM]))
    scene.dies(scene.server, f"kill at {cell.point},.* step {step}")
    scene.server = processes.again(scene.server, resume=True)
    scene.go()
    scene.ends_well()
    resumed = int(scene.server.says(r"going on from step (\d+) of \d+, of a checkpoint")[1])
    if cell.point is Point.MID_CHECKPOINT:
        assert resumed == (step if part == "parent" else step - 1)
    assert step - 3 <= resumed <= step
    if cell.outcome is SAME:
        scene.is_same()
    elif cell.mode.name == "ssp":
        scene.is_bounded(since=resumed)


# ---- the bound of ssp ----------------------------------------------------------------------------------


def test_no_rank_runs_further_ahead_than_the_bound_and_who_is_held_is_told_for_whom(processes):
    scene = Scene(processes, SSP)
    scene.open(steps=14)
    scene.push(VICTIM)
    scene.answered(VICTIM)
    scene.go(0)
    scene.workers[0].says(r"rank 1 may not fall further behind; the others wait")
    assert scene.workers[0].log.count("answered with step") == 2, "the third is held"
    scene.go(VICTIM)
    scene.ends_well()
    assert scene.ranks()[:4] == [[1], [0], [0], [0]]
    scene.is_bounded()


# ---- connections ---------------------------------------------------------------------------------------


def breaks(side: Side) -> list[str]:
    """Return all that can happen to a connection on a side, and delays."""
    never = (Action.KILL, Action.STOP)
    faults = [
        f"{action}:0.05@{point}" if action is Action.DELAY else f"{action}@{point}"
        for point, sides in GOES.items()
        for action in sides.get(side, ())
        if action not in never
    ]
    whose = f",rank={VICTIM}"
    return [fault + ("" if "checkpoint" in fault or "apply" in fault else whose) for fault in faults]


@cells("connection broken")
@twenty_times
def test_a_connection_that_breaks_or_halts(processes, tmp_path, cell, attempt):
    side = Side.WORKER if cell.row.endswith("worker") else Side.SERVER
    faults = breaks(side)
    turns = len(faults) + 1
    plan = ";".join(faults)
    scene = Scene(processes, cell.mode)
    options = {"steps": turns if cell.mode.is_sync else turns * cell.mode.workers}
    if side is Side.SERVER:
        options |= {"inject": plan, "checkpoint_dir": tmp_path / "kept", "checkpoint_every": 4}
    scene.open(plan if side is Side.WORKER else None, **options)
    for _ in range(turns - 1):
        scene.turn()
    scene.go()
    scene.ends_well()
    said = scene.workers[VICTIM] if side is Side.WORKER else scene.server
    for fault in faults:
        what, where = fault.split(",")[0].split("@")
        said.says(f"^injected: {what} at {where}")
    ranks, row = scene.ranks(), scene.server.summary()["workers"][VICTIM]
    if cell.outcome is SAME:
        scene.is_same()
    elif cell.outcome is Outcome.EACH_ONCE:
        assert sum(VICTIM in line for line in ranks) == row["pushes"]
        assert {number for slot, number in scene.applied() if slot == VICTIM} >= set(range(turns - 1))
    if side is Side.WORKER and cell.mode in (WAIT, ASYNC):
        assert row["duplicates"] >= 1
