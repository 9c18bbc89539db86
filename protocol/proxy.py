"""A TCP proxy that knows where frames begin: it cuts, delays, doubles, holds or swallows what it is told to.

It reads prefixes only, and passes on the bytes that it got. A fault fires once, and says so.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol.addresses import Address
from protocol.errors import ConfigurationError, RemoteProtocolError
from protocol.frame_faults import Action, Fault, FrameFaults, Way
from protocol.frames import PREFIX_BYTES, Prefix
from protocol.messages import Kind

BLOCK_BYTES = 1 << 18
"""Frames are passed on in blocks of this size."""

MAX_KEPT_BYTES = 4 << 30
"""A frame that is doubled or held is kept in memory as a whole; a larger one is not."""

CONNECT_S = 10.0
"""How long a connection to the server may take."""


class FaultProxy:
    """Listens on a loopback port and passes everything on to a server, except what faults strike.

    As a context manager it leaves no thread and no socket.

    Args:
        to: the server.
        faults: what is to happen.
        port: 0 takes any that is free.
        say: told of each fault that fires, in a line; called from threads of the proxy, one at a time.

    Attributes:
        address: where it listens.

    Raises:
        ConfigurationError: the port is taken, or two faults strike the same frame.
    """

    def __init__(
        self, to: Address, *faults: Fault, port: int = 0, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._to = to
        self._faults = FrameFaults(faults)
        self._say = say
        self._lock = threading.Condition()
        self._fired: set[Fault] = set()
        self._held: list[tuple[Fault, memoryview]] = []
        self._connections: list[_Connection] = []
        self._timers: list[threading.Timer] = []
        self._open = {way: threading.Event() for way in Way}
        self._closing = threading.Event()
        self._server_missed = False
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on port {port}: {error.strerror or error}; choose another --port (0 takes any)"
            ) from error
        self.address = Address(*self._listener.getsockname()[:2])
        self._accepting = threading.Thread(target=self._accept, name="proxy")
        self.heal()

    # ---- for whoever runs it ---------------------------------------------------------------------------

    @property
    def seen(self) -> dict[Kind, int]:
        """Frames of each kind so far, over all connections."""
        with self._lock:
            return dict(self._faults.seen)

    @property
    def fired(self) -> frozenset[Fault]:
        """The faults that have fired."""
        with self._lock:
            return frozenset(self._fired)

    def await_fired(self, fault: Fault, timeout_s: float) -> bool:
        """Wait until a fault has fired; False when the time is over."""
        with self._lock:
            return self._lock.wait_for(lambda: fault in self._fired, timeout_s)

    def swallow(self, *ways: Way) -> None:
        """Become a black hole: bytes are taken and not passed on, not even the end of a connection."""
        with self._lock:
            for way in ways if not self._closing.is_set() else ():
                self._open[way].clear()

    def heal(self, *ways: Way) -> None:
        """Pass everything on again (all ways if none is named); what was sent meanwhile arrives late."""
        for way in ways or tuple(Way):
            self._open[way].set()

    def __enter__(self) -> "FaultProxy":
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closing.set()
            connections, timers = list(self._connections), list(self._timers)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for timer in timers:
            timer.cancel()
            timer.join()
        for connection in connections:
            connection.cut()
        self.heal()
        self._accepting.join()
        for connection in self._connections:
            connection.join()

    # ---- for its connections ---------------------------------------------------------------------------

    def strike(self, kind: Kind) -> Fault | None:
        """Count a frame; return the fault that strikes it."""
        with self._lock:
            return self._faults.strike(kind)

    def report(self, fault: Fault, text: str) -> None:
        """Note that a fault has fired, and say what it did."""
        with self._lock:
            self._say(f"fired: {fault.text} ({text})")
            self._fired.add(fault)
            self._lock.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than this proxy lasts."""
        self._closing.wait(seconds)

    def await_open(self, way: Way) -> None:
        """Wait while bytes of this way are swallowed."""
        self._open[way].wait()

    def blackhole(self, fault: Fault) -> None:
        """Swallow what a fault says, as long as it says."""
        self.swallow(*fault.ways)
        if fault.seconds is None:
            return
        timer = threading.Timer(fault.seconds, self._heal_after, [fault])
        with self._lock:
            if not self._closing.is_set():
                self._timers.append(timer)
                timer.start()

    def _heal_after(self, fault: Fault) -> None:
        self.heal(*fault.ways)
        with self._lock:
            self._say(f"healed: {fault.text}")

    def hold(self, fault: Fault, frame: memoryview) -> None:
        """Keep a frame until a later connection is welcomed."""
        with self._lock:
            self._held.append((fault, frame))

    def deliver(self, connection: "_Connection") -> None:
        """Give a connection that is being welcomed the frames that were kept, ahead of all that it says."""
        with self._lock:
            held, self._held = self._held, []
        for fault, frame in held:
            connection.pass_on(Way.UP, frame)
            with self._lock:
                self._say(f"delivered: {fault.text}")

    # ---- connections come ------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                downstream, _ = self._listener.accept()
            except OSError:
                return
            upstream = self._reach_server()
            if upstream is None:  # the worker finds out as it would without a proxy
                downstream.close()
                continue
            connection = _Connection(self, upstream, downstream)
            with self._lock:
                self._connections = [other for other in self._connections if not other.is_over()]
                self._connections.append(connection)
                closing = self._closing.is_set()
            connection.start()
            if closing:
                connection.cut()

    def _reach_server(self) -> socket.socket | None:
        try:
            upstream = socket.create_connection((self._to.host, self._to.port), timeout=CONNECT_S)
            if (
                upstream.getsockname() == upstream.getpeername()
            ):  # the kernel may lend us the port nobody listens on
                upstream.close()
                raise ConnectionRefusedError("the connection led back to this process")
        except (OSError, UnicodeError) as error:
            if not self._server_missed:
                reason = getattr(error, "strerror", None) or error
                with self._lock:
                    self._say(f"nobody answers at {self._to} ({reason}); whoever calls meanwhile is sent away")
            self._server_missed = True
            return None
        self._server_missed = False
        return upstream


class _Connection:
    """One proxied connection: a thread for each way."""

    def __init__(self, proxy: FaultProxy, upstream: socket.socket, downstream: socket.socket) -> None:
        self._proxy = proxy
        self._sockets = {Way.UP: upstream, Way.DOWN: downstream}
        self._sending = {way: threading.Lock() for way in Way}
        upstream.settimeout(None)
        for end in (upstream, downstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [threading.Thread(target=self._pump, args=(way,), name=f"proxy {way.name}") for way in Way]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def is_over(self) -> bool:
        """Tell whether both ways have ended, and release the sockets if so."""
        if any(thread.is_alive() for thread in self._threads):
            return False
        self.join()
        return True

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for end in self._sockets.values():
            end.close()

    def cut(self) -> None:
        """Cut both sides as a crashed machine in between would: whoever is left gets a reset."""
        for end in self._sockets.values():
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def pass_on(self, way: Way, *data: memoryview | bytes) -> None:
        """Send bytes, with nothing in between."""
        with self._sending[way]:
            self._send(way, *data)

    def _send(self, way: Way, *data: memoryview | bytes) -> None:
        self._proxy.await_open(way)
        with contextlib.suppress(OSError):  # the receiver is gone; the sender is told by the other way's end
            for piece in data:
                self._sockets[way].sendall(piece)

    def _pump(self, way: Way) -> None:
        source = self._sockets[Way.DOWN if way is Way.UP else Way.UP]
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._handle(way, source)
        self._proxy.await_open(way)
        with contextlib.suppress(OSError):
            self._sockets[way].shutdown(socket.SHUT_WR)

    def _handle(self, way: Way, source: socket.socket) -> None:
        """Read the next frame and pass it on, or do to it what a fault says.

        Raises:
            EOFError: the sender has ended.
        """
        prefix = bytearray(PREFIX_BYTES)
        got = _fill(source, memoryview(prefix))
        try:
            if got < PREFIX_BYTES:
                raise RemoteProtocolError("the connection ends")
            sizes = Prefix.unpack(bytes(prefix))
            kind = Kind(sizes.kind)
        except (RemoteProtocolError, ValueError):  # no frame, which is passed on as it is
            self._relay(way, source, bytes(prefix[:got]), None)
            raise EOFError from None
        header_end = PREFIX_BYTES + sizes.header_bytes + sizes.padding_bytes
        frame = _Frame(way, source, bytes(prefix), header_end, header_end + sizes.payload_bytes)
        fault = self._proxy.strike(kind)
        if fault is not None:
            self._suffer(fault, frame)
            return
        if kind is Kind.WELCOME:
            self._proxy.deliver(self)
        self._relay_frame(frame)

    def _suffer(self, fault: Fault, frame: "_Frame") -> None:
        proxy, size = self._proxy, frame.size
        match fault.action:
            case Action.CUT:
                passes = fault.passes_bytes(frame.header_end, size)
                self._relay(frame.way, frame.source, frame.prefix[:passes], max(0, passes - PREFIX_BYTES))
                proxy.report(fault, f"{passes} of {size} bytes passed on")
                self.cut()
            case Action.DELAY:
                seconds = fault.seconds or 0.0
                proxy.report(fault, f"{size} bytes wait {seconds:g} s")
                proxy.pause(seconds)
                self._relay_frame(frame)
            case Action.DOUBLE | Action.HOLD if size > MAX_KEPT_BYTES:
                proxy.report(fault, f"not done: {size} bytes are too many to keep; passed on once")
                self._relay_frame(frame)
            case Action.DOUBLE:
                whole = frame.read()
                self.pass_on(frame.way, whole, whole)
                proxy.report(fault, f"{size} bytes passed on twice")
            case Action.HOLD:
                proxy.hold(fault, frame.read())
                proxy.report(fault, f"{size} bytes kept until a later connection is welcomed")
            case Action.SWALLOW:
                frame.discard()
                proxy.report(fault, f"{size} bytes not passed on")
            case Action.BLACKHOLE:
                proxy.blackhole(fault)
                how_long = "" if fault.seconds is None else f" for {fault.seconds:g} s"
                proxy.report(fault, f"nothing passes {' and '.join(fault.ways)}{how_long}")
                self._relay_frame(frame)

    def _relay_frame(self, frame: "_Frame") -> None:
        self._relay(frame.way, frame.source, frame.prefix, frame.size - PREFIX_BYTES)

    def _relay(self, way: Way, source: socket.socket, head: bytes, left: int | None) -> None:
        """Pass on `head`, and so many bytes of what follows (None: all).

        Raises:
            EOFError: the sender ended before.
        """
        with self._sending[way]:
            self._send(way, head)
            for block in _blocks(source, left):
                self._send(way, block)


@dataclass(frozen=True)
class _Frame:
    """A frame of which only the prefix has been read.

    Attributes:
        way: where it goes.
        source: where the rest of it comes from.
        prefix: its first 20 bytes.
        header_end: bytes before the payload.
        size: bytes of the whole.
    """

    way: Way
    source: socket.socket
    prefix: bytes
    header_end: int
    size: int

    def read(self) -> memoryview:
        """Read the rest and return the whole."""
        whole = memoryview(bytearray(self.size))
        whole[:PREFIX_BYTES] = self.prefix
        if _fill(self.source, whole[PREFIX_BYTES:]) < self.size - PREFIX_BYTES:
            raise EOFError
        return whole

    def discard(self) -> None:
        """Read the rest and forget it."""
        for _ in _blocks(self.source, self.size - PREFIX_BYTES):
            pass


def _fill(source: socket.socket, view: memoryview) -> int:
    """Fill `view`; return how many bytes came before the sender ended."""
    got = 0
    while got < view.nbytes:
        count = source.recv_into(view[got:])
        if count == 0:
            break
        got += count
    return got


def _blocks(source: socket.socket, left: int | None) -> Iterator[memoryview]:
    """Yield the next bytes as they come, so many of them (None: until the sender ends).

    Raises:
        EOFError: the sender ended before.
    """
    block = memoryview(bytearray(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES)))
    while left is None or left > 0:
        count = source.recv_into(block if left is None else block[: min(left, BLOCK_BYTES)])
        if count == 0:
            raise EOFError
        yield block[:count]
        left = None if left is None else left - count
