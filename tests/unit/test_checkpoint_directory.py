"""The directory of checkpoints: whole or not there, the newest good one, who may use it, how many are kept."""

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import CheckpointError, ConfigurationError
from ps.checkpoints.directory import NO_FAULTS, CheckpointDirectory, NoFaults, load
from ps.checkpoints.format import directory_name
from tests.unit.checkpoints import EPOCH, assert_same, snapshot

OTHER_EPOCH = 7


@pytest.fixture
def opened(tmp_path):
    """Open the directory again and again, as servers do one after another."""
    directories = []

    def open_again(keep=9, faults=NO_FAULTS):
        if directories:
            directories[-1].close()
        directories.append(CheckpointDirectory.open(tmp_path / "checkpoints", keep, faults))
        return directories[-1]

    yield open_again
    for directory in directories:
        directory.close()


def names(directory):
    return sorted(path.name for path in directory.path.iterdir() if path.name != "lock")


def damage(path, name="values.safetensors"):
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)


# ---- crashes -------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nobody cleans up."""


class KillAt:
    def __init__(self, point):
        self.point = point
        self.seen = []

    def at(self, point, step):
        self.seen.append((point, step))
        if point == self.point and step == 20:
            raise Killed


@pytest.mark.parametrize("point", ["file", "manifest", "rename", "parent"])
def test_killed_at_a_point_the_one_before_is_used_until_the_new_one_has_its_name(opened, point, caplog):
    faults = KillAt(point)
    directory = opened(faults=faults)
    directory.write(snapshot(10))
    with pytest.raises(Killed):
        directory.write(snapshot(20))
    assert faults.seen[-1] == (point, 20)
    left = names(directory)
    with caplog.at_level(logging.INFO):
        directory = opened()
    expected = snapshot(20) if point == "parent" else snapshot(10)
    assert_same(expected, directory.newest())
    assert names(directory) == [directory_name(step, EPOCH) for step in (10, 20) if step <= expected.step]
    unfinished = [name for name in left if name.startswith(".")]
    assert len(unfinished) == (point != "parent")
    assert all(name in caplog.text for name in unfinished)
    assert_same(snapshot(20), load(directory.write(snapshot(20))))


def test_the_points_come_in_order(opened):
    faults = KillAt(None)
    opened(faults=faults).write(snapshot(10))
    assert faults.seen == [(point, 10) for point in ("file", "manifest", "rename", "parent")]


def test_killed_while_an_old_one_is_removed(opened, monkeypatch):
    directory = opened(keep=1)
    directory.write(snapshot(10))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, **_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            directory.write(snapshot(20))
    assert names(directory) == [f".{directory_name(10, EPOCH)}.removing", directory_name(20, EPOCH)]
    directory = opened()
    assert names(directory) == [directory_name(20, EPOCH)]
    assert directory.newest().step == 20


def test_files_of_other_people_are_left_alone(opened):
    directory = opened()
    for name in ("step-1.writing", ".step-0000000001.writing", ".notes", "step-notes"):
        (directory.path / name).mkdir()
    before = names(directory)
    directory = opened()
    assert names(directory) == before
    assert not directory.has_checkpoints
    assert directory.newest() is None


# ---- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["writev", "fsync", "mkdir"])
def test_a_full_disk_leaves_the_others_and_nothing_half_written(opened, monkeypatch, call):
    directory = opened(keep=1)
    directory.write(snapshot(10))
    calls = []

    def full(*_, **__):
        calls.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError) as failure:
            directory.write(snapshot(20))
    assert calls
    assert str(failure.value) == (
        f"checkpoint of step 20 cannot be written in {directory.path}: No space left on device"
    )
    assert failure.value.exit_code == 6
    assert names(directory) == [directory_name(10, EPOCH)]
    assert_same(snapshot(10), directory.newest())
    directory.write(snapshot(20))
    assert names(directory) == [directory_name(20, EPOCH)]


FILL = """
import logging, sys
from pathlib import Path
import numpy as np
from protocol.errors import CheckpointError
from ps.checkpoints.directory import CheckpointDirectory, Snapshot
logging.basicConfig(stream=sys.stderr)
directory = CheckpointDirectory.open(Path(sys.argv[1]) / "checkpoints", 9)
values = {"x": np.zeros(100_000, np.float32)}
try:
    for step in range(9):
        directory.write(Snapshot(step, 1, {"values": values}, {}))
except CheckpointError as error:
    print(error)
print(directory.newest().step, sorted(path.name for path in directory.path.iterdir()))
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 1 MB has room for two checkpoints of 400 kB."""
    if shutil.which("unshare") is None:
        pytest.skip("no program to mount file systems for one process only")
    mount = f'mount -t tmpfs -o size=1m none "$1" && exec "{sys.executable}" -c "$2" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(tmp_path), FILL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if run.returncode and "Traceback" not in run.stderr:
        pytest.skip(f"this system does not let users mount: {run.stderr.strip()}")
    kept = [directory_name(step, 1) for step in (0, 1)]
    assert run.stdout.splitlines() == [
        f"checkpoint of step 2 cannot be written in {tmp_path / 'checkpoints'}: No space left on device",
        f"1 {['lock', *kept]}",
    ]


def test_what_could_not_be_removed_does_not_stop_the_next_attempt(opened, monkeypatch):
    directory = opened()
    unfinished = directory.path / f".{directory_name(20, EPOCH)}.writing"
    unfinished.mkdir()
    (unfinished / "values.safetensors").touch()
    assert_same(snapshot(20), load(directory.write(snapshot(20))))


def test_an_old_one_that_cannot_be_removed_is_told_and_stops_nobody(opened, monkeypatch, caplog):
    directory = opened(keep=1)
    directory.write(snapshot(10))

    def refuse(*_, **__):
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        directory.write(snapshot(20))
    assert "step-0000000010-fedcba9876543210 cannot be removed: Permission denied" in caplog.text


# ---- which one is used ---------------------------------------------------------------------------------


def test_an_empty_directory_has_none(opened):
    directory = opened()
    assert not directory.has_checkpoints
    assert directory.newest() is None


def test_the_greatest_step_is_the_newest_and_of_equal_ones_the_latest(opened):
    directory = opened()
    late = directory.write(snapshot(20, OTHER_EPOCH))
    early = directory.write(snapshot(20, EPOCH))
    directory.write(snapshot(3))
    for path, time_ns in ((late, 2_000_000_000), (early, 1_000_000_000)):
        os.utime(path, ns=(time_ns, time_ns))
    assert directory.newest().epoch == OTHER_EPOCH
    os.utime(early, ns=(3_000_000_000, 3_000_000_000))
    assert directory.newest().epoch == EPOCH


def test_damaged_ones_are_named_and_passed_over(opened, caplog):
    directory = opened()
    first, second, third = (directory.write(snapshot(step)) for step in (10, 20, 30))
    damage(third)
    (second / "manifest.json").unlink()
    assert_same(snapshot(10), directory.newest())
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert str(third) in warned[0] and "values.safetensors is damaged: its checksum differs" in warned[0]
    assert str(second) in warned[1] and "manifest.json is missing" in warned[1]
    assert first.exists() and second.exists() and third.exists()


def test_none_good_is_an_error_and_never_a_fresh_start(opened):
    directory = opened()
    for step in (10, 20):
        damage(directory.write(snapshot(step)))
    assert directory.has_checkpoints
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints in .*checksum differs.*start afresh"
    ) as failure:
        directory.newest()
    assert failure.value.exit_code == 6


def test_an_empty_checkpoint_is_a_damaged_one(opened):
    directory = opened()
    (directory.path / directory_name(5, EPOCH)).mkdir()
    assert directory.has_checkpoints
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        directory.newest()


def test_a_link_is_no_checkpoint(opened, tmp_path):
    directory = opened()
    path = directory.write(snapshot(10))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not directory.has_checkpoints
    assert directory.newest() is None


def test_later_ones_are_abandoned_and_told(opened, caplog):
    directory = opened()
    for step in (10, 20, 30):
        directory.write(snapshot(step))
    directory.abandon_after(10)
    abandoned = [f"{directory_name(step, EPOCH)}.abandoned" for step in (20, 30)]
    assert names(directory) == [directory_name(10, EPOCH), *abandoned]
    assert all(name in caplog.text for name in abandoned)
    assert directory.newest().step == 10


def test_an_abandoned_one_never_takes_anothers_place(opened):
    directory = opened()
    for _ in range(3):
        directory.write(snapshot(20))
        directory.abandon_after(10)
    name = directory_name(20, EPOCH)
    assert names(directory) == sorted([f"{name}.abandoned", f"{name}.2.abandoned", f"{name}.3.abandoned"])
    assert not directory.has_checkpoints


def test_one_of_the_same_step_and_epoch_stays_as_it_is(opened):
    directory = opened()
    path = directory.write(snapshot(10))
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    assert directory.write(snapshot(10)) == path
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


# ---- how many are kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_are_kept(opened, keep):
    directory = opened(keep)
    for step in (0, 5, 10, 15, 20):
        directory.write(snapshot(step))
    assert names(directory) == [directory_name(step, EPOCH) for step in (0, 5, 10, 15, 20)[-keep:]]


def test_a_damaged_one_does_not_count_as_kept(opened):
    directory = opened()
    for step in (5, 10, 20):
        directory.write(snapshot(step))
    damage(directory.path / directory_name(20, EPOCH))
    directory = opened(keep=2)
    assert directory.newest().step == 10
    directory.write(snapshot(15))
    assert names(directory) == [directory_name(step, EPOCH) for step in (10, 15, 20)]
    directory.write(snapshot(25))
    assert names(directory) == [directory_name(step, EPOCH) for step in (15, 20, 25)]
    directory.write(snapshot(30))
    assert names(directory) == [directory_name(step, EPOCH) for step in (25, 30)]


def test_none_must_not_be_kept(tmp_path):
    with pytest.raises(ConfigurationError, match="at least 1"):
        CheckpointDirectory.open(tmp_path / "new", 0)
    assert not (tmp_path / "new").exists()


# ---- whose directory it is -----------------------------------------------------------------------------

HOLDER = (
    "import sys; from pathlib import Path; from ps.checkpoints.directory import CheckpointDirectory;"
    "directory = CheckpointDirectory.open(Path(sys.argv[1]), 3); print('held', flush=True); input()"
)


def test_a_second_server_is_refused_naming_the_first_and_let_in_when_that_is_killed(tmp_path):
    path = tmp_path / "checkpoints"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            unfinished = path / f".{directory_name(1, 1)}.writing"
            unfinished.mkdir()
            with pytest.raises(
                ConfigurationError, match=f"in use by another server, process {holder.pid};"
            ) as refused:
                CheckpointDirectory.open(path, 3)
            assert refused.value.exit_code == 2
            assert unfinished.exists(), "it belongs to the first"
        finally:
            holder.kill()
    CheckpointDirectory.open(path, 3).close()
    assert int((path / "lock").read_text()) == os.getpid()


def test_a_server_that_closes_it_lets_the_next_one_in(opened):
    first = opened()
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()};"):
        CheckpointDirectory.open(first.path, 3)
    first.close()
    first.close()
    CheckpointDirectory.open(first.path, 3).close()


def test_it_is_made_for_the_owner_alone(tmp_path):
    CheckpointDirectory.open(tmp_path / "a" / "b", 3).close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / "lock").stat().st_mode & 0o777 == 0o600


def test_a_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ConfigurationError, match="link is a link: name the directory itself"):
        CheckpointDirectory.open(tmp_path / "link", 3)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=os.strerror(errno.ELOOP)):
        CheckpointDirectory.open(tmp_path, 3)
    assert not (tmp_path / "elsewhere").exists()


def test_one_of_somebody_else_is_refused(tmp_path, monkeypatch):
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match="belongs to somebody else: name one of your own"):
        CheckpointDirectory.open(tmp_path, 3)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_one_that_others_can_write_in_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"can be written by others: `chmod go-w .*` first"):
        CheckpointDirectory.open(tmp_path, 3)


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be written: File exists; name another") as refused:
        CheckpointDirectory.open(tmp_path / "file", 3)
    assert refused.value.exit_code == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("has_lock", [False, True])
def test_one_that_cannot_be_written_is_refused_at_once(tmp_path, has_lock):
    path = tmp_path / "checkpoints"
    path.mkdir(mode=0o700)
    if has_lock:
        (path / "lock").touch()
    path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="cannot be written: Permission denied") as refused:
            CheckpointDirectory.open(path, 3)
    finally:
        path.chmod(0o700)
    assert refused.value.exit_code == 6


def test_a_directory_that_is_full_is_refused_at_once(tmp_path, monkeypatch):
    make = os.mkdir

    def full(path, *arguments, **named):
        if "probe" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            CheckpointDirectory.open(tmp_path / "checkpoints", 3)
    CheckpointDirectory.open(tmp_path / "checkpoints", 3).close()


def test_a_directory_that_cannot_be_synced_is_used_all_the_same(opened, monkeypatch):
    """As on some network file systems."""
    directory = opened()
    sync = os.fsync
    refused = []

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    assert_same(snapshot(10), load(directory.write(snapshot(10))))
    assert refused


def test_all_is_synced_before_the_name_is_given(opened, monkeypatch):
    log = []
    sync = os.fsync

    def watched(descriptor):
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    class Faults(NoFaults):
        def at(self, point, step):
            if point in ("manifest", "rename"):
                log.append(point)

    directory = opened(faults=Faults())
    monkeypatch.setattr(os, "fsync", watched)
    directory.write(snapshot(10))
    hidden = f".{directory_name(10, EPOCH)}.writing"
    files = ["values.safetensors", "optimizer.safetensors", "state.safetensors", "state.json"]
    assert log == [*files, "manifest", "manifest.json", hidden, "rename", "checkpoints"]
