"""What TLS adds to a channel; that it keeps the promises of every channel is among the tests of those."""

import contextlib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.addresses import Address
from protocol.certificates import ClientTls, ServerTls
from protocol.deadlines import Patience
from protocol.errors import ConnectionLost, PeerSilent, Refused, RemoteProtocolError
from protocol.frames import MAGIC
from protocol.tls import PIECE_BYTES, Unsecured, _pieces
from protocol.transport import Listener, connect
from tests.unit.authority import Authority

LONG_S = 60.0


def patient(size_bytes=0):
    return Patience(size_bytes, silence_s=LONG_S)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def issued(authority):
    return authority.issue("server")


@pytest.fixture
def server(issued):
    return ServerTls(issued.certificate, issued.key)


@pytest.fixture
def beside():
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@contextlib.contextmanager
def connected():
    """Two plain channels."""
    listener = Listener(Address("127.0.0.1", 0))
    caller = connect(listener.address, LONG_S)
    called = listener.accept(LONG_S)
    listener.close()
    try:
        yield caller, called
    finally:
        caller.close()
        called.close()


@pytest.fixture
def plain():
    with connected() as both:
        yield both


def secured(plain, server, client, beside, host="127.0.0.1"):
    """Shake hands; return both channels."""
    caller, called = client.wrap(plain[0], Address(host, 1)), server.wrap(plain[1])
    answering = beside(called.secure, patient())
    caller.secure(patient())
    answering.result(LONG_S)
    return caller, called


# ---- who is who ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "::1%lo", "ps_1", "LOCALHOST", "localhost."])
def test_names_of_every_kind_are_found_in_the_certificate(plain, server, authority, issued, beside, host):
    caller, called = secured(plain, server, ClientTls(authority.file), beside, host)
    assert caller.certificate == called.certificate == issued.digest
    assert caller._tls.version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["ps_2", "127.0.0.2", "::2", "server"])
def test_another_name_is_refused_and_a_common_name_is_no_name(plain, server, authority, beside, host):
    """`server` is the subject of the certificate, which is not among its names."""
    caller, called = ClientTls(authority.file).wrap(plain[0], Address(host, 1)), server.wrap(plain[1])
    answering = beside(called.secure, patient())
    with pytest.raises(Refused, match=f"is not for {host}: call the server by a name in its certificate"):
        caller.secure(patient())
    with pytest.raises(Unsecured, match="it does not accept this server's certificate"):
        answering.result(LONG_S)


def test_a_pinned_server_needs_no_authority_and_no_name(plain, server, issued, beside):
    caller, _ = secured(plain, server, ClientTls(fingerprint=issued.digest), beside, "whatever.example")
    assert caller.certificate == issued.digest


def test_who_is_not_the_pinned_server_sees_no_certificate_of_ours(plain, authority, issued, beside):
    """The check comes before the client's own part of the handshake is sent."""
    mine = authority.issue("me", is_client=True)
    client = ClientTls(None, bytes(32), mine.certificate, mine.key)
    caller = client.wrap(plain[0], Address("127.0.0.1", 1))
    called = ServerTls(issued.certificate, issued.key, authority.file).wrap(plain[1])
    answering = beside(called.secure, patient())
    with pytest.raises(Refused, match=f"another fingerprint than --tls-fingerprint says: {issued.digest.hex()}"):
        caller.secure(patient())
    caller.close()
    with pytest.raises(ConnectionLost, match="in the TLS handshake"):
        answering.result(LONG_S)
    with pytest.raises(ValueError, match="handshake not done"):
        called._tls.getpeercert()


def test_an_older_tls_is_refused(plain, server, beside):
    """By the server; the other side is OpenSSL's own client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    called = server.wrap(plain[1])
    answering = beside(called.secure, patient())
    raw = socket.socket(fileno=plain[0]._socket.detach())
    with raw, pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        context.wrap_socket(raw)
    with pytest.raises(Unsecured, match=r"does not speak TLS 1\.3"):
        answering.result(LONG_S)


def test_our_client_accepts_no_older_tls_either(plain, authority, issued, beside):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    raw = socket.socket(fileno=plain[1]._socket.detach())
    raw.setblocking(True)

    def answer():
        with raw, contextlib.suppress(ssl.SSLError):
            context.wrap_socket(raw, server_side=True)

    answering = beside(answer)
    with pytest.raises(Refused, match=r"does not speak TLS 1\.3"):
        ClientTls(authority.file).wrap(plain[0], Address("127.0.0.1", 1)).secure(patient())
    answering.result(LONG_S)


# ---- who speaks none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [MAGIC, MAGIC + bytes(60), MAGIC[:1]])
def test_our_protocol_without_tls_is_recognised_by_its_first_bytes(plain, server, authority, data):
    plain[0].send([data], patient())
    with pytest.raises(Unsecured, match="it speaks no TLS") as refused:
        server.wrap(plain[1]).secure(patient())
    assert "this server speaks TLS only" in refused.value.answer
    plain[1].send([data], patient())
    with pytest.raises(Refused, match="speaks no TLS: start it with --tls-cert and --tls-key"):
        ClientTls(authority.file).wrap(plain[0], Address("127.0.0.1", 1)).secure(patient())


def test_anything_else_is_no_tls(plain, server, authority):
    plain[0].send([b"GET / HTTP/1.1\r\n\r\n"], patient())
    with pytest.raises(Unsecured, match="speaks no TLS that can be understood") as refused:
        server.wrap(plain[1]).secure(patient())
    assert refused.value.answer == ""
    with connected() as (caller, called):
        called.send([b"SSH-2.0-OpenSSH\r\n"], patient())
        with pytest.raises(RemoteProtocolError, match=r"speaks no TLS that can be understood .*check the address"):
            ClientTls(authority.file).wrap(caller, Address("127.0.0.1", 1)).secure(patient())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"])
def test_a_handshake_that_stalls_ends_with_its_time(plain, server, sent):
    plain[0].send([sent], patient())
    with pytest.raises(PeerSilent):
        server.wrap(plain[1]).secure(Patience(0, LONG_S, 0.01))


def test_an_abort_ends_a_handshake(plain, server, beside):
    called = server.wrap(plain[1])
    answering = beside(called.secure, patient())
    called.abort()
    with pytest.raises(ConnectionLost):
        answering.result(LONG_S)


# ---- bytes ---------------------------------------------------------------------------------------------


def test_pieces_hold_all_bytes_in_order_and_large_ones_are_not_copied():
    large = memoryview(bytes(range(256)) * 4096)
    small = [bytes([n % 256]) * (n % 50) for n in range(500)]
    buffers = [*small, large, b"", *small]
    pieces = list(_pieces(buffers))
    assert b"".join(pieces) == b"".join(buffers)
    assert {piece.nbytes for piece in pieces[:-1]} == {PIECE_BYTES} and 0 < pieces[-1].nbytes <= PIECE_BYTES
    assert sum(piece.obj is large.obj for piece in pieces) >= large.nbytes // PIECE_BYTES - 1
    assert list(_pieces([])) == list(_pieces([b""])) == []


class Between:
    """Two secured channels with somebody on the path between them."""

    def __init__(self, stack, server, client, beside):
        self.caller_side, self.called_side = stack.enter_context(connected()), stack.enter_context(connected())
        caller, called = client.wrap(self.caller_side[0], Address("127.0.0.1", 1)), server.wrap(self.called_side[1])
        shaking = [beside(channel.secure, patient()) for channel in (caller, called)]
        self.pass_on(self.caller_side[1], self.called_side[0])
        self.pass_on(self.called_side[0], self.caller_side[1])
        shaking[0].result(LONG_S)
        self.pass_on(self.caller_side[1], self.called_side[0])
        shaking[1].result(LONG_S)
        self.caller, self.called = caller, called

    @staticmethod
    def pass_on(source, target):
        buffer = memoryview(bytearray(1 << 20))
        count = source.receive_some(buffer, patient())
        target.send([buffer[:count]], patient())

    def taken(self):
        """What the caller has sent, which has not been passed on."""
        buffer = memoryview(bytearray(1 << 20))
        return bytearray(buffer[: self.caller_side[1].receive_some(buffer, patient())])


@pytest.fixture
def between(server, authority, beside):
    with contextlib.ExitStack() as stack:
        yield Between(stack, server, ClientTls(authority.file), beside)


def test_one_altered_bit_ends_the_connection(between):
    between.caller.send([b"gradient" * 10], patient())
    taken = between.taken()
    assert b"gradient" not in taken
    taken[20] ^= 1
    between.called_side[0].send([taken], patient())
    buffer = memoryview(bytearray(80))
    assert between.called.wait(LONG_S)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="damaged or altered on its way"):
            between.called.receive_into(buffer, patient())
    assert bytes(buffer) == bytes(80)


def test_half_a_record_is_not_yet_something_to_read(between):
    between.caller.send([b"whole"], patient())
    taken = between.taken()
    between.called_side[0].send([taken[:10]], patient())
    assert not between.called.wait(0.01)
    between.called_side[0].send([taken[10:]], patient())
    assert between.called.wait(LONG_S)
    buffer = memoryview(bytearray(5))
    between.called.receive_into(buffer, patient())
    assert bytes(buffer) == b"whole"
    assert not between.called.wait(0)


def test_a_record_that_is_repeated_on_the_path_is_noticed(between):
    between.caller.send([b"push"], patient())
    taken = between.taken()
    between.called_side[0].send([taken, taken], patient())
    buffer = memoryview(bytearray(4))
    between.called.receive_into(buffer, patient())
    with pytest.raises(ConnectionLost, match="damaged or altered"):
        between.called.receive_into(buffer, patient())


def test_the_rest_of_a_record_needs_no_more_bytes_from_below(plain, server, authority, beside):
    """`poll` would wait for ever: what is left lies in OpenSSL."""
    caller, called = secured(plain, server, ClientTls(authority.file), beside)
    caller.send([b"two messages"], patient())
    first, second = memoryview(bytearray(4)), memoryview(bytearray(8))
    called.receive_into(first, patient())
    assert called.wait(0)
    called.receive_into(second, patient())
    assert bytes(first) + bytes(second) == b"two messages"


def test_a_clients_missing_certificate_is_told_when_it_first_receives(plain, authority, issued, beside):
    """The server judges it after the client's handshake has ended."""
    server = ServerTls(issued.certificate, issued.key, authority.file)
    caller, called = ClientTls(authority.file).wrap(plain[0], Address("127.0.0.1", 1)), server.wrap(plain[1])
    answering = beside(called.secure, patient())
    caller.secure(patient())
    with pytest.raises(Unsecured, match="shows no client certificate"):
        answering.result(LONG_S)
    assert caller.wait(LONG_S)
    with pytest.raises(Refused, match=r"asks for a client certificate.*it is missing; give --tls-cert"):
        caller.receive_into(memoryview(bytearray(1)), patient())
