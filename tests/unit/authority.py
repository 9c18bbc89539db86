"""An authority for tests: certificates of every kind of fault, made at once, kept in files as users keep them."""

import datetime
import hashlib
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)
HOSTS = ("localhost", "127.0.0.1", "::1", "ps_1")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in files; the SHA-256 of the certificate."""

    certificate: Path
    key: Path
    digest: bytes


class Authority:
    """Signs certificates with a key of its own; `file` is its own certificate."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        own = self._builder(self._name, self._key, -1, 10)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.file = directory / "ca.pem"
        self.file.write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        name: str,
        hosts: tuple[str, ...] = HOSTS,
        first_day: int = -1,
        last_day: int = 10,
        is_client: bool = False,
    ) -> Issued:
        """Make a certificate that is good from `first_day` to `last_day`, counted from today."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if is_client else ExtendedKeyUsageOID.SERVER_AUTH
        builder = self._builder(_named(name), key, first_day, last_day)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if hosts and not is_client:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        paths = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        paths[0].write_bytes(_pem(certificate))
        write_key(paths[1], key)
        return Issued(*paths, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest())

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, first_day: int, last_day: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + first_day * DAY)
            .not_valid_after(now + last_day * DAY)
        )


def write_key(path: Path, key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> None:
    """Write a private key that only its owner can read, encrypted if there is a password."""
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, hidden))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
