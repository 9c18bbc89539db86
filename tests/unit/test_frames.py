"""The prefix: twenty fixed bytes, whatever the version."""

import struct

import pytest

from protocol.errors import ExitCode, LocalProtocolError, RemoteProtocolError, VersionMismatch
from protocol.frames import MAX_HEADER_MANIFEST, MAX_PAYLOAD, PREFIX_BYTES, VERSION, Prefix


def test_the_prefix_is_these_twenty_bytes():
    """Byte order, widths and places are those of the document: a client in another language relies on them."""
    packed = Prefix(kind=10, header_bytes=0x01020304 % MAX_HEADER_MANIFEST, payload_bytes=0x1122334455667788).pack()
    assert packed == bytes.fromhex("574d5053 0100 0a00 04030200 8877665544332211")
    assert len(packed) == PREFIX_BYTES == 20


def test_unpack_is_the_inverse_of_pack():
    prefix = Prefix(9, 77, 2**40 + 1)
    assert Prefix.unpack(prefix.pack()) == prefix


def test_foreign_bytes_are_named_as_such():
    """A stray HTTP request is refused by its first bytes, and the text shows them."""
    with pytest.raises(RemoteProtocolError, match=r"does not speak this protocol.*GET / HT"):
        Prefix.unpack(b"GET / HTTP/1.1\r\nHost:"[:20])


@pytest.mark.parametrize("magic", [b"WMPs", b"\0MPS", b"SPMW"])
def test_every_byte_of_the_magic_counts(magic):
    with pytest.raises(RemoteProtocolError):
        Prefix.unpack(struct.pack("<4sHHIQ", magic, VERSION, 1, 0, 0))


@pytest.mark.parametrize("version", [0, VERSION + 1, 65_535])
def test_a_version_mismatch_names_both_versions_and_exits_as_refused(version):
    with pytest.raises(VersionMismatch, match=rf"version {version}, this side version {VERSION}") as caught:
        Prefix.unpack(struct.pack("<4sHHIQ", b"WMPS", version, 1, 0, 0))
    assert caught.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes"),
    [(MAX_HEADER_MANIFEST + 1, 0), (-1, 0), (0, MAX_PAYLOAD + 1), (0, -1)],
)
def test_lengths_over_the_limit_are_our_own_mistake(header_bytes, payload_bytes):
    with pytest.raises(LocalProtocolError):
        Prefix(1, header_bytes, payload_bytes).pack()


def test_lengths_at_the_limit_can_be_sent():
    prefix = Prefix(5, MAX_HEADER_MANIFEST, MAX_PAYLOAD)
    assert Prefix.unpack(prefix.pack()) == prefix
