"""Sessions over real sockets: who is held, who defines the variables, and how a refusal is cut to fit."""

import contextlib
import io
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import worker
from protocol.codec import encode_header
from protocol.deadlines import Patience
from protocol.errors import ConnectionLost, PeerSilent, Refused
from protocol.frames import MAX_HEADER_UNPROVEN
from protocol.injection import Plan
from protocol.injector import Faults
from protocol.messages import (
    AUTO_RANK,
    Bye,
    Ended,
    Heartbeat,
    Hello,
    Refusal,
    RefusalCode,
    Role,
    Side,
    Status,
    Welcome,
)
from protocol.tensors import Manifest, VariableSpec
from ps.connections.session import Session
from ps.monitoring.console import Console
from ps.server import ParameterServer
from ps.settings.config import ServerConfig
from tests.unit.exchange import frame_of
from tests.unit.server_run import BIAS, KERNEL, PATIENCE_S, Run, answer


@pytest.fixture
def run(request):
    """A run whose options a test may change by parametrizing it."""
    options = {"heartbeat_interval": 0.2} | getattr(request, "param", {})
    faults = Faults(Plan.parse([options.pop("inject", "")], Side.SERVER))
    config = ServerConfig(workers=1, steps=1, port=0, threads=1, optimizer="sgd", learning_rate=1.0, **options)
    server = ParameterServer(config, Console(1, io.StringIO(), interactive=False), epoch=5, faults=faults)
    with contextlib.ExitStack() as links, ThreadPoolExecutor(1) as pool:
        run = Run(server, links)
        running = pool.submit(server.run, run.listener)
        try:
            yield run
        finally:
            server.stop(Status.INTERRUPTED, "the test is over")
            running.result(PATIENCE_S)


def await_end(link):
    """Read until the server has ended the connection."""
    with pytest.raises(ConnectionLost):
        while True:
            link.receive()


# ---- an evaluator that comes first ---------------------------------------------------------------------


def test_an_evaluator_that_comes_first_waits_for_the_worker_that_defines_the_variables(run):
    """It is told for whom it waits, may beat meanwhile, and the order of the variables is the worker's."""
    evaluator = run.offer(Role.EVALUATOR, BIAS, KERNEL)
    waiting = evaluator.receive()
    while isinstance(waiting, Heartbeat) and "kernels" in waiting.waiting:  # what everybody waits for first
        waiting = evaluator.receive()
    assert isinstance(waiting, Heartbeat)
    assert "waits for rank 0" in waiting.waiting
    evaluator.send(Heartbeat())
    assert isinstance(evaluator.receive(), Heartbeat), "held on"
    worker = run.offer(Role.WORKER, KERNEL, BIAS)
    for link, rank in ((worker, 0), (evaluator, AUTO_RANK)):
        welcome = answer(link)
        assert isinstance(welcome, Welcome)
        assert (welcome.rank, welcome.manifest) == (rank, Manifest((KERNEL, BIAS)).to_wire())


def test_an_evaluator_with_other_variables_is_the_one_that_is_refused(run):
    """Not the worker, however early the evaluator came."""
    evaluator = run.offer(Role.EVALUATOR, KERNEL, VariableSpec("bias", (2,), "float32"))
    assert isinstance(evaluator.receive(), Heartbeat)
    worker = run.offer(Role.WORKER, KERNEL, BIAS)
    assert isinstance(answer(worker), Welcome)
    refusal = answer(evaluator)
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.MANIFEST
    assert "'bias'" in refusal.reason


def test_an_evaluator_that_is_held_is_told_when_the_run_ends(run):
    evaluator = run.offer(Role.EVALUATOR, KERNEL)
    assert isinstance(evaluator.receive(), Heartbeat)
    run.server.stop(Status.NO_PROGRESS, "nobody came")
    assert answer(evaluator) == Ended(Status.NO_PROGRESS, "nobody came")


@pytest.mark.parametrize("how", ["closes", "says what it may not"])
def test_an_evaluator_that_is_held_and_goes_leaves_no_session(run, how):
    evaluator = run.offer(Role.EVALUATOR, KERNEL)
    assert isinstance(evaluator.receive(), Heartbeat)
    session = run.server.session(1)
    if how == "closes":
        evaluator.close()
    else:  # a goodbye is for open connections, and our own code would not send it here
        evaluator.channel.send([frame_of(Bye())], Patience(0, PATIENCE_S))
        with pytest.raises(ConnectionLost):
            answer(evaluator)
    session.join(PATIENCE_S)
    assert not session.is_alive()
    assert run.server.session(1) is None
    assert isinstance(answer(run.offer(Role.WORKER, KERNEL)), Welcome)


def test_an_evaluator_that_was_held_for_long_is_not_taken_for_silent_when_it_is_welcomed(run):
    """It has no welcome to beat from before that, so the silence of the wait must not count."""
    evaluator = run.offer(Role.EVALUATOR, KERNEL)
    assert isinstance(evaluator.receive(), Heartbeat)
    session = run.server.session(1)
    session.link.heard_at -= 1000
    assert isinstance(answer(run.offer(Role.WORKER, KERNEL)), Welcome)
    assert isinstance(answer(evaluator), Welcome)
    assert time.monotonic() - session.link.heard_at < 500


@pytest.mark.parametrize("run", [{"heartbeat_interval": 1e6, "heartbeat_timeout": 1e7}], indirect=True)
def test_a_newcomer_that_is_held_for_its_rank_is_told_when_the_run_ends(run):
    """It need not wait until it is known whether the holder lives."""
    assert isinstance(answer(run.offer(Role.WORKER, KERNEL)), Welcome)
    newcomer = run.offer(Role.WORKER, KERNEL, incarnation=99)
    assert "holds this rank" in newcomer.receive().waiting
    run.server.stop(Status.NO_PROGRESS, "enough")
    assert answer(newcomer) == Ended(Status.NO_PROGRESS, "enough")


def test_a_new_start_of_a_worker_whose_old_socket_still_looks_open_gets_in(run, caplog):
    """The old one is silent, as after a power cut: the newcomer is held for an interval and then has its rank."""
    old = run.offer(Role.WORKER, KERNEL, incarnation=7)
    assert isinstance(answer(old), Welcome)
    newcomer = run.offer(Role.WORKER, KERNEL, incarnation=99)
    assert "asking whether it is alive" in newcomer.receive().waiting
    welcome = answer(newcomer)
    assert isinstance(welcome, Welcome)
    assert welcome.rank == 0
    await_end(old)
    assert "rank 0 (host-a:0) is lost: another connection took its place" in caplog.text


def test_a_rank_whose_holder_is_alive_is_not_given_to_another(run):
    old = run.offer(Role.WORKER, KERNEL, incarnation=7)
    assert isinstance(answer(old), Welcome)
    newcomer = run.offer(Role.WORKER, KERNEL, incarnation=99)
    message = newcomer.receive()
    while isinstance(message, Heartbeat):
        old.send(Heartbeat())
        message = newcomer.receive()
    assert isinstance(message, Refusal)
    assert message.code is RefusalCode.RANK_TAKEN
    assert run.server.session(1) is not None


def test_the_same_start_of_a_worker_replaces_its_old_connection_at_once(run):
    """One that was stopped and goes on, or whose network was cut: it need not show that the old one is dead."""
    old = run.offer(Role.WORKER, KERNEL, incarnation=7)
    assert isinstance(answer(old), Welcome)
    again = run.offer(Role.WORKER, KERNEL, incarnation=7)
    assert isinstance(again.receive(), Welcome)
    await_end(old)


def test_a_server_that_was_stopped_itself_reads_before_it_takes_clients_for_silent(run):
    """What they said meanwhile lies unread; only where nothing lies is anybody silent."""
    link = run.offer(Role.WORKER, KERNEL)
    assert isinstance(answer(link), Welcome)
    unread, said = [True], []
    stopped = SimpleNamespace(
        link=SimpleNamespace(
            heard_at=time.monotonic() - 1000, wait=lambda timeout_s: unread[0], peer="p", send_if_quiet=said.append
        ),
        _server=run.server,
        _owes_values=False,
    )
    Session._keep_alive(stopped)
    unread[0] = False
    with pytest.raises(PeerSilent, match="nothing was heard of p for 1000 s"):
        Session._keep_alive(stopped)


# ---- faults on purpose -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "lost"),
    [
        ({"inject": "cut@mid-push,rank=0,step=0"}, True),
        ({"inject": "half-close@mid-push,rank=0,step=0"}, True),
        ({"inject": "cut@mid-reply,rank=0,step=1"}, True),
        ({"inject": "half-close@mid-reply,rank=0,step=1"}, True),
        ({"inject": "delay:0.001@mid-push; delay:0.001@mid-reply"}, False),
    ],
    indirect=["run"],
)
def test_a_fault_of_the_server_costs_no_push_and_counts_none_twice(run, lost, capsys):
    """The worker comes back, and gets what one push of a gradient of -1 gives."""
    told = []
    initial = {"kernel": np.zeros(3, np.float32)}
    with worker.connect(str(run.listener.address), initial, rank=0, on_event=told.append) as server:
        server.pull()
        update = server.push({"kernel": -np.ones(3, np.float32)}, loss=1.0)
        assert (update.step, update.applied, update.done) == (1, True, True)
        np.testing.assert_array_equal(update.values["kernel"], np.ones(3, np.float32))
    assert capsys.readouterr().err.startswith("injected: ")
    assert any("connection to the server is lost" in text for text in told) == lost


def test_a_push_that_is_sent_twice_on_purpose_counts_once(run):
    initial = {"kernel": np.zeros(3, np.float32)}
    with worker.connect(str(run.listener.address), initial, rank=0, inject="duplicate@after-push") as server:
        server.pull()
        update = server.push({"kernel": -np.ones(3, np.float32)}, loss=1.0)
        np.testing.assert_array_equal(update.values["kernel"], np.ones(3, np.float32))
    course = run.server._coordinator
    assert (course.step, course.pushes, course.duplicates) == (1, {0: 1}, {0: 1})


@pytest.mark.parametrize("run", [{"ema_decay": 0.75}], indirect=True)
def test_an_evaluator_gets_the_moving_average_and_holds_no_version_for_it(run, monkeypatch):
    """An update that waits for a hold, and an evaluator that waits for the update, would wait for ever."""
    held, replies = [], run.server.replies
    smooth_values, store_hold = replies.smooth_values, replies.values_for
    monkeypatch.setattr(replies, "values_for", lambda *a: (held.append("worker"), store_hold(*a))[1])
    monkeypatch.setattr(replies, "smooth_values", lambda *a: (held.append("evaluator"), smooth_values(*a))[1])
    initial = {"kernel": np.zeros(3, np.float32)}
    with worker.connect(str(run.listener.address), initial, rank=0) as server:
        server.pull()
        server.push({"kernel": -np.ones(3, np.float32)}, loss=1.0)
        with worker.connect(str(run.listener.address), initial, role="evaluator") as evaluator:
            held.clear()
            update = evaluator.pull()
    assert (update.step, update.done, held) == (1, True, ["evaluator"])
    np.testing.assert_array_equal(update.values["kernel"], np.full(3, 0.25, np.float32))


# ---- a push as the server understands it ---------------------------------------------------------------


def test_gradients_in_any_memory_order_mean_the_same_numbers(run):
    """Strided, in Fortran order, big-endian: what travels is little endian and in C order."""
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    gradients = {
        "big-endian": numbers.astype(">f4"),
        "fortran": np.asfortranarray(numbers),
        "strided": np.repeat(numbers, 2, axis=1)[:, ::2],
    }
    initial = {name: np.zeros_like(numbers) for name in gradients}
    with worker.connect(str(run.listener.address), initial, rank=0) as server:
        assert not server.pull().done
        update = server.push(gradients, loss=1.0)
        for name in gradients:
            np.testing.assert_array_equal(update.values[name], -numbers, name)


# ---- the length of a refusal ---------------------------------------------------------------------------

LONG_REASON = "no\n" + "😀" * 5000


def test_a_refusal_before_the_proof_is_cut_to_what_a_stranger_may_be_sent(run, monkeypatch):
    """4 KB with the rest of the header; whole characters, and dots say that it was longer."""

    def refuse(link, hello, grants, proof_failed):
        raise Refused(RefusalCode.TOKEN_REQUIRED, LONG_REASON)

    monkeypatch.setattr("ps.connections.session.authenticate", refuse)
    link = run.call()
    link.send(Hello("", "host-a", 0, Role.WORKER, 7, bytes(32)))
    refusal = link.receive()
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith("no?😀")
    assert refusal.reason.endswith("😀...")
    assert MAX_HEADER_UNPROVEN - 100 < len(encode_header(refusal)) <= MAX_HEADER_UNPROVEN


def test_a_refusal_after_the_proof_has_all_characters_of_a_reason(run, monkeypatch):
    def refuse(who, offer):
        raise Refused(RefusalCode.MANIFEST, LONG_REASON)

    monkeypatch.setattr(run.server.admissions, "check_offer", refuse)
    refusal = run.offer(Role.WORKER, KERNEL).receive()
    assert isinstance(refusal, Refusal)
    assert len(refusal.reason) == 4096
    assert refusal.reason.endswith("😀...")


def test_a_refusal_that_fits_is_not_cut(run, monkeypatch):
    def refuse(link, hello, grants, proof_failed):
        raise Refused(RefusalCode.CODEC, "no " + "x" * 4000)

    monkeypatch.setattr("ps.connections.session.authenticate", refuse)
    link = run.call()
    link.send(Hello("", "host-a", 0, Role.WORKER, 7, bytes(32)))
    assert link.receive() == Refusal(RefusalCode.CODEC, "no " + "x" * 4000)
