"""Identities and their tokens: a file with a line per identity, and who may join with which token.

Both sides read one: the server all lines, a worker its own.
"""

import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigurationError
from protocol.messages import AUTO_RANK, Role
from protocol.own_files import read_own_file
from protocol.proof import check_token

TOKEN_BYTES = 32


@dataclass(frozen=True)
class Grant:
    """One line of the server's token file; None means any."""

    name: str | None
    role: Role
    rank: int | None
    token: bytes

    def covers(self, name: str, role: Role, rank: int) -> bool:
        """Say whether this grant may serve an identity; who gives no name or rank takes those of the grant."""
        if role is not self.role or (name and self.name not in (None, name)):
            return False
        return role is not Role.WORKER or self.rank is None or rank in (AUTO_RANK, self.rank)

    def line(self) -> str:
        """Return the grant as a line of a token file."""
        rank = "*" if self.rank is None else str(self.rank)
        return f"{self.name or '*'} {self.role.value} {rank} {self.token.decode('ascii')}"


def new_token() -> str:
    """Return a fresh token of 256 bits."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def parse_grants(lines: Iterable[str], where: str) -> tuple[Grant, ...]:
    """Parse a token file: lines of `name role rank token` (`*`: any), or one token alone, for workers only.

    Blank lines and lines that begin with `#` are skipped.

    Raises:
        ConfigurationError: naming the file and the line.
    """
    grants: list[Grant] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{where}, line {number}"
        if len(words) == 1:
            grants.append(Grant(None, Role.WORKER, None, check_token(words[0], place)))
            continue
        if len(words) != 4:
            raise ConfigurationError(f"{place}: expected `name role rank token` or a token alone")
        name, role, rank, token = words
        if role not in Role._value2member_map_:
            raise ConfigurationError(f"{place}: {role!r} is not a role; use {' or '.join(Role)}")
        if rank != "*" and not rank.isdecimal():
            raise ConfigurationError(f"{place}: {rank!r} is not a rank; use a number or *")
        grants.append(
            Grant(
                None if name == "*" else name,
                Role(role),
                None if rank == "*" else int(rank),
                check_token(token, place),
            )
        )
    if not grants:
        raise ConfigurationError(
            f"{where} holds no token; make one with the server's sub-command `token`, as in `token --file {where}`"
        )
    return tuple(grants)


def read_grants(path: Path) -> tuple[Grant, ...]:
    """Read the server's token file."""
    return parse_grants(read_secret(path).splitlines(), str(path))


def read_secret(path: Path) -> str:
    """Read a file that nobody else may read.

    Raises:
        ConfigurationError: it is missing, not a plain file, too long, or others may read it.
    """
    try:
        return read_own_file("the token file", path, is_secret=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the token file {path} is not text") from error


def append_grant(path: Path, grant: Grant) -> None:
    """Add a line to a token file, which is made with mode 0600 when it is not there; links are not followed.

    Raises:
        ConfigurationError: it cannot be written, or others may read it.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"the token file {path} cannot be written: it is not a plain file")
        if status.st_mode & 0o077:
            raise ConfigurationError(f"the token file {path} can be read by others: `chmod 600 {path}` first")
        ends_whole = not status.st_size or os.pread(descriptor, 1, status.st_size - 1) == b"\n"
        file.write(f"{'' if ends_whole else chr(10)}{grant.line()}\n".encode())


def candidates(grants: Sequence[Grant], name: str, role: Role, rank: int) -> list[Grant]:
    """Return the grants that an identity may prove itself with, in file order."""
    return [grant for grant in grants if grant.covers(name, role, rank)]
