"""Lines on standard output that a worker can do without: a log that cannot be written must not end the work."""

import contextlib
import os
import sys
from typing import TextIO


class Output:
    """Writes lines to a stream. One that breaks (a full disk, a closed pipe) ends the writing and nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Choose the stream; None: standard output, as it is when a line comes."""
        self._stream = stream
        self._is_broken = False

    def __call__(self, line: str) -> None:
        """Write a line; what the stream's encoding does not have is escaped, since names of peers are in it."""
        if self._is_broken:
            return
        stream = sys.stdout if self._stream is None else self._stream
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(f"{line.encode(encoding, 'backslashreplace').decode(encoding)}\n")
            stream.flush()
        except OSError:
            self._is_broken = True
            _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """Turn the stream away from what cannot be written: Python flushes it once more at the end, and would fail."""
    with contextlib.suppress(OSError):  # also that it has no number of a file
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, number)
        finally:
            os.close(nowhere)
