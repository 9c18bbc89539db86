"""Connections that break at a chosen byte, copy, delay or swallow: the values are those of an undisturbed run."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.messages import Kind
from tests.faults.light_worker import START
from tests.faults.proxy import Cut, Double, HoldUntilWelcome, Proxy, Way
from tests.faults.runs import QUICK_BEATS, assert_done, light, serve

TWO_BLOCKS = 600_000
"""Elements of a push of 2.4 MB, so that half of it is more than one block of the server's receiver."""


def test_pushes_cut_at_any_byte_are_sent_again_and_count_once(processes):
    cuts = [  # a cut push is sent again, and is then the next one that the proxy sees
        Cut(Kind.PUSH, 0, lambda header_end, size: 1),
        Cut(Kind.PUSH, 2, lambda header_end, size: header_end),
        Cut(Kind.PUSH, 4, lambda header_end, size: size // 2),
        Cut(Kind.PUSH, 6, lambda header_end, size: size - 1),
    ]
    server = serve(processes, workers=2, steps=5)
    with Proxy(server.port, *cuts) as proxy:
        zero = light(processes, proxy.address, 0, "--size", TWO_BLOCKS, workers=2)
        one = light(processes, server.address, 1, "--size", TWO_BLOCKS, workers=2)
        for process in (zero, one):
            process.ends_with(0)
        rows = assert_done(server, workers=2, steps=5)
    assert all(cut.fired.is_set() for cut in cuts)
    assert cuts[0].passed == 1 and cuts[2].passed > 1_000_000
    assert proxy.seen[Kind.PUSH] == 5 + len(cuts)
    assert [(rows[rank]["pushes"], rows[rank]["duplicates"]) for rank in rows] == [(5, 0), (5, 0)]
    server.says(r"rank 0 \(.*\) is lost", times=len(cuts))


def test_replies_cut_before_and_in_the_middle_are_given_again_from_memory(processes):
    cuts = [  # values 0 answer the first pull; a reply that is given again is the next one that the proxy sees
        Cut(Kind.VALUES, 1, lambda header_end, size: 0),
        Cut(Kind.VALUES, 3, lambda header_end, size: size // 2),
        Cut(Kind.VALUES, 6, lambda header_end, size: size - 1),  # the last: the run is in its drain
    ]
    server = serve(processes, workers=2, steps=4)
    with Proxy(server.port, *cuts) as proxy:
        zero = light(processes, proxy.address, 0, "--size", TWO_BLOCKS, workers=2)
        one = light(processes, server.address, 1, "--size", TWO_BLOCKS, workers=2)
        for process in (zero, one):
            process.ends_with(0)
        rows = assert_done(server, workers=2, steps=4)
    assert all(cut.fired.is_set() for cut in cuts)
    assert proxy.seen[Kind.VALUES] == 8
    assert [(rows[rank]["pushes"], rows[rank]["duplicates"]) for rank in rows] == [(4, 3), (4, 0)]


def test_handshakes_and_initial_values_that_are_cut_are_begun_anew(processes):
    kinds = (Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.SERVER_PROOF, Kind.OFFER, Kind.WELCOME, Kind.INITIAL)
    cuts = [Cut(kind, 0, lambda header_end, size: size - 1) for kind in kinds]
    server = serve(processes, workers=1, steps=2)
    with Proxy(server.port, *cuts) as proxy:
        light(processes, proxy.address, 0, workers=1).ends_with(0)
        assert_done(server, workers=1, steps=2)
    assert all(cut.fired.is_set() for cut in cuts)
    assert proxy.seen[Kind.HELLO] == len(cuts) + 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_push_that_arrives_twice_counts_once(processes, workers):
    """With one worker the first copy closes the round, with two the second finds it open."""
    server = serve(processes, workers=workers, steps=4)
    copies = [Double(Kind.PUSH, 1), Double(Kind.PUSH, 3)]
    with Proxy(server.port, *copies) as proxy:
        for rank, address in enumerate([proxy.address, server.address][:workers]):
            light(processes, address, rank, workers=workers)
        rows = assert_done(server, workers=workers, steps=4)
    assert all(copy.fired.is_set() for copy in copies)
    assert (rows[0]["pushes"], rows[0]["duplicates"], rows[0]["stale"]) == (4, 2, 0)


def test_a_push_held_over_a_restart_of_the_server_is_dropped_and_the_worker_goes_on(processes, tmp_path):
    """A server with initial values of its own is at step 0 at once: only the epoch tells that the push is old."""
    initial = tmp_path / "initial.safetensors"
    save_file({"w": np.full(1000, START, np.float32), "b": np.full(3, -START, np.float32)}, initial)
    server = serve(processes, workers=1, steps=4, init=initial)
    port = server.port
    held = HoldUntilWelcome(Kind.PUSH, 0)
    with Proxy(port, held) as proxy:
        zero = light(processes, proxy.address, 0, workers=1)
        held.await_fired()
        server.kill()
        zero.says("the connection to the server is lost")
        anew = serve(processes, workers=1, steps=4, port=port, init=initial)
        zero.says("answered with step 0, restarted")
        zero.ends_with(0)
        rows = assert_done(anew, workers=1, steps=4)
    assert held.delivered.is_set()
    assert (rows[0]["pushes"], rows[0]["stale"], rows[0]["duplicates"]) == (4, 1, 0)


def test_a_server_that_starts_anew_without_values_asks_for_them_again(processes):
    server = serve(processes, workers=2, steps=4)
    port = server.port
    zero = light(processes, server.address, 0, "--pause-at", 2, workers=2)
    one = light(processes, server.address, 1, "--pause-at", 2, workers=2)
    for process in (zero, one):
        process.says("paused at step 2")
    server.kill()
    anew = serve(processes, workers=2, steps=4, port=port)
    for process in (zero, one):
        process.tell()
    for process in (zero, one):
        process.says("answered with step 0, restarted")
        process.ends_with(0)
    assert_done(anew, workers=2, steps=4)


# ---- black holes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [tuple(Way), (Way.UP,), (Way.DOWN,)], ids=["both ways", "up", "down"])
def test_a_partition_is_noticed_by_both_sides_and_healed_by_the_same_process(processes, ways):
    server = serve(processes, workers=2, steps=5, **QUICK_BEATS)
    with Proxy(server.port) as proxy:
        zero = light(processes, proxy.address, 0, "--pause-at", 2, workers=2)
        one = light(processes, server.address, 1, workers=2)
        zero.says("paused at step 2")
        proxy.swallow(*ways)
        zero.tell()
        zero.says(r"the connection to the server is lost: .*127\.0\.0\.1:\d+")
        server.says(r"rank 0 \(.*\) is lost: .*127\.0\.0\.1:\d+")
        if Way.UP in ways:
            server.says(r"rank 0 \(.*\) is lost: nothing was heard of 127\.0\.0\.1:\d+ for \d+ s")
            assert "answered with step 3" not in one.log, "the round waits for the push in the hole"
        proxy.heal()
        for process in (zero, one):
            process.ends_with(0)
        rows = assert_done(server, workers=2, steps=5)
    server.says(r"rank 0 \(.*\) on .* has returned")
    assert zero.log.count("joined as rank 0") == 1
    assert rows[0]["pushes"] == 5
    if ways == (Way.DOWN,):
        assert rows[0]["duplicates"] >= 1, "its push had arrived, the reply had not"
