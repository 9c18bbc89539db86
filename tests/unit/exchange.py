"""Both sides of a connection in memory, and one valid message of each kind; shared by the protocol's tests."""

from protocol.codec import encode_header
from protocol.connection import TRANSITIONS, WITH_PAYLOAD, Connection, State
from protocol.frames import Prefix
from protocol.messages import (
    AskInitial,
    Bye,
    Challenge,
    Ended,
    Heartbeat,
    Hello,
    Initial,
    Kind,
    Logits,
    Message,
    Offer,
    Proof,
    Pull,
    Push,
    Refusal,
    RefusalCode,
    Report,
    Role,
    ServerProof,
    Side,
    Status,
    TestLogits,
    Values,
    Weights,
    Welcome,
)
from protocol.tensors import Layout, Manifest, SideSpec, VariableSpec

MANIFEST = Manifest((VariableSpec("dense/kernel", (3,), "float32"), VariableSpec("dense/bias", (), "float32")))
LAYOUT = Layout.of(MANIFEST, sides=(SideSpec("logits", (2, 2), "float32"),))
"""128 bytes of values and 64 of a side array, so the payloads of a push and of values differ."""


PAYLOADS = {Kind.LOGITS: 128, Kind.WEIGHTS: 64, Kind.TEST_LOGITS: 192}
"""What ensemble mode would agree upon beside the layout."""


def hello(role: Role = Role.WORKER) -> Hello:
    return Hello("site-north", "host-a", 0, role, incarnation=7, nonce=bytes(range(32)))


SAMPLES: dict[Kind, Message] = {
    message.KIND: message
    for message in (
        hello(),
        Challenge(bytes(range(32, 64)), token_required=True),
        Proof(b"p" * 32),
        ServerProof(b"s" * 32),
        Offer(MANIFEST.to_wire(), threads=2, seed=None),
        Welcome(
            epoch=2**62,
            step=0,
            steps=10,
            rank=0,
            name="site-north",
            seed=0,
            threads=2,
            workers=1,
            shards=1,
            mode="shared",
            codec="raw",
            heartbeat_interval=5.0,
            heartbeat_timeout=30.0,
            manifest=MANIFEST.to_wire(),
        ),
        Refusal(RefusalCode.RANK_TAKEN, "rank 0 is held by another"),
        Pull(min_step=0),
        Values(epoch=2**62, step=1, seq=1, applied=True, reason="", done=False),
        Push(epoch=2**62, step=0, seq=1, loss=0.5, accuracy=None, examples=32),
        AskInitial(),
        Initial(),
        Heartbeat("waiting for rank 1"),
        Report(epoch=2**62, step=1, loss=0.5, accuracy=0.25, examples=100),
        Bye(),
        Ended(Status.NO_PROGRESS, "rank 1 did not return"),
        Logits(epoch=2**62, step=0, seq=1, labels=b"l" * 16),
        Weights(epoch=2**62, step=0, seq=1),
        TestLogits(epoch=2**62, step=0),
    )
}

OPENING = (
    (Side.WORKER, Kind.HELLO),
    (Side.SERVER, Kind.CHALLENGE),
    (Side.WORKER, Kind.PROOF),
    (Side.SERVER, Kind.SERVER_PROOF),
    (Side.WORKER, Kind.OFFER),
    (Side.SERVER, Kind.WELCOME),
)


def payload_bytes(kind: Kind) -> int:
    """The size of a message's payload under `LAYOUT`."""
    if kind not in WITH_PAYLOAD:
        return PAYLOADS.get(kind, 0)
    return LAYOUT.payload_bytes if kind is Kind.PUSH else LAYOUT.values_bytes


def prefix_of(kind: Kind, header: bytes, payload: int | None = None) -> bytes:
    return Prefix(kind, len(header), payload_bytes(kind) if payload is None else payload).pack()


def padded(frame: bytes, filler: bytes = b"\0") -> bytes:
    """Prefix and header with the bytes that follow them; written out here, since the code may not test itself."""
    return frame + filler * ((64 - len(frame) % 64) % 64)


def frame_of(message: Message, filler: bytes = b"\0") -> bytes:
    """Prefix, header and padding, made without asking any state machine."""
    header = encode_header(message)
    return padded(prefix_of(message.KIND, header) + header, filler)


def hear(connection: Connection, stream: bytes) -> list[Message]:
    """Feed a stream to one side as a driver would, payloads skipped; what is too short for a frame is left."""
    messages = []
    position = 0
    while len(stream) - position >= connection.needed:
        piece = stream[position : position + connection.needed]
        position += len(piece)
        message = connection.feed(piece)
        if message is not None:
            messages.append(message)
            position += connection.payload_bytes
            connection.payload_received()
    return messages


class ConnectionPair:
    """A worker's and a server's connection; what one sends the other hears at once."""

    def __init__(self, role: Role = Role.WORKER) -> None:
        self.role = role
        self.sides = {side: Connection(side) for side in Side}

    def send(self, sender: Side, message: Message) -> Message:
        """Send, let the other side hear it, and check that both stand where the other does."""
        frame = self.sides[sender].send(message)
        ours, theirs = self.sides[sender], self.sides[other(sender)]
        (heard,) = hear(theirs, frame + bytes(payload_bytes(message.KIND)))
        assert theirs.state is ours.state
        return heard

    def open(self, until: State = State.OPEN) -> "ConnectionPair":
        """Go through the handshake as far as `until`; in `OPEN` both have agreed on `LAYOUT`."""
        for sender, kind in OPENING:
            state = self.sides[Side.WORKER].state
            if state is until:
                return self
            if (state, kind) not in TRANSITIONS:
                continue
            self.send(sender, hello(self.role) if kind is Kind.HELLO else SAMPLES[kind])
        for side in self.sides.values():
            side.agree(LAYOUT, PAYLOADS)
        if until is State.CLOSED:
            self.send(Side.WORKER, Bye())
        return self


def other(side: Side) -> Side:
    return Side.SERVER if side is Side.WORKER else Side.WORKER
