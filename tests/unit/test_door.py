"""The door over real sockets: turns, shortages, and that nobody is left standing when it closes."""

import logging
import socket
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from protocol.addresses import Address
from protocol.errors import NetworkError
from protocol.transport import Listener
from ps.connections.door import TICK_S, Door
from ps.connections.doorstep import MAX_UNPROVEN, MAX_WAITING

PATIENCE_S = 30.0


class Stranger(threading.Thread):
    """Stands for a session: it says nothing, and leaves when it is told to."""

    def __init__(self, number, channel, started):
        super().__init__()
        self.number, self.link = number, channel
        self.leaves_door = lambda: None
        self.may_go = threading.Event()
        self.started = started

    def run(self):
        self.started.append(self)
        with self.started.changed:
            self.started.changed.notify_all()
        self.may_go.wait(PATIENCE_S)
        self.link.close()
        self.leaves_door()


class Started(list):
    """Sessions that have begun, in order."""

    changed = threading.Condition()

    def reaches(self, count):
        with self.changed:
            return self.changed.wait_for(lambda: len(self) >= count, PATIENCE_S)


@pytest.fixture
def opened():
    started = Started()
    door = Door(lambda number, channel: Stranger(number, channel, started), pytest.fail)
    listener = Listener(Address("127.0.0.1", 0))
    door.open(listener)
    with ExitStack() as callers:
        yield SimpleNamespace(
            started=started,
            call=lambda: callers.enter_context(socket.create_connection(tuple(vars(listener.address).values()))),
        )
        for stranger in started:
            stranger.may_go.set()
        door.close(listener)
        for stranger in started:
            stranger.join()


def test_the_thirty_third_waits_and_is_served_when_another_has_left(opened):
    for _ in range(MAX_UNPROVEN + 1):
        opened.call()
    assert opened.started.reaches(MAX_UNPROVEN)
    assert len(opened.started) == MAX_UNPROVEN
    opened.started[7].may_go.set()
    assert opened.started.reaches(MAX_UNPROVEN + 1)


def test_more_than_can_wait_are_closed_and_the_operator_hears_of_it_once(opened, caplog):
    for _ in range(MAX_UNPROVEN):
        opened.call()
    assert opened.started.reaches(MAX_UNPROVEN)
    waiting = [opened.call() for _ in range(MAX_WAITING)]
    for _ in range(3):
        extra = opened.call()
        extra.settimeout(PATIENCE_S)
        assert extra.recv(1) == b"", "closed at once"
    for caller in waiting[:3]:
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(1)
    assert [text for text in caplog.messages if "too many connections wait" in text] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_server_short_of_descriptors_pauses_and_says_so_once(caplog):
    class Short:
        def accept(self, timeout_s, wake):
            raise NetworkError("a caller cannot be answered: Too many open files")

    class Dismissed:
        def __init__(self):
            self.pauses = []

        def is_set(self):
            return len(self.pauses) == 3

        def wait(self, timeout_s):
            self.pauses.append(timeout_s)

    door = Door(lambda number, channel: None, lambda error: None)
    door._dismissed = Dismissed()
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        door.accept(Short())
    assert door._dismissed.pauses == [TICK_S] * 3
    assert len(caplog.messages) == 1
    assert "cannot take more connections for now" in caplog.messages[0]


def test_one_that_cannot_be_served_for_lack_of_threads_is_turned_away_and_holds_no_place(caplog):
    class Refusing:
        def __init__(self, number, channel):
            self.channel = channel

        def start(self):
            raise RuntimeError("can't start new thread")

    listener = Listener(Address("127.0.0.1", 0))
    door = Door(Refusing, pytest.fail)
    door.open(listener)
    for _ in range(MAX_UNPROVEN + 3):
        with socket.create_connection((listener.address.host, listener.address.port)) as caller:
            caller.settimeout(PATIENCE_S)
            assert caller.recv(1) == b""
    door.close(listener)
    assert not door.sessions()
    assert sum("was turned away" in text for text in caplog.messages) == MAX_UNPROVEN + 3


def test_a_fault_of_the_door_itself_is_told_and_does_not_leave_everybody_before_it():
    broken, told = ZeroDivisionError("a fault"), []

    class Broken:
        def accept(self, timeout_s, wake=None):
            raise broken

    door = Door(lambda number, channel: None, told.append)
    door._accept_or_tell(Broken())
    assert told == [broken]
