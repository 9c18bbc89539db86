"""The state machine: who may say what, when, how long, and nothing else."""

import hashlib

import pytest

import protocol.connection
from protocol.codec import encode_header
from protocol.connection import Connection, State
from protocol.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from protocol.frames import PREFIX_BYTES, Prefix
from protocol.messages import Heartbeat, Kind, Offer, Push, Refusal, RefusalCode, Role, Side, Values
from tests.unit.exchange import (
    LAYOUT,
    OPENING,
    SAMPLES,
    ConnectionPair,
    frame_of,
    hear,
    other,
    padded,
    payload_bytes,
    prefix_of,
)

WORKER, SERVER = Side.WORKER, Side.SERVER

EXPECTED: dict[State, dict[tuple[Side, Kind], State]] = {
    State.AWAIT_HELLO: {(WORKER, Kind.HELLO): State.AWAIT_CHALLENGE},
    State.AWAIT_CHALLENGE: {(SERVER, Kind.CHALLENGE): State.AWAIT_PROOF},
    State.AWAIT_PROOF: {(WORKER, Kind.PROOF): State.AWAIT_SERVER_PROOF},
    State.AWAIT_SERVER_PROOF: {(SERVER, Kind.SERVER_PROOF): State.AWAIT_OFFER},
    State.AWAIT_OFFER: {(WORKER, Kind.OFFER): State.AWAIT_WELCOME},
    State.AWAIT_WELCOME: {
        (SERVER, Kind.WELCOME): State.OPEN,
        (WORKER, Kind.HEARTBEAT): State.AWAIT_WELCOME,
        (SERVER, Kind.HEARTBEAT): State.AWAIT_WELCOME,
        (SERVER, Kind.ENDED): State.CLOSED,
    },
    State.OPEN: {
        (WORKER, Kind.PULL): State.OPEN,
        (WORKER, Kind.PUSH): State.OPEN,
        (WORKER, Kind.INITIAL): State.OPEN,
        (WORKER, Kind.HEARTBEAT): State.OPEN,
        (WORKER, Kind.LOGITS): State.OPEN,
        (WORKER, Kind.TEST_LOGITS): State.OPEN,
        (WORKER, Kind.BYE): State.CLOSED,
        (SERVER, Kind.WEIGHTS): State.OPEN,
        (SERVER, Kind.VALUES): State.OPEN,
        (SERVER, Kind.ASK_INITIAL): State.OPEN,
        (SERVER, Kind.HEARTBEAT): State.OPEN,
        (SERVER, Kind.ENDED): State.CLOSED,
    },
    State.CLOSED: {},
}
"""What a worker and its server may say; a refusal may be said by the server wherever it is not over."""

for _state in State:
    if _state is not State.CLOSED:
        EXPECTED[_state][SERVER, Kind.REFUSED] = State.CLOSED


def said(state, sender, role=Role.WORKER):
    """Let each kind be said by one side in one state; yield the kind, the pair, and the state it should lead to."""
    for kind in Kind:
        yield kind, ConnectionPair(role).open(until=state), EXPECTED[state].get((sender, kind))


def test_the_whole_handshake():
    """Six frames, alternating, and both sides are open and know the role."""
    pair = ConnectionPair()
    states = []
    for sender, kind in OPENING:
        assert pair.send(sender, SAMPLES[kind]) == SAMPLES[kind]
        states.append(pair.sides[SERVER].state)
    assert states == list(State)[1:7]
    assert {side.role for side in pair.sides.values()} == {Role.WORKER}


def test_a_step_and_the_end():
    pair = ConnectionPair().open()
    for sender, kind in [
        (WORKER, Kind.PULL),
        (SERVER, Kind.HEARTBEAT),
        (SERVER, Kind.ASK_INITIAL),
        (WORKER, Kind.HEARTBEAT),
        (WORKER, Kind.INITIAL),
        (SERVER, Kind.VALUES),
        (WORKER, Kind.PUSH),
        (SERVER, Kind.VALUES),
        (WORKER, Kind.BYE),
    ]:
        assert pair.send(sender, SAMPLES[kind]) == SAMPLES[kind]
    assert pair.sides[SERVER].state is State.CLOSED


@pytest.mark.parametrize("sender", Side)
@pytest.mark.parametrize("state", State)
def test_what_may_be_sent_in_each_state_and_what_may_not(state, sender):
    """Every (state, side, kind): the table lets it through to the right state, or it is our own mistake."""
    for kind, pair, leads_to in said(state, sender):
        connection = pair.sides[sender]
        if leads_to is None or kind is Kind.REPORT:
            with pytest.raises(LocalProtocolError):
                connection.send(SAMPLES[kind])
            assert connection.state is state, f"a refused {kind.name} moved the state"
        else:
            assert connection.send(SAMPLES[kind]) == frame_of(SAMPLES[kind])
            assert connection.state is leads_to


@pytest.mark.parametrize("sender", Side)
@pytest.mark.parametrize("state", State)
def test_what_may_be_heard_in_each_state_and_what_may_not(state, sender):
    """Every (state, side, kind): heard, or refused at the prefix, before a byte of header or payload is read."""
    for kind, pair, leads_to in said(state, sender):
        connection = pair.sides[other(sender)]
        frame = frame_of(SAMPLES[kind])
        if leads_to is None and kind is not Kind.REPORT:
            with pytest.raises(RemoteProtocolError, match=rf"sent {kind.name} in state '{state}'"):
                connection.feed(frame[:PREFIX_BYTES])
            assert connection.state is state
        elif kind is not Kind.REPORT:
            assert connection.feed(frame[:PREFIX_BYTES]) is None
            assert connection.needed == len(frame) - PREFIX_BYTES
            assert connection.feed(frame[PREFIX_BYTES:]) == SAMPLES[kind]
            assert connection.state is leads_to


# ---- roles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "kind", "allowed"),
    [
        (Role.WORKER, Kind.PUSH, True),
        (Role.WORKER, Kind.INITIAL, True),
        (Role.WORKER, Kind.REPORT, False),
        (Role.EVALUATOR, Kind.PUSH, False),
        (Role.EVALUATOR, Kind.INITIAL, False),
        (Role.EVALUATOR, Kind.REPORT, True),
        (Role.WORKER, Kind.LOGITS, True),
        (Role.EVALUATOR, Kind.LOGITS, False),
        (Role.VALIDATOR, Kind.LOGITS, False),
        (Role.WORKER, Kind.TEST_LOGITS, True),
        (Role.EVALUATOR, Kind.TEST_LOGITS, False),
        (Role.WORKER, Kind.PULL, True),
        (Role.EVALUATOR, Kind.PULL, True),
        (Role.EVALUATOR, Kind.BYE, True),
    ],
)
def test_roles_on_both_sides(role, kind, allowed):
    """Only a worker pushes, only an evaluator reports; the server holds everybody to the role of the hello."""
    pair = ConnectionPair(role).open()
    if allowed:
        assert pair.send(WORKER, SAMPLES[kind]) == SAMPLES[kind]
        return
    with pytest.raises(LocalProtocolError, match=rf"role {role} cannot send {kind.name}"):
        pair.sides[WORKER].send(SAMPLES[kind])
    with pytest.raises(RemoteProtocolError, match=rf"sent {kind.name}, which is not for role {role}"):
        pair.sides[SERVER].feed(frame_of(SAMPLES[kind])[:PREFIX_BYTES])  # before a byte of header is read
    assert pair.sides[SERVER].payload_bytes == 0


# ---- padding -------------------------------------------------------------------------------------------


def speaker_of(kind):
    """The pair where this kind is due, and who says it."""
    state = next(state for state, heard in EXPECTED.items() if any(said is kind for _, said in heard))
    sender = next(side for side, said in EXPECTED[state] if said is kind) if kind is not Kind.REPORT else WORKER
    return ConnectionPair(Role.EVALUATOR if kind is Kind.REPORT else Role.WORKER).open(until=state), sender


EXPECTED_KINDS = [kind for kind in Kind if kind is not Kind.REPORT]


@pytest.mark.parametrize("kind", EXPECTED_KINDS)
def test_every_frame_is_filled_with_zeros_to_a_multiple_of_64(kind):
    """With a payload or without: so whatever comes next in the stream is aligned as well."""
    pair, sender = speaker_of(kind)
    frame = pair.sides[sender].send(SAMPLES[kind])
    header = encode_header(SAMPLES[kind])
    assert len(frame) % 64 == 0
    assert len(frame) - PREFIX_BYTES - len(header) < 64
    assert frame[:PREFIX_BYTES] == Prefix(kind, len(header), payload_bytes(kind)).pack(), "padding is not announced"
    assert frame[PREFIX_BYTES:] == header + bytes(len(frame) - PREFIX_BYTES - len(header))


@pytest.mark.parametrize("characters", range(0, 130))
def test_headers_of_any_length_end_at_a_multiple_of_64(characters):
    """All remainders occur; the receiver asks for header and padding at once and finds the message in it."""
    pair = ConnectionPair().open()
    message = Heartbeat("x" * characters)
    frame = pair.sides[WORKER].send(message)
    server = pair.sides[SERVER]
    assert len(frame) % 64 == 0
    assert server.feed(frame[:PREFIX_BYTES]) is None
    assert server.needed == len(frame) - PREFIX_BYTES
    assert server.feed(frame[PREFIX_BYTES:]) == message


@pytest.mark.parametrize("kind", EXPECTED_KINDS)
def test_what_the_padding_holds_is_ignored(kind):
    """Even bytes that would be msgpack: the header ends where the prefix says."""
    for filler in (b"\xff", b"\x80", b"\xc1"):
        pair, sender = speaker_of(kind)
        listener = pair.sides[other(sender)]
        assert hear(listener, frame_of(SAMPLES[kind], filler)) == [SAMPLES[kind]]
        assert listener.needed == PREFIX_BYTES


def test_a_frame_without_its_padding_is_not_whole():
    connection = Connection(SERVER)
    frame = frame_of(SAMPLES[Kind.HELLO])
    connection.feed(frame[:PREFIX_BYTES])
    bare = frame[PREFIX_BYTES : PREFIX_BYTES + len(encode_header(SAMPLES[Kind.HELLO]))]
    assert len(bare) < connection.needed
    with pytest.raises(LocalProtocolError, match=f"{connection.needed} bytes are needed, not {len(bare)}"):
        connection.feed(bare)


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.CHALLENGE])
def test_the_digest_of_the_hellos_covers_the_padding(kind):
    """Frames are hashed just as they were sent: padding changed on the way is ignored, and shows in the proof."""
    assert frame_of(SAMPLES[kind], b"\1") != frame_of(SAMPLES[kind]), "there is padding to change"
    digests = []
    for filler in (b"\0", b"\1"):
        server, worker = Connection(SERVER), Connection(WORKER)
        said = worker.send(SAMPLES[Kind.HELLO])
        heard = frame_of(SAMPLES[Kind.HELLO], filler if kind is Kind.HELLO else b"\0")
        assert hear(server, heard) == [SAMPLES[Kind.HELLO]]
        answer = server.send(SAMPLES[Kind.CHALLENGE])
        arrived = frame_of(SAMPLES[Kind.CHALLENGE], filler if kind is Kind.CHALLENGE else b"\0")
        assert hear(worker, arrived) == [SAMPLES[Kind.CHALLENGE]]
        assert server.hellos_digest == hashlib.sha256(heard + answer).digest()
        assert worker.hellos_digest == hashlib.sha256(said + arrived).digest()
        digests.append((server.hellos_digest, worker.hellos_digest))
    assert digests[0][0] == digests[0][1]
    assert digests[1][0] != digests[1][1]


# ---- limits, judged at the prefix ----------------------------------------------------------------------

KB, MB = 1 << 10, 1 << 20
HEADER_LIMITS = [
    (State.AWAIT_HELLO, WORKER, Kind.HELLO, 4 * KB),
    (State.AWAIT_CHALLENGE, SERVER, Kind.CHALLENGE, 4 * KB),
    (State.AWAIT_CHALLENGE, SERVER, Kind.REFUSED, 4 * KB),
    (State.AWAIT_PROOF, WORKER, Kind.PROOF, 4 * KB),
    (State.AWAIT_SERVER_PROOF, SERVER, Kind.SERVER_PROOF, 4 * KB),
    (State.AWAIT_OFFER, WORKER, Kind.OFFER, 16 * MB),
    (State.AWAIT_OFFER, SERVER, Kind.REFUSED, 64 * KB),
    (State.AWAIT_WELCOME, SERVER, Kind.WELCOME, 16 * MB),
    (State.AWAIT_WELCOME, SERVER, Kind.HEARTBEAT, 64 * KB),
    (State.OPEN, WORKER, Kind.PULL, 64 * KB),
    (State.OPEN, WORKER, Kind.PUSH, 64 * KB),
    (State.OPEN, SERVER, Kind.VALUES, 64 * KB),
    (State.OPEN, SERVER, Kind.ENDED, 64 * KB),
]


@pytest.mark.parametrize(("state", "sender", "kind", "limit"), HEADER_LIMITS)
def test_headers_on_both_sides_of_the_limit(state, sender, kind, limit):
    """A header of the limit is asked for, with its padding; one byte more is refused before any of it is."""
    connection = ConnectionPair().open(until=state).sides[other(sender)]
    assert connection.feed(Prefix(kind, limit, payload_bytes(kind)).pack()) is None
    assert connection.needed == limit + 44
    connection = ConnectionPair().open(until=state).sides[other(sender)]
    with pytest.raises(RemoteProtocolError, match=rf"{kind.name} header of {limit + 1} bytes; {limit} are allowed"):
        connection.feed(frame_prefix(kind, limit + 1))
    assert connection.needed == PREFIX_BYTES


def frame_prefix(kind, header_bytes, payload=None, version=1):
    """A prefix with lengths that our own code would not send."""
    payload = payload_bytes(kind) if payload is None else payload
    return b"WMPS" + b"".join(
        number.to_bytes(width, "little")
        for number, width in ((version, 2), (kind, 2), (header_bytes, 4), (payload, 8))
    )


def test_our_own_headers_obey_the_same_limits():
    """A refusal before the proof must fit 4 KB; one after it may be longer."""
    refusal = Refusal(RefusalCode.MANIFEST, "x" * 4096)
    with pytest.raises(LocalProtocolError, match="header of 4121 bytes is too long"):
        ConnectionPair().open(until=State.AWAIT_PROOF).sides[SERVER].send(refusal)
    assert ConnectionPair().open(until=State.AWAIT_OFFER).send(SERVER, refusal) == refusal
    with pytest.raises(LocalProtocolError, match="too long"):
        ConnectionPair().open(until=State.AWAIT_OFFER).sides[WORKER].send(Offer(bytes(16 * MB), 1))


@pytest.mark.parametrize(
    ("sender", "kind", "expected"),
    [
        (WORKER, Kind.PUSH, LAYOUT.payload_bytes),
        (WORKER, Kind.INITIAL, LAYOUT.values_bytes),
        (SERVER, Kind.VALUES, LAYOUT.values_bytes),
        (WORKER, Kind.LOGITS, 128),
        (SERVER, Kind.WEIGHTS, 64),
        (WORKER, Kind.TEST_LOGITS, 192),
        (WORKER, Kind.PULL, 0),
        (WORKER, Kind.BYE, 0),
        (SERVER, Kind.HEARTBEAT, 0),
        (SERVER, Kind.REFUSED, 0),
    ],
)
def test_a_payload_is_exactly_the_layouts_or_refused_at_the_prefix(sender, kind, expected):
    assert LAYOUT.values_bytes == 128
    assert LAYOUT.payload_bytes == 192
    header = encode_header(SAMPLES[kind])
    for wrong in {0, 1, expected - 1, expected + 1, 128, 192, 2**62, 2**64 - 1} - {expected, -1}:
        connection = ConnectionPair().open().sides[other(sender)]
        with pytest.raises(
            RemoteProtocolError, match=rf"{kind.name} payload of {wrong} bytes; it must be {expected}"
        ):
            connection.feed(frame_prefix(kind, len(header), wrong))
    connection = ConnectionPair().open().sides[other(sender)]
    assert hear_one(connection, padded(prefix_of(kind, header) + header)) == SAMPLES[kind]
    assert connection.payload_bytes == expected


def hear_one(connection, frame):
    connection.feed(frame[:PREFIX_BYTES])
    return connection.feed(frame[PREFIX_BYTES:])


def test_a_payload_cannot_be_sent_before_a_layout_is_agreed():
    pair = ConnectionPair().open()
    for side, kind in ((WORKER, Kind.PUSH), (WORKER, Kind.INITIAL), (SERVER, Kind.VALUES)):
        pair.sides[side].layout = None
        with pytest.raises(LocalProtocolError, match="before a layout is agreed"):
            pair.sides[side].send(SAMPLES[kind])


@pytest.mark.parametrize(
    ("sender", "kind"), [(WORKER, Kind.LOGITS), (SERVER, Kind.WEIGHTS), (WORKER, Kind.TEST_LOGITS)]
)
def test_what_only_some_modes_have_must_have_been_agreed_upon(sender, kind):
    """Neither side says it, nor takes it, not even without a payload."""
    pair = ConnectionPair().open()
    for side in pair.sides.values():
        side.agree(LAYOUT)
    with pytest.raises(LocalProtocolError, match="was not agreed upon"):
        pair.sides[sender].send(SAMPLES[kind])
    with pytest.raises(RemoteProtocolError, match=f"sent {kind.name}, which this mode does not have"):
        pair.sides[other(sender)].feed(frame_prefix(kind, len(encode_header(SAMPLES[kind])), 0))


# ---- driving it wrongly, and broken peers --------------------------------------------------------------


def test_the_next_frame_waits_for_the_payload():
    connection = ConnectionPair().open().sides[SERVER]
    hear_one(connection, frame_of(SAMPLES[Kind.PUSH]))
    with pytest.raises(LocalProtocolError, match="payload is due"):
        connection.feed(bytes(PREFIX_BYTES))
    connection.payload_received()
    assert hear(connection, frame_of(SAMPLES[Kind.PULL])) == [SAMPLES[Kind.PULL]]


@pytest.mark.parametrize("size", [0, 1, PREFIX_BYTES - 1, PREFIX_BYTES + 1])
def test_feed_takes_exactly_what_is_needed(size):
    with pytest.raises(LocalProtocolError, match=f"20 bytes are needed, not {size}"):
        Connection(SERVER).feed(bytes(size))


def test_an_empty_header_is_refused():
    """No message has an empty header: even one without fields is an empty map of one byte."""
    connection = ConnectionPair().open().sides[SERVER]
    assert connection.feed(frame_prefix(Kind.BYE, 0)) is None
    with pytest.raises(RemoteProtocolError, match="not valid"):
        connection.feed(bytes(connection.needed))


@pytest.mark.parametrize("kind", [0, 20, 65_535])
def test_an_unknown_kind_is_refused_at_the_prefix(kind):
    with pytest.raises(RemoteProtocolError, match=f"unknown kind {kind}"):
        ConnectionPair().open().sides[SERVER].feed(frame_prefix(kind, 1, 0))


def test_another_version_names_both_and_can_still_be_answered():
    """The newer side learns why it was turned away: a refusal may follow a broken hello."""
    connection = Connection(SERVER)
    with pytest.raises(VersionMismatch, match="version 2, this side version 1"):
        connection.feed(frame_prefix(Kind.HELLO, 10, version=2))
    worker = ConnectionPair().open(until=State.AWAIT_CHALLENGE).sides[WORKER]
    refusal = Refusal(RefusalCode.VERSION, "version 1 only")
    assert hear(worker, connection.send(refusal)) == [refusal]


@pytest.mark.parametrize(
    "broken",
    [b"GET / HTTP/1.1\r\n\r\n--", prefix_of(Kind.BYE, b"\x80"), padded(prefix_of(Kind.HELLO, b"\xc1") + b"\xc1")],
)
def test_nothing_is_heard_after_a_broken_frame(broken):
    """Garbage, a frame out of turn and an invalid header all end the hearing."""
    connection = Connection(SERVER)
    with pytest.raises(RemoteProtocolError):
        hear(connection, broken)
    with pytest.raises(LocalProtocolError, match="dead"):
        hear(connection, frame_of(SAMPLES[Kind.HELLO]))
    assert connection.state is State.AWAIT_HELLO


def test_frames_in_one_stream_are_told_apart():
    """Ten pushes back to back, payloads between them, come out as ten."""
    pair = ConnectionPair().open()
    pushes = [Push(2**62, 0, seq, 0.5, None, 32) for seq in range(1, 11)]
    stream = b"".join(pair.sides[WORKER].send(push) + bytes(LAYOUT.payload_bytes) for push in pushes)
    assert hear(pair.sides[SERVER], stream) == pushes


def test_frames_that_cross_are_no_fault():
    """Both sides may speak at once while the connection is open: here heartbeats, a push and values cross."""
    pair = ConnectionPair().open()
    up = [pair.sides[WORKER].send(Heartbeat()), pair.sides[WORKER].send(SAMPLES[Kind.PUSH]) + bytes(192)]
    down = [pair.sides[SERVER].send(Heartbeat()), pair.sides[SERVER].send(SAMPLES[Kind.VALUES]) + bytes(128)]
    assert hear(pair.sides[SERVER], b"".join(up)) == [Heartbeat(), SAMPLES[Kind.PUSH]]
    assert [type(m) for m in hear(pair.sides[WORKER], b"".join(down))] == [Heartbeat, Values]


@pytest.mark.parametrize("end", [Kind.ENDED, Kind.REFUSED])
def test_a_message_on_its_way_does_not_open_a_connection_that_has_just_ended(monkeypatch, end):
    """A heartbeat's thread is in the middle of sending when another hears the end: closed stays closed."""
    worker = ConnectionPair().open().sides[WORKER]

    def encode_while_the_end_is_heard(message):
        assert hear(worker, frame_of(SAMPLES[end])) == [SAMPLES[end]]
        return encode_header(message)

    monkeypatch.setattr(protocol.connection, "encode_header", encode_while_the_end_is_heard)
    worker.send(Heartbeat())
    assert worker.state is State.CLOSED
