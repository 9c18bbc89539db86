"""How many workers take part where nobody has said it: who counts, when it is settled, and who takes over."""

import io
import threading
from types import SimpleNamespace

import pytest

from protocol.addresses import Address
from protocol.errors import ConfigurationError, Interrupted, NoProgress, Refused
from protocol.injector import NONE
from protocol.messages import AUTO_RANK, Role, Status
from protocol.transport import Listener
from ps import compiling, gathering
from ps.coordination.members import Identity
from ps.gathering import Gathering, Headcount
from ps.monitoring.console import Console
from ps.server import ParameterServer
from ps.settings.combinations import MAX_WORKERS
from ps.settings.config import AUTO, ServerConfig

QUIET_S, TIMEOUT_S = 10.0, 60.0


def who(number, *, name="", rank=AUTO_RANK, role=Role.WORKER):
    return Identity(name, "host", rank, role, incarnation=number)


@pytest.fixture
def heads():
    return Headcount(QUIET_S, TIMEOUT_S, began=100.0)


# ---- who counts, and when it is settled ----------------------------------------------------------------


def test_it_is_settled_when_for_so_long_no_further_worker_has_come(heads):
    heads.came(1, who(1), 101.0)
    heads.came(2, who(2), 110.0)
    assert not heads.is_settled(119.9)
    assert heads.is_settled(120.0)
    assert (heads.count, heads.callers) == (2, {1, 2})


def test_with_nobody_there_it_is_never_settled_and_in_vain_at_last(heads):
    assert not heads.is_settled(10_000.0)
    assert not heads.is_in_vain(159.9)
    assert heads.is_in_vain(160.0)


def test_workers_that_keep_coming_put_the_start_off_only_so_long(heads):
    for second in range(60):
        heads.came(second, who(second), 100.0 + second)
        assert not heads.is_settled(100.0 + second)
    assert heads.is_settled(160.0)
    assert not heads.is_in_vain(160.0)
    assert heads.count == 60


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (who(1), who(1)),
        (who(1, name="a"), who(2, name="a")),
        (who(1, rank=0), who(2, rank=0)),
        (who(1, name="a", rank=1), who(2, name="b", rank=1)),
    ],
    ids=["process", "name", "rank", "rank of two names"],
)
def test_who_calls_twice_counts_once_and_delays_nobody(heads, one, other):
    heads.came(1, one, 100.0)
    heads.came(2, other, 109.0)
    assert heads.count == 1
    assert heads.is_settled(110.0)
    heads.left(1)
    assert heads.count == 1, "the other connection is still there"


def test_those_without_name_and_rank_are_each_another(heads):
    for number in range(3):
        heads.came(number, who(number), 100.0)
    assert heads.count == 3


def test_a_connection_is_counted_when_it_comes_and_not_each_time_it_asks(heads):
    heads.came(1, who(1), 100.0)
    heads.came(1, who(1), 109.0)
    assert heads.is_settled(110.0)


@pytest.mark.parametrize("role", [Role.EVALUATOR, Role.VALIDATOR])
def test_other_roles_do_not_count(heads, role):
    heads.came(1, who(1, role=role), 100.0)
    assert heads.count == 0
    assert not heads.is_settled(120.0)
    heads.left(1)


def test_who_goes_does_not_count_and_who_comes_back_does(heads):
    heads.came(1, who(1), 100.0)
    heads.came(2, who(2), 100.0)
    heads.left(1)
    assert heads.count == 1
    assert heads.is_settled(110.0)
    heads.came(3, who(1), 111.0)
    assert heads.count == 2
    assert not heads.is_settled(112.0)
    heads.left(2)
    heads.left(3)
    assert not heads.is_settled(130.0), "nobody is there any more"


def test_no_more_count_than_there_may_be(heads):
    for number in range(MAX_WORKERS + 1):
        heads.came(number, who(number), 100.0)
    assert heads.count == MAX_WORKERS


def test_it_says_for_what_the_start_waits(heads):
    assert heads.waiting_for(100.0) == "the start waits for the first worker"
    assert heads.waiting_for(112.0) == "the start waits for the first worker since 12 s"
    heads.came(1, who(1), 112.0)
    heads.came(2, who(2), 113.0)
    assert heads.waiting_for(116.0) == "the start waits for more workers: 2 so far; the run begins in 7 s"
    assert heads.waiting_for(200.0) == "the start waits for more workers: 2 so far; the run begins in 0 s"


# ---- between the door and the server -------------------------------------------------------------------


class Caller:
    """Stands in for a session: the gathering asks for no more of it than this."""

    def __init__(self, number):
        self.number, self.joined, self.nudged = number, False, threading.Event()
        self.posted = []

    def nudge(self):
        self.nudged.set()

    def post(self, item):
        self.posted.append(item)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a gathering whose door stays shut, and a clock that the test moves."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(gathering.time, "monotonic", lambda: clock.now)
    config = ServerConfig(
        workers=AUTO, steps=1, port=0, run_dir=tmp_path, gather_timeout=QUIET_S, start_timeout=TIMEOUT_S
    )
    return Gathering(config, (), NONE), clock


def comes(gathered, number, role=Role.WORKER):
    caller = Caller(number)
    gathered.door._sessions[number] = caller
    assert gathered.holds(caller, who(number, role=role))
    return caller


def server_of(gathered, workers):
    config = gathered.config.for_workers(workers)
    return ParameterServer(config, Console(1, io.StringIO(), interactive=False), epoch=5, gathering=gathered)


def test_a_server_takes_over_the_connections_that_are_held(made):
    gathered, clock = made
    callers = [comes(gathered, number) for number in (1, 2)]
    clock.now += QUIET_S
    assert gathered._counted_now() == 2
    assert gathered.holds(callers[0], who(1)) == "the start waits for the server to be ready"
    server = server_of(gathered, 2)
    assert server._door is gathered.door and server._lock is gathered.lock
    gathered.hand_over(server)
    for caller in callers:
        assert caller.nudged.is_set()
        assert gathered.holds(caller, who(caller.number)) == ""
    assert gathered.server is server
    server.compiling = SimpleNamespace(what_waits=lambda: "the server to compile its kernels")
    assert "kernels" in gathered.holds(callers[0], who(1))


def test_who_asks_for_a_rank_goes_before_those_who_take_any(made):
    """Else one of these would get the very rank that another asks for, and is refused for."""
    gathered, clock = made
    anyone, certain = comes(gathered, 1), Caller(2)
    gathered.door._sessions[2] = certain
    assert gathered.holds(certain, who(2, rank=0))
    clock.now += QUIET_S
    assert gathered._counted_now() == 2
    gathered.hand_over(server_of(gathered, 2))
    assert "come first" in gathered.holds(anyone, who(1))
    assert gathered.holds(certain, who(2, rank=0)) == ""
    certain.joined = True
    assert gathered.holds(anyone, who(1)) == ""


def test_a_rank_that_no_run_for_these_has_ends_the_start_at_once(made):
    gathered, clock = made
    comes(gathered, 1)
    gathered.door._sessions[2] = Caller(2)
    assert gathered.holds(gathered.door._sessions[2], who(2, rank=2))
    clock.now += QUIET_S
    with pytest.raises(ConfigurationError, match=r"asks for rank 2, .* the run is for 2, .* without --rank"):
        gathered._counted_now()


def test_more_connections_than_there_may_be_workers_are_refused(made, monkeypatch):
    """Each holds a thread and what it offers; who is counted already is asked again and again."""
    monkeypatch.setattr(gathering, "MAX_WORKERS", 2)
    gathered, _ = made
    callers = [comes(gathered, number) for number in (1, 2)]
    with pytest.raises(Refused, match="2 workers are here already"):
        comes(gathered, 3)
    assert "2 so far" in gathered.holds(callers[0], who(1))
    assert comes(gathered, 4, Role.EVALUATOR)


def test_who_comes_after_the_count_takes_the_rank_of_nobody_who_was_counted(made):
    gathered, clock = made
    first = comes(gathered, 1)
    clock.now += QUIET_S
    assert gathered._counted_now() == 1
    late, judge = comes(gathered, 2), comes(gathered, 3, Role.EVALUATOR)
    gathered.hand_over(server_of(gathered, 1))
    assert gathered.holds(judge, who(3, role=Role.EVALUATOR)) == ""
    assert "come first" in gathered.holds(late, who(2))
    first.joined = True
    assert gathered.holds(late, who(2)) == "", "the server judges it now"


def test_who_was_counted_and_went_is_not_waited_for(made):
    gathered, clock = made
    first = comes(gathered, 1)
    clock.now += QUIET_S
    assert gathered._counted_now() == 1
    late = comes(gathered, 2)
    gathered.left(first, "gone")
    gathered.hand_over(server_of(gathered, 1))
    assert gathered.holds(late, who(2)) == ""


def test_nobody_in_time_is_no_progress(made):
    gathered, clock = made
    comes(gathered, 1, Role.EVALUATOR)
    clock.now += TIMEOUT_S
    with pytest.raises(NoProgress, match=r"no worker came within 60 s; .*--start-timeout") as caught:
        gathered._counted_now()
    assert gathered.summary(caught.value)["status"] == "no_progress"


def test_a_signal_ends_it_and_one_that_comes_later_reaches_the_server(made):
    gathered, clock = made
    comes(gathered, 1)
    clock.now += QUIET_S
    assert gathered._counted_now() == 1
    gathered.interrupt("SIGTERM")
    with pytest.raises(Interrupted):
        gathered._counted_now()
    server = server_of(gathered, 1)
    gathered.hand_over(server)
    assert server.ending.signal == "SIGTERM"


def test_a_fault_of_a_thread_ends_it(made, caplog):
    gathered, _ = made
    gathered.broke(RuntimeError("oh"))
    gathered.broke(RuntimeError("and this"))
    with pytest.raises(ConfigurationError, match=r"the server itself has failed: RuntimeError\('oh'\)"):
        gathered._counted_now()
    server = server_of(gathered, 1)
    gathered.hand_over(server)
    assert server._finish.status is Status.FAILED


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConfigurationError("--quorum is too high"), Status.FAILED, "--quorum is too high"),
        (NoProgress("no worker came"), Status.NO_PROGRESS, "no worker came"),
        (Interrupted("SIGINT"), Status.INTERRUPTED, "the server was stopped by SIGINT"),
        (ValueError("oh"), Status.FAILED, "the server itself has failed: ValueError('oh')"),
    ],
    ids=["options", "nobody", "signal", "fault"],
)
def test_all_hear_why_there_will_be_no_run(tmp_path, monkeypatch, error, status, words):
    warmed = []
    monkeypatch.setattr(compiling, "warm_up", lambda *what: warmed.append(what))
    config = ServerConfig(workers=AUTO, steps=1, port=0, run_dir=tmp_path)
    gathered = Gathering(config, (), NONE)
    told = []
    gathered.interrupt("SIGINT")
    gathered.door.announce = told.append
    with pytest.raises(type(error)), gathered:
        with pytest.raises(Interrupted):
            gathered.gather(Listener(Address("127.0.0.1", 0), "auto"))
        raise error
    assert [(news.status, news.reason) for news in told] == [(status, words)]
    assert not gathered.door._accepting.is_alive()
    assert warmed == [(config, "float32")], "the kernels are compiled while workers come"
