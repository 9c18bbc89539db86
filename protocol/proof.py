"""The proof that both sides hold the same token, without sending it.

    mac = HMAC-SHA256(token, label || side || worker nonce || server nonce || SHA-256(both hellos) || certificate)

The side inside the mac stops a reflected challenge, both nonces a replay, and the hash of both hello frames any
change of name, rank or role on the way. `certificate` is the SHA-256 of the server's TLS certificate, or empty.
"""

import hashlib
import hmac

from protocol.errors import ConfigurationError
from protocol.messages import MAC_BYTES, Side

LABEL = b"weighmaster proof 1\0"
NO_PROOF = bytes(MAC_BYTES)
MIN_TOKEN_CHARACTERS = 22
"""22 characters of base64 are 132 bits; a shorter token could be guessed offline from one recorded handshake."""


def check_token(token: str, where: str) -> bytes:
    """Return a token as bytes.

    Raises:
        ConfigurationError: it is too short to be safe, or not printable ASCII without blanks.
    """
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigurationError(
            f"the token in {where} has {len(token)} characters; at least {MIN_TOKEN_CHARACTERS} are needed: "
            "make one with the server's sub-command `token`"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(f"the token in {where} must be printable ASCII without blanks")
    return token.encode("ascii")


def prove(
    token: bytes,
    side: Side,
    worker_nonce: bytes,
    server_nonce: bytes,
    hellos: bytes,
    certificate: bytes = b"",
) -> bytes:
    """Return the 32-byte proof of one side.

    Args:
        token: the shared secret.
        side: whose proof this is.
        worker_nonce: from the hello, 32 bytes.
        server_nonce: from the challenge, 32 bytes.
        hellos: SHA-256 over the hello frame followed by the challenge frame, prefixes included.
        certificate: SHA-256 of the server's TLS certificate, or empty without TLS.
    """
    message = LABEL + side.value.encode() + b"\0" + worker_nonce + server_nonce + hellos + certificate
    return hmac.new(token, message, hashlib.sha256).digest()


def proves(mac: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(mac, expected)
