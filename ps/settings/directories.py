"""Directories that a server writes in: made for the owner alone, and refused where others could interfere."""

import os
import stat
from pathlib import Path

from protocol.errors import ConfigurationError


def make_own_directory(what: str, path: Path) -> None:
    """Make a directory for the owner alone; one that is there must be his own.

    Tokens and checkpoints lie in it, in whose place whoever could write there might put links.

    Args:
        what: it is called in errors, as in `the run directory`.
        path: of the directory.

    Raises:
        ConfigurationError: it is a link, belongs to somebody else, or others may write in it.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    problem = ""
    if stat.S_ISLNK(status.st_mode):
        problem = "is a link: name the directory itself"
    elif os.geteuid() not in (0, status.st_uid):  # root in a container works in directories of the host's users
        problem = "belongs to somebody else: name one of your own"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others: `chmod go-w {path}` first"
    if problem:
        raise ConfigurationError(f"{what} {path} {problem}")
