"""Whose turn it is before the door: limits on both sides, delays after failed proofs, bounded memory."""

import pytest

from ps.connections.doorstep import (
    FIRST_S,
    FORGOTTEN_S,
    FREE_FAILURES,
    LONGEST_S,
    MAX_SOURCES,
    MAX_UNPROVEN,
    MAX_UNPROVEN_OF_SOURCE,
    MAX_WAITING,
    PATIENCE_S,
    BackOff,
    Doorstep,
    Source,
    source_of,
)

HERE = Source("127.0.0.1", is_local=True)
FAR, OTHER = Source("192.0.2.1"), Source("192.0.2.2")


def let_in(doorstep, now):
    """All whose turn it is."""
    callers = []
    while (turn := doorstep.next(now)) is not None:
        callers.append(turn[0])
    return callers


# ---- where a connection comes from ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("127.0.0.1:5", HERE),
        ("192.0.2.1:80", FAR),
        ("[::1]:80", Source("::/64", is_local=True)),
        ("[::ffff:192.0.2.1]:80", FAR),
        ("[::ffff:127.0.0.1]:80", HERE),
        ("[2001:db8:1:2:3::4]:80", Source("2001:db8:1:2::/64")),
        ("[fe80::1%eth0]:80", Source("fe80::/64")),
        ("nonsense", Source("")),
    ],
)
def test_a_source_is_an_address_or_the_network_that_one_host_may_fill(peer, source):
    assert source_of(peer) == source


# ---- after failed proofs -------------------------------------------------------------------------------


def test_the_wait_doubles_from_the_first_failure_that_is_not_free_up_to_a_bound():
    back_off, waits = BackOff(), []
    for _ in range(FREE_FAILURES + 6):
        back_off.failed(FAR, 0.0)
        waits.append(back_off.wait_s(FAR, 1.0))
    assert waits[:FREE_FAILURES] == [0.0] * FREE_FAILURES
    assert waits[FREE_FAILURES:] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, LONGEST_S, LONGEST_S]
    assert back_off.wait_s(OTHER, 1.0) == 0.0


def test_a_million_failures_wait_no_longer_than_a_client_has_patience():
    back_off = BackOff()
    for _ in range(1_000_000):
        back_off.failed(FAR, 0.0)
    assert back_off.wait_s(FAR, 0.0) == LONGEST_S < PATIENCE_S


def test_failures_are_forgotten_after_a_while_without_one():
    back_off = BackOff()
    for now in (0.0, 1.0, 2.0, 3.0):
        back_off.failed(FAR, now)
    assert back_off.wait_s(FAR, 3.0 + FORGOTTEN_S - 0.1) == FIRST_S
    assert back_off.wait_s(FAR, 3.0 + FORGOTTEN_S) == 0.0
    back_off.failed(FAR, 3.0 + FORGOTTEN_S)
    assert back_off.wait_s(FAR, 3.0 + FORGOTTEN_S) == 0.0, "it begins anew"


def test_so_many_sources_are_remembered_and_the_oldest_is_forgotten():
    back_off = BackOff()
    for _ in range(FREE_FAILURES + 1):
        back_off.failed(FAR, 0.0)
        back_off.failed(OTHER, 0.0)
    for number in range(MAX_SOURCES - 2):
        back_off.failed(Source(str(number)), 1.0)
    back_off.failed(FAR, 2.0)
    assert back_off.wait_s(OTHER, 2.0) == FIRST_S
    back_off.failed(Source("one more"), 2.0)
    assert back_off.wait_s(OTHER, 2.0) == 0.0, "it failed longest ago"
    assert back_off.wait_s(FAR, 2.0) == 2 * FIRST_S
    assert len(back_off._failures) == MAX_SOURCES


# ---- turns ---------------------------------------------------------------------------------------------


def test_a_source_that_fails_is_delayed_and_comes_in_while_others_are_not_delayed():
    doorstep = Doorstep()
    for _ in range(FREE_FAILURES + 1):
        doorstep.arrive("wrong", FAR, 0.0)
        assert let_in(doorstep, 0.0) == ["wrong"]
        doorstep.failed(FAR, 0.0)
        doorstep.leave(FAR)
    doorstep.arrive("right", FAR, 1.0)
    doorstep.arrive("elsewhere", OTHER, 1.0)
    assert let_in(doorstep, 1.0) == ["elsewhere"]
    assert let_in(doorstep, 1.0 + FIRST_S - 0.01) == []
    assert let_in(doorstep, 1.0 + FIRST_S) == ["right"]


def test_connections_that_were_waiting_when_a_proof_failed_are_delayed_too():
    """Else all guesses could be lined up before the first of them fails."""
    doorstep = Doorstep()
    for number in range(20):
        doorstep.arrive(number, FAR, 0.0)
    tried = 0
    while callers := let_in(doorstep, 0.0):
        tried += len(callers)
        for _ in callers:
            doorstep.failed(FAR, 0.0)
            doorstep.leave(FAR)
    assert tried <= FREE_FAILURES + MAX_UNPROVEN_OF_SOURCE


def test_loopback_is_delayed_after_failures_like_everybody():
    doorstep = Doorstep()
    for _ in range(FREE_FAILURES + 1):
        doorstep.failed(HERE, 0.0)
    doorstep.arrive("right", HERE, 0.0)
    assert let_in(doorstep, 0.0) == []
    assert let_in(doorstep, FIRST_S) == ["right"]


def test_four_of_an_address_are_served_and_the_fifth_waits_without_holding_up_others():
    doorstep = Doorstep()
    for number in range(MAX_UNPROVEN_OF_SOURCE + 1):
        doorstep.arrive(number, FAR, 0.0)
    doorstep.arrive("other", OTHER, 0.0)
    assert let_in(doorstep, 0.0) == [*range(MAX_UNPROVEN_OF_SOURCE), "other"]
    doorstep.leave(OTHER)
    assert let_in(doorstep, 0.0) == []
    doorstep.leave(FAR)
    assert let_in(doorstep, 0.0) == [MAX_UNPROVEN_OF_SOURCE]


@pytest.mark.parametrize("spread", [False, True])
def test_thirty_two_are_served_in_all_from_loopback_or_from_everywhere(spread):
    doorstep = Doorstep()
    for number in range(MAX_UNPROVEN + 1):
        doorstep.arrive(number, Source(str(number)) if spread else HERE, 0.0)
    assert let_in(doorstep, 0.0) == [*range(MAX_UNPROVEN)]
    doorstep.leave(Source("0") if spread else HERE)
    assert let_in(doorstep, 0.0) == [MAX_UNPROVEN]


def test_where_there_is_no_more_room_the_source_with_the_most_callers_makes_room():
    doorstep = Doorstep()
    assert [doorstep.arrive(n, FAR, 0.0) for n in range(MAX_WAITING)] == [None] * MAX_WAITING
    assert doorstep.arrive("flood", FAR, 0.0) == "flood"
    assert doorstep.arrive("other", OTHER, 0.0) == MAX_WAITING - 1, "the flood's newest goes, not the newcomer"
    assert "other" in let_in(doorstep, 0.0)


def test_who_has_waited_longer_than_a_client_does_is_given_up():
    doorstep = Doorstep()
    doorstep.arrive("old", FAR, 0.0)
    doorstep.arrive("new", FAR, 1.0)
    assert doorstep.give_up(PATIENCE_S - 0.1) == []
    assert doorstep.give_up(PATIENCE_S) == ["old"]
    assert not doorstep.is_empty
    assert doorstep.clear() == ["new"]
    assert doorstep.is_empty


def test_who_has_left_leaves_nothing_in_memory():
    doorstep = Doorstep()
    for number in range(1000):
        doorstep.arrive(number, Source(str(number)), 0.0)
        doorstep.next(0.0)
        doorstep.leave(Source(str(number)))
    assert not doorstep._unproven
    assert not doorstep._waiting
