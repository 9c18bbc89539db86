"""Links: whole messages over a channel, from several threads, and for how long each may take."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from protocol import deadlines
from protocol.addresses import Address
from protocol.connection import Connection, State
from protocol.deadlines import Deadline
from protocol.errors import ConnectionLost, LocalProtocolError, PeerSilent, RemoteProtocolError
from protocol.link import HANDSHAKE_S, RECEIVE_BLOCK, Link, expect
from protocol.messages import Bye, Heartbeat, Initial, Kind, Offer, Pull, Push, Side, Values
from protocol.tensors import Layout, Manifest, VariableSpec
from protocol.transport import Listener, connect
from tests.unit.exchange import LAYOUT, OPENING, SAMPLES, other


class MemoryChannel:
    """One end of a pipe in memory: what is missing counts as the peer's end of the stream."""

    def __init__(self, incoming, outgoing):
        self.peer = "memory:1"
        self.incoming, self.outgoing = incoming, outgoing
        self.closed_with = None
        self.between = lambda size, patience: None

    descriptor = None

    def send(self, buffers, patience):
        self.outgoing.extend(b"".join(buffers))

    def receive_into(self, view, patience):
        self.between(view.nbytes, patience)
        if view.nbytes > len(self.incoming):
            raise ConnectionLost(f"{self.peer} closed the connection")
        view[:] = bytes(self.incoming.popleft() for _ in range(view.nbytes))

    def wait(self, timeout_s, wake=None):
        return bool(self.incoming)

    def abort(self):
        self.closed_with = "abort"

    def close(self, linger_s=0.0):
        self.closed_with = linger_s


class FakeIntake:
    """Takes note of the blocks that it is told of."""

    def __init__(self, ends, look=lambda end: end, drained=()):
        self.block_ends = ends
        self.seen = []
        self._look = look
        self._drained = iter(drained)
        self.asked = []

    def received(self, end):
        self.seen.append(self._look(end))

    def drain(self, descriptor, start):
        self.asked.append((descriptor, start))
        return start + next(self._drained)


@pytest.fixture
def links():
    """Both ends of a connection that is open."""
    up, down = deque(), deque()
    both = {
        Side.WORKER: Link(MemoryChannel(down, up), Side.WORKER),
        Side.SERVER: Link(MemoryChannel(up, down), Side.SERVER),
    }
    for sender, kind in OPENING:
        both[sender].send(SAMPLES[kind])
        assert both[other(sender)].receive() == SAMPLES[kind]
    for link in both.values():
        link.connection.agree(LAYOUT)
    return both[Side.WORKER], both[Side.SERVER]


def test_a_message_and_its_payload_arrive_whole(links):
    worker, server = links
    payload = np.arange(LAYOUT.payload_bytes, dtype=np.uint8)
    worker.send(SAMPLES[Kind.PUSH], [payload.data[:100], payload.data[100:]])
    worker.send(Bye())
    assert server.receive() == SAMPLES[Kind.PUSH]
    received = np.empty_like(payload)
    server.receive_payload(memoryview(received))
    np.testing.assert_array_equal(received, payload)
    assert server.receive() == Bye()
    assert server.connection.state is State.CLOSED


@pytest.mark.parametrize(
    "payload", [[], [bytes(191)], [bytes(193)], [bytes(192), b"\0"], [bytes(64), bytes(127)], [bytes(128)]]
)
def test_a_payload_that_does_not_add_up_is_not_sent(links, payload):
    """Else the receiver would take the next frame for the rest of it, or the rest for the next frame."""
    worker, server = links
    said = sum(map(len, payload))
    with pytest.raises(LocalProtocolError, match=rf"PUSH payload of {said} bytes cannot be sent; it must be 192"):
        worker.send(SAMPLES[Kind.PUSH], payload)
    assert not server.channel.incoming, "not even the prefix"
    worker.send(SAMPLES[Kind.PUSH], [bytes(192)])
    assert server.receive() == SAMPLES[Kind.PUSH]


def test_a_payload_after_a_message_that_has_none_is_not_sent(links):
    worker, server = links
    with pytest.raises(LocalProtocolError, match="PULL payload of 1 bytes cannot be sent; it must be 0"):
        worker.send(Pull(0), [b"x"])
    worker.send(Pull(0), [b"", memoryview(b"")])
    assert server.receive() == Pull(0)
    assert not server.wait(0.0)


@pytest.mark.parametrize(
    "buffer",
    [
        np.ones(192, np.float32).data,
        np.ones((192, 4), np.uint8).data,
        np.ones(24).data,
        np.ones((3, 0), np.uint8).data,
    ],
    ids=["192 numbers", "192 rows", "192 bytes of numbers", "nothing"],
)
def test_a_payload_that_is_not_flat_bytes_is_not_sent(links, buffer):
    """Its length would not be its number of bytes."""
    worker, server = links
    with pytest.raises(LocalProtocolError, match="flat buffers of bytes"):
        worker.send(SAMPLES[Kind.PUSH], [buffer])
    assert not server.channel.incoming


@pytest.mark.parametrize(
    ("size", "block_ends", "message"),
    [
        (191, (), "192 bytes cannot be received into 191 bytes"),
        (193, (), "192 bytes cannot be received into 193 bytes"),
        (0, (), "into 0 bytes"),
        (256, (64, 192), "into 256 bytes in blocks up to 192"),
        (192, (64, 128), "into 192 bytes in blocks up to 128"),
        (192, (64, 256), "into 192 bytes in blocks up to 256"),
    ],
)
def test_a_payload_is_received_whole_or_not_at_all(links, size, block_ends, message):
    """A view or blocks of another length leave the payload where it is, and it is still due."""
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(range(192))])
    server.receive()
    with pytest.raises(LocalProtocolError, match=message):
        server.receive_payload(memoryview(bytearray(size)), FakeIntake(block_ends) if block_ends else None)
    payload = bytearray(192)
    server.receive_payload(memoryview(payload))
    assert payload == bytes(range(192))


def test_no_payload_is_received_when_none_is_due(links):
    with pytest.raises(LocalProtocolError, match="a payload of 0 bytes cannot be received into 192 bytes"):
        links[1].receive_payload(memoryview(bytearray(192)))


def test_payloads_start_at_a_multiple_of_64_in_the_stream(links):
    """Whatever was said before: so the kernel's buffers and the arena are aligned alike."""
    worker, server = links
    sent = server.channel.incoming
    mark = bytes(range(1, 193))
    for characters in range(70):
        worker.send(Heartbeat("x" * characters))
        worker.send(Push(2**62, 0, 10**characters if characters < 18 else 1, None, 0.5, characters), [mark])
    stream = bytes(sent)
    starts = [at for at in range(len(stream)) if stream.startswith(mark, at)]
    assert len(starts) == 70
    assert {start % 64 for start in starts} == {0}


def test_a_payload_can_be_received_in_blocks_that_are_told_as_they_come(links):
    worker, server = links
    payload = np.arange(LAYOUT.payload_bytes, dtype=np.uint8)
    worker.send(SAMPLES[Kind.PUSH], [payload.data])
    server.receive()
    received = np.zeros_like(payload)
    blocks = FakeIntake((64, 128, 192), lambda end: (end, received[:end].tobytes() == bytes(range(end))))
    server.receive_payload(memoryview(received), blocks)
    assert blocks.seen == [(64, True), (128, True), (192, True)]
    assert blocks.asked == []  # there is no socket to drain


def test_blocks_are_drained_as_long_as_they_come_and_then_received(links):
    """Of 192 bytes the first 64 and half of the next block are drained; the rest is received here."""
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(range(192))])
    server.receive()
    server.channel.descriptor = 7
    for _ in range(96):
        server.channel.incoming.popleft()
    received = np.zeros(192, np.uint8)
    blocks = FakeIntake((64, 128, 192), drained=(64, 32, 0, 0))
    server.receive_payload(received.data, blocks)
    assert blocks.asked == [(7, 0), (7, 64), (7, 96), (7, 128)]
    assert blocks.seen == [128, 192]
    assert received[96:].tobytes() == bytes(range(96, 192))
    worker.send(Bye())
    assert server.receive() == Bye()


def test_a_payload_that_was_drained_whole_is_not_waited_for(links):
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(192)])
    server.receive()
    server.channel.descriptor = 7
    server.channel.incoming.clear()
    blocks = FakeIntake((64, 128, 192), drained=(128, 64))
    server.receive_payload(memoryview(bytearray(192)), blocks)
    assert (blocks.asked, blocks.seen) == ([(7, 0), (7, 128)], [])
    worker.send(Bye())
    assert server.receive() == Bye()


def test_who_trickles_while_it_is_drained_is_given_up_as_anybody_else(links, monkeypatch):
    """A byte a second keeps a peer alive, but the whole must end in its time."""
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(192)])
    server.receive()
    server.channel.descriptor = 7
    now = [1000.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])

    class Trickle(FakeIntake):
        def drain(self, descriptor, start):
            now[0] += 1.0
            return start + 1

    with pytest.raises(PeerSilent, match="moves too few bytes"):
        server.receive_payload(memoryview(bytearray(192)), Trickle((64, 128, 192)))
    assert now[0] - 1000.0 == pytest.approx(deadlines.GRACE_S, abs=1.5)


def test_a_fault_in_mid_payload_comes_at_its_very_byte_so_nothing_is_drained(links):
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(192)])
    server.receive()
    server.channel.descriptor = 7
    blocks, left = FakeIntake((64, 128, 192)), []
    server.receive_payload(
        memoryview(bytearray(192)), blocks, midway=lambda: left.append(len(server.channel.incoming))
    )
    assert (left, blocks.asked, blocks.seen) == ([96], [], [64, 128, 192])


def test_a_payload_that_is_not_wanted_is_read_away():
    """Longer than the block it is read in, and not a multiple: the next message is found behind it."""
    layout = Layout.of(Manifest((VariableSpec("v", (RECEIVE_BLOCK // 4 * 2 + 100,), "float32"),)))
    assert layout.values_bytes > 2 * RECEIVE_BLOCK
    stream = deque()
    sender, receiver = (
        Link(MemoryChannel(deque(), stream), Side.WORKER),
        Link(MemoryChannel(stream, deque()), Side.SERVER),
    )
    for link in (sender, receiver):
        link.connection.state = State.OPEN
        link.connection.role = SAMPLES[Kind.HELLO].role
        link.connection.agree(layout)
    sender.send(Initial(), [bytes(layout.values_bytes)])
    sender.send(Pull(3))
    assert receiver.receive() == Initial()
    receiver.discard_payload()
    assert receiver.receive() == Pull(3)


def test_the_next_message_is_not_received_before_the_payload(links):
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(LAYOUT.payload_bytes)])
    server.receive()
    with pytest.raises(LocalProtocolError, match="payload is due"):
        server.receive()


def test_a_stream_that_ends_within_a_frame_is_lost(links):
    worker, server = links
    worker.send(Pull(3))
    server.channel.incoming.pop()
    with pytest.raises(ConnectionLost):
        server.receive()


def test_close_and_abort_reach_the_channel(links):
    worker, server = links
    worker.close(2.5)
    server.abort()
    assert (worker.channel.closed_with, server.channel.closed_with) == (2.5, "abort")
    assert worker.peer == "memory:1"


def test_expect():
    assert expect(Bye(), Bye) == Bye()
    with pytest.raises(RemoteProtocolError, match="sent Pull where Values was due"):
        expect(Pull(0), Values)


# ---- time ----------------------------------------------------------------------------------------------


class Clock:
    """Time that moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(deadlines.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_what_was_heard_and_said_last_is_known(clock, links):
    """Heartbeats and the loss of a peer hang on these two."""
    worker, server = links
    clock.now += 5
    worker.send(Heartbeat())
    clock.now += 2
    server.receive()
    assert worker.spoke_at == 1005.0
    assert server.heard_at == 1007.0
    assert (worker.heard_at, server.spoke_at) == (1000.0, 1000.0)


def test_a_payload_is_a_sign_of_life_too(clock, links):
    worker, server = links
    worker.send(SAMPLES[Kind.PUSH], [bytes(192)])
    server.receive()
    clock.now += 7
    server.discard_payload()
    assert server.heard_at == 1007.0


def test_a_heartbeat_is_sent_after_own_silence_only(clock, links):
    worker, server = links
    worker.send(Pull(1))
    clock.now += 4.9
    worker.send_if_quiet(Heartbeat("early"), 5.0)
    clock.now += 0.1
    worker.send_if_quiet(Heartbeat("due"), 5.0)
    worker.send_if_quiet(Heartbeat("again"), 5.0)
    assert server.receive() == Pull(1)
    assert server.receive() == Heartbeat("due")
    assert not server.wait(0.0)


def test_a_heartbeat_does_not_wait_for_a_message_on_its_way(clock, links):
    """Who is sending is not silent: the heartbeat's thread must not queue behind a push."""
    worker, server = links
    sending, done = threading.Event(), threading.Event()
    send = worker.channel.send

    def slow_send(buffers, patience):
        sending.set()
        assert done.wait(30)
        send(buffers, patience)

    worker.channel.send = slow_send
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(worker.send, Pull(1))
        assert sending.wait(30)
        clock.now += 100
        worker.send_if_quiet(Heartbeat(), 5.0)
        done.set()
        push.result(30)
    assert server.receive() == Pull(1)
    assert not server.wait(0.0)


def test_a_header_may_take_as_long_as_its_size_allows(clock, links):
    """A manifest of megabytes may take a minute over a slow line; a byte a second may not."""
    worker, server = links
    server.connection.state = worker.connection.state = State.AWAIT_OFFER
    worker.send(Offer(bytes(1 << 20), 1))

    def slow_line(size, patience):
        clock.now += size / 20_000
        patience.moved()
        patience.check("peer")

    server.channel.between = slow_line
    assert len(server.receive().manifest) == 1 << 20
    assert clock.now > 1050

    def drip(size, patience):
        for _ in range(size):
            clock.now += 1.0
            patience.moved()
            patience.check("peer")

    worker.send(Heartbeat())
    server.channel.between = drip
    with pytest.raises(PeerSilent, match="too few bytes"):
        server.receive()


def test_a_peer_may_be_silent_before_a_frame_for_as_long_as_was_agreed(clock, links):
    """Not for the 10 s only that a transfer may take whatever its rate."""
    worker, server = links
    server.silence_s = 30.0

    def silence(seconds):
        def between(size, patience):
            clock.now += seconds
            patience.check("peer")
            server.channel.between = lambda size, patience: None

        return between

    worker.send(Pull(1))
    server.channel.between = silence(29.0)
    assert server.receive() == Pull(1)
    server.channel.between = silence(31.0)
    with pytest.raises(PeerSilent, match="silent for 31 s"):
        server.receive()


def test_a_payload_may_take_as_long_to_send_as_its_size_allows(clock, links):
    """The sender's patience is measured by the buffers that it was given: a second for each 16384 bytes."""
    worker, _ = links
    worker.connection.agree(Layout.of(Manifest((VariableSpec("v", (1 << 20,), "float32"),))))
    size = 4 << 20

    def slow_send(buffers, patience):
        clock.now += 10 + size / 16384 - 1
        patience.moved()
        patience.check("peer")
        clock.now += 2
        patience.moved()
        with pytest.raises(PeerSilent, match="too few bytes"):
            patience.check("peer")

    worker.channel.send = slow_send
    worker.send(SAMPLES[Kind.PUSH], [bytes(size // 2), bytes(size // 2)])
    assert clock.now == 1000 + 10 + 256 + 1, "it has been sent"


def test_a_deadline_holds_for_the_whole_message(clock, links):
    """In the handshake a stranger has its seconds for prefix and header together."""
    worker, server = links
    worker.send(Heartbeat())
    checked = []

    def between(size, patience):
        clock.now += 6.0
        checked.append(size)
        patience.moved()
        patience.check("peer")

    server.channel.between = between
    with pytest.raises(PeerSilent):
        server.receive(Deadline(HANDSHAKE_S))
    assert len(checked) == 2


# ---- several threads -----------------------------------------------------------------------------------


def test_frames_of_several_threads_never_mix():
    """Two threads push while two beat, over a real socket: every frame arrives whole, pushes in order."""
    listener = Listener(Address("127.0.0.1", 0))
    worker = Link(connect(listener.address, 30), Side.WORKER)
    server = Link(listener.accept(30), Side.SERVER)
    listener.close()
    for link in (worker, server):
        link.connection.state = State.OPEN
        link.connection.role = SAMPLES[Kind.HELLO].role
        link.connection.agree(LAYOUT)
    rounds = 300

    def push(epoch):
        payload = bytes([epoch]) * LAYOUT.payload_bytes
        for seq in range(1, rounds + 1):
            worker.send(Push(epoch, 0, seq, None, None, 1), [payload[:50], payload[50:]])

    def beat():
        for _ in range(rounds):
            worker.send_if_quiet(Heartbeat("beat"), 0.0)

    pushes = {1: [], 2: []}
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(push, 1), pool.submit(push, 2), pool.submit(beat), pool.submit(beat)]
        while sum(map(len, pushes.values())) < 2 * rounds:
            message = server.receive()
            if isinstance(message, Push):
                payload = bytearray(LAYOUT.payload_bytes)
                server.receive_payload(memoryview(payload))
                assert payload == bytes([message.epoch]) * LAYOUT.payload_bytes
                pushes[message.epoch].append(message.seq)
            else:
                assert message == Heartbeat("beat")
        for future in futures:
            future.result(30)
    assert pushes == {1: list(range(1, rounds + 1)), 2: list(range(1, rounds + 1))}
    worker.close()
    server.close()


def test_a_link_before_the_welcome_waits_no_longer_than_a_step_of_the_handshake():
    link = Link(MemoryChannel(deque(), deque()), Side.SERVER)
    assert link.silence_s == HANDSHAKE_S == 10.0


# ---- the middle of a payload ---------------------------------------------------------------------------


def test_halfway_through_a_payload_half_of_it_has_left(links):
    worker, server = links
    payload = np.arange(LAYOUT.payload_bytes, dtype=np.uint8)
    frame_bytes = len(Connection.send(links[0].connection, SAMPLES[Kind.PUSH]))
    seen = []
    worker.send(
        SAMPLES[Kind.PUSH],
        [payload.data[:10], b"", payload.data[10:150], payload.data[150:]],
        midway=lambda: seen.append(len(server.channel.incoming)),
    )
    assert seen == [frame_bytes + payload.nbytes // 2]
    assert server.receive() == SAMPLES[Kind.PUSH]
    received = np.empty_like(payload)
    server.receive_payload(received.data)
    np.testing.assert_array_equal(received, payload)


@pytest.mark.parametrize("block_ends", [(), (192,), (64, 128, 192), (96, 192), (10, 20, 192)])
def test_halfway_through_a_payload_half_of_it_has_come_however_it_is_read(links, block_ends):
    worker, server = links
    payload = np.arange(LAYOUT.payload_bytes, dtype=np.uint8)
    worker.send(SAMPLES[Kind.PUSH], [payload.data])
    server.receive()
    left, received = [], np.empty_like(payload)
    blocks = FakeIntake(block_ends) if block_ends else None
    server.receive_payload(received.data, blocks, midway=lambda: left.append(len(server.channel.incoming)))
    assert left == [96]
    assert blocks is None or blocks.seen == list(block_ends)
    np.testing.assert_array_equal(received, payload)


def test_what_breaks_in_the_middle_of_a_payload_ends_the_frame_there(links):
    worker, server = links

    def cut():
        raise ConnectionLost("cut")

    with pytest.raises(ConnectionLost):
        worker.send(SAMPLES[Kind.PUSH], [bytes(192)], midway=cut)
    server.receive()
    with pytest.raises(ConnectionLost):
        server.receive_payload(memoryview(bytearray(192)))
    assert len(server.channel.incoming) == 96
