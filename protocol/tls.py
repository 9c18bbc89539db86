"""TLS over a plain channel, behind the same interface.

OpenSSL works in memory (`ssl.MemoryBIO`) and the plain channel below moves its bytes. So deadlines, minimum rate
and cuts from another thread are those of every connection, and the lock round OpenSSL, which must not send and
receive at once, is never held while a call blocks.
"""

import contextlib
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from protocol.deadlines import Deadline, Patience
from protocol.errors import ConnectionLost, NetworkError, PeerSilent, RemoteProtocolError, WeighmasterError
from protocol.frames import MAGIC
from protocol.transport import TICK_S, PlainChannel, Wake

PIECE_BYTES = 256 << 10
"""Bytes that are encrypted at once, and received at once: 16 records, which stay in the cache."""

AHEAD_BYTES = 16 << 10
"""Bytes that `wait` decrypts to know whether there are any; what a record holds."""

RECORDS = (b"\x16\x03", b"\x15\x03")
"""How TLS begins: a handshake, or an alert, of any version."""


class Unsecured(RemoteProtocolError):
    """The two sides could not agree on TLS.

    Attributes:
        answer: what to tell the peer without TLS, when one of the two speaks none; empty: it has been told.
    """

    def __init__(self, reason: str, answer: str = "") -> None:
        super().__init__(reason)
        self.answer = answer


class Endpoint(Protocol):
    """What differs between the two sides of TLS."""

    def begin(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return OpenSSL's state of a new connection."""

    def identify(self, tls: ssl.SSLObject, peer: str) -> bytes:
        """Return the SHA-256 of the server's certificate; raise if it is not the one that is meant."""

    def met_plain(self, peer: str) -> WeighmasterError:
        """Return the error of a peer that speaks our protocol without TLS."""

    def failed(self, error: ssl.SSLError, peer: str, shaking_hands: bool) -> WeighmasterError:
        """Return what an error of OpenSSL means."""


def begins_tls(data: bytes | bytearray) -> bool:
    """Tell whether a peer's first bytes are of TLS."""
    return data.startswith(RECORDS)


class TlsChannel:
    """A TCP connection with TLS.

    One thread may send while another receives; any may abort. The stream's end is that of TCP, with or without
    TLS's own word for it: every frame says how long it is, and the last one that it is the last.
    """

    def __init__(self, below: PlainChannel, endpoint: Endpoint) -> None:
        self.peer = below.peer
        self.certificate = b""
        self._below = below
        self._endpoint = endpoint
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = endpoint.begin(self._incoming, self._outgoing)  # typeshed: `read` fills bytearrays only
        self._lock = threading.Lock()
        self._raw = memoryview(bytearray(PIECE_BYTES))
        self._ahead_buffer = memoryview(bytearray(AHEAD_BYTES))
        self._ahead = self._ahead_buffer[:0]
        self._end: WeighmasterError | None = None

    @property
    def descriptor(self) -> int | None:
        """None: the socket's bytes are not the peer's words."""
        return None

    def secure(self, patience: Patience) -> None:
        """Shake hands: agree on keys, check certificates.

        Raises:
            Unsecured: server: no agreement with this client.
            Refused: client: the server is not the one that is meant, or speaks no TLS.
            NetworkError: the connection broke, or the peer takes too long.
        """
        is_first = True
        while not self._shake(patience):
            count = self._fetch(patience, "in the TLS handshake")
            if is_first and MAGIC.startswith(bytes(self._raw[: min(count, len(MAGIC))])):
                raise self._endpoint.met_plain(self.peer)
            is_first = False
            patience.check(self.peer)
        # A client's own certificate is in what is still to be sent: it is not for a server that is not meant.
        self.certificate = self._endpoint.identify(self._tls, self.peer)
        self._flush(patience)

    def _shake(self, patience: Patience) -> bool:
        """Go on with the handshake as far as it goes; say whether it is done, but for what is to be sent."""
        try:
            with self._lock:
                self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            self._flush(patience)
            return False
        except ssl.SSLError as error:
            with contextlib.suppress(NetworkError):  # an alert tells the peer why
                self._flush(patience)
            raise self._endpoint.failed(error, self.peer, shaking_hands=True) from error

    def _flush(self, patience: Patience) -> None:
        with self._lock:
            data = self._outgoing.read()
        if data:
            self._below.send([data], patience)

    def send(self, buffers: Sequence[memoryview | bytes], patience: Patience) -> None:
        """Send all buffers in order; small ones are joined.

        Raises:
            ConnectionLost: the connection broke.
            PeerSilent: the peer takes no bytes, or too few.
        """
        for piece in _pieces(buffers):
            self._below.send([self._encrypt(piece)], patience)

    def _encrypt(self, piece: memoryview) -> bytes:
        done = 0
        with self._lock:
            try:
                while done < piece.nbytes:
                    done += self._tls.write(piece[done:])
            except ssl.SSLError as error:  # the other direction has failed before
                raise ConnectionLost(f"the connection to {self.peer} broke: {error.reason or error}") from error
            return self._outgoing.read()

    def receive_into(self, view: memoryview, patience: Patience) -> None:
        """Fill `view` completely.

        Raises:
            ConnectionLost: the connection broke or was closed, also in mid-frame, or its bytes were altered.
            PeerSilent: the peer sends nothing, or too little.
            Refused: client: the server has looked at our certificate and said no.
        """
        got = min(self._ahead.nbytes, view.nbytes)
        view[:got] = self._ahead[:got]
        self._ahead = self._ahead[got:]
        got += self._decrypt(view[got:])
        while got < view.nbytes:
            if self._end is not None:
                raise self._end
            self._fetch(patience)
            got += self._decrypt(view[got:])
            if got < view.nbytes:
                patience.check(self.peer)

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt what has been fetched into `view`; return the number of bytes."""
        got = 0
        if self._end is not None:
            raise self._end
        try:
            with self._lock:
                while got < view.nbytes:
                    count = self._tls.read(view.nbytes - got, view[got:])
                    if count == 0:
                        self._end = ConnectionLost(f"{self.peer} closed the connection")
                        break
                    got += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._end = self._endpoint.failed(error, self.peer, shaking_hands=False)
            self._end.__cause__ = error
        if self._end is not None and got == 0:
            raise self._end
        return got

    def _fetch(self, patience: Patience, when: str = "") -> int:
        """Receive some bytes from below; return their number."""
        count = self._below.receive_some(self._raw, patience)
        if count == 0:
            raise ConnectionLost(f"{self.peer} closed the connection{when and ' ' + when}")
        self._incoming.write(self._raw[:count])
        return count

    def wait(self, timeout_s: float, wake: Wake | None = None) -> bool:
        """Wait until bytes (or the end of the stream) can be read; `wake` or the time-out return False."""
        deadline = Deadline(timeout_s)
        while not self._ahead:
            try:
                self._ahead = self._ahead_buffer[: self._decrypt(self._ahead_buffer)]
                if not self._ahead:
                    if not self._below.wait(deadline.left_s, wake):
                        return False
                    self._fetch(Patience(0, TICK_S))
            except PeerSilent:  # there was nothing, after all
                continue
            except WeighmasterError as error:  # the next receive raises it
                self._end = error
                return True
        return True

    def abort(self) -> None:
        """Cut the connection from any thread: the peer gets a reset, blocked calls here end."""
        self._below.abort()

    def half_close(self) -> None:
        """Shut the sending side: the peer reads the end of the stream, and may go on sending."""
        self._below.half_close()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; with `linger_s`, read and forget what still comes until the peer has closed."""
        self._below.close(linger_s)


def _pieces(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview]:
    """Yield the bytes of all buffers in order, in pieces of `PIECE_BYTES` and a last one, copying little."""
    joined = bytearray()
    for buffer in buffers:
        rest = memoryview(buffer)
        if not rest.nbytes:
            continue
        rest = rest.cast("B")
        while rest.nbytes:
            head = rest[: PIECE_BYTES - len(joined)]
            rest = rest[head.nbytes :]
            if head.nbytes == PIECE_BYTES:
                yield head
                continue
            joined += head
            if len(joined) == PIECE_BYTES:
                yield memoryview(joined)
                joined = bytearray()
    if joined:
        yield memoryview(joined)
