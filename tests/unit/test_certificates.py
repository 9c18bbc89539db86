"""The files of TLS, on both sides: what is wrong with one is said at the start, with the option and the file."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from protocol.certificates import ClientTls, ServerTls, parse_fingerprint
from protocol.errors import ConfigurationError
from protocol.tls_failures import (
    ALERTS,
    fault_of_client,
    fault_of_server,
    refused_by_client,
    refused_by_server,
)
from ps.settings.config import ServerConfig
from tests.unit.authority import Authority, write_key

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_test_ca.sh"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def issued(authority):
    return authority.issue("server")


def test_a_certificate_is_known_by_its_sha_256(authority, issued):
    tls = ServerTls(issued.certificate, issued.key)
    assert (tls.certificate, tls.asks_clients) == (issued.digest, False)
    assert ServerTls(issued.certificate, issued.key, authority.file).asks_clients


def test_of_a_chain_the_first_counts_and_one_file_may_hold_certificate_and_key(authority, issued, tmp_path):
    both = tmp_path / "both.pem"
    both.touch(mode=0o600)
    both.write_bytes(issued.certificate.read_bytes() + authority.file.read_bytes() + issued.key.read_bytes())
    assert ServerTls(both, both).certificate == issued.digest


def test_an_authority_may_stand_among_others_and_comments_in_any_encoding(authority, tmp_path):
    others = Authority(tmp_path / "others")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# Zertifikate für alle\n".encode() + others.file.read_bytes() + authority.file.read_bytes())
    assert len(ClientTls(bundle)._context.get_ca_certs()) == 2


def missing(issued, path):
    return path / "nothing", issued.key


def directory(issued, path):
    return path, issued.key


def no_certificate(issued, path):
    return issued.key, issued.key


def damaged_certificate(issued, path):
    first, body, *rest = issued.certificate.read_text().splitlines()
    (path / "damaged").write_text("\n".join([first, "AAAA" + body[4:], *rest]))
    return path / "damaged", issued.key


def open_key(issued, path):
    issued.key.chmod(0o640)
    return issued.certificate, issued.key


def no_key(issued, path):
    certificate = path / "no-key"
    certificate.touch(mode=0o600)
    certificate.write_bytes(issued.certificate.read_bytes())
    return issued.certificate, certificate


def encrypted_key(issued, path):
    write_key(path / "hidden", ec.generate_private_key(ec.SECP256R1()), b"password")
    return issued.certificate, path / "hidden"


def other_key(issued, path):
    write_key(path / "other", ec.generate_private_key(ec.SECP256R1()))
    return issued.certificate, path / "other"


def pipe(issued, path):
    os.mkfifo(path / "pipe", 0o600)
    return issued.certificate, path / "pipe"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (missing, r"^--tls-cert \S+/nothing cannot be read: No such file or directory$"),
        (directory, r"^--tls-cert \S+ is not a plain file"),
        (no_certificate, r"^--tls-cert \S+/server.key holds no certificate in PEM$"),
        (damaged_certificate, r"^--tls-cert \S+/damaged and --tls-key \S+ cannot be used: "),
        (open_key, r"^--tls-key \S+/server.key can be read by others: `chmod 600 \S+/server.key` first$"),
        (no_key, r"^--tls-key \S+/no-key holds no private key in PEM$"),
        (encrypted_key, r"^--tls-key \S+/hidden is encrypted, .*`openssl pkey -in \S+/hidden -out FILE`"),
        (other_key, r"^--tls-key \S+/other does not fit --tls-cert \S+/server.pem: it is the key of another"),
        (pipe, r"^--tls-key \S+/pipe is not a plain file"),
    ],
)
def test_files_that_cannot_be_used_on_both_sides(authority, issued, tmp_path, files, sentence):
    pair = files(issued, tmp_path)
    with pytest.raises(ConfigurationError, match=sentence):
        ServerTls(*pair)
    with pytest.raises(ConfigurationError, match=sentence):
        ClientTls(authority.file, None, *pair)


EMPTY = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("content", ["", "no PEM", EMPTY])
def test_a_file_without_an_authority_on_both_sides(issued, tmp_path, content):
    (tmp_path / "ca").write_text(content)
    with pytest.raises(ConfigurationError, match=r"--tls-ca \S+/ca holds no certificate of an authority"):
        ServerTls(issued.certificate, issued.key, tmp_path / "ca")
    with pytest.raises(ConfigurationError, match=r"--tls-ca \S+/ca holds no certificate of an authority"):
        ClientTls(tmp_path / "ca")


def test_a_server_whose_files_cannot_be_used_is_refused_with_its_options(issued):
    """Not at its first connection."""
    issued.key.chmod(0o604)
    with pytest.raises(ConfigurationError, match="can be read by others"):
        ServerConfig(workers=1, steps=1, tls_cert=issued.certificate, tls_key=issued.key)


@pytest.mark.parametrize("fingerprint", [None, bytes(32)])
def test_a_client_knows_the_server_by_one_thing(authority, fingerprint):
    with pytest.raises(ConfigurationError, match="either --tls-ca or --tls-fingerprint"):
        ClientTls(authority.file if fingerprint else None, fingerprint)


def test_a_certificate_without_its_key(authority, issued):
    with pytest.raises(ConfigurationError, match="--tls-cert and --tls-key go together"):
        ClientTls(authority.file, None, issued.certificate)


def test_fingerprints_are_read_as_openssl_prints_them():
    digest = bytes(range(100, 132))
    colons = ":".join(f"{byte:02X}" for byte in digest)
    assert parse_fingerprint(digest.hex()) == parse_fingerprint(colons) == digest


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "g" * 64, "sha1:" + "ab" * 20])
def test_what_is_no_fingerprint(text):
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        parse_fingerprint(text)


def test_faults_that_are_rare_are_told_in_openssls_words():
    assert "cannot be trusted: key too small" in fault_of_server(66, "key too small", "h:1", "h")
    assert "cannot be trusted: key too small" in fault_of_client(66, "key too small")


def test_reasons_that_are_no_alert_say_nothing_of_certificates():
    assert refused_by_server("WRONG_VERSION_NUMBER", "h:1") is refused_by_client("WRONG_VERSION_NUMBER") is None
    assert all(refused_by_server(reason, "h:1") and refused_by_client(reason) for reason in ALERTS)


def test_files_under_run_secrets_are_not_judged_by_their_mode(issued, monkeypatch):
    monkeypatch.setattr("protocol.own_files.SECRETS_DIRECTORY", issued.key.parent)
    issued.key.chmod(0o644)
    assert ServerTls(issued.certificate, issued.key).certificate == issued.digest


# ---- the script that makes some ------------------------------------------------------------------------


def make_test_ca(*words):
    return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the script needs openssl")
def test_the_script_makes_files_that_both_sides_take(tmp_path):
    """A second call keeps the authority, makes other certificates, and leaves nothing beside them."""
    digests, authorities = set(), set()
    for names in ([], ["ps_1", "10.0.0.1", "fd00::1"]):
        done = make_test_ca(tmp_path, *names)
        assert (done.returncode, done.stderr) == (0, "")
        server = ServerTls(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")
        ClientTls(tmp_path / "ca.pem", None, tmp_path / "client.pem", tmp_path / "client.key")
        digests.add(server.certificate)
        authorities.add((tmp_path / "ca.pem").read_bytes())
    assert (len(digests), len(authorities)) == (2, 1)
    found = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["ps_1", "10.0.0.1", "fd00::1"]
    ours = {f"{name}.{end}" for name in ("ca", "server", "client") for end in ("pem", "key")}
    assert {path.name for path in tmp_path.iterdir()} == ours
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the script needs openssl")
@pytest.mark.parametrize("words", [[], ["--wrong"], ["d", "a;b"], ["d", "-x"], ["d", "a b"]])
def test_the_script_refuses_what_it_cannot_mean(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = make_test_ca(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("make_test_ca.sh: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
