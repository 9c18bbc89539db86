"""Addresses as people write them, and whether only this machine can reach one. Pure."""

import ipaddress
import re
from dataclasses import dataclass

from protocol.errors import ConfigurationError


@dataclass(frozen=True)
class Address:
    """Host (name or number) and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read `HOST:PORT`; an IPv6 address stands in brackets, as in `[::1]:5014`.

    Raises:
        ConfigurationError: the text is no address.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]]+)):(\d{1,5})", text, re.ASCII)
    if match is None or not 0 < int(match[3]) <= 65535:
        raise ConfigurationError(
            f"{text!r} is not HOST:PORT with a port from 1 to 65535; write an IPv6 address as [::1]:5014"
        )
    return Address(match[1] or match[2], int(match[3]))


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
