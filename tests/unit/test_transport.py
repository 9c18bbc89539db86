"""Channels over real sockets of the loopback: whole transfers, named ends, and no call without a limit.

What holds of a plain channel holds of one with TLS: most tests are run with both.
"""

import contextlib
import math
import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from protocol import deadlines
from protocol.addresses import Address, is_loopback
from protocol.certificates import ClientTls, ServerTls
from protocol.deadlines import Deadline, Patience
from protocol.errors import ConfigurationError, ConnectionLost, NetworkError, PeerSilent
from protocol.transport import LOCAL_SEND_BYTES, MAX_BUFFERS, Channel, Listener, Wake, connect
from tests.unit.authority import Authority

LONG_S = 60.0
MEGABYTE = 1 << 20


def patient(size_bytes=0):
    return Patience(size_bytes, silence_s=LONG_S)


@contextlib.contextmanager
def listening(host="127.0.0.1", congestion_control="auto"):
    listener = Listener(Address(host, 0), congestion_control)
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def channels(host="127.0.0.1", congestion_control="auto") -> Iterator[tuple[Channel, Channel]]:
    """A connected pair: who called, who was called."""
    with listening(host, congestion_control) as listener:
        caller = connect(listener.address, LONG_S, congestion_control)
        called = listener.accept(LONG_S)
    assert called is not None
    try:
        yield caller, called
    finally:
        caller.close()
        called.close()


@pytest.fixture
def beside():
    """Run a function in a thread beside the test."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture(scope="module")
def both_sides(tmp_path_factory):
    """A server's and a client's side of TLS that know each other."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    issued = authority.issue("server")
    return ServerTls(issued.certificate, issued.key), ClientTls(authority.file)


@pytest.fixture(params=["plain", "TLS"])
def pair(request, both_sides, beside):
    with channels() as (caller, called):
        if request.param == "plain":
            yield caller, called
            return
        server, client = both_sides
        secured = client.wrap(caller, Address("127.0.0.1", 0)), server.wrap(called)
        answering = beside(secured[1].secure, patient())
        secured[0].secure(patient())
        answering.result(LONG_S)
        yield secured


def receive(channel, size):
    data = bytearray(size)
    channel.receive_into(memoryview(data), patient(size))
    return bytes(data)


# ---- whole transfers -----------------------------------------------------------------------------------


def test_more_buffers_than_the_kernel_takes_arrive_in_order(pair, beside):
    """1025 are refused by one `sendmsg`; here are 5000, empty ones and single bytes among them."""
    caller, called = pair
    buffers = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    expected = b"".join(buffers)
    assert sum(map(bool, buffers)) > 8 * MAX_BUFFERS > 1024
    sending = beside(caller.send, buffers, patient())
    assert receive(called, len(expected)) == expected
    sending.result(LONG_S)


def test_tens_of_megabytes_both_ways_at_once(pair, beside):
    """Far more than any socket buffer holds, so sends are partial on both sides, from uneven pieces."""
    caller, called = pair
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 24 * MEGABYTE, np.uint8)
    cuts = np.sort(rng.integers(0, data.size, 1500))
    pieces = [memoryview(piece) for piece in np.split(data, cuts)]
    answers = [np.empty_like(data), np.empty_like(data)]
    sends = [beside(channel.send, pieces, patient(data.size)) for channel in pair]
    other = beside(called.receive_into, memoryview(answers[0]), patient(data.size))
    caller.receive_into(memoryview(answers[1]), patient(data.size))
    for future in (*sends, other):
        future.result(LONG_S)
    for answer in answers:
        np.testing.assert_array_equal(answer, data)


def test_views_of_any_item_type_are_sent_as_their_bytes(pair):
    """A length counts items, a transfer counts bytes: a float64 array must not lose seven eighths."""
    caller, called = pair
    numbers = np.arange(1000.0)
    caller.send([memoryview(numbers), b"", b"end"], patient())
    assert receive(called, 8003) == numbers.tobytes() + b"end"


def test_nothing_is_sent_and_received_at_once(pair):
    caller, called = pair
    caller.send([], patient())
    caller.send([b""], patient())
    called.receive_into(memoryview(bytearray()), patient())
    assert not called.wait(0.0)


# ---- how a transfer ends otherwise ---------------------------------------------------------------------


def test_a_peer_that_closes_in_mid_frame_is_lost(pair):
    caller, called = pair
    caller.send([b"half"], patient())
    caller.close()
    with pytest.raises(ConnectionLost, match="closed the connection") as caught:
        receive(called, 8)
    assert called.peer in str(caught.value)


def test_a_peer_that_is_gone_is_noticed_while_sending(pair, beside):
    """The peer reads a little and cuts: a sender with much left to say does not go on for ever."""
    caller, called = pair
    sending = beside(caller.send, [bytes(64 * MEGABYTE)], patient(64 * MEGABYTE))
    receive(called, 10)
    called.abort()
    called.close()
    with pytest.raises(ConnectionLost, match=r"connection to .* broke"):
        sending.result(LONG_S)


def test_a_reset_is_a_lost_connection_and_not_an_os_error(pair):
    """A peer that closes with our bytes unread resets the connection."""
    caller, called = pair
    called.send([b"x" * 1000], patient())
    assert caller.wait(LONG_S)
    caller.abort()
    caller.close()
    with pytest.raises(ConnectionLost):
        receive(called, 1)


def test_a_silent_peer_ends_a_receive(pair):
    """After one tick of the socket the patience is asked."""
    with pytest.raises(PeerSilent, match=r"silent for .* in mid-transfer") as caught:
        pair[0].receive_into(memoryview(bytearray(4)), Patience(4, silence_s=0.01))
    assert pair[0].peer in str(caught.value)


def test_only_silence_within_a_frame_is_one_in_mid_transfer():
    """Who waits for a frame of which nothing has come yet is told that the peer is silent, and no more."""
    waits = Patience(0, silence_s=0.0, has_begun=False)
    with pytest.raises(PeerSilent, match=r"^h:1 has been silent for 0 s$"):
        waits.check("h:1")
    waits.moved()
    with pytest.raises(PeerSilent, match=r"^h:1 has been silent for 0 s in mid-transfer$"):
        waits.check("h:1")


def test_a_peer_that_takes_nothing_ends_a_send(pair):
    with pytest.raises(PeerSilent):
        pair[0].send([bytes(64 * MEGABYTE)], Patience(64 * MEGABYTE, silence_s=0.01))


def test_a_dripping_peer_ends_too(pair):
    """It is never silent, but the whole takes longer than its size allows."""
    caller, called = pair
    caller.send([b"drip"], patient())
    with pytest.raises(PeerSilent, match="too few bytes"):
        called.receive_into(memoryview(bytearray(1000)), Patience(1000, silence_s=LONG_S, total_s=0.0))


class Clock:
    """Time that moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(deadlines.time, "monotonic", lambda: self.now)


def test_patience_on_both_sides_of_its_limits(monkeypatch):
    """Silence counts from the last byte; the whole may take 10 s and a second for each 16 KB."""
    clock = Clock(monkeypatch)
    patience = Patience(160 << 10, silence_s=5.0)
    clock.now += 4.9
    patience.check("peer")
    patience.moved()
    clock.now += 4.9
    patience.check("peer")
    clock.now += 0.1
    with pytest.raises(PeerSilent, match="peer has been silent for 5 s"):
        patience.check("peer")
    patience.moved()
    clock.now = 1000.0 + 19.9
    patience.moved()
    patience.check("peer")
    clock.now = 1000.0 + 20.0
    with pytest.raises(PeerSilent, match="too few bytes"):
        patience.check("peer")


def test_a_deadline_on_both_sides(monkeypatch):
    clock = Clock(monkeypatch)
    deadline = Deadline(3.0)
    clock.now += 2.0
    assert (deadline.left_s, deadline.over) == (1.0, False)
    clock.now += 1.0
    assert (deadline.left_s, deadline.over) == (0.0, True)
    clock.now += 9.0
    assert deadline.left_s == 0.0


@pytest.mark.parametrize("blocked", ["receive", "send", "wait"])
def test_abort_from_another_thread_ends_a_blocked_call(pair, beside, blocked):
    caller, called = pair
    begun = threading.Event()

    def call():
        begun.set()
        if blocked == "receive":
            receive(caller, 1)
        elif blocked == "send":
            caller.send([bytes(64 * MEGABYTE)], patient(64 * MEGABYTE))
        elif caller.wait(LONG_S):
            receive(caller, 1)

    future = beside(call)
    begun.wait(LONG_S)
    if blocked == "send":
        assert called.wait(LONG_S)
    caller.abort()
    with pytest.raises(ConnectionLost):
        future.result(LONG_S / 2)


def test_abort_and_close_may_come_twice_and_in_any_order(pair):
    caller, _ = pair
    caller.abort()
    caller.abort()
    caller.close()
    caller.close()
    caller.abort()
    with pytest.raises(ConnectionLost):
        caller.send([b"x"], patient())
    with pytest.raises(ConnectionLost):
        receive(caller, 1)


# ---- waiting -------------------------------------------------------------------------------------------


@pytest.fixture
def wake():
    wake = Wake()
    yield wake
    wake.close()


def test_wait_tells_bytes_from_time(pair):
    caller, called = pair
    assert not called.wait(0.0)
    assert not called.wait(-1.0)
    caller.send([b"x"], patient())
    assert called.wait(LONG_S)
    assert receive(called, 1) == b"x"
    assert not called.wait(0.0)


def test_wait_sees_the_end_of_the_stream(pair):
    """Else a peer that has gone would be noticed by its silence only."""
    caller, called = pair
    caller.close()
    assert called.wait(LONG_S)
    with pytest.raises(ConnectionLost):
        receive(called, 1)


def test_wake_ends_a_wait(pair, wake, beside):
    waiting = beside(pair[0].wait, LONG_S, wake)
    wake.set()
    assert waiting.result(LONG_S / 2) is False


def test_a_wake_stays_set_until_it_is_cleared(pair, wake):
    caller, called = pair
    for _ in range(3):
        wake.set()
    assert caller.wait(LONG_S, wake) is False
    assert caller.wait(LONG_S, wake) is False
    called.send([b"x"], patient())
    wake.clear()
    assert caller.wait(LONG_S, wake) is True
    assert caller.wait(LONG_S) is True, "a wait without the wake sees the bytes as well"


@pytest.mark.parametrize("another", [True, False], ids=["another wake", "no wake"])
def test_a_wake_may_be_closed_before_the_next_wait(pair, wake, another):
    """The channel outlives those who wake it: a closed one is forgotten, whoever has its number now."""
    caller, called = pair
    earlier = Wake()
    assert caller.wait(0.0, earlier) is False
    earlier.close()
    assert caller.wait(0.0, wake if another else None) is False
    called.send([b"x"], patient())
    assert caller.wait(LONG_S, wake if another else None) is True


def test_a_wake_with_the_number_of_a_closed_one_wakes(pair):
    caller, called = pair
    earlier = Wake()
    assert caller.wait(0.0, earlier) is False
    number = earlier.fileno()
    earlier.close()
    later = Wake()
    try:
        assert later.fileno() == number, "the system gives out the lowest free number"
        later.set()
        assert caller.wait(LONG_S, later) is False
        called.send([b"x"], patient())
        later.clear()
        assert caller.wait(LONG_S, later) is True
    finally:
        later.close()


@pytest.mark.parametrize("timeout_s", [2.0**31 / 1000, 1e9, 1e300, math.inf])
def test_a_wait_may_be_told_to_last_for_ever(pair, wake, timeout_s):
    """`poll` takes milliseconds as a C integer; 25 days and more are cut to what it can count."""
    caller, called = pair
    wake.set()
    assert caller.wait(timeout_s, wake) is False
    called.send([b"x"], patient())
    assert caller.wait(timeout_s) is True
    with listening() as listener:
        assert listener.accept(timeout_s, wake) is None


def test_a_negative_time_is_no_time():
    """`poll` would take it for for ever."""
    with listening() as listener:
        assert listener.accept(-1.0) is None


def test_a_wake_may_be_set_very_often_and_after_it_was_closed():
    """Whoever sets it must never block and never fail."""
    wake = Wake()
    for _ in range(100_000):
        wake.set()
    wake.clear()
    wake.close()
    wake.set()


# ---- last words ----------------------------------------------------------------------------------------


def test_last_words_survive_a_close_that_lingers(pair, beside):
    """Closing with unread bytes resets the connection; lingering reads them until the peer has closed."""
    caller, called = pair
    caller.send([bytes(100_000)], patient())
    assert called.wait(LONG_S)
    called.send([b"no, because of this"], patient())
    closing = beside(called.close, LONG_S)
    caller.send([bytes(100_000)], patient())
    assert receive(caller, 19) == b"no, because of this"
    with pytest.raises(ConnectionLost, match="closed the connection"):
        receive(caller, 1)
    assert not closing.done(), "it waits for the peer to close first"
    caller.close()
    closing.result(LONG_S)


def test_a_close_that_lingers_gives_up_on_a_peer_that_does_not_close(pair):
    caller, called = pair
    called.close(0.01)
    with pytest.raises(ConnectionLost):
        receive(called, 1)
    assert caller.wait(LONG_S)


# ---- listening and calling -----------------------------------------------------------------------------


def test_a_connection_that_is_half_closed_still_receives(pair):
    caller, called = pair
    caller.send([b"last"], patient())
    caller.half_close()
    assert receive(called, 4) == b"last"
    with pytest.raises(ConnectionLost, match="closed the connection"):
        receive(called, 1)
    called.send([b"answer"], patient())
    assert receive(caller, 6) == b"answer"
    with pytest.raises(ConnectionLost):
        caller.send([b"more"], patient())
    caller.close()
    caller.half_close()  # of what is closed there is nothing left to shut


def test_a_taken_port_is_named_with_its_host():
    with listening() as listener, pytest.raises(ConfigurationError) as caught:
        Listener(listener.address)
    text = str(caught.value)
    assert f"cannot listen on 127.0.0.1:{listener.address.port}: Address already in use" in text
    assert "--port" in text


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:"):
        Listener(Address("192.0.2.1", 0))


def unresolvable(*_args, **_kwargs):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_an_unknown_name_is_named_on_both_sides(monkeypatch):
    """For a client it may be a matter of time; a server cannot start."""
    monkeypatch.setattr(socket, "getaddrinfo", unresolvable)
    with pytest.raises(NetworkError, match=r"host name 'nowhere\.example' cannot be resolved \(Name or service"):
        connect(Address("nowhere.example", 1), LONG_S)
    with pytest.raises(ConfigurationError, match=r"cannot listen on nowhere\.example:1: Name or service"):
        Listener(Address("nowhere.example", 1))


def test_a_name_that_cannot_be_one_is_no_other_error():
    with pytest.raises(NetworkError):
        connect(Address("x" * 64, 1), LONG_S)
    with pytest.raises(ConfigurationError):
        Listener(Address("x" * 64, 1))


def test_nobody_there_is_worth_another_attempt():
    with listening() as listener:
        address = listener.address
    with pytest.raises(NetworkError, match=f"nobody answers at {address} \\(Connection refused\\)"):
        connect(address, LONG_S)


def test_accept_ends_with_its_time_or_its_wake(wake, beside):
    with listening() as listener:
        assert listener.accept(0.0) is None
        waiting = beside(listener.accept, LONG_S, wake)
        wake.set()
        assert waiting.result(LONG_S / 2) is None


def test_a_shortage_of_descriptors_is_told_and_does_not_look_like_a_caller_who_has_gone():
    """Whoever asks again at once would spin: the connection that waits makes every poll return."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening() as listener:
        caller = connect(listener.address, LONG_S)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(NetworkError, match="a caller cannot be answered: Too many open files"):
                listener.accept(LONG_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        called = listener.accept(LONG_S)
        assert called is not None, "it has waited"
        caller.close()
        called.close()


def test_each_side_names_the_other():
    with listening() as listener:
        caller = connect(listener.address, LONG_S)
        called = listener.accept(LONG_S)
        assert caller.peer == str(listener.address)
        assert called.peer.startswith("127.0.0.1:")
        caller.close()
        called.close()


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6():
    with channels("::1") as (caller, called):
        caller.send([b"six"], patient())
        assert receive(called, 3) == b"six"
        assert caller.peer.startswith("[::1]:")


def test_addresses_are_written_as_people_write_them():
    assert str(Address("host", 5014)) == "host:5014"
    assert str(Address("::1", 5014)) == "[::1]:5014"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("::1%lo", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("[::]", False),
        ("10.0.0.1", False),
        ("192.0.2.1", False),
        ("::ffff:10.0.0.1", False),
        ("example.org", False),
        ("localhost.example", False),
        ("fe80::1%eth0", False),
        ("127.0.0.1%lo", False),
        ("", False),
        ("[]", False),
    ],
)
def test_which_hosts_are_loopback_is_told_without_asking_the_network(host, loopback):
    """What is not surely loopback needs tokens."""
    assert is_loopback(host) is loopback


# ---- what is asked of the kernel -----------------------------------------------------------------------


def test_what_is_on_its_way_within_a_machine_stays_small():
    """Linux grants twice what is asked, for its own book-keeping, and no more than the machine allows."""
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with channels() as both:
        for channel in both:
            granted = channel._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert granted == 2 * min(LOCAL_SEND_BYTES, allowed)


def congestion_of(channel_or_socket):
    sock = getattr(channel_or_socket, "_socket", channel_or_socket)
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def system_default():
    with socket.socket() as sock:
        return congestion_of(sock)


def available(name):
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
    return True


needs_choice = pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system cannot choose it")


@needs_choice
@pytest.mark.parametrize("choice", ["auto", "system", "reno"])
def test_the_choice_of_congestion_control_holds_on_both_sides(choice):
    """On loopback `auto` is reno where the kernel has it, and the system's own otherwise."""
    wanted = "reno" if choice != "system" and available("reno") else system_default()
    if choice == "reno" and not available("reno"):
        pytest.skip("this kernel has no reno")
    with channels(congestion_control=choice) as both:
        assert [congestion_of(channel) for channel in both] == [wanted, wanted]


@needs_choice
def test_one_that_the_kernel_does_not_know_is_named_and_leaves_no_socket_open():
    with listening(congestion_control="nonsense") as listener:
        with pytest.raises(ConfigurationError, match="congestion control 'nonsense' is not available"):
            connect(listener.address, LONG_S, "nonsense")
        with pytest.raises(ConfigurationError, match="'nonsense' is not available"):
            listener.accept(LONG_S)


def test_a_connection_that_leads_back_to_itself_is_nobody_there(monkeypatch):
    """Who asks again and again for a free port of this machine is at last lent that very port by the kernel."""
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    own.connect(own.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: own)
    with pytest.raises(NetworkError, match=r"nobody answers at .*led back to this process"):
        connect(Address(*own.getsockname()), LONG_S)
    assert own.fileno() == -1, "it is closed, or no server could ever listen there"
