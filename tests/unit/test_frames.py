"""The prefix: twenty fixed bytes, whatever the version."""

import struct

import pytest

from protocol import tensors
from protocol.errors import ExitCode, LocalProtocolError, RemoteProtocolError, VersionMismatch
from protocol.frames import ALIGNMENT, MAX_HEADER_MANIFEST, MAX_PAYLOAD, PREFIX_BYTES, VERSION, Prefix


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


@pytest.mark.parametrize(
    ("header_bytes", "padding"),
    [
        (0, 44),
        (1, 43),
        (43, 1),
        (44, 0),
        (45, 63),
        (107, 1),
        (108, 0),
        (109, 63),
        (4096, 44),
        (MAX_HEADER_MANIFEST, 44),
    ],
)
def test_zeros_follow_the_header_up_to_a_multiple_of_64(header_bytes, padding):
    """Prefix, header and padding together, with or without a payload; never a whole 64 bytes of padding."""
    for payload_bytes in (0, 64, MAX_PAYLOAD):
        assert Prefix(10, header_bytes, payload_bytes).padding_bytes == padding


def test_a_payload_is_aligned_in_its_frame_as_its_tensors_are_in_memory():
    """Else no tensor would lie in the kernel's buffers as it lies in the arena."""
    assert ALIGNMENT == tensors.ALIGNMENT == 64
