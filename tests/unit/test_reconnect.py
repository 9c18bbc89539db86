"""How often a client calls a server that is away, for how long, and what it says, with a made-up clock."""

import random

import numpy as np
import pytest

from protocol.addresses import Address
from protocol.ensemble import Answers
from protocol.errors import ConfigurationError, NetworkError, PeerLost, Refused
from protocol.messages import MAX_RANK
from protocol.tensors import Manifest
from worker import reconnect
from worker.joining import connect
from worker.reconnect import FIRST_PAUSE_S, HOPEFUL_S, LONG_PAUSE_S, SHORT_PAUSE_S, Caller, ClientConfig, pause_s

ADDRESS = Address("ps.example", 5014)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Away:
    """A network in which the server cannot be reached until `back_at`, seconds from the start."""

    def __init__(self, clock, back_at=float("inf")):
        self.clock = clock
        self.back_at = clock.now + back_at
        self.attempts = []

    def shake_hands(self, caller, deadline):
        self.attempts.append(self.clock.now)
        if self.clock.now < self.back_at:
            raise NetworkError(f"nobody answers at {ADDRESS}")
        return "link"


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Deadline:
        def __init__(self, timeout_s):
            self.end = clock.now + timeout_s

        @property
        def left_s(self):
            return max(0.0, self.end - clock.now)

    monkeypatch.setattr(reconnect, "time", clock)
    monkeypatch.setattr(reconnect, "Deadline", Deadline)
    return clock


def call(monkeypatch, shake_hands, timeout_s=120.0):
    """Call, and return how it ended and what was said."""
    told = []
    config = ClientConfig(ADDRESS, Manifest.of({"w": np.zeros(1)}), dict, on_event=told.append)
    monkeypatch.setattr(Caller, "_shake_hands", shake_hands)
    try:
        return Caller(config).call(timeout_s), told
    except PeerLost as error:
        return error, told


@pytest.mark.parametrize("back_at", [0.0, 0.05, 0.7, 3.0, 17.0, HOPEFUL_S - 1])
def test_a_server_that_comes_back_soon_is_found_within_a_second(monkeypatch, clock, back_at):
    away = Away(clock, back_at)
    link, told = call(monkeypatch, lambda caller, deadline: away.shake_hands(caller, deadline))
    assert link == "link"
    assert clock.now - away.back_at <= SHORT_PAUSE_S
    assert (told[-1:] == [f"connected to the server at {ADDRESS}"]) == (back_at > 0)


def test_pauses_double_and_one_that_is_away_for_long_is_called_less_often(monkeypatch, clock):
    monkeypatch.setattr(random, "random", lambda: 1.0)
    away = Away(clock)
    call(monkeypatch, lambda caller, deadline: away.shake_hands(caller, deadline))
    pauses = np.diff(away.attempts)
    np.testing.assert_allclose(pauses[:5], [FIRST_PAUSE_S * 2**n for n in range(4)] + [SHORT_PAUSE_S])
    soon = np.array(away.attempts[:-1]) - away.attempts[0] < HOPEFUL_S
    assert pauses[soon].max() == pytest.approx(SHORT_PAUSE_S)
    assert pauses[~soon].min() == pytest.approx(LONG_PAUSE_S)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": MAX_RANK + 1}, "Hello.rank cannot be 65536"),
        ({"rank": -2}, "Hello.rank cannot be -2"),
        ({"name": "n" * 129}, "Hello.name cannot be 'nnn"),
        ({"name": "two\nlines"}, "Hello.name cannot be"),
        ({"threads": 0}, "Offer.threads cannot be 0"),
        ({"seed": -1}, "Offer.seed cannot be -1"),
        ({"answers": Answers(2**31, 3)}, "Offer.examples cannot be 2147483648"),
        ({"role": "tester"}, "'tester' is not a valid Role"),
        ({"state": ["x"]}, "state variable 'x' is not among the variables"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_said_is_a_sentence_before_anybody_is_called(monkeypatch, options, said):
    monkeypatch.setattr(reconnect, "open_channel", lambda *_: pytest.fail("the server was called"))
    with pytest.raises(ConfigurationError, match=said):
        connect(str(ADDRESS), {"w": np.zeros(1)}, **options)


def test_the_largest_that_can_be_said_is_said(monkeypatch):
    """With it the server is called."""

    def called(*_):
        raise Refused("full", "called")

    monkeypatch.setattr(reconnect, "open_channel", called)
    with pytest.raises(Refused, match="called"):
        connect(str(ADDRESS), {"w": np.zeros(1)}, rank=MAX_RANK, name="n" * 128, threads=4096, seed=2**63 - 1)


def test_many_clients_do_not_come_back_at_one_moment():
    assert pause_s(10, 0.0, 0.0) == SHORT_PAUSE_S / 2
    assert pause_s(10, 0.0, 0.5) == 0.75 * SHORT_PAUSE_S
    assert pause_s(10**6, HOPEFUL_S, 1.0) == LONG_PAUSE_S


def test_who_waits_says_for_whom_and_how_long_still_and_gives_up_in_time(monkeypatch, clock):
    away = Away(clock)
    error, told = call(monkeypatch, lambda caller, deadline: away.shake_hands(caller, deadline))
    assert str(error) == f"the server at {ADDRESS} could not be reached for 120 s: nobody answers at {ADDRESS}"
    assert 120 - LONG_PAUSE_S <= clock.now - 1000 <= 120
    assert told[0] == f"waiting for the server at {ADDRESS}, 120 s left: nobody answers at {ADDRESS}"
    left = [int(text.split(", ")[1].split()[0]) for text in told]
    assert left == sorted(left, reverse=True) and left[-1] < 15
    assert 10 < len(told) < 25, "every few seconds, not at each attempt"


def test_a_server_that_was_there_until_now_is_waited_for_as_long_as_one_that_has_just_gone(monkeypatch, clock):
    """A client may be held in the handshake for longer than it would wait for a server that is away."""
    away = Away(clock, 350.0)
    held_for = [300.0]

    def shake_hands(caller, deadline):
        caller._held = False
        if held_for:
            clock.sleep(held_for.pop())
            caller._hold("the start waits for rank 0")
            raise NetworkError("it closed the connection")
        return away.shake_hands(caller, deadline)

    link, _ = call(monkeypatch, shake_hands, timeout_s=60.0)
    assert link == "link"
