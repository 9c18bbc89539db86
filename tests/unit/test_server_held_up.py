"""A server over real sockets: what it does while it is held up, when it fails itself, and in rounds of nothing."""

import contextlib
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from protocol.errors import NoProgress
from protocol.messages import Bye, Ended, Heartbeat, Pull, Push, Role, Status, Values, Welcome
from protocol.tensors import Layout, Manifest, VariableSpec
from ps import compiling
from ps.checkpoints.directory import CheckpointDirectory, checkpoints_in
from ps.coordination.course_clock import CourseClock
from ps.coordination.instructions import Reply
from ps.monitoring.console import Console
from ps.rules.aggregation import Decision
from ps.server import ParameterServer
from ps.settings.config import ServerConfig
from tests.unit.checkpoints import HoldAt
from tests.unit.server_run import KERNEL, PATIENCE_S, Run, answer

LAYOUT = Layout.of(Manifest((KERNEL,)))
OPTIONS = {
    **{"workers": 1, "steps": 5, "port": 0, "threads": 1, "optimizer": "sgd", "learning_rate": 1.0},
    **{"heartbeat_interval": 0.2, "checkpoint_every": 1},
}


@pytest.fixture
def disk():
    """The disk, which stops at `point` of a checkpoint until it may go on."""
    disk = HoldAt(None)
    yield disk
    disk.go_on.set()


@pytest.fixture
def serve(tmp_path, disk):
    """Start a server that keeps checkpoints, and has initial values of 0."""
    with contextlib.ExitStack() as stack:

        def serve(**options):
            config = ServerConfig(
                **(OPTIONS | {"checkpoint_dir": tmp_path / "kept", "run_dir": tmp_path} | options)
            )
            directory = CheckpointDirectory.open(tmp_path / "kept", 9, disk)
            stack.callback(directory.close)
            values = {"kernel": np.zeros(3, np.float32)}
            console = Console(5, io.StringIO(), interactive=False)
            server = ParameterServer(config, console, 5, initial_values=values, checkpoints=directory)
            stack.callback(server.close)
            pool = stack.enter_context(ThreadPoolExecutor(1))
            run = Run(server, stack)
            run.running = pool.submit(server.run, run.listener)
            stack.callback(lambda: run.running.result(PATIENCE_S))
            stack.callback(disk.go_on.set)
            stack.callback(lambda: server.stop(Status.INTERRUPTED, "the test is over"))
            return run

        yield serve


def join(run, rank=0):
    """Join as a worker, up to the first pull."""
    link = run.offer(Role.WORKER, KERNEL, rank=rank)
    assert isinstance(answer(link), Welcome)
    link.connection.agree(LAYOUT, {})
    link.send(Pull(0))
    return link


def push(link, step, seq=1):
    gradient = np.zeros(LAYOUT.payload_bytes, np.uint8)
    gradient[: LAYOUT.payload_bytes].view(np.float32)[:3] = -1
    link.send(Push(5, step, seq, 1.0, None, 1), [gradient.data])


def values(link):
    """The next values: their step, and what is in them."""
    message = answer(link)
    assert isinstance(message, Values)
    buffer = np.empty(LAYOUT.values_bytes, np.uint8)
    link.receive_payload(buffer.data)
    return message.step, buffer.view(np.float32)[:3].tolist()


def kept(tmp_path):
    return sorted(int(path.name.split("-")[1]) for path in checkpoints_in(tmp_path / "kept"))


def waiting_words(link):
    message = link.receive()
    assert isinstance(message, Heartbeat)
    return message.waiting


def test_nobody_gets_the_first_values_before_they_are_kept_and_all_hear_that_the_server_is_alive(
    serve, disk, tmp_path
):
    disk.point = "rename"
    run = serve()
    worker = join(run)
    assert disk.reached.wait(PATIENCE_S)
    while "step 0 waits for its checkpoint" not in waiting_words(worker):
        pass
    assert isinstance(answer(run.offer(Role.EVALUATOR, KERNEL)), Welcome), "others come in meanwhile"
    assert kept(tmp_path) == []
    disk.go_on.set()
    assert values(worker) == (0, [0.0] * 3)
    assert kept(tmp_path) == [0]


def test_nobody_gets_values_that_are_not_on_the_disk_yet(serve, disk, tmp_path):
    run = serve()
    worker = join(run)
    assert values(worker)[0] == 0
    disk.point = "rename"
    push(worker, 0)
    assert disk.reached.wait(PATIENCE_S)
    while "step 1 waits for its checkpoint" not in waiting_words(worker):
        pass
    assert kept(tmp_path) == [0]
    disk.go_on.set()
    assert values(worker) == (1, [1.0] * 3)
    assert kept(tmp_path) == [0, 1]


def test_nobody_gets_the_last_values_before_they_are_kept(serve, disk, tmp_path):
    """Who has got them leaves, and could not help a server that died before it had kept them."""
    run = serve(steps=2, checkpoint_every=100)
    worker = join(run)
    assert values(worker)[0] == 0
    disk.point = "rename"
    push(worker, 0)
    assert values(worker)[0] == 1
    push(worker, 1, seq=2)
    assert disk.reached.wait(PATIENCE_S)
    while "step 2 waits for its checkpoint" not in waiting_words(worker):
        pass
    disk.go_on.set()
    assert values(worker)[0] == 2
    assert kept(tmp_path) == [0, 2]


def test_a_slow_disk_makes_nobody_late_and_the_page_says_what_is_waited_for(serve, disk, tmp_path):
    """Hours pass while values are held back: neither the limit of idle time nor that of goodbyes counts them."""
    run = serve(steps=2, idle_timeout=3600, status_port=0)
    jumped_s = 0.0
    run.server._clock = CourseClock(lambda: time.monotonic() + jumped_s)
    run.server.admissions._clock = run.server._clock
    worker = join(run)
    assert values(worker)[0] == 0
    for step in range(2):
        disk.point = "rename"
        push(worker, step, seq=step + 1)
        assert disk.reached.wait(PATIENCE_S)
        while f"step {step + 1} waits for its checkpoint" not in waiting_words(worker):
            pass
        jumped_s += 7200
        sentence = f"step {step + 1} waits for its checkpoint to be on the disk"
        while (shown := run.server._onlookers._feed.latest.status.waiting).sentence != sentence:
            waiting_words(worker)
        assert shown.ranks == ()
        disk.point, disk.reached = None, threading.Event()
        disk.go_on.set()
        assert values(worker) == (step + 1, [step + 1.0] * 3)
        disk.go_on.clear()
    worker.send(Bye())
    assert run.running.result(PATIENCE_S).status is Status.DONE
    assert kept(tmp_path) == [0, 1, 2]


def test_one_checkpoint_serves_for_the_single_pushes_that_came_while_another_was_written(serve, disk, tmp_path):
    run = serve(workers=3, consistency="async")
    workers = [join(run, rank) for rank in range(3)]
    assert [values(worker)[0] for worker in workers] == [0, 0, 0]
    disk.point = "rename"
    push(workers[0], 0)
    assert disk.reached.wait(PATIENCE_S)
    for worker in workers[1:]:
        push(worker, 0)
    while "step 3 waits for its checkpoint" not in waiting_words(workers[0]):
        pass
    disk.go_on.set()
    assert [values(worker)[0] for worker in workers] == [3, 3, 3]
    assert kept(tmp_path) == [0, 1, 3]


def test_the_end_from_outside_does_not_wait_for_the_disk(serve, disk):
    disk.point = "file"
    run = serve()
    worker = join(run)
    assert disk.reached.wait(PATIENCE_S)
    run.server.interrupt("SIGTERM")
    ended = answer(worker)
    assert isinstance(ended, Ended)
    assert ended.status is Status.INTERRUPTED
    assert run.running.result(PATIENCE_S).status is Status.INTERRUPTED
    disk.go_on.set()
    run.server.ending.keep_last(run.running.result())


def test_whoever_waits_hears_of_the_server_and_callers_are_challenged_while_its_state_is_locked(serve):
    """As it is during an update of many gigabytes, or one that waits for a reader to let go of values."""
    run = serve(workers=2)
    worker = join(run)
    while "the start waits for rank 1" not in waiting_words(worker):
        pass
    with run.server._lock:
        beats = [waiting_words(worker) for _ in range(3)]
        run.offer(Role.WORKER, KERNEL, rank=1)  # challenged, and its proof accepted
    assert "the start waits for rank 1" in beats[-1]


def test_kernels_of_another_dtype_are_compiled_while_everybody_is_heard(serve, monkeypatch):
    may_compile, asked = threading.Event(), []

    def warm_up(config, dtype):
        asked.append(dtype)
        assert dtype == "float32" or may_compile.wait(PATIENCE_S)

    monkeypatch.setattr(compiling, "warm_up", warm_up)
    run = serve(workers=2)
    wide = VariableSpec("kernel", (3,), "float64")
    first = run.offer(Role.WORKER, wide, rank=0)
    while "to compile its kernels" not in waiting_words(first):
        pass
    second = run.offer(Role.WORKER, wide, rank=1)
    assert "to compile its kernels" in waiting_words(second)
    run.server.stop(Status.INTERRUPTED, "enough")
    assert isinstance(answer(first), Ended)
    may_compile.set()
    assert asked == ["float32", "float64"]


# ---- what the server itself fails in -------------------------------------------------------------------


def fail(*_):
    raise ZeroDivisionError("a fault")


@pytest.mark.parametrize("also_the_vote", [False, True])
def test_a_fault_in_what_the_server_does_by_itself_ends_the_run_in_the_ordinary_way(
    serve, monkeypatch, also_the_vote
):
    """Clients hear why; `run` returns, so that a summary is written."""
    run = serve(workers=2)
    worker = join(run)
    if also_the_vote:
        monkeypatch.setattr(run.server._mode, "vote_now", fail)
    monkeypatch.setattr(run.server._coordinator, "tick", fail)
    ended = answer(worker)
    assert ended == Ended(Status.FAILED, "the server itself has failed: ZeroDivisionError('a fault')")
    finish = run.running.result(PATIENCE_S)
    assert finish.status is Status.FAILED
    assert run.server.ending.summary(finish)["status"] == "failed"


def test_a_fault_between_a_decision_and_the_end_that_comes_with_it_does_not_swallow_the_end(serve, monkeypatch):
    run = serve(workers=1, steps=1)
    worker = join(run)
    assert values(worker)[0] == 0
    monkeypatch.setattr(run.server._mode, "close", fail)
    monkeypatch.setattr(
        run.server._coordinator, "_next_step", lambda *_: run.server._coordinator._finish(Status.DONE, "")
    )
    push(worker, 0)
    assert run.running.result(PATIENCE_S).status is Status.FAILED


def test_a_run_that_ends_in_the_midst_of_an_update_has_a_summary_and_no_last_checkpoint(
    serve, monkeypatch, caplog, tmp_path
):
    def stuck(*_):
        raise NoProgress("the values of steps [0] have been in use for over 60 s")

    run = serve()
    worker = join(run)
    assert values(worker)[0] == 0
    monkeypatch.setattr(run.server._store, "apply", stuck)
    push(worker, 0)
    finish = run.running.result(PATIENCE_S)
    assert finish.status is Status.NO_PROGRESS
    run.server.ending.keep_last(finish)
    assert run.server.ending.summary(finish)["status"] == "no_progress"
    assert kept(tmp_path) == [0]
    assert "no last checkpoint is written, since the values of step 1 could not be made" in caplog.text


# ---- rounds of which the rule applies nothing ----------------------------------------------------------


def test_rounds_whose_weights_are_all_0_are_void_and_the_first_of_them_is_told(serve, monkeypatch, caplog):
    """The values stay, the push was taken; what the rule finds in between begins a new series."""
    run = serve(steps=4)
    worker = join(run)
    assert values(worker)[0] == 0
    rule = run.server._closer.rule
    blind = SimpleNamespace(needs=frozenset(), decide=lambda view: Decision(np.zeros(1), np.ones(1)))
    for step, judge, value in ((0, blind, 0.0), (1, blind, 0.0), (2, rule, 1.0), (3, blind, 1.0)):
        monkeypatch.setattr(run.server._closer, "rule", judge)
        push(worker, step, seq=step + 1)
        assert values(worker) == (step + 1, [value] * 3)
    worker.send(Bye())
    summary = run.server.ending.summary(run.running.result(PATIENCE_S))
    assert (summary["void_rounds"], summary["workers"][0]["pushes"]) == (3, 4)
    told = [text for text in caplog.messages if "is void" in text]
    assert told == [f"round {step} is void: the rule mean found nothing to apply" for step in (0, 3)]


def test_a_reader_that_held_up_an_update_is_lost_for_that_reason(serve, caplog):
    """What cuts it off is the hold itself, as an update does that finds no buffer."""
    run = serve()
    worker = join(run)
    assert values(worker)[0] == 0
    session = run.server.session(1)
    pinned = run.server.replies.values_for(session, Reply(1, 0, False))
    assert pinned is not None
    _, hold, _ = pinned
    with hold:
        assert hold.cut_off is not None
        hold.cut_off()
    session.join(PATIENCE_S)
    assert "rank 0 (host-a:0) is lost: it held up an update: it was too slow to take the values" in caplog.text
