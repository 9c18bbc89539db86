"""Attacks over real sockets on a real server: the honest run goes on, its values are exact, nothing is left over.

Every attack stands, or goes on, while two honest workers train; then it ends, and the server must hold no more
threads and descriptors than before. Which promise is proved is said at each test.
"""

import contextlib
import os
import pickle
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import worker
from protocol.errors import Refused
from protocol.frames import MAX_HEADER_MANIFEST, MAX_HEADER_UNPROVEN
from protocol.messages import Challenge, Kind, Proof, Pull, Push, Role, ServerProof
from protocol.proof import NO_PROOF
from ps.connections.doorstep import FIRST_S, FREE_FAILURES, MAX_UNPROVEN
from tests.faults.hardened import (
    BEFORE,
    DURING,
    ENDINGS,
    LAYOUT,
    PATIENCE_S,
    STEPS,
    WORKERS,
    Honest,
    besieged,
    call,
    drip,
    hello,
    is_ended,
    linked,
    shake_hands,
)
from tests.faults.runs import serve
from tests.unit.authority import Authority
from tests.unit.exchange import frame_of, prefix_of

HALF_OPEN = 1000
TOKEN, WRONG = "correct-horse-battery-staple", "wrong-horse-battery-staple"


@pytest.fixture
def server(processes):
    return serve(processes, workers=WORKERS, steps=STEPS)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def tls_server(processes, authority):
    if not (issued := getattr(authority, "issued", None)):
        issued = authority.issued = authority.issue("server")
    return serve(processes, workers=WORKERS, steps=STEPS, tls_cert=issued.certificate, tls_key=issued.key)


@pytest.fixture
def many_descriptors():
    """Let this process hold both ends' worth of a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HALF_OPEN + 500
    if hard not in (-1, resource.RLIM_INFINITY) and hard < wanted:
        pytest.skip(f"this machine allows {hard} descriptors, and {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- slow clients --------------------------------------------------------------------------------------


def test_bytes_that_drip_do_not_stretch_a_step_of_the_handshake(server):
    """Each step of the handshake has its time, however often a byte comes: hello, proof and offer."""

    def in_hello(port, over):
        with call(port) as sock:
            return drip(sock, frame_of(hello()) * 9, over)

    def in_proof(port, over):
        with call(port) as sock:
            sock.sendall(frame_of(hello()))
            sock.recv(1 << 16)
            return drip(sock, frame_of(Proof(NO_PROOF)) * 9, over)

    def in_offer(port, over):
        with call(port) as sock:
            for message in (hello(), Proof(NO_PROOF)):
                sock.sendall(frame_of(message))
                sock.recv(1 << 16)
            return drip(sock, prefix_of(Kind.OFFER, bytes(MAX_HEADER_MANIFEST)) + bytes(1000), over)

    with besieged(server) as siege:
        dripping = [result for body in (in_hello, in_proof, in_offer) for result in siege.attack(body, 3)]
        siege.honest.reach(DURING)
        assert all(result.result(PATIENCE_S) for result in dripping), "the server ends each of them"
        siege.bounded()


def test_bytes_that_drip_into_the_handshake_of_tls_do_not_stretch_it(tls_server, authority):
    """A hello of TLS that never ends, byte by byte, with or without its first bytes, has the same time."""

    def in_record(port, over):
        with call(port) as sock:
            return drip(sock, b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb" + bytes(500), over)

    def in_silence(port, over):
        with call(port) as sock:
            return is_ended(sock)

    with besieged(tls_server, tls_ca=authority.file) as siege:
        slow = [*siege.attack(in_record, 3), *siege.attack(in_silence, 3)]
        siege.honest.reach(DURING)
        assert all(result.result(PATIENCE_S) for result in slow)
        siege.bounded()


# ---- many clients --------------------------------------------------------------------------------------


def test_a_thousand_half_open_connections_cost_little_and_keep_nobody_out(server, many_descriptors):
    """32 are served, 128 wait, the others are closed; one who wants to join meanwhile joins."""
    with besieged(server) as siege, contextlib.ExitStack() as silent:
        for _ in range(HALF_OPEN):
            silent.enter_context(call(siege.port))
        siege.bounded()
        siege.honest.reach(DURING)
        with worker.connect(
            server.address, Honest.variables(), role="evaluator", connect_timeout=PATIENCE_S
        ) as late:
            assert late.pull().step == DURING
        siege.bounded()
        silent.close()
    server.says("too many connections wait to be let in")


@pytest.mark.parametrize("finishes", [False, True])
def test_a_flood_of_hellos_slows_down_and_stops_nobody(server, finishes):
    """Those who hang up after the hello, and those who would read the answer and say no more."""

    def flood(port, over):
        count = 0
        while not over.is_set():
            with contextlib.suppress(OSError), call(port) as sock:
                sock.sendall(frame_of(hello()))
                count += bool(sock.recv(1 << 12)) if finishes else 1
        return count

    with besieged(server) as siege:
        floods = siege.attack(flood, 4)
        for step in range(BEFORE + 1, DURING + 1):
            siege.honest.reach(step)
            siege.bounded()
        siege.over.set()
        assert all(result.result(PATIENCE_S) for result in floods), "each of them struck"


def test_strangers_who_are_told_why_they_are_refused_count_as_strangers_until_they_are_gone(server):
    """The server listens on for a moment so that its words arrive: that must be no way to make it hold hundreds."""
    other_version = bytearray(frame_of(hello()))
    other_version[4:6] = (99).to_bytes(2, "little")
    with besieged(server) as siege, contextlib.ExitStack() as refused:
        socks = [refused.enter_context(call(siege.port)) for _ in range(100)]
        for sock in socks:
            sock.sendall(other_version)
        for sock in socks:
            assert sock.recv(4), "it is told"
            siege.bounded()
        siege.honest.reach(DURING)
        refused.close()


def test_offers_that_are_begun_and_never_finished_are_as_few_as_strangers(server):
    """Without tokens a proof costs nothing: who made no offer is a stranger; what he announces is not held."""

    def begin(port, over):
        with call(port) as sock:
            try:
                for message in (hello(), Proof(NO_PROOF)):
                    sock.sendall(frame_of(message))
                    sock.recv(1 << 16)
                sock.sendall(prefix_of(Kind.OFFER, bytes(MAX_HEADER_MANIFEST)) + bytes(1 << 16))
            except (ConnectionError, BrokenPipeError):  # it has waited longer than a client does
                return True
            return is_ended(sock)

    with besieged(server) as siege, ThreadPoolExecutor(3 * MAX_UNPROVEN) as crowd:
        begun = [crowd.submit(begin, siege.port, siege.over) for _ in range(3 * MAX_UNPROVEN)]
        siege.honest.reach(DURING)
        while not all(result.done() for result in begun):
            siege.bounded()
        assert all(result.result() for result in begun)


# ---- clients with the right to be there ----------------------------------------------------------------


@pytest.fixture
def quorum_server(processes):
    """Two of three pushes close a round, so whoever holds the third rank cannot hold it up."""
    return serve(
        processes,
        workers=3,
        quorum=WORKERS,
        steps=STEPS,
        heartbeat_timeout=3,
        heartbeat_interval=0.5,
        drain_timeout=1,
    )


def strike(link, message, payload, over, reads, struck):
    """Say the same again and again until the server ends the connection or the attack is over."""
    link.silence_s = 1.0  # a sender who is not listened to, looks whether it is over
    with contextlib.suppress(*ENDINGS):
        while not over.is_set():
            link.send(message, payload)
            if reads:
                link.receive()
                link.discard_payload()
            struck.release()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("what", ["push", "pull"])
def test_a_member_that_asks_without_end_costs_the_others_nothing(quorum_server, what, reads):
    """It pushes for steps that are not open, or pulls, and reads the answers or never one of them."""
    struck = threading.Semaphore(0)

    def member(port, over):
        with linked(port) as link:
            welcome = shake_hands(link, rank=2)
            push = Push(welcome.epoch, 10**6, 1, 1.0, None, 8), [bytes(LAYOUT.payload_bytes)]
            message, payload = push if what == "push" else (Pull(0), [])
            strike(link, message, payload, over, reads, struck)

    with besieged(quorum_server) as siege:
        siege.attack(member)
        for step in range(BEFORE + 1, DURING + 1):
            assert all(struck.acquire(timeout=PATIENCE_S) for _ in range(20))
            siege.honest.reach(step)
            siege.bounded()


def test_a_member_that_never_reads_is_cut_off_and_frees_what_it_held(quorum_server):
    """Its answers fill what the network holds; then it has the time that any silent peer has."""

    def member(port, over):
        with linked(port) as link:
            shake_hands(link, rank=2)
            link.silence_s = PATIENCE_S
            with contextlib.suppress(*ENDINGS):
                while not over.is_set():
                    link.send(Pull(0))
                return 0
            return 1

    with besieged(quorum_server) as siege:
        (cut_off,) = siege.attack(member)
        siege.honest.reach(DURING)
        assert cut_off.result(PATIENCE_S) == 1, "the server has ended the connection"
        siege.recovers()
    quorum_server.says(r"rank 2 .* is lost: .* in mid-transfer")


# ---- what is no handshake ------------------------------------------------------------------------------

NOISE = random.Random(7).randbytes(1 << 16)
STRAYS = {
    "a header of 4 GB": b"WMPS\x01\x00\x01\x00" + b"\xff" * 4 + bytes(8),
    "a payload of 2^64": b"WMPS\x01\x00\x01\x00\x10\x00\x00\x00" + b"\xff" * 8,
    "a byte too much": b"WMPS\x01\x00\x01\x00" + (MAX_HEADER_UNPROVEN + 1).to_bytes(4, "little") + bytes(8),
    "an offer first": prefix_of(Kind.OFFER, bytes(MAX_HEADER_MANIFEST)),
    "noise": NOISE,
    "zeros": bytes(1 << 16),
    "HTTP": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a pickle": pickle.dumps({"weights": [1.0] * 100}),
    "TLS": b"\x16\x03\x01\x01\xfa\x01\x00\x01\xf6\x03\x03" + bytes(500),
}


def stray(port, data):
    with call(port) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        return is_ended(sock)


def test_what_is_no_handshake_ends_its_own_connection_only(server):
    """Every length is judged before memory is taken, and nothing that comes is executed."""
    with besieged(server) as siege:
        for _ in range(5):
            assert {what: stray(siege.port, data) for what, data in STRAYS.items()} == dict.fromkeys(STRAYS, True)
            siege.bounded()
        siege.honest.reach(DURING)


def test_what_is_no_handshake_of_tls_ends_its_own_connection_only(tls_server, authority):
    """The same where TLS is spoken, and our own hello without TLS."""
    strays = STRAYS | {"a hello without TLS": frame_of(hello())}
    with besieged(tls_server, tls_ca=authority.file) as siege:
        for _ in range(3):
            assert {what: stray(siege.port, data) for what, data in strays.items()} == dict.fromkeys(strays, True)
            siege.bounded()
        siege.honest.reach(DURING)


@pytest.mark.parametrize("excess", [0, 1])
def test_a_header_of_a_stranger_may_be_of_so_many_bytes_and_no_more(server, excess):
    """Both sides of the limit: one is heard out (and is nonsense), the other is judged by its prefix."""
    size = MAX_HEADER_UNPROVEN + excess
    with besieged(server) as siege:
        with call(siege.port) as sock:
            sock.sendall(prefix_of(Kind.HELLO, bytes(size)))
            if not excess:
                sock.sendall(bytes(size + 64))
            assert is_ended(sock)
        siege.honest.reach(DURING)
    server.says("4097 bytes; 4096 are allowed" if excess else "cut off: (?!.*are allowed)")


# ---- wrong tokens --------------------------------------------------------------------------------------


@pytest.fixture
def token_server(processes, tmp_path):
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(f"* worker * {TOKEN}\n* evaluator * {TOKEN}\n")
    return serve(processes, workers=WORKERS, steps=STEPS, token_file=file)


def test_a_wrong_token_again_and_again_delays_its_address_and_locks_nobody_out(token_server):
    """The wait grows with each failure; with the right token one comes in, from the same address, meanwhile."""

    def guess(port, over):
        count = 0
        while not over.is_set():
            with contextlib.suppress(Refused):
                worker.connect(f"127.0.0.1:{port}", Honest.variables(), token=WRONG, connect_timeout=PATIENCE_S)
            count += 1
        return count

    with besieged(token_server, token=TOKEN) as siege:
        began = time.monotonic()
        for _ in range(FREE_FAILURES + 3):
            with pytest.raises(Refused, match="the token was not accepted"):
                worker.connect(token_server.address, Honest.variables(), token=WRONG)
        assert time.monotonic() - began >= FIRST_S + 2 * FIRST_S, "the last two had to wait"
        guesses = siege.attack(guess, 4)
        token_server.says("failed the proof", times=FREE_FAILURES + 5)
        siege.honest.reach(DURING)
        options = {"role": "evaluator", "token": TOKEN, "connect_timeout": PATIENCE_S}
        with worker.connect(token_server.address, Honest.variables(), **options) as late:
            assert late.pull().step == DURING
        siege.bounded()
        siege.over.set()
        assert all(result.result(PATIENCE_S) for result in guesses)


def test_a_client_that_answers_the_challenge_with_noise_gets_the_answer_of_a_wrong_token(token_server):
    """It learns nothing from how it fails."""
    answers = set()
    with besieged(token_server, token=TOKEN) as siege:
        for mac in (NO_PROOF, os.urandom(32), b"\xff" * 32):
            with linked(siege.port) as link:
                link.send(hello(role=Role.WORKER))
                assert isinstance(link.receive(), Challenge)
                link.send(Proof(mac))
                answer = link.receive()
                assert not isinstance(answer, ServerProof)
                answers.add((answer.code, answer.reason))
        siege.honest.reach(DURING)
    assert len(answers) == 1
