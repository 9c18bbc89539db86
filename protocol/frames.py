"""The frame: a fixed prefix, a small header, a raw payload; every length is checked before anything else.

    offset  size  field
         0     4  magic b"WMPS"
         4     2  protocol version
         6     2  kind of message
         8     4  header bytes
        12     8  payload bytes

All little endian. Zero bytes follow the header until prefix, header and they are a multiple of 64 bytes, as every
payload is: what is 64-byte aligned in memory then stays aligned with the kernel's buffers. (`rep movsb` of AMD's
processors copies six times slower when the destination is 1 to 31 bytes past the source, modulo 4096.)

The prefix never changes between versions, so a mismatch can always be named.
"""

import struct
from dataclasses import dataclass

from protocol.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch

MAGIC = b"WMPS"
VERSION = 1

PREFIX = struct.Struct("<4sHHIQ")
PREFIX_BYTES = PREFIX.size

ALIGNMENT = 64
"""Payloads start at a multiple of this many bytes from the start of their frame."""

MAX_HEADER_UNPROVEN = 4 << 10
"""Before the proof: a hello or a proof is a few hundred bytes, and a stranger may make us hold no more."""

MAX_HEADER = 64 << 10
"""After the proof: names and reasons are short; 64 KB leaves room for a hundredfold."""

MAX_HEADER_MANIFEST = 16 << 20
"""A frame that carries a manifest: 100,000 variables of 160 bytes each."""

MAX_PAYLOAD = 1 << 62
"""No payload can be larger than this, whatever a layout says: sums of sizes stay within 64 bits."""


@dataclass(frozen=True)
class Prefix:
    """The first 20 bytes of a frame."""

    kind: int
    header_bytes: int
    payload_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Zero bytes between header and payload."""
        return -(PREFIX_BYTES + self.header_bytes) % ALIGNMENT

    def pack(self) -> bytes:
        """Return the 20 bytes.

        Raises:
            LocalProtocolError: a length does not fit.
        """
        if not 0 <= self.header_bytes <= MAX_HEADER_MANIFEST or not 0 <= self.payload_bytes <= MAX_PAYLOAD:
            raise LocalProtocolError(f"a frame of {self.header_bytes} + {self.payload_bytes} bytes cannot be sent")
        return PREFIX.pack(MAGIC, VERSION, self.kind, self.header_bytes, self.payload_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> "Prefix":
        """Read 20 bytes; lengths are not judged here, since what is allowed depends on the state.

        Raises:
            RemoteProtocolError: not a frame of this protocol.
            VersionMismatch: a frame of another version; the text names both.
        """
        magic, version, kind, header_bytes, payload_bytes = PREFIX.unpack(data)
        if magic != MAGIC:
            raise RemoteProtocolError(f"the peer does not speak this protocol (it began with {data[:8]!r})")
        if version != VERSION:
            raise VersionMismatch(f"the peer speaks protocol version {version}, this side version {VERSION}")
        return cls(kind, header_bytes, payload_bytes)
