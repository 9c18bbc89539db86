"""The only module that opens sockets: blocking channels with deadlines, and the translation of OS errors.

A data socket blocks, with `SO_RCVTIMEO` and `SO_SNDTIMEO` of one second (a socket time-out of Python's would defeat
`MSG_WAITALL`); each expiry asks a `Patience` whether the peer has been silent, or too slow, for too long.
"""

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from protocol.addresses import Address, is_loopback
from protocol.deadlines import Deadline, Patience
from protocol.errors import ConfigurationError, ConnectionLost, NetworkError, WeighmasterError

TICK_S = 1.0
"""How long a blocking call may last before its patience is asked."""

MAX_BUFFERS = 512
"""Buffers handed to one `sendmsg`; the kernel refuses more than 1024."""

WAIT_FOR_ALL = int(socket.MSG_WAITALL)
"""To `recv`: return when everything has come, or nothing comes for the time-out of the socket."""

LOCAL_SEND_BYTES = 512 << 10
"""Send buffer that is asked for between processes of one machine, so that what is on its way stays in the cache.
On a network the kernel's own choice is better, which grows with the distance."""

BACKLOG = 128

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""With these no connection can be accepted for now, while the one that waits makes every poll return at once."""

LONGEST_POLL_MS = 2**31 - 1
"""The longest that `poll` can be told to wait, 24 days."""


class Channel(Protocol):
    """Bytes to and from one peer. Plain TCP and TLS stand behind this same interface.

    Attributes:
        peer: its address, for messages.
        certificate: SHA-256 of the server's TLS certificate, once it is known; empty without TLS.
    """

    peer: str
    certificate: bytes

    @property
    def descriptor(self) -> int | None:
        """The socket's, where its bytes are what the peer has said; None with TLS."""

    def secure(self, patience: Patience) -> None:
        """Shake hands, before anything else is sent or received; without TLS there is nothing to do."""

    def send(self, buffers: Sequence[memoryview | bytes], patience: Patience) -> None:
        """Send all buffers in order."""

    def receive_into(self, view: memoryview, patience: Patience) -> None:
        """Fill `view` completely."""

    def wait(self, timeout_s: float, wake: "Wake | None" = None) -> bool:
        """Wait until bytes can be read (True), or `wake` was set or time is over (False)."""

    def abort(self) -> None:
        """Cut the connection from any thread; a call that blocks on it ends with `ConnectionLost`."""

    def half_close(self) -> None:
        """Send nothing more, as the peer is told, while its bytes can still be received."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close; with `linger_s`, wait so long for the peer to close first, so that it reads our last words."""


class Wake:
    """An event that `Channel.wait` can wait for together with its socket."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the waiter; may be called from any thread, and often."""
        with contextlib.suppress(OSError):  # full: it is set already; closed: nobody waits any more
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget all wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Release the descriptors."""
        self._reader.close()
        self._writer.close()


class PlainChannel:
    """A TCP connection without encryption."""

    def __init__(self, sock: socket.socket, peer: str, congestion_control: str) -> None:
        self.peer = peer
        self.certificate = b""
        self._socket = sock
        sock.settimeout(None)
        tick = struct.pack("@ll", int(TICK_S), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_local = _ends_here(sock)
        _choose_congestion_control(sock, congestion_control, is_local)
        if is_local:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)  # or as much as it allows
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._woken_by: int | None = None  # a number, since the wake itself may be closed by the next wait

    @property
    def descriptor(self) -> int | None:
        """The socket's; whoever receives from it by itself must know that it blocks for a second at most."""
        return self._socket.fileno()

    def secure(self, patience: Patience) -> None:
        """Do nothing: there is no TLS here."""

    def send(self, buffers: Sequence[memoryview | bytes], patience: Patience) -> None:
        """Send all buffers, flat ones of bytes, in order; partial sends are resumed.

        Raises:
            ConnectionLost: the connection broke.
            PeerSilent: the peer takes no bytes, or too few.
        """
        rest: Sequence[memoryview | bytes] = buffers
        while rest:
            try:
                sent = self._socket.sendmsg(rest[:MAX_BUFFERS])
            except BlockingIOError:
                patience.check(self.peer)
                continue
            except OSError as error:
                raise self._lost(error) from error
            patience.moved()
            rest = _after(rest, sent)
            if rest:
                patience.check(self.peer)

    def receive_into(self, view: memoryview, patience: Patience) -> None:
        """Fill `view` completely.

        Raises:
            ConnectionLost: the connection broke or was closed, also in mid-frame.
            PeerSilent: the peer sends nothing, or too little.
        """
        got = 0
        while got < view.nbytes:
            try:
                count = self._socket.recv_into(view[got:], 0, WAIT_FOR_ALL)
            except BlockingIOError:
                patience.check(self.peer)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise ConnectionLost(f"{self.peer} closed the connection")
            got += count
            patience.moved()
            if got < view.nbytes:
                patience.check(self.peer)

    def receive_some(self, view: memoryview, patience: Patience) -> int:
        """Receive what there is, at least one byte, into `view`; return the number, 0 at the end of the stream.

        Raises:
            ConnectionLost: the connection broke.
            PeerSilent: the peer sends nothing.
        """
        while True:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                patience.check(self.peer)
                continue
            except OSError as error:
                raise self._lost(error) from error
            patience.moved()
            return count

    def wait(self, timeout_s: float, wake: Wake | None = None) -> bool:
        """Wait until bytes (or the end of the stream) can be read; `wake` or the time-out return False."""
        woken_by = None if wake is None else wake.fileno()
        if woken_by != self._woken_by:
            if self._woken_by is not None:
                self._poll.unregister(self._woken_by)
            if woken_by is not None:
                self._poll.register(woken_by, select.POLLIN)
            self._woken_by = woken_by
        try:
            ready = self._poll.poll(_milliseconds(timeout_s))
        except OSError as error:
            raise self._lost(error) from error
        if any(event & select.POLLNVAL for _, event in ready):
            raise ConnectionLost(f"the connection to {self.peer} was cut")
        return any(descriptor != woken_by for descriptor, _ in ready)

    def abort(self) -> None:
        """Cut the connection from any thread: the peer gets a reset, blocked calls here end."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def half_close(self) -> None:
        """Shut the sending side: the peer reads the end of the stream, and may go on sending."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; with `linger_s`, read and forget what still comes until the peer has closed.

        Closing with unread bytes would reset the connection and could destroy our last words on their way.
        """
        poll = select.poll()  # one of its own: a wake-up that was set must not end the wait for the peer
        with contextlib.suppress(OSError, ValueError):  # broken, or closed before
            poll.register(self._socket, select.POLLIN)
            self._socket.shutdown(socket.SHUT_WR)
            deadline = Deadline(linger_s)
            while not deadline.over and poll.poll(_milliseconds(deadline.left_s)):
                if not self._socket.recv(64 << 10):
                    break
        self._socket.close()

    def _lost(self, error: OSError) -> NetworkError:
        return ConnectionLost(f"the connection to {self.peer} broke: {error.strerror or error}")


def _after(buffers: Sequence[memoryview | bytes], sent: int) -> Sequence[memoryview | bytes]:
    """Return what is left of flat buffers after their first `sent` bytes."""
    if sent == sum(map(len, buffers)):  # nearly always
        return ()
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return ()


def _choose_congestion_control(sock: socket.socket, choice: str, is_local: bool) -> None:
    """Ask for a congestion control; `auto` asks for reno on loopback only, where pacing costs throughput."""
    name = choice
    if choice == "auto":
        name = "reno" if is_local else "system"
    if name == "system":
        return
    option = getattr(socket, "TCP_CONGESTION", None)
    try:
        if option is None:
            raise OSError("this system cannot choose it")
        sock.setsockopt(socket.IPPROTO_TCP, option, name.encode())
    except OSError as error:
        if choice != "auto":
            raise ConfigurationError(
                f"congestion control {name!r} is not available: {error.strerror or error}"
            ) from error


def _ends_here(sock: socket.socket) -> bool:
    try:
        return is_loopback(sock.getpeername()[0])
    except OSError:
        return False


def _milliseconds(timeout_s: float) -> int:
    """Return a time-out as `poll` takes it: not negative, which would be for ever, and within a C integer."""
    return int(min(max(timeout_s, 0.0) * 1000, LONGEST_POLL_MS))


def connect(address: Address, timeout_s: float, congestion_control: str = "auto") -> PlainChannel:
    """Open a connection, resolving the name anew.

    Raises:
        NetworkError: nobody listens there, the name is unknown, or the time is over; worth another attempt.
    """
    try:
        sock = socket.create_connection((address.host, address.port), timeout=max(timeout_s, 0.001))
    except socket.gaierror as error:
        raise NetworkError(f"the host name {address.host!r} cannot be resolved ({error.strerror})") from error
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise NetworkError(f"nobody answers at {address} ({reason})") from error
    try:
        if sock.getsockname() == sock.getpeername():  # the kernel may lend us the very port that nobody listens on
            raise NetworkError(f"nobody answers at {address} (the connection led back to this process)")
        return PlainChannel(sock, str(address), congestion_control)
    except OSError as error:
        sock.close()
        raise NetworkError(f"the connection to {address} broke at once ({error.strerror or error})") from error
    except WeighmasterError:
        sock.close()
        raise


class Listener:
    """A listening socket; `accept` never blocks longer than it is told."""

    def __init__(self, address: Address, congestion_control: str = "auto") -> None:
        """Bind and listen.

        Raises:
            ConfigurationError: the port is taken, or the address is not one of this machine.
        """
        self._congestion_control = congestion_control
        try:
            family, kind, proto, _, target = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigurationError(
                f"cannot listen on {address}: {reason}; give an address of this machine as --host"
            ) from error
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(target)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            cure = "choose another --port (0 takes any)"
            if error.errno == errno.EADDRNOTAVAIL:
                cure = "give an address of this machine as --host"
            raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}; {cure}") from error
        self._socket.setblocking(False)
        self.address = Address(*self._socket.getsockname()[:2])

    def accept(self, timeout_s: float, wake: Wake | None = None) -> PlainChannel | None:
        """Return the next connection, or None when the time is over or `wake` was set.

        Raises:
            NetworkError: this process has no descriptor left for it; worth another attempt after a while.
            ConfigurationError: the congestion control that was asked for is not available.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if wake is not None:
            poll.register(wake, select.POLLIN)
        if self._socket.fileno() not in dict(poll.poll(_milliseconds(timeout_s))):
            return None
        try:
            sock, peer = self._socket.accept()
        except OSError as error:
            if error.errno in SHORTAGES:
                raise NetworkError(f"a caller cannot be answered: {error.strerror}") from error
            return None  # the peer has gone already
        try:
            return PlainChannel(sock, str(Address(*peer[:2])), self._congestion_control)
        except OSError:
            sock.close()
            return None
        except ConfigurationError:
            sock.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
