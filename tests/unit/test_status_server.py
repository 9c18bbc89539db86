"""The status server over loopback: whole answers, limits, clients that are slow or speak no HTTP."""

import contextlib
import http.client
import socket
import threading

import pytest

from protocol.errors import ConfigurationError
from ps.monitoring.status_answers import EVERY_ANSWER, PAGE_FILES, load_page
from ps.monitoring.status_server import Limits, StatusServer
from tests.unit.status_run import Watched

PATIENT = Limits(request_s=60, idle_s=60, send_s=60)
"""Nobody is cut for being slow: what a test sees is not a time-out."""

HURRIED = Limits(request_s=0.05, idle_s=0.05, send_s=0.05)
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def watched(tmp_path):
    watched = Watched(tmp_path).start().round([0.5, 0.5])
    watched.publish()
    return watched


@pytest.fixture
def serve(watched):
    """Return a function that starts a server and returns its port."""
    with contextlib.ExitStack() as stack:

        def start(limits=PATIENT, latest=lambda: watched.feed.latest, **options):
            server = StatusServer("127.0.0.1", 0, latest, limits=limits, **options)
            stack.callback(server.close)
            server.start()
            return server.port

        yield start


@pytest.fixture
def dial():
    """Return a function that connects to a port; all connections are closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect(port):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            return sock

        yield connect


def everything(sock):
    """Return all that comes until the other side closes; a reset ends it, too."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while block := sock.recv(65536):
            received += block
    return received


def ask(port, method="GET", path="/status.json", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PAGE_FILES)
def test_files_arrive_byte_for_byte_with_all_headers(serve, path):
    answer, body = ask(serve(), path=path)
    assert answer.status == 200 and body == load_page()[path].body
    for name, value in EVERY_ANSWER:
        assert answer.headers.get_all(name) == [value]


def test_the_state_arrives_byte_for_byte(serve, watched):
    answer, body = ask(serve())
    assert body == watched.feed.latest.document() and answer.headers["Cache-Control"] == "no-store"
    assert int(answer.headers["Content-Length"]) == len(body)


def test_metrics_are_served(serve):
    answer, body = ask(serve(), path="/metrics")
    assert answer.status == 200 and b"\nweighmaster_steps_total 1.0\n" in body
    assert answer.headers["Content-Type"].startswith("text/plain")


def test_head_has_the_headers_of_get_and_no_body(serve, watched):
    answer, body = ask(serve(), "HEAD")
    assert answer.status == 200 and body == b""
    assert int(answer.headers["Content-Length"]) == len(watched.feed.latest.document())


def test_what_has_not_changed_is_not_sent(serve):
    port = serve()
    answer, _ = ask(port)
    answer, body = ask(port, **{"If-None-Match": answer.headers["ETag"]})
    assert (answer.status, body, answer.headers["Content-Length"]) == (304, b"", None)


def test_a_connection_serves_many_requests(serve):
    connection = http.client.HTTPConnection("127.0.0.1", serve(), timeout=30)
    connection.connect()
    first = connection.sock
    for path in ("/", "/status.json", "/nothing", "/healthz"):
        connection.request("GET", path)
        connection.getresponse().read()
    assert connection.sock is first
    connection.close()


def test_requests_may_come_together_and_in_pieces(serve, dial):
    sock = dial(serve())
    two = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    for at in range(len(two) - 5):
        sock.sendall(two[at : at + 1])
    sock.sendall(two[-5:-1])
    sock.sendall(b"\nGET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert everything(sock).count(OK) == 3


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /status.json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 413),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n", 421),
        (b"GET / HTTP/3.7\r\nHost: localhost\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 421),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 9000, 431),
    ],
)
def test_what_is_no_good_request_is_answered_and_ends_the_connection(serve, dial, request_bytes, status):
    sock = dial(serve())
    sock.sendall(request_bytes)
    sock.shutdown(socket.SHUT_WR)
    answer = everything(sock)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and answer.count(b"HTTP/1.1") == 1
    assert b"evil" not in answer and b"nonsense" not in answer, "nothing that came is repeated"


def test_eight_kilobytes_of_headers_are_taken(serve, dial):
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nA: "
    sock = dial(serve())
    sock.sendall(head + b"b" * (8192 - len(head)) + b"\r\n\r\n")
    assert everything(sock).startswith(OK)
    sock = dial(serve())
    sock.sendall(head + b"b" * (8193 - len(head)) + b"\r\n\r\n")
    assert everything(sock).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: local"])
def test_who_does_not_get_on_is_cut(serve, dial, sent):
    sock = dial(serve(HURRIED))
    sock.sendall(sent)
    assert everything(sock) == b""


def test_who_has_nothing_to_ask_any_more_is_cut(serve, dial):
    sock = dial(serve(Limits(request_s=60, idle_s=0.05, send_s=60)))
    sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert everything(sock).startswith(OK)


def test_dripping_bytes_buy_no_time(serve, dial):
    sock = dial(serve(HURRIED))
    sock.settimeout(0.01)
    with pytest.raises((BrokenPipeError, ConnectionResetError, EOFError)):  # else the test's own time-out ends it
        while True:
            sock.sendall(b"A")
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1):
                    raise EOFError


def test_slow_clients_keep_nobody_out(serve, dial):
    port = serve()
    slow = [dial(port) for _ in range(3 * PATIENT.connections)]
    for sock in slow:
        with contextlib.suppress(OSError):  # the first were cut already
            sock.sendall(b"GET / HTTP/1.1\r\nHost: loc")
    answer, _ = ask(port)
    assert answer.status == 200
    connections = [thread for thread in threading.enumerate() if thread.name == "status-connection"]
    assert len(connections) <= PATIENT.connections
    assert everything(slow[0]) == b"", "the one that did nothing for longest was cut"


def test_who_reads_nothing_is_cut_and_keeps_nobody_out(serve, dial, watched):
    class Large:
        status = watched.feed.latest.status
        sequence = 1

        def document(self, since):
            return b" " * (64 << 20)

    port = serve(Limits(send_s=0.05), latest=Large)
    sock = dial(port)
    sock.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer, _ = ask(port, path="/healthz")
    assert answer.status == 200
    for thread in threading.enumerate():
        if thread.name == "status-connection":
            thread.join(30)
    assert len(everything(sock)) < 64 << 20


def test_a_port_that_is_taken_is_said(serve):
    port = serve()
    with pytest.raises(ConfigurationError, match=rf"status page cannot listen on 127.0.0.1:{port}.*--status-port"):
        StatusServer("127.0.0.1", port, lambda: None)
    with pytest.raises(ConfigurationError, match="--status-host"):
        StatusServer("no-such-host.invalid", 0, lambda: None)


def test_it_listens_on_ipv6(watched):
    try:
        server = StatusServer("::1", 0, lambda: watched.feed.latest)
    except ConfigurationError:
        pytest.skip("no IPv6 here")
    with contextlib.closing(server):
        server.start()
        connection = http.client.HTTPConnection("::1", server.port, timeout=30)
        connection.request("GET", "/status.json")
        assert connection.getresponse().status == 200
        connection.close()


def test_closing_ends_all_connections_and_may_be_repeated(watched, dial):
    server = StatusServer("127.0.0.1", 0, lambda: watched.feed.latest, limits=PATIENT)
    server.start()
    sock = dial(server.port)
    sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert sock.recv(12) == b"HTTP/1.1 200"
    server.close()
    server.close()
    everything(sock)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("status-")]


def test_one_that_never_served_can_be_closed(watched):
    StatusServer("127.0.0.1", 0, lambda: watched.feed.latest).close()
