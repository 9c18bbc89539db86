"""The fault proxy between two sockets of this process: which bytes arrive, and what is said."""

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import fault_proxy
from protocol.addresses import Address
from protocol.errors import ConfigurationError
from protocol.frame_faults import Fault, Way
from protocol.frames import Prefix
from protocol.messages import Kind
from protocol.proxy import BLOCK_BYTES, FaultProxy

PATIENCE_S = 60.0
"""How long a test waits for what comes at once: far longer than a busy machine needs."""


def frame(kind: Kind, payload: bytes = b"", header: bytes = b"header") -> bytes:
    """Return a frame whose header means nothing: the proxy does not read it."""
    prefix = Prefix(kind, len(header), len(payload))
    return prefix.pack() + header + bytes(prefix.padding_bytes) + payload


def read(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (block := end.recv(size - len(data))):
        data += block
    return bytes(data)


def read_all(end: socket.socket) -> bytes:
    """Read until the end of the stream, or a reset, which a cut connection may end in."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while block := end.recv(1 << 16):
            data += block
    return bytes(data)


class Ends:
    """A server's socket, a proxy before it, and what the proxy said."""

    def __init__(self, *faults: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.said: list[str] = []
        self.faults = [Fault.parse(text) for text in faults]
        to = Address("127.0.0.1", self.listener.getsockname()[1])
        self.proxy = FaultProxy(to, *self.faults, say=self.said.append)
        self._stack = contextlib.ExitStack()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection: the worker's, the server's."""
        address = (self.proxy.address.host, self.proxy.address.port)
        worker = self._stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
        server = self._stack.enter_context(self.listener.accept()[0])
        server.settimeout(PATIENCE_S)
        return worker, server

    def __enter__(self) -> "Ends":
        self._stack.enter_context(self.listener)
        self._stack.enter_context(self.proxy)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


PUSH = frame(Kind.PUSH, bytes(range(256)) * 4)


def test_without_a_fault_all_bytes_and_the_end_pass_both_ways() -> None:
    large = frame(Kind.VALUES, os.urandom(3 * BLOCK_BYTES + 7))
    with Ends() as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH + PUSH)
        server.sendall(large)
        assert read(server, 2 * len(PUSH)) == PUSH + PUSH
        assert read(worker, len(large)) == large
        worker.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""
        server.sendall(PUSH)  # one way has ended, the other has not
        assert read(worker, len(PUSH)) == PUSH
    assert ends.proxy.seen == {Kind.PUSH: 3, Kind.VALUES: 1}
    assert ends.said == []


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\n\r\n" * 3, b"WMPS", struct.pack("<4sHHIQ", b"WMPS", 1, 999, 0, 0), b"WMPS" + bytes(99)],
)
def test_what_is_no_frame_passes_as_it_is(junk: bytes) -> None:
    with Ends("cut@push") as ends:
        worker, server = ends.connect()
        worker.sendall(junk)
        worker.shutdown(socket.SHUT_WR)
        assert read_all(server) == junk


@pytest.mark.parametrize(("part", "passes"), [("start", 0), ("7", 7), ("header", 64), ("last", len(PUSH) - 1)])
def test_a_cut_ends_both_sides_after_so_many_bytes(part: str, passes: int) -> None:
    assert len(PUSH) == 64 + 1024
    with Ends(f"cut:{part}@push,number=1") as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH)
        assert read(server, len(PUSH)) == PUSH
        worker.sendall(PUSH)
        rest = read_all(server)
        assert read_all(worker) == b""
        assert ends.proxy.fired == set(ends.faults)
    assert rest == PUSH[: len(rest)] and len(rest) <= passes  # a reset may overtake them
    assert ends.said == [f"fired: cut:{part}@push,number=1 ({passes} of 1088 bytes passed on)"]


def test_a_doubled_frame_arrives_twice_and_the_next_once() -> None:
    with Ends("double@push") as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH + frame(Kind.BYE))
        assert read(server, 2 * len(PUSH) + 64) == PUSH + PUSH + frame(Kind.BYE)
    assert ends.said == ["fired: double@push (1088 bytes passed on twice)"]


def test_a_swallowed_frame_does_not_arrive_and_the_next_does() -> None:
    with Ends("swallow@push,number=1") as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH + PUSH + frame(Kind.BYE))
        assert read(server, len(PUSH) + 64) == PUSH + frame(Kind.BYE)
    assert ends.said == ["fired: swallow@push,number=1 (1088 bytes not passed on)"]


def test_a_held_frame_comes_with_the_next_welcome_before_all_else() -> None:
    with Ends("hold@push") as ends:
        first, first_server = ends.connect()
        first.sendall(PUSH)
        assert ends.proxy.await_fired(ends.faults[0], PATIENCE_S)
        first.close()
        assert read_all(first_server) == b""
        second, second_server = ends.connect()
        second_server.sendall(frame(Kind.WELCOME))
        assert read(second, 64) == frame(Kind.WELCOME)
        second.sendall(frame(Kind.PULL))
        assert read(second_server, len(PUSH) + 64) == PUSH + frame(Kind.PULL)
        second_server.sendall(frame(Kind.WELCOME))  # only once
        assert read(second, 64) == frame(Kind.WELCOME)
        second.shutdown(socket.SHUT_WR)
        assert read_all(second_server) == b""
    assert ends.said == [
        "fired: hold@push (1088 bytes kept until a later connection is welcomed)",
        "delivered: hold@push",
    ]


def test_a_delayed_frame_is_announced_and_waits_no_longer_than_the_proxy() -> None:
    with Ends("delay:0.01@push", "delay:100000@push,number=1") as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH)
        assert read(server, len(PUSH)) == PUSH
        worker.sendall(PUSH)
        assert ends.proxy.await_fired(ends.faults[1], PATIENCE_S)
    assert ends.said[1] == "fired: delay:100000@push,number=1 (1088 bytes wait 100000 s)"


def test_a_black_hole_of_one_way_takes_all_and_gives_it_back_when_it_heals() -> None:
    with Ends("blackhole@push,way=up") as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH)
        assert ends.proxy.await_fired(ends.faults[0], PATIENCE_S)
        server.sendall(frame(Kind.HEARTBEAT))
        assert read(worker, 64) == frame(Kind.HEARTBEAT)
        worker.sendall(frame(Kind.BYE))
        worker.shutdown(socket.SHUT_WR)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1)
        server.settimeout(PATIENCE_S)
        ends.proxy.heal()
        assert read_all(server) == PUSH + frame(Kind.BYE)
    assert ends.said == ["fired: blackhole@push,way=up (nothing passes up)"]


def test_a_black_hole_heals_by_itself_after_its_time() -> None:
    with Ends("blackhole:0.01@push") as ends:
        worker, server = ends.connect()
        worker.sendall(PUSH)
        assert read(server, len(PUSH)) == PUSH
    assert ends.said == [
        "fired: blackhole:0.01@push (nothing passes up and down for 0.01 s)",
        "healed: blackhole:0.01@push",
    ]


def test_it_ends_also_in_a_black_hole() -> None:
    with Ends() as ends:
        ends.proxy.swallow(*Way)
        worker, server = ends.connect()
        worker.sendall(PUSH)
        server.sendall(PUSH)


def test_who_calls_while_there_is_no_server_is_sent_away_and_it_is_said_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()[1]
    said: list[str] = []
    with FaultProxy(Address("127.0.0.1", nobody), say=said.append) as proxy:
        for _ in range(2):
            with socket.create_connection((proxy.address.host, proxy.address.port), timeout=PATIENCE_S) as worker:
                assert worker.recv(1) == b""
    (sentence,) = said
    assert sentence.startswith(f"nobody answers at 127.0.0.1:{nobody} (")


# ---- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """Put the handlers back that the command changes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_line_is_read() -> None:
    options = fault_proxy.parse(["--to", "[::1]:5014", "cut:half@push,number=3", "double@values", "--port", "7"])
    assert (options.to, options.port, options.port_file) == (Address("::1", 5014), 7, None)
    assert [fault.text for fault in options.faults] == ["cut:half@push,number=3", "double@values"]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: --to"),
        (["--to", "5014"], "--to '5014' is not HOST:PORT"),
        (["--to", "here:70000"], "--to 'here:70000' is not HOST:PORT with a port from 1 to 65535"),
        (["--to", "here:1", "--port", "70000"], "--port 70000 is not a port from 0 to 65535"),
        (["--to", "here:1", "--port", "many"], "argument --port: invalid int value: 'many'"),
        (["--to", "here:1", "--prt", "1"], "unrecognized arguments: --prt"),
        (["--to", "here:1", "cut@nothing"], "'nothing' in 'cut@nothing' is not a kind of frame"),
        (["--to", "here:1", "cut@push", "double@push"], "strike the same frame"),
        (["--to", "here:1", "--port-file", "/no/such/place"], "--port-file /no/such/place cannot be written"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert fault_proxy.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("weighmaster-proxy: ") and sentence in err and err.count("\n") == 1


@pytest.mark.usefixtures("signals")
def test_a_port_that_is_taken_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert fault_proxy.main(["--to", "here:1", "--port", str(port)]) == 2
        assert f"cannot listen on port {port}: " in capsys.readouterr().err
        with pytest.raises(ConfigurationError):
            FaultProxy(Address("here", 1), port=port)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_tells_its_port_and_ends_by_a_signal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(signal, "pause", lambda: os.kill(os.getpid(), number))
    port_file = tmp_path / "port"
    assert fault_proxy.main(["--to", "127.0.0.1:1", "--port-file", str(port_file), "cut@push"]) == code
    out, err = capsys.readouterr()
    port = int(port_file.read_text())
    assert out == f"listening on 127.0.0.1:{port}, passing on to 127.0.0.1:1; faults to come: 1\n"
    assert err == f"weighmaster-proxy: interrupted by {signal.Signals(number).name}\n"
    assert list(tmp_path.iterdir()) == [port_file]
