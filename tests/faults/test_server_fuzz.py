"""A whole server under bytes that mean harm, over many connections, with an honest run beside.

The default profile is quick and the same on every run. The long one looks further, at random:

    HYPOTHESIS_PROFILE=long pytest tests/faults/test_server_fuzz.py
"""

import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.messages import Bye, Heartbeat, Initial, Kind, Offer, Proof, Pull, Push, Report, Role
from protocol.proof import NO_PROOF
from protocol.tensors import Manifest, VariableSpec
from tests.faults.hardened import (
    DURING,
    LAYOUT,
    WORKERS,
    besieged,
    call,
    hello,
    is_ended,
    offer,
)
from tests.faults.runs import serve
from tests.faults.test_hardening import STRAYS, TOKEN
from tests.unit.exchange import frame_of
from tests.unit.test_fuzz_decoder import mutate, mutations

PROFILE = (
    settings.get_profile(os.environ["HYPOTHESIS_PROFILE"]) if "HYPOTHESIS_PROFILE" in os.environ else settings()
)
LONG = PROFILE.max_examples >= 10_000
CASES = 4000 if LONG else 150
TIMEOUT_S = 1800 if LONG else 240

ELSEWHERE = 2**62
"""No epoch of this server, but once in 2^63 runs: a push of it is never applied."""

PUSH = Push(ELSEWHERE, 3, 1, 0.5, None, 8)
HUGE = Manifest((VariableSpec("elsewhere", (2**20, 2**20), "float32"),))

VALID = (
    [frame_of(message) for message in (hello(), Proof(NO_PROOF), offer(), Pull(0), Pull(2**62), Heartbeat(), Bye())]
    + [frame_of(Report(ELSEWHERE, 1, 0.5, 0.25, 10)), frame_of(Offer(HUGE.to_wire(), 1))]
    + [frame_of(message) + bytes(LAYOUT.payload_bytes) for message in (PUSH, Initial())]
)
"""Frames that a client may send somewhere; the payloads are as this run's layout wants them."""

prefixes = st.builds(
    lambda version, kind, header, payload, rest: (
        b"WMPS"
        + version.to_bytes(2, "little")
        + kind.to_bytes(2, "little")
        + header.to_bytes(4, "little")
        + payload.to_bytes(8, "little")
        + rest
    ),
    st.sampled_from([1, 1, 1, 0, 2, 65_535]),
    st.integers(0, max(Kind) + 2),
    st.sampled_from([0, 1, 40, 112, 4096, 4097, 65_536, 2**24, 2**24 + 1, 2**32 - 1]),
    st.sampled_from([0, 64, LAYOUT.values_bytes, LAYOUT.payload_bytes, 2**63, 2**64 - 1]),
    st.binary(max_size=300),
)
pieces = st.one_of(
    st.sampled_from(VALID),
    st.builds(mutate, st.sampled_from(VALID), mutations),
    prefixes,
    st.binary(max_size=600),
    st.sampled_from(sorted(STRAYS.values())),
)
cases = st.fixed_dictionaries(
    {
        "steps": st.integers(0, 3),
        "role": st.sampled_from([Role.WORKER, Role.EVALUATOR, Role.VALIDATOR]),
        "rank": st.sampled_from([-1, WORKERS, WORKERS, 0, 7]),
        "stream": st.lists(pieces, max_size=5),
        "hangs_up": st.booleans(),
    }
)


def attempt(port, steps, role, rank, stream, hangs_up):
    """Shake hands so far, say what was drawn, and go, at once or when the server has ended it."""
    handshake = [hello(rank, role), Proof(NO_PROOF), offer()]
    with call(port) as sock:
        try:
            for message in handshake[:steps]:
                sock.sendall(frame_of(message))
                if not sock.recv(1 << 16):
                    return
            sock.sendall(b"".join(stream))
            if not hangs_up:
                sock.shutdown(socket.SHUT_WR)
        except TimeoutError as error:
            raise AssertionError("the server neither listens nor ends the connection") from error
        except OSError:  # it has ended the connection before all was said
            return
        if not hangs_up:
            assert is_ended(sock), "the server neither answers nor ends the connection"


def fuzzed(port):
    """Try so many cases; return how many were tried."""
    count = 0

    @settings(PROFILE, max_examples=CASES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(case=cases)
    def attack(case):
        nonlocal count
        count += 1
        attempt(port, **case)

    attack()
    return count


def assert_sound(server):
    """It lives, and has met no fault of its own."""
    assert server._process.poll() is None
    assert "Traceback" not in server.log
    assert "the server itself has failed" not in server.log


@pytest.mark.timeout(TIMEOUT_S)
def test_a_server_survives_whatever_its_clients_say(processes):
    """Strangers and members of every role say anything in any order; the honest run has exact values."""
    quick = {"heartbeat_interval": 0.2, "heartbeat_timeout": 20, "drain_timeout": 1}
    server = serve(processes, workers=WORKERS + 1, quorum=WORKERS, steps=8, **quick)
    with besieged(server) as siege:
        for step in (DURING - 1, DURING):
            assert fuzzed(siege.port) >= CASES / 2
            assert_sound(server)
            siege.honest.reach(step)
        siege.bounded()


@pytest.mark.timeout(TIMEOUT_S)
def test_a_server_with_tokens_survives_whatever_strangers_say(processes, tmp_path):
    """Nobody without the token gets as far as an offer, whatever he says."""
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(f"* worker * {TOKEN}\n")
    server = serve(processes, workers=WORKERS, steps=8, token_file=file)
    strangers = cases.map(lambda case: case | {"steps": min(case["steps"], 1)})

    # Few: those that fail the proof delay all that follow, and that is right.
    @settings(PROFILE, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(case=strangers)
    def attack(case):
        attempt(server.port, **case)

    with besieged(server, token=TOKEN) as siege:
        attack()
        assert_sound(server)
        siege.honest.reach(DURING)
    assert server.log.count("has joined") == WORKERS
