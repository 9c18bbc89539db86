"""The proof: what it covers, and which tokens may make one."""

import hashlib
import hmac

import pytest

from protocol.errors import ConfigurationError
from protocol.messages import Role, Side
from protocol.proof import MIN_TOKEN_CHARACTERS, NO_PROOF, check_token, prove, proves
from tests.unit.exchange import SAMPLES, ConnectionPair, Kind, State, hello

TOKEN = b"correct-horse-battery-staple"
WORKER_NONCE, SERVER_NONCE, HELLOS, CERTIFICATE = b"w" * 32, b"s" * 32, b"h" * 32, b"c" * 32
ARGUMENTS = (TOKEN, Side.WORKER, WORKER_NONCE, SERVER_NONCE, HELLOS, CERTIFICATE)


@pytest.mark.parametrize("certificate", [b"", CERTIFICATE])
@pytest.mark.parametrize("side", Side)
def test_a_proof_is_this_hmac(side, certificate):
    """The formula of the document, written out without our code."""
    message = (
        b"weighmaster proof 1\0" + str(side).encode() + b"\0" + WORKER_NONCE + SERVER_NONCE + HELLOS + certificate
    )
    expected = hmac.new(TOKEN, message, hashlib.sha256).digest()
    assert prove(TOKEN, side, WORKER_NONCE, SERVER_NONCE, HELLOS, certificate) == expected


@pytest.mark.parametrize("changed", range(6))
def test_a_proof_depends_on_each_of_its_inputs(changed):
    """Another token, side (reflection), nonce (replay), hello (identity) or certificate (relay) gives another."""
    arguments = list(ARGUMENTS)
    old = arguments[changed]
    arguments[changed] = Side.SERVER if isinstance(old, Side) else old[:-1] + b"!"
    assert not proves(prove(*arguments), prove(*ARGUMENTS))


def test_a_proof_proves_itself_and_zeros_prove_nothing():
    mac = prove(*ARGUMENTS)
    assert proves(mac, prove(*ARGUMENTS))
    assert len(mac) == len(NO_PROOF) == 32
    assert not proves(NO_PROOF, mac)


def test_both_sides_of_a_connection_hash_the_same_hellos():
    pair = ConnectionPair().open(until=State.AWAIT_PROOF)
    worker, server = pair.sides[Side.WORKER], pair.sides[Side.SERVER]
    assert worker.hellos_digest == server.hellos_digest
    frames = ConnectionPair()
    stream = frames.sides[Side.WORKER].send(SAMPLES[Kind.HELLO])
    frames.sides[Side.SERVER].feed(stream[:20])
    frames.sides[Side.SERVER].feed(stream[20:])
    stream += frames.sides[Side.SERVER].send(SAMPLES[Kind.CHALLENGE])
    assert worker.hellos_digest == hashlib.sha256(stream).digest()


def test_the_digest_does_not_move_after_the_challenge():
    pair = ConnectionPair().open(until=State.AWAIT_PROOF)
    before = pair.sides[Side.SERVER].hellos_digest
    pair.open()
    assert pair.sides[Side.SERVER].hellos_digest == before


def test_a_hello_changed_on_the_way_changes_the_digest():
    """Who turns a worker's hello into an evaluator's on the way leaves two sides with different digests."""
    pair = ConnectionPair()
    worker, server = pair.sides[Side.WORKER], pair.sides[Side.SERVER]
    worker.send(hello(Role.WORKER))
    forged = ConnectionPair().sides[Side.WORKER].send(hello(Role.EVALUATOR))
    server.feed(forged[:20])
    server.feed(forged[20:])
    assert worker.hellos_digest != server.hellos_digest


def test_tokens_on_both_sides_of_the_shortest():
    assert check_token("x" * MIN_TOKEN_CHARACTERS, "file") == b"x" * MIN_TOKEN_CHARACTERS
    with pytest.raises(
        ConfigurationError, match=r"tokens\.txt has 21 characters; at least 22.*the server's sub-command `token`"
    ):
        check_token("x" * (MIN_TOKEN_CHARACTERS - 1), "tokens.txt")


@pytest.mark.parametrize(
    "token", ["x" * 30 + " ", "x" * 30 + "\t", "x" * 30 + "ä", "x" * 30 + "\n", "x" * 30 + "\x7f"]
)
def test_tokens_are_printable_ascii_without_blanks(token):
    with pytest.raises(ConfigurationError, match="printable ASCII") as caught:
        check_token(token, "file")
    assert "xxx" not in str(caught.value), "an error must not show the secret"
