"""A connection on a channel: whole messages over a socket, sent from several threads, received by one."""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from protocol.connection import Connection
from protocol.deadlines import GRACE_S, Deadline, Patience
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import Message, Side
from protocol.tls import Unsecured, begins_tls
from protocol.transport import Channel, Wake

RECEIVE_BLOCK = 1 << 22
"""Payloads are received in blocks of this size: asked for all at once, the kernel takes twice as long."""

HEADER_BLOCK = 64 << 10
"""Headers are received in blocks of this size: 20 bytes of a stranger must not make us take 16 MB."""

HANDSHAKE_S = 10.0
"""Time for each step of the handshake."""


class Intake(Protocol):
    """Takes a payload block by block, and looks at each while it is in the cache."""

    @property
    def block_ends(self) -> Sequence[int]:
        """Ascending ends of the blocks, in bytes; the last is that of the payload."""

    def received(self, end: int) -> None:
        """Take note of a block that has been received; of those that `drain` has received it knows."""

    def drain(self, descriptor: int, start: int) -> int:
        """Receive by itself from the socket that has a descriptor, whole blocks as long as they come.

        Args:
            descriptor: of a socket that blocks.
            start: the byte of the payload that is due.

        Returns:
            The byte that is due now; `start` if nothing came, for whatever reason.
        """


class Link:
    """One peer: its channel, its protocol state, and when it last said something.

    Attributes:
        channel: the bytes.
        connection: the state machine.
        heard_at: monotonic time of the last bytes received.
        spoke_at: monotonic time of the last bytes sent.
    """

    def __init__(self, channel: Channel, side: Side, silence_s: float = HANDSHAKE_S) -> None:
        self.channel = channel
        self.connection = Connection(side)
        self.silence_s = silence_s
        self.heard_at = self.spoke_at = time.monotonic()
        self._sending = threading.Lock()

    @property
    def peer(self) -> str:
        """Address of the peer, for messages."""
        return self.channel.peer

    @property
    def certificate(self) -> bytes:
        """SHA-256 of the server's TLS certificate, which both proofs cover; empty without TLS."""
        return self.channel.certificate

    def secure(self, deadline: Deadline) -> None:
        """Make the channel secret and tamper-proof, before the first message; does nothing without TLS.

        Raises:
            Unsecured: server: no agreement with this client.
            Refused: client: the server is not the one that is meant, or speaks no TLS.
            NetworkError: the connection broke, or the deadline has passed.
        """
        self.channel.secure(Patience(0, self.silence_s, deadline.left_s, has_begun=False))
        self.heard_at = time.monotonic()

    def send(
        self,
        message: Message,
        payload: Sequence[memoryview | bytes] = (),
        midway: Callable[[], object] | None = None,
    ) -> None:
        """Send a message and its payload as one frame.

        Args:
            message: what to say.
            payload: flat buffers of bytes, in order; together exactly what the layout says.
            midway: called when half of the payload has been sent.

        Raises:
            LocalProtocolError: this side may not say this here, or not with this payload; nothing was sent.
            NetworkError: the peer is gone, or takes no bytes or too few.
        """
        with self._sending:
            announced = self.connection.payload_of(message.KIND)
            size_bytes = sum(map(len, payload))
            if not all(map(_is_flat, payload)):
                raise LocalProtocolError(f"a {message.KIND.name} payload must be sent as flat buffers of bytes")
            if size_bytes != announced:
                raise LocalProtocolError(
                    f"a {message.KIND.name} payload of {size_bytes} bytes cannot be sent; it must be {announced}"
                )
            buffers = [self.connection.send(message), *payload]
            if midway is not None:
                first, buffers = _split(buffers, len(buffers[0]) + size_bytes // 2)
                self.channel.send(first, Patience(size_bytes, self.silence_s))
                midway()
            self.channel.send(buffers, Patience(size_bytes, self.silence_s))
            self.spoke_at = time.monotonic()

    def send_if_quiet(self, message: Message, quiet_s: float) -> None:
        """Send a small message unless something was sent within `quiet_s`, or is being sent right now."""
        if time.monotonic() - self.spoke_at < quiet_s or not self._sending.acquire(blocking=False):
            return
        try:
            self.channel.send([self.connection.send(message)], Patience(0, self.silence_s))
            self.spoke_at = time.monotonic()
        finally:
            self._sending.release()

    def wait(self, timeout_s: float, wake: Wake | None = None) -> bool:
        """Wait for the first byte of a frame; False when the time is over or `wake` was set."""
        return self.channel.wait(timeout_s, wake)

    def receive(self, deadline: Deadline | None = None) -> Message:
        """Receive one message, without its payload.

        Args:
            deadline: when the frame must be whole; the silence limit and a minimum rate alone if None.

        Raises:
            NetworkError: the peer closed, fell silent or is too slow.
            RemoteProtocolError: it said what it may not say here; `Unsecured` if it speaks TLS where we do not.
        """
        # The peer may be silent before a frame, and then has its time for the prefix.
        total_s = self.silence_s + GRACE_S if deadline is None else deadline.left_s
        patience = Patience(0, self.silence_s, total_s, has_begun=False)
        while True:
            piece = self._receive_piece(self.connection.needed, patience)
            try:
                message = self.connection.feed(bytes(piece))
            except RemoteProtocolError as error:
                if begins_tls(piece):
                    raise self._met_tls(error) from error
                raise
            if message is not None:
                return message
            if deadline is None and self.connection.needed > HEADER_BLOCK:
                # One with a manifest may take as long as its size allows.
                patience = Patience(self.connection.needed, self.silence_s)

    def _receive_piece(self, size: int, patience: Patience) -> bytearray:
        """Receive `size` bytes; memory grows with what has come, not with what was announced."""
        piece = bytearray()
        while True:
            block = bytearray(min(size - len(piece), HEADER_BLOCK))
            self.channel.receive_into(memoryview(block), patience)
            self.heard_at = time.monotonic()
            piece = piece + block if piece else block
            if len(piece) == size:
                return piece

    def receive_payload(
        self, view: memoryview, intake: Intake | None = None, midway: Callable[[], object] | None = None
    ) -> None:
        """Receive the payload of the last message straight into place.

        Args:
            view: where it goes; exactly as long as the payload.
            intake: says in which blocks it is read, and looks at each; every `RECEIVE_BLOCK` if None.
            midway: called when half of the payload has been received.

        Raises:
            LocalProtocolError: `view`, or the blocks, are not as long as the payload; nothing was read.
            NetworkError: the peer closed, fell silent or is too slow.
        """
        due = self.connection.payload_bytes
        ends: Sequence[int] = range(RECEIVE_BLOCK, due + RECEIVE_BLOCK, RECEIVE_BLOCK)
        if intake is not None:
            ends = intake.block_ends
        if view.nbytes != due or (intake is not None and due and ends[-1] != due):
            raise LocalProtocolError(
                f"a payload of {due} bytes cannot be received into {view.nbytes} bytes"
                + (f" in blocks up to {ends[-1]}" if intake is not None and ends else "")
            )
        patience = Patience(due, self.silence_s)
        descriptor = None if intake is None or midway is not None else self.channel.descriptor
        start = 0
        while start < due:
            if intake is not None and descriptor is not None:
                before, start = start, intake.drain(descriptor, start)
                if start > before:
                    self.heard_at = time.monotonic()
                    patience.moved()
                    patience.check(self.channel.peer)
                    continue  # there may be more; what keeps it from coming shows when nothing does
            end = ends[bisect_right(ends, start)]
            if midway is not None and end >= due // 2:
                self.channel.receive_into(view[start : due // 2], patience)
                midway()
                start, midway, patience = due // 2, None, Patience(due, self.silence_s)
            self.channel.receive_into(view[start:end], patience)
            self.heard_at = time.monotonic()
            if intake is not None:
                intake.received(end)
            start = min(end, due)
        self.connection.payload_received()

    def discard_payload(self) -> None:
        """Read the payload of the last message and forget it."""
        left = self.connection.payload_bytes
        patience = Patience(left, self.silence_s)
        scratch = memoryview(bytearray(min(left, RECEIVE_BLOCK)))
        while left:
            block = scratch[: min(left, RECEIVE_BLOCK)]
            self.channel.receive_into(block, patience)
            self.heard_at = time.monotonic()
            left -= block.nbytes
        self.connection.payload_received()

    def _met_tls(self, error: RemoteProtocolError) -> Unsecured:
        if self.connection.side is Side.WORKER:
            return Unsecured(f"{error}: it speaks TLS, so give --tls-ca or --tls-fingerprint")
        return Unsecured(
            f"{error}: it speaks TLS, and this server has no --tls-cert",
            answer="this server speaks no TLS: start it with --tls-cert and --tls-key, or call it without TLS",
        )

    def abort(self) -> None:
        """Cut the connection, from any thread."""
        self.channel.abort()

    def half_close(self) -> None:
        """Shut the sending side of the connection; what the peer sends can still be received."""
        self.channel.half_close()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection; `linger_s` lets the peer read our last words first."""
        with self._sending:  # another thread's heartbeat must not hit a descriptor that has been given away
            self.channel.close(linger_s)


Buffers = list[memoryview | bytes]


def _is_flat(buffer: memoryview | bytes) -> bool:
    """Say whether the length of a buffer is its number of bytes."""
    return type(buffer) is bytes or (isinstance(buffer, memoryview) and buffer.format == "B" and buffer.ndim == 1)


def _split(buffers: Sequence[memoryview | bytes], at: int) -> tuple[Buffers, Buffers]:
    """Part buffers into their first `at` bytes and the rest."""
    first, rest = Buffers(), Buffers()
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes:
            view = view.cast("B")
            first.append(view[: max(at, 0)])
            rest.append(view[max(at, 0) :])
            at -= view.nbytes
    return first, rest


M = TypeVar("M", bound=Message)


def expect(message: Message, kind: type[M]) -> M:
    """Return a message that must be of one kind.

    Raises:
        RemoteProtocolError: it is another.
    """
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"the peer sent {type(message).__name__} where {kind.__name__} was due")
    return message
