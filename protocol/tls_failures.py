"""What OpenSSL's errors mean to a person: a sentence for each that a wrong file or a wrong option can cause.

OpenSSL says why a certificate was not accepted by a number (X509_V_ERR_* in `x509_vfy.h`), and all else by a
reason; alerts (RFC 8446, section 6) are the reasons of the other side.
"""

EXPIRED = 10
NOT_YET_VALID = 9
OTHER_NAME = (62, 64)
"""Host name, IP address."""

UNKNOWN_AUTHORITY = (2, 7, 18, 19, 20, 21)
"""No issuer found, one of the same name but with another key, signed by itself, or a chain that ends elsewhere."""

NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"

OLD_VERSIONS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE")

ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it is missing",
    "TLSV1_ALERT_UNKNOWN_CA": "it is not of the authority that is known there",
    "TLSV1_ALERT_DECRYPT_ERROR": "it is not of the authority that is known there, but of one with the same name",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is not valid yet, or not for this name or use",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it was not accepted",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it is not made for this use",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it was revoked",
}
"""What the other side says of this side's certificate."""


def fault_of_server(verify_code: int, verify_message: str, peer: str, host: str) -> str:
    """Say why a client does not accept the server's certificate, and what to do.

    Args:
        verify_code: of OpenSSL.
        verify_message: likewise, for the rare cases.
        peer: address of the server.
        host: name or number that its certificate must be for.
    """
    whose = f"the certificate of the server at {peer}"
    if verify_code == EXPIRED:
        return f"{whose} has expired: renew it there, or set the clock of this machine"
    if verify_code == NOT_YET_VALID:
        return f"{whose} is not valid yet: set the clocks of both machines, or make another"
    if verify_code in OTHER_NAME:
        return (
            f"{whose} is not for {host}: call the server by a name in its certificate, "
            "or make one with this name too (as a subjectAltName)"
        )
    if verify_code in UNKNOWN_AUTHORITY:
        return f"{whose} is not of an authority in --tls-ca: give the file of the authority that signed it"
    return f"{whose} cannot be trusted: {verify_message}"


def fault_of_client(verify_code: int, verify_message: str) -> str:
    """Say why a server does not accept a client's certificate."""
    if verify_code == EXPIRED:
        return "its client certificate has expired"
    if verify_code == NOT_YET_VALID:
        return "its client certificate is not valid yet"
    if verify_code in UNKNOWN_AUTHORITY:
        return "its client certificate is not of an authority in --tls-ca"
    return f"its client certificate cannot be trusted: {verify_message}"


def refused_by_server(reason: str, peer: str) -> str | None:
    """Say what a server's alert says of the client's certificate, and what to do; None if it says nothing of it."""
    if reason not in ALERTS:
        return None
    return (
        f"the server at {peer} asks for a client certificate, and that of this side was refused: {ALERTS[reason]}; "
        "give --tls-cert and --tls-key with a certificate of the authority in the server's --tls-ca"
    )


def refused_by_client(reason: str) -> str | None:
    """Say what a client's alert says of the server's certificate; None if it says nothing of it."""
    return None if reason not in ALERTS else f"it does not accept this server's certificate: {ALERTS[reason]}"
