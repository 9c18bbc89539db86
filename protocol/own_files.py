"""Files that the user names and that must be what they should: plain, small, and, for secrets, his alone."""

import os
import stat
from pathlib import Path

from protocol.errors import ConfigurationError

MAX_FILE_BYTES = 1 << 20
"""Lists of tokens and chains of certificates are a few kilobytes; all authorities of a system are 300 KB."""

SECRETS_DIRECTORY = Path("/run/secrets")
"""Container engines fix the mode of files here, so it is not judged."""


def read_own_file(what: str, path: Path, is_secret: bool) -> bytes:
    """Read a small file.

    Args:
        what: it is called in errors, as in `the token file`.
        path: of the file; a pipe is refused, not waited for.
        is_secret: whether nobody else may be able to read it.

    Raises:
        ConfigurationError: it is missing, not a plain file, too long, or a secret that others may read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ConfigurationError(f"{what} {path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"{what} {path} is not a plain file of at most 1 MB")
        if is_secret and status.st_mode & 0o077 and not path.absolute().is_relative_to(SECRETS_DIRECTORY):
            raise ConfigurationError(f"{what} {path} can be read by others: `chmod 600 {path}` first")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
