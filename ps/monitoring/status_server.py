"""Serves the status page: a thread for each of a few connections, all of them with deadlines.

It changes nothing of the run and takes no lock of it; whoever is slow, or sends what is none of HTTP, is cut.
"""

import contextlib
import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from protocol.errors import ConfigurationError
from ps.monitoring.status_answers import EVERY_ANSWER, METHODS, TEXT, Access, Answer, Answers, Request
from ps.monitoring.status_feed import Published

logger = logging.getLogger("weighmaster.ps")

JOIN_S = 1.0
"""How long is waited for a thread whose connection was cut; it ends at once."""

LINGER_S = 1.0
LINGER_BYTES = 1 << 16
"""How long, and how much, is read of a client that has got its last answer."""

BLOCK_BYTES = 4096

SHORT_PAUSE_S = 0.25
"""Before the next try when no connection can be taken, as when descriptors are short."""


@dataclass(frozen=True)
class Limits:
    """What a client may take of the server.

    Attributes:
        connections: open at a time: three browsers and a few scrapers. One more, and the one that has done nothing
            for longest is cut: slow clients keep nobody out.
        request_s: from the first byte of a request to its last; also from the connection to the first byte.
        idle_s: between two requests of a connection.
        send_s: for the whole answer: 500 kB at 50 kB/s.
        head_bytes: of a request line with all headers. No request has a body.
    """

    connections: int = 16
    request_s: float = 5.0
    idle_s: float = 30.0
    send_s: float = 10.0
    head_bytes: int = 8192


class StatusServer:
    """Listens from the start on, serves from `start` to `close`.

    Args:
        host: address to listen on.
        port: 0 takes any that is free.
        latest: returns the newest state of the run, or None; must not wait for anybody.
        tokens: asked for on an address that is not loopback; empty: nobody is asked.
        limits: what a client may take.

    Raises:
        ConfigurationError: the port is taken, or the address is not of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        latest: Callable[[], Published | None],
        tokens: Sequence[bytes] = (),
        limits: Limits = Limits(),
    ) -> None:
        exposition, content_type = None, TEXT
        with contextlib.suppress(ModuleNotFoundError):  # an extra: without it /metrics says what is missing
            from ps.monitoring.prometheus import CONTENT_TYPE, Exposition

            exposition, content_type = Exposition().text, CONTENT_TYPE
        answers = Answers(latest, Access(host, tokens), exposition, content_type)
        self._listener = _open(host, port, answers, limits)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return int(self._listener.server_address[1])

    def start(self) -> None:
        """Begin to serve, in threads of its own."""
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(0.1,), name="status-accept", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Cut all connections and end every thread; again is harmless."""
        if self._thread is not None:
            self._listener.shutdown()
            self._thread.join()
            self._thread = None
        self._listener.server_close()
        self._listener.connections.cut_all()


def _open(host: str, port: int, answers: Answers, limits: Limits) -> "_Listener":
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )[0]
        return _Listener(family, address, answers, limits)
    except OSError as error:
        raise ConfigurationError(
            f"the status page cannot listen on {host}:{port}: {error.strerror or error}; "
            "give another --status-host or --status-port"
        ) from error


class _Listener(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 128  # calls that wait to be taken; more would be dropped, and try again a second later

    def __init__(self, family: int, address: Any, answers: Answers, limits: Limits) -> None:
        self.address_family = family
        self.answers = answers
        self.limits = limits
        self.connections = _Connections(limits.connections)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Take a connection; what cannot be taken stays in the queue, and must not make this a busy loop."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(SHORT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        self.connections.make_room()
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="status-connection", daemon=True
        )
        self.connections.add(request, thread)
        thread.start()

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            _Handler(request, client_address, self)
        except OSError:  # the client has gone, or was cut
            pass
        finally:
            self.connections.remove(request)
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say that a connection could not be served, as when threads are short."""
        logger.warning("the status page could not serve %s", client_address[0], exc_info=True)
        self.connections.remove(request)


class _Connections:
    """The connections that are open, and since when each does what it does."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[socket.socket, tuple[float, threading.Thread]] = {}

    def add(self, connection: socket.socket, thread: threading.Thread) -> None:
        with self._lock:
            self._open[connection] = (time.monotonic(), thread)

    def moved_on(self, connection: socket.socket) -> None:
        """Note that a connection has done something: a whole request came, or a whole answer went."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = (time.monotonic(), self._open[connection][1])

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def make_room(self) -> None:
        """Cut the connection that has done nothing for longest, if there is no room for one more."""
        with self._lock:
            if len(self._open) < self._most:
                return
            victim = min(self._open, key=lambda connection: self._open[connection][0])
            _, thread = self._open.pop(victim)
            _cut(victim)
        thread.join(JOIN_S)

    def cut_all(self) -> None:
        with self._lock:
            threads = [thread for _, thread in self._open.values()]
            for connection in self._open:
                _cut(connection)
        for thread in threads:
            thread.join(JOIN_S)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it, which closes it


class _Handler(BaseHTTPRequestHandler):
    """One connection: request after request, each read whole before it is looked at."""

    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        self.connection = self.request
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left = b""
        self._wait_s = self.server.limits.request_s

    def finish(self) -> None:
        """Nothing is buffered: there is nothing to flush."""

    def handle_one_request(self) -> None:
        """Read a request and answer it; `close_connection` says whether it was the last."""
        self.close_connection = True
        self._out = io.BytesIO()
        self.rfile, self.wfile = io.BytesIO(), self._out
        self.request_version = self.requestline = ""
        self.command = None  # type: ignore[assignment]  # as the base class has it until the line is read
        head = self._read_head()
        if head is None:
            return
        self.server.connections.moved_on(self.connection)
        self.rfile = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if self.parse_request():
            self._answer_request()
        self._send(self._out.getvalue())
        if self.close_connection:
            self._linger()
        self.server.connections.moved_on(self.connection)
        self._wait_s = self.server.limits.idle_s

    def _read_head(self) -> bytes | None:
        """Return the next request up to its empty line; None: the client has gone, or does not get on."""
        limits, data = self.server.limits, self._left
        deadline = time.monotonic() + (limits.request_s if data else self._wait_s)
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > limits.head_bytes:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self.connection.settimeout(left_s)
            block = self.connection.recv(BLOCK_BYTES)
            if not block:
                return None
            if not data:
                deadline = time.monotonic() + limits.request_s
            data += block
        if end < 0 or end > limits.head_bytes:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            self._send(self._out.getvalue())
            self._linger()
            return None
        self._left = data[end + 4 :]
        return data[: end + 4]

    def _answer_request(self) -> None:
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0").strip() != "0":
            self.close_connection = True  # what comes is a body, which is not read
            if self.command in METHODS:
                self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                return
        request = Request(
            method=self.command,
            target=self.path,
            hosts=tuple(self.headers.get_all("Host", [])),
            authorization=self.headers.get("Authorization", ""),
            if_none_match=self.headers.get("If-None-Match", ""),
        )
        self._write(self.server.answers.answer(request))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request that can be understood; nothing of it is repeated."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._write(Answer(status, f"{status.phrase.lower()}\n".encode()))

    def _write(self, answer: Answer) -> None:
        lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}", f"Date: {self.date_time_string()}"]
        if answer.status is not HTTPStatus.NOT_MODIFIED:
            lines += [f"Content-Type: {answer.content_type}", f"Content-Length: {len(answer.body)}"]
        lines += [f"{name}: {value}" for name, value in (*EVERY_ANSWER, *answer.headers)]
        lines += ["Connection: close"] if self.close_connection else []
        self._out.write("\r\n".join([*lines, "", ""]).encode("ascii"))
        if self.command != "HEAD" and answer.status is not HTTPStatus.NOT_MODIFIED:
            self._out.write(answer.body)

    def _send(self, data: bytes) -> None:
        self.connection.settimeout(self.server.limits.send_s)
        self.connection.sendall(data)  # the time-out is that of the whole, however slowly it is read

    def _linger(self) -> None:
        """Let the client read the last answer: closed with bytes unread, the connection would be reset."""
        self.connection.shutdown(socket.SHUT_WR)
        deadline, left = time.monotonic() + LINGER_S, LINGER_BYTES
        while left > 0 and (left_s := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left_s)
            block = self.connection.recv(BLOCK_BYTES)
            if not block:
                return
            left -= len(block)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a page that asks each second would fill the log."""
