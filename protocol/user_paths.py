"""Paths that a user writes: `~` taken for a home, and what lies there. Whatever fails is one sentence."""

import stat
from enum import Enum
from pathlib import Path

from protocol.errors import ConfigurationError

NOTHING_THERE = (FileNotFoundError, NotADirectoryError, ValueError)
"""The last is for a NUL in a path, which no file has."""


class Entry(Enum):
    """What lies at a path, links followed."""

    NOTHING = "nothing"
    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"


def expanded(file: str, what: str) -> Path:
    """Return a path with `~` and `~user` replaced by the home they mean.

    Args:
        file: as the user wrote it.
        what: it is called in errors, as in `data file`.

    Raises:
        ConfigurationError: there is no such user, or no home.
    """
    try:
        return Path(file).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{what} {file} cannot be used: its ~ stands for no home that is known") from error


def look(path: Path, what: str) -> Entry:
    """Return what lies at a path.

    Args:
        path: to look at.
        what: it is called in errors.

    Raises:
        ConfigurationError: it cannot be told, as in a folder that this user may not enter, or for a name too long.
    """
    try:
        mode = path.stat().st_mode
    except NOTHING_THERE:
        return Entry.NOTHING
    except OSError as error:
        raise ConfigurationError(f"{what} {path} cannot be used: {error.strerror or error}") from error
    if stat.S_ISREG(mode):
        return Entry.FILE
    return Entry.FOLDER if stat.S_ISDIR(mode) else Entry.OTHER
