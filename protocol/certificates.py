"""Certificates and keys of both sides: read, checked at once, and made into what begins a TLS connection.

TLS 1.3 only. A client checks the server's certificate against an authority and the name that it calls, or against a
fingerprint; there is no way round either.
"""

import hashlib
import hmac
import re
import ssl
from pathlib import Path

from protocol.addresses import Address
from protocol.errors import ConfigurationError, ConnectionLost, Refused, RemoteProtocolError, WeighmasterError
from protocol.messages import RefusalCode
from protocol.own_files import read_own_file
from protocol.tls import TlsChannel, Unsecured
from protocol.tls_failures import (
    NO_CERTIFICATE,
    OLD_VERSIONS,
    fault_of_client,
    fault_of_server,
    refused_by_client,
    refused_by_server,
)
from protocol.transport import PlainChannel

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")
_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----")
_ENCRYPTED = re.compile(r"-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: 4,ENCRYPTED")


class ServerTls:
    """The server's side of TLS.

    Attributes:
        certificate: SHA-256 of its certificate (DER).
        asks_clients: whether clients must show a certificate.
    """

    def __init__(self, certificate: Path, key: Path, authority: Path | None = None) -> None:
        """Read the files.

        Args:
            certificate: PEM; the server's own first, then those between it and the authority.
            key: PEM, not encrypted, for the owner's eyes only.
            authority: PEM; clients must show a certificate of it. None: they need none.

        Raises:
            ConfigurationError: naming the option and the file.
        """
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # no session is ever resumed
        self.certificate = _load_pair(self._context, certificate, key)
        self.asks_clients = authority is not None
        if authority is not None:
            _load_authority(self._context, authority)
            self._context.verify_mode = ssl.CERT_REQUIRED

    def wrap(self, channel: PlainChannel) -> TlsChannel:
        """Return a connection with TLS; it is to be `secure`d."""
        return TlsChannel(channel, self)

    def begin(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return OpenSSL's state of a new connection."""
        return self._context.wrap_bio(incoming, outgoing, server_side=True)

    def identify(self, tls: ssl.SSLObject, peer: str) -> bytes:
        """Return the SHA-256 of this server's certificate; OpenSSL has checked the client's."""
        return self.certificate

    def met_plain(self, peer: str) -> WeighmasterError:
        """Return the error of a client that speaks our protocol without TLS."""
        return Unsecured(
            "it speaks no TLS, and this server has a --tls-cert",
            answer="this server speaks TLS only: give --tls-ca FILE with its authority, "
            "or --tls-fingerprint with its certificate's",
        )

    def failed(self, error: ssl.SSLError, peer: str, shaking_hands: bool) -> WeighmasterError:
        """Return what an error of OpenSSL means; in the handshake the client has been sent an alert."""
        reason = error.reason or str(error)
        if not shaking_hands:
            return _damaged(reason, peer)
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unsecured(fault_of_client(error.verify_code, error.verify_message))
        if reason == NO_CERTIFICATE:
            return Unsecured("it shows no client certificate, which --tls-ca asks for")
        if reason in OLD_VERSIONS:
            return Unsecured("it does not speak TLS 1.3")
        said = refused_by_client(reason)
        return Unsecured(said or f"it speaks no TLS that can be understood ({_words(reason)})")


class ClientTls:
    """A client's side of TLS: by which the server is known, and what it is shown."""

    def __init__(
        self,
        authority: Path | None = None,
        fingerprint: bytes | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        """Read the files.

        Args:
            authority: PEM; the server's certificate must be of it, valid today, and for the name that is called.
            fingerprint: instead: SHA-256 of the server's certificate, which must be this very one.
            certificate: PEM, for servers that ask clients for one.
            key: of `certificate`.

        Raises:
            ConfigurationError: naming the option and the file; or not exactly one of the first two was given.
        """
        if (authority is None) == (fingerprint is None):
            raise ConfigurationError("TLS needs either --tls-ca or --tls-fingerprint to know the server by")
        if (certificate is None) != (key is None):
            raise ConfigurationError("--tls-cert and --tls-key go together: give both or none")
        self._fingerprint = fingerprint
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._context.hostname_checks_common_name = False
        if authority is None:
            self._context.check_hostname = False
            self._context.verify_mode = ssl.CERT_NONE  # `identify` compares the whole certificate instead
        else:
            _load_authority(self._context, authority)
        if certificate is not None and key is not None:
            _load_pair(self._context, certificate, key)

    def wrap(self, channel: PlainChannel, address: Address) -> TlsChannel:
        """Return a connection with TLS to the server at `address`; it is to be `secure`d."""
        return TlsChannel(channel, _Call(self._context, self._fingerprint, address))


class _Call:
    """One connection of a client: the name that the server's certificate must be for."""

    def __init__(self, context: ssl.SSLContext, fingerprint: bytes | None, address: Address) -> None:
        self._context, self._fingerprint = context, fingerprint
        self._host = address.host.partition("%")[0].rstrip(".")  # certificates know no zones and no final dots

    def begin(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        try:
            return self._context.wrap_bio(incoming, outgoing, server_hostname=self._host)
        except ValueError as error:  # a UnicodeError too
            raise ConfigurationError(f"the host name {self._host!r} cannot be in a certificate: {error}") from error

    def identify(self, tls: ssl.SSLObject, peer: str) -> bytes:
        shown = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest()
        if self._fingerprint is not None and not hmac.compare_digest(shown, self._fingerprint):
            raise _refuse(
                f"the certificate of the server at {peer} has another fingerprint than --tls-fingerprint says: "
                f"{shown.hex()}; if the server has a new certificate, give this one, else it is not your server"
            )
        return shown

    def met_plain(self, peer: str) -> WeighmasterError:
        return _refuse(
            f"the server at {peer} speaks no TLS: start it with --tls-cert and --tls-key, "
            "or leave out --tls-ca and --tls-fingerprint here",
            RefusalCode.VERSION,
        )

    def failed(self, error: ssl.SSLError, peer: str, shaking_hands: bool) -> WeighmasterError:
        reason = error.reason or str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            return _refuse(fault_of_server(error.verify_code, error.verify_message, peer, self._host))
        if said := refused_by_server(reason, peer):
            return _refuse(said)
        if not shaking_hands:
            return _damaged(reason, peer)
        if reason in OLD_VERSIONS:
            return _refuse(f"the server at {peer} does not speak TLS 1.3", RefusalCode.VERSION)
        return RemoteProtocolError(
            f"what answers at {peer} speaks no TLS that can be understood ({_words(reason)}); check the address"
        )


def _refuse(reason: str, code: RefusalCode = RefusalCode.PROOF) -> Refused:
    return Refused(code, reason)


def _damaged(reason: str, peer: str) -> ConnectionLost:
    return ConnectionLost(f"what {peer} sent was damaged or altered on its way ({_words(reason)})")


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def parse_fingerprint(text: str) -> bytes:
    """Read a SHA-256 as 64 hexadecimal digits, with or without colons.

    Raises:
        ConfigurationError: it is none.
    """
    digits = text.strip().replace(":", "")
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", digits):
        raise ConfigurationError(
            f"--tls-fingerprint must be a SHA-256, 64 hexadecimal digits with or without colons, not {text!r}; "
            "`openssl x509 -in FILE -noout -fingerprint -sha256` prints it"
        )
    return bytes.fromhex(digits)


# ---- files ---------------------------------------------------------------------------------------------


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> bytes:
    """Load a certificate and its key; return the SHA-256 of the certificate."""
    found = _CERTIFICATE.search(_read("--tls-cert", certificate))
    if found is None:
        raise ConfigurationError(f"--tls-cert {certificate} holds no certificate in PEM")
    text = _read("--tls-key", key, is_secret=True)
    if _ENCRYPTED.search(text):
        raise ConfigurationError(
            f"--tls-key {key} is encrypted, and nobody is asked for passwords here: "
            f"`openssl pkey -in {key} -out FILE` decrypts it"
        )
    if _KEY.search(text) is None:
        raise ConfigurationError(f"--tls-key {key} holds no private key in PEM")
    try:
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).digest()
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise ConfigurationError(
                f"--tls-key {key} does not fit --tls-cert {certificate}: it is the key of another certificate"
            ) from error
        raise ConfigurationError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used: {_words(reason or str(error))}"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"--tls-cert {certificate} cannot be read: {error.strerror}") from error
    return digest


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    certificates = _CERTIFICATE.findall(_read("--tls-ca", authority))  # comments between them are of any encoding
    try:
        if not certificates:
            raise ValueError("no certificate in PEM")
        context.load_verify_locations(cadata="\n".join(certificates))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"--tls-ca {authority} holds no certificate of an authority in PEM") from error


def _read(option: str, path: Path, is_secret: bool = False) -> str:
    return read_own_file(option, path, is_secret).decode("latin-1")
