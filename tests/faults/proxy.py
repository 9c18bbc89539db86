"""A TCP proxy that knows where frames begin: it cuts, doubles, holds or swallows exactly what it is told to.

It reads prefixes only, so the bytes that it passes on are those that it got. A fault fires once, and says so.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from enum import Enum

from protocol.frames import PREFIX_BYTES, Prefix
from protocol.messages import Kind
from tests.integration.processes import PATIENCE_S


class Way(Enum):
    """Direction of the bytes."""

    UP = "from the worker to the server"
    DOWN = "from the server to the worker"


class Fault:
    """What happens to the `number`-th frame of a kind, counted from 0 over all connections; it fires once."""

    def __init__(self, kind: Kind, number: int) -> None:
        self.kind = kind
        self.number = number
        self.fired = threading.Event()

    def strike(self, connection: "_Connection", way: Way, frame: bytes) -> None:
        """Do to the frame what this fault does, instead of passing it on."""
        raise NotImplementedError

    def await_fired(self) -> None:
        """Wait until it has fired."""
        assert self.fired.wait(PATIENCE_S), f"{type(self).__name__} of {self.kind.name} {self.number} has not fired"


class Cut(Fault):
    """Passes on the first bytes of the frame and then cuts the connection on both sides.

    `at` says how many, given the bytes before the payload and those of the whole frame.
    """

    def __init__(self, kind: Kind, number: int, at: Callable[[int, int], int]) -> None:
        super().__init__(kind, number)
        self.at = at
        self.passed = -1

    def strike(self, connection: "_Connection", way: Way, frame: bytes) -> None:
        prefix = Prefix.unpack(frame[:PREFIX_BYTES])
        self.passed = self.at(len(frame) - prefix.payload_bytes, len(frame))
        connection.pass_on(way, frame[: self.passed])
        connection.cut()


class Double(Fault):
    """Passes the frame on twice."""

    def strike(self, connection: "_Connection", way: Way, frame: bytes) -> None:
        connection.pass_on(way, frame + frame)


class HoldUntilWelcome(Fault):
    """Keeps the frame back and passes it on once a later connection is welcomed, ahead of all that it says."""

    def __init__(self, kind: Kind, number: int) -> None:
        super().__init__(kind, number)
        self.frame = b""
        self.delivered = threading.Event()

    def strike(self, connection: "_Connection", way: Way, frame: bytes) -> None:
        self.frame = frame

    def welcomed(self, connection: "_Connection") -> None:
        if self.frame and not self.delivered.is_set():
            connection.pass_on(Way.UP, self.frame)
            self.delivered.set()


class Proxy:
    """Listens on a port of its own and passes everything on to a server, except what faults strike.

    As a context manager it leaves no thread and no socket.
    """

    def __init__(self, port: int, *faults: Fault) -> None:
        self.server_port = port
        self.faults = faults
        self.open = {way: threading.Event() for way in Way}
        self.lock = threading.Lock()
        self.seen: dict[Kind, int] = {}
        self._connections: list[_Connection] = []
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="proxy")
        self.heal()

    def swallow(self, *ways: Way) -> None:
        """Become a black hole: bytes are taken and not passed on, not even the end of a connection."""
        for way in ways:
            self.open[way].clear()

    def heal(self) -> None:
        """Pass everything on again; what was sent meanwhile arrives late, as TCP has it."""
        for event in self.open.values():
            event.set()

    def fault_for(self, kind: Kind) -> Fault | None:
        """Count a frame; return the fault that strikes it."""
        with self.lock:
            number = self.seen.get(kind, 0)
            self.seen[kind] = number + 1
        return next((fault for fault in self.faults if (fault.kind, fault.number) == (kind, number)), None)

    def _accept(self) -> None:
        while True:
            try:
                downstream, _ = self._listener.accept()
            except OSError:
                return
            try:
                upstream = socket.create_connection(("127.0.0.1", self.server_port), timeout=PATIENCE_S)
            except OSError:  # no server there: the worker finds out as it would without a proxy
                downstream.close()
                continue
            connection = _Connection(self, upstream, downstream)
            with self.lock:
                self._connections.append(connection)
                closing = self._closing
            connection.start()
            if closing:
                connection.cut()

    def __enter__(self) -> "Proxy":
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self._closing = True
            connections = list(self._connections)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.cut()
        self.heal()
        self._accepting.join()
        for connection in self._connections:
            connection.join()


class _Connection:
    """One proxied connection: a thread for each way."""

    def __init__(self, proxy: Proxy, upstream: socket.socket, downstream: socket.socket) -> None:
        self.proxy = proxy
        self.sockets = {Way.UP: upstream, Way.DOWN: downstream}
        self._sending = {way: threading.Lock() for way in Way}
        upstream.settimeout(None)
        for end in (upstream, downstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [threading.Thread(target=self._pump, args=(way,), name=f"proxy {way.name}") for way in Way]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for end in self.sockets.values():
            end.close()

    def cut(self) -> None:
        """Cut both sides as a crashed machine in between would: whoever is left gets a reset."""
        for end in self.sockets.values():
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def pass_on(self, way: Way, data: bytes) -> None:
        with self._sending[way], contextlib.suppress(OSError):
            self.sockets[way].sendall(data)

    def _pump(self, way: Way) -> None:
        source = self.sockets[Way.DOWN if way is Way.UP else Way.UP]
        with contextlib.suppress(OSError, EOFError):
            while True:
                frame = self._read_frame(source)
                self.proxy.open[way].wait()
                self._handle(way, frame)
        self.proxy.open[way].wait()
        with contextlib.suppress(OSError):
            self.sockets[way].shutdown(socket.SHUT_WR)

    def _handle(self, way: Way, frame: bytes) -> None:
        kind = Kind(Prefix.unpack(frame[:PREFIX_BYTES]).kind)
        fault = self.proxy.fault_for(kind)
        if fault is not None:
            fault.strike(self, way, frame)
            fault.fired.set()
            return
        if kind is Kind.WELCOME:
            for held in self.proxy.faults:
                if isinstance(held, HoldUntilWelcome):
                    held.welcomed(self)
        self.pass_on(way, frame)

    def _read_frame(self, source: socket.socket) -> bytes:
        prefix = self._read(source, PREFIX_BYTES)
        sizes = Prefix.unpack(prefix)
        return prefix + self._read(source, sizes.header_bytes + sizes.padding_bytes + sizes.payload_bytes)

    def _read(self, source: socket.socket, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        got = 0
        while got < size:
            count = source.recv_into(view[got:])
            if count == 0:
                raise EOFError
            got += count
        return bytes(data)
