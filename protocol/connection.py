"""One connection as a pure state machine: bytes in, messages out; messages in, bytes out.

It opens no socket and reads no clock. Whoever drives it asks `needed`, brings exactly that many bytes to `feed`,
and gets a message when one is whole. A payload never passes through it: after a message with `payload_bytes` the
driver moves those bytes straight into place and says `payload_received`.
"""

import hashlib
from collections.abc import Mapping
from enum import StrEnum

from protocol import frames
from protocol.codec import decode_header, encode_header
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.frames import PREFIX_BYTES, Prefix
from protocol.messages import MESSAGES, Hello, Kind, Message, Role, Side
from protocol.tensors import Layout


class State(StrEnum):
    """Where a connection stands; one state serves both sides, since the handshake alternates."""

    AWAIT_HELLO = "await hello"
    AWAIT_CHALLENGE = "await challenge"
    AWAIT_PROOF = "await proof"
    AWAIT_SERVER_PROOF = "await server proof"
    AWAIT_OFFER = "await offer"
    AWAIT_WELCOME = "await welcome"
    OPEN = "open"
    CLOSED = "closed"


TRANSITIONS: dict[tuple[State, Kind], State] = {
    (State.AWAIT_HELLO, Kind.HELLO): State.AWAIT_CHALLENGE,
    (State.AWAIT_CHALLENGE, Kind.CHALLENGE): State.AWAIT_PROOF,
    (State.AWAIT_PROOF, Kind.PROOF): State.AWAIT_SERVER_PROOF,
    (State.AWAIT_SERVER_PROOF, Kind.SERVER_PROOF): State.AWAIT_OFFER,
    (State.AWAIT_OFFER, Kind.OFFER): State.AWAIT_WELCOME,
    (State.AWAIT_WELCOME, Kind.WELCOME): State.OPEN,
    (State.AWAIT_WELCOME, Kind.HEARTBEAT): State.AWAIT_WELCOME,
    (State.AWAIT_WELCOME, Kind.ENDED): State.CLOSED,
    (State.OPEN, Kind.PULL): State.OPEN,
    (State.OPEN, Kind.VALUES): State.OPEN,
    (State.OPEN, Kind.PUSH): State.OPEN,
    (State.OPEN, Kind.ASK_INITIAL): State.OPEN,
    (State.OPEN, Kind.INITIAL): State.OPEN,
    (State.OPEN, Kind.HEARTBEAT): State.OPEN,
    (State.OPEN, Kind.REPORT): State.OPEN,
    (State.OPEN, Kind.LOGITS): State.OPEN,
    (State.OPEN, Kind.WEIGHTS): State.OPEN,
    (State.OPEN, Kind.TEST_LOGITS): State.OPEN,
    (State.OPEN, Kind.BYE): State.CLOSED,
    (State.OPEN, Kind.ENDED): State.CLOSED,
} | {(state, Kind.REFUSED): State.CLOSED for state in State if state is not State.CLOSED}
"""What may be said when, and where it leads; anything else ends the connection."""

SENDERS: dict[Kind, Side | None] = {kind: cls.SENDER for kind, cls in MESSAGES.items()}
"""Who may say it; None: both."""

ROLES: dict[Kind, tuple[Role, ...]] = {
    Kind.PUSH: (Role.WORKER, Role.VALIDATOR),
    Kind.INITIAL: (Role.WORKER, Role.VALIDATOR),
    Kind.REPORT: (Role.EVALUATOR,),
    Kind.LOGITS: (Role.WORKER,),
    Kind.TEST_LOGITS: (Role.WORKER,),
}
"""Messages that only these roles may send."""

WITH_PAYLOAD = frozenset({Kind.PUSH, Kind.VALUES, Kind.INITIAL})

OPTIONAL = frozenset({Kind.LOGITS, Kind.WEIGHTS, Kind.TEST_LOGITS})
"""Messages, with a payload, that only some modes have: what was agreed says which, and of how many bytes."""

PROVEN = frozenset({State.AWAIT_OFFER, State.AWAIT_WELCOME, State.OPEN})
"""States in which the peer has shown that it holds the token."""


class Connection:
    """One side of a connection.

    Attributes:
        state: where it stands.
        role: the role in the hello, once there was one.
        layout: set with `agree` when the manifest is known; no payload may travel before.
        payloads: bytes of payload of the optional messages that were agreed upon.
        payload_bytes: bytes of payload that must be read before the next frame; 0 if none are due.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self.state = State.AWAIT_HELLO
        self.role: Role | None = None
        self.layout: Layout | None = None
        self.payloads: Mapping[Kind, int] = {}
        self.payload_bytes = 0
        self._prefix: Prefix | None = None
        self._prefix_data = b""
        self._broken = False
        self._hellos = hashlib.sha256()

    @property
    def hellos_digest(self) -> bytes:
        """SHA-256 over the hello frame and the challenge frame, which both proofs cover."""
        return self._hellos.digest()

    def agree(self, layout: Layout, payloads: Mapping[Kind, int] | None = None) -> None:
        """Fix the layout: from now on payloads of exactly its size may travel.

        Args:
            layout: of the values and of a push.
            payloads: bytes of payload of each optional message that may be said; None for none.
        """
        self.layout = layout
        self.payloads = payloads or {}

    # ---- bytes in, messages out ------------------------------------------------------------------------

    @property
    def needed(self) -> int:
        """Number of bytes that the next call of `feed` must bring."""
        if self._prefix is None:
            return PREFIX_BYTES
        return self._prefix.header_bytes + self._prefix.padding_bytes

    def feed(self, data: bytes) -> Message | None:
        """Take the next `needed` bytes; return a message when they complete one.

        Raises:
            RemoteProtocolError: the peer may not say this here; the connection is dead.
        """
        if self.payload_bytes or self._broken:
            raise LocalProtocolError("a payload is due before the next frame, or the connection is dead")
        if len(data) != self.needed:
            raise LocalProtocolError(f"{self.needed} bytes are needed, not {len(data)}")
        try:
            if self._prefix is None:
                self._prefix = self._judge(Prefix.unpack(data))
                self._prefix_data = data
                return None
            prefix, self._prefix = self._prefix, None
            message = decode_header(prefix.kind, data[: prefix.header_bytes])
        except RemoteProtocolError:
            self._broken = True  # nothing more is heard, but a refusal may still be said
            raise
        self.payload_bytes = prefix.payload_bytes
        self._advance(message, self._prefix_data, data)
        return message

    def payload_received(self) -> None:
        """Say that the payload of the last message has been read."""
        self.payload_bytes = 0

    def _judge(self, prefix: Prefix) -> Prefix:
        peer = Side.SERVER if self.side is Side.WORKER else Side.WORKER
        if prefix.kind not in Kind._value2member_map_:
            raise RemoteProtocolError(f"the peer sent a message of unknown kind {prefix.kind}")
        kind = Kind(prefix.kind)
        if (self.state, kind) not in TRANSITIONS or SENDERS[kind] not in (None, peer):
            raise RemoteProtocolError(f"the peer sent {kind.name} in state '{self.state}'")
        if kind in ROLES and self.role not in ROLES[kind]:
            raise RemoteProtocolError(f"the peer sent {kind.name}, which is not for role {self.role}")
        if kind in OPTIONAL and kind not in self.payloads:
            raise RemoteProtocolError(f"the peer sent {kind.name}, which this mode does not have")
        limit = self.header_limit(kind)
        if prefix.header_bytes > limit:
            raise RemoteProtocolError(
                f"the peer announced a {kind.name} header of {prefix.header_bytes} bytes; {limit} are allowed"
            )
        expected = self.payload_of(kind)
        if prefix.payload_bytes != expected:
            raise RemoteProtocolError(
                f"the peer announced a {kind.name} payload of {prefix.payload_bytes} bytes; it must be {expected}"
            )
        return prefix

    def header_limit(self, kind: Kind) -> int:
        """Return the bytes that a header of this kind may have in the present state."""
        if kind in (Kind.OFFER, Kind.WELCOME):
            return frames.MAX_HEADER_MANIFEST
        return frames.MAX_HEADER if self.state in PROVEN else frames.MAX_HEADER_UNPROVEN

    def payload_of(self, kind: Kind) -> int:
        """Return the bytes of payload that follow a message of this kind."""
        if kind in OPTIONAL:
            return self.payloads.get(kind, 0)
        if kind not in WITH_PAYLOAD or self.layout is None:
            return 0
        return self.layout.payload_bytes if kind is Kind.PUSH else self.layout.values_bytes

    # ---- messages in, bytes out ------------------------------------------------------------------------

    def send(self, message: Message) -> bytes:
        """Return prefix, header and padding of a message; its payload, if it has one, must follow.

        Raises:
            LocalProtocolError: this side may not say this here.
        """
        kind = message.KIND
        if (self.state, kind) not in TRANSITIONS or SENDERS[kind] not in (None, self.side):
            raise LocalProtocolError(f"the {self.side} cannot send {kind.name} in state '{self.state}'")
        if kind in ROLES and self.role not in ROLES[kind]:
            raise LocalProtocolError(f"role {self.role} cannot send {kind.name}")
        if kind in OPTIONAL and kind not in self.payloads:
            raise LocalProtocolError(f"{kind.name} was not agreed upon and cannot be sent")
        if kind in WITH_PAYLOAD and self.layout is None:
            raise LocalProtocolError(f"{kind.name} cannot be sent before a layout is agreed")
        header = encode_header(message)
        if len(header) > self.header_limit(kind):
            raise LocalProtocolError(f"a {kind.name} header of {len(header)} bytes is too long")
        prefix = Prefix(kind, len(header), self.payload_of(kind))
        frame = prefix.pack() + header + bytes(prefix.padding_bytes)
        self._advance(message, frame)
        return frame

    def _advance(self, message: Message, *frame: bytes) -> None:
        if message.KIND in (Kind.HELLO, Kind.CHALLENGE):
            for piece in frame:
                self._hellos.update(piece)
        if isinstance(message, Hello):
            self.role = message.role
        # One thread may send while another receives the end: what leads nowhere must not write the old state again.
        before = self.state
        leads_to = TRANSITIONS.get((before, message.KIND), State.CLOSED)
        if leads_to is not before:
            self.state = leads_to
