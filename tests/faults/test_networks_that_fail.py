"""Connections that break at a chosen byte, copy, delay or swallow: the values are those of an undisturbed run."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.addresses import Address
from protocol.frame_faults import Fault, Way
from protocol.messages import Kind
from protocol.proxy import FaultProxy
from tests.faults.light_worker import START
from tests.faults.runs import QUICK_BEATS, assert_done, light, serve
from tests.integration.processes import PATIENCE_S

TWO_BLOCKS = 600_000
"""Elements of a push of 2.4 MB, so that half of it is more than one block of the server's receiver."""


def proxy_of(port, *faults, say=lambda text: None):
    """Return a proxy before a server of this machine."""
    return FaultProxy(Address("127.0.0.1", port), *map(Fault.parse, faults), say=say)


def address_of(proxy):
    return str(proxy.address)


def test_pushes_cut_at_any_byte_are_sent_again_and_count_once(processes):
    cuts = [  # a cut push is sent again, and is then the next one that the proxy sees
        "cut:1@push,number=0",
        "cut:header@push,number=2",
        "cut:half@push,number=4",
        "cut:last@push,number=6",
    ]
    server = serve(processes, workers=2, steps=5)
    said = []
    with proxy_of(server.port, *cuts, say=said.append) as proxy:
        zero = light(processes, address_of(proxy), 0, "--size", TWO_BLOCKS, workers=2)
        one = light(processes, server.address, 1, "--size", TWO_BLOCKS, workers=2)
        for process in (zero, one):
            process.ends_with(0)
        rows = assert_done(server, workers=2, steps=5)
    size = 4 * TWO_BLOCKS + 2 * 64 + 64  # frame: prefix and header, "w", "b" and its gap
    passed = [re.fullmatch(r"fired: (\S+) \((\d+) of (\d+) bytes passed on\)", line) for line in said]
    assert [match[1] for match in passed] == cuts
    assert passed[0][2] == "1" and int(passed[2][2]) > 1_000_000
    assert int(passed[3][2]) == int(passed[3][3]) - 1 >= size - 64
    assert proxy.seen[Kind.PUSH] == 5 + len(cuts)
    assert [(rows[rank]["pushes"], rows[rank]["duplicates"]) for rank in rows] == [(5, 0), (5, 0)]
    server.says(r"rank 0 \(.*\) is lost", times=len(cuts))


def test_replies_cut_before_and_in_the_middle_are_given_again_from_memory(processes):
    cuts = [  # values 0 answer the first pull; a reply that is given again is the next one that the proxy sees
        "cut:start@values,number=1",
        "cut:half@values,number=3",
        "cut:last@values,number=6",  # the last: the run is in its drain
    ]
    server = serve(processes, workers=2, steps=4)
    with proxy_of(server.port, *cuts) as proxy:
        zero = light(processes, address_of(proxy), 0, "--size", TWO_BLOCKS, workers=2)
        one = light(processes, server.address, 1, "--size", TWO_BLOCKS, workers=2)
        for process in (zero, one):
            process.ends_with(0)
        rows = assert_done(server, workers=2, steps=4)
    assert {fault.text for fault in proxy.fired} == set(cuts)
    assert proxy.seen[Kind.VALUES] == 8
    assert [(rows[rank]["pushes"], rows[rank]["duplicates"]) for rank in rows] == [(4, 3), (4, 0)]


def test_handshakes_and_initial_values_that_are_cut_are_begun_anew(processes):
    kinds = ("hello", "challenge", "proof", "server-proof", "offer", "welcome", "initial")
    cuts = [f"cut:last@{kind}" for kind in kinds]
    server = serve(processes, workers=1, steps=2)
    with proxy_of(server.port, *cuts) as proxy:
        light(processes, address_of(proxy), 0, workers=1).ends_with(0)
        assert_done(server, workers=1, steps=2)
    assert {fault.text for fault in proxy.fired} == set(cuts)
    assert proxy.seen[Kind.HELLO] == len(cuts) + 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_push_that_arrives_twice_counts_once(processes, workers):
    """With one worker the first copy closes the round, with two the second finds it open."""
    server = serve(processes, workers=workers, steps=4)
    copies = ["double@push,number=1", "double@push,number=3"]
    with proxy_of(server.port, *copies) as proxy:
        for rank, address in enumerate([address_of(proxy), server.address][:workers]):
            light(processes, address, rank, workers=workers)
        rows = assert_done(server, workers=workers, steps=4)
    assert {fault.text for fault in proxy.fired} == set(copies)
    assert (rows[0]["pushes"], rows[0]["duplicates"], rows[0]["stale"]) == (4, 2, 0)


def test_a_push_held_over_a_restart_of_the_server_is_dropped_and_the_worker_goes_on(processes, tmp_path):
    """A server with initial values of its own is at step 0 at once: only the epoch tells that the push is old."""
    initial = tmp_path / "initial.safetensors"
    save_file({"w": np.full(1000, START, np.float32), "b": np.full(3, -START, np.float32)}, initial)
    server = serve(processes, workers=1, steps=4, init=initial)
    port = server.port
    said = []
    with proxy_of(port, "hold@push", say=said.append) as proxy:
        zero = light(processes, address_of(proxy), 0, workers=1)
        assert proxy.await_fired(Fault.parse("hold@push"), PATIENCE_S)
        server.kill()
        zero.says("the connection to the server is lost")
        anew = serve(processes, workers=1, steps=4, port=port, init=initial)
        zero.says("answered with step 0, restarted")
        zero.ends_with(0)
        rows = assert_done(anew, workers=1, steps=4)
    assert "delivered: hold@push" in said
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
    with proxy_of(server.port) as proxy:
        zero = light(processes, address_of(proxy), 0, "--pause-at", 2, workers=2)
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
