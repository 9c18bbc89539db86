"""Faults on purpose: what a text means, what goes with what, and that each fires once, says so first, and acts."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protocol import injector
from protocol.errors import ConfigurationError, ConnectionLost
from protocol.injection import DOES, GOES, Action, Injection, Part, Plan, Point
from protocol.injector import NONE, ON_LINK, ON_PROCESS, CheckpointFaults, Faults
from protocol.messages import AUTO_RANK, Side

ROOT = Path(__file__).resolve().parents[2]


def text_of(action, point):
    return f"{action}:2@{point}" if action is Action.DELAY else f"{action}@{point}"


# ---- what a text means -----------------------------------------------------------------------------------


def test_a_text_names_action_point_and_what_must_be_met():
    assert Plan.parse(["kill@mid-push,rank=1,step=3"]).injections == (
        Injection(Action.KILL, Point.MID_PUSH, rank=1, step=3),
    )


def test_several_stand_in_one_text_or_in_several():
    plan = Plan.parse(
        ["delay:0.5@before-apply,step=10; cut@mid-reply", "", "kill@mid-checkpoint,part=rename,step=4"]
    )
    assert plan.injections == (
        Injection(Action.DELAY, Point.BEFORE_APPLY, 0.5, step=10),
        Injection(Action.CUT, Point.MID_REPLY),
        Injection(Action.KILL, Point.MID_CHECKPOINT, step=4, part=Part.RENAME),
    )
    assert plan.announcement == (
        "faults will be injected: delay:0.5 at before-apply, step 10; cut at mid-reply; "
        "kill at mid-checkpoint, part rename, step 4"
    )


def test_no_text_is_no_fault():
    assert Plan.parse([]) == Plan.parse(["", " ; "]) == Plan()
    assert Plan().announcement == ""
    assert not NONE.is_armed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kill", "is not ACTION"),
        ("kill@", "is not ACTION"),
        ("kill@mid-push@mid-push", "is not ACTION"),
        ("explode@mid-push", "names no action that is known; known are kill, stop, delay,"),
        ("kill@lunch", "names no point that is known; known are before-push, mid-push,"),
        ("kill:3@mid-push", "only delay takes one"),
        ("delay@mid-push", "needs the delay's seconds"),
        ("delay:@mid-push", "needs the delay's seconds"),
        ("delay:0@mid-push", "above 0"),
        ("delay:nan@mid-push", "above 0"),
        ("delay:inf@mid-push", "above 0"),
        ("delay:soon@mid-push", "as in delay:2"),
        ("kill@mid-push,rank=one", "has a rank that is no number from 0"),
        ("kill@mid-push,step=-1", "has a step that is no number from 0"),
        ("kill@mid-push,step=", "has a step that is no number from 0"),
        ("kill@mid-push,step=9999999999999999", "has a step that is no number from 0"),
        ("kill@mid-push,step=1,step=2", "each once"),
        ("kill@mid-push,colour=3", "with mid-push go rank and step"),
        ("kill@mid-push,part=file", "with mid-push go rank and step"),
        ("kill@mid-checkpoint,rank=0", "with mid-checkpoint go step and part"),
        (
            "kill@mid-checkpoint,part=lunch",
            "names no part that is known; known are file, manifest, rename and parent",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_would_go(text, why):
    with pytest.raises(ConfigurationError) as refused:
        Plan.parse([text])
    assert str(refused.value).startswith(f"--inject {text!r} ")
    assert why in str(refused.value)


# ---- what goes with what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("point", Point)
@pytest.mark.parametrize("action", Action)
def test_the_table_says_what_goes_with_what_on_which_side(action, point, side):
    text = text_of(action, point)
    if side in GOES[point] and action in GOES[point][side]:
        assert Plan.parse([text], side).injections[0].action is action
        return
    with pytest.raises(ConfigurationError) as refused:
        Plan.parse([text], side)
    goes = GOES[point].get(side)
    named = [action for action in Action if action in goes] if goes else [p for p in Point if side in GOES[p]]
    assert str(refused.value).endswith(f"{', '.join(named[:-1])} and {named[-1]}")


def test_without_a_side_everything_goes_that_goes_on_one():
    assert len(Plan.parse(["cut@mid-push; drop@before-push; kill@after-apply"]).injections) == 3


def test_every_action_is_carried_out_by_somebody():
    assert DOES.keys() == set(Action)
    assert ON_PROCESS.keys() | ON_LINK.keys() | {Action.DUPLICATE} == set(Action)
    assert {action for sides in GOES.values() for actions in sides.values() for action in actions} == set(Action)


# ---- when it fires ---------------------------------------------------------------------------------------


@pytest.fixture
def acts(monkeypatch):
    """What was done to this process, instead of doing it."""
    done = []
    for action in ON_PROCESS:
        monkeypatch.setitem(
            injector.ON_PROCESS, action, lambda seconds, action=action: done.append((action, seconds))
        )
    return done


class RecordingLink:
    """Takes note of what is done to it."""

    def __init__(self):
        self.done = []

    def abort(self):
        self.done.append("abort")

    def half_close(self):
        self.done.append("half-close")

    peer = "memory:1"


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setitem(injector.ON_LINK, Action.HALF_CLOSE, RecordingLink.half_close)
    return RecordingLink()


def test_it_fires_once_where_all_that_it_names_is_met_and_says_so_first(acts, capsys):
    faults = Faults(Plan.parse(["kill@mid-push,rank=1,step=3"]))
    for point, rank, step in (
        (Point.AFTER_PUSH, 1, 3),
        (Point.MID_PUSH, 0, 3),
        (Point.MID_PUSH, None, 3),
        (Point.MID_PUSH, 1, 2),
        (Point.MID_PUSH, 1, None),
    ):
        assert faults.at(point, rank, step) is None
    assert (acts, capsys.readouterr().err) == ([], "")
    assert faults.is_armed
    assert faults.at(Point.MID_PUSH, 1, 3) is None
    assert acts == [(Action.KILL, 0.0)]
    assert capsys.readouterr().err == "injected: kill at mid-push, rank 1, step 3\n"
    assert not faults.is_armed
    faults.at(Point.MID_PUSH, 1, 3)
    assert len(acts) == 1


def test_what_is_left_out_is_met_by_all_and_the_line_says_by_whom(acts, capsys):
    faults = Faults(Plan.parse(["delay:2@before-push", "stop@before-push"]))
    faults.at(Point.BEFORE_PUSH, AUTO_RANK, 7)
    assert acts == [(Action.DELAY, 2.0), (Action.STOP, 0.0)]
    assert capsys.readouterr().err == (
        "injected: delay:2 at before-push, step 7\ninjected: stop at before-push, step 7\n"
    )


def test_a_rank_that_is_named_is_not_met_by_whoever_has_none(acts):
    faults = Faults(Plan.parse(["kill@before-push,rank=0"]))
    faults.at(Point.BEFORE_PUSH, AUTO_RANK, 0)
    faults.at(Point.BEFORE_PUSH, None, 0)
    assert acts == []


def test_a_part_of_a_checkpoint_is_met_as_the_writer_calls_it(acts, capsys):
    faults = Faults(Plan.parse(["kill@mid-checkpoint,part=manifest,step=40", "delay:1@mid-checkpoint"]))
    writer = CheckpointFaults(faults)
    for step in (20, 40):
        for part in Part:
            writer.at(part.value, step)
    assert acts == [(Action.DELAY, 1.0), (Action.KILL, 0.0)]
    assert capsys.readouterr().err == (
        "injected: delay:1 at mid-checkpoint, part file, step 20\n"
        "injected: kill at mid-checkpoint, part manifest, step 40\n"
    )
    CheckpointFaults(NONE).at("file", 0)


def test_a_connection_is_cut_dropped_or_half_closed(link, capsys):
    faults = Faults(Plan.parse(["cut@mid-push; drop@before-push; half-close@after-push"]))
    for point in (Point.MID_PUSH, Point.BEFORE_PUSH):
        with pytest.raises(ConnectionLost, match="the connection to memory:1 was cut on purpose"):
            faults.on(link, point, 0, 1)
    assert not faults.on(link, Point.AFTER_PUSH, 0, 1)
    assert link.done == ["abort", "abort", "half-close"]
    assert capsys.readouterr().err.splitlines()[0] == "injected: cut at mid-push, rank 0, step 1"


def test_a_duplicate_is_the_callers_to_send_and_two_things_for_the_caller_come_one_after_the_other(link, acts):
    faults = Faults(Plan.parse(["duplicate@after-push; drop@after-push; delay:1@after-push"]))
    assert faults.on(link, Point.AFTER_PUSH, 0, 1)
    assert (link.done, acts) == ([], [(Action.DELAY, 1.0)])
    with pytest.raises(ConnectionLost):
        faults.on(link, Point.AFTER_PUSH, 0, 2)
    assert link.done == ["abort"]


def test_of_many_threads_one_meets_it(acts):
    faults = Faults(Plan.parse(["kill@mid-push"]))
    together = threading.Barrier(8)

    def meet():
        together.wait()
        for step in range(100):
            faults.at(Point.MID_PUSH, 0, step)

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acts == [(Action.KILL, 0.0)]


def test_a_kill_ends_the_process_on_the_spot_and_its_line_arrives():
    program = (
        "from protocol.injection import Plan, Point\n"
        "from protocol.injector import Faults\n"
        "Faults(Plan.parse(['kill@before-apply,step=2'])).at(Point.BEFORE_APPLY, None, 2)\n"
        "print('still here', flush=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stdout) == (-9, "")
    assert ended.stderr == "injected: kill at before-apply, step 2\n"
