"""What a worker says where nobody can hear it: it says no more, and goes on."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.output import Output

ROOT = Path(__file__).resolve().parents[2]

TALKS = """
from worker.job import _say
_say("one \\u00e9 \\u65e5")
_say("two")
print("and what else is printed")
raise SystemExit(7)
"""


def talking(stdout, **environment):
    return subprocess.run(
        [sys.executable, "-c", TALKS],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
        timeout=60,
        check=False,
    )


def test_lines_are_written_at_once_and_none_is_lost():
    stream = io.StringIO()
    say = Output(stream)
    say("one"), say("two")
    assert stream.getvalue() == "one\ntwo\n"


def test_what_the_encoding_does_not_have_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    Output(stream)("é 日")
    assert raw.getvalue() == b"\xe9 \\u65e5\n"


class Breaks(io.StringIO):
    attempts = 0

    def flush(self):
        self.attempts += 1
        raise OSError(28, "No space left on device")


def test_after_the_first_failure_nothing_more_is_tried():
    stream = Breaks()
    say = Output(stream)
    say("one"), say("two")
    assert stream.attempts == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_changes_neither_exit_code_nor_standard_error():
    with Path("/dev/full").open("w") as full:
        done = talking(full)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_pipe_that_nobody_reads_changes_neither_exit_code_nor_standard_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = talking(writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_terminal_of_another_encoding_ends_nothing():
    done = talking(subprocess.PIPE, PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (7, "")
    assert "one \\xe9 \\u65e5\n" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_error_that_cannot_be_said_is_still_the_exit_code():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "worker", "--batch-size", "0"]
        done = subprocess.run(command, stderr=full, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2
