"""Checkpoints written beside the training: one at a time, failures told and counted, memory let go."""

import errno
import gc
import logging
import os
import threading
import weakref

import pytest

from protocol.errors import CheckpointError, LocalProtocolError
from ps.checkpoints.directory import CheckpointDirectory, Snapshot
from ps.checkpoints.writer import CheckpointWriter
from tests.unit.checkpoints import PATIENCE_S, HoldAt, assert_same, snapshot


@pytest.fixture
def faults():
    return HoldAt(None)


@pytest.fixture
def directory(tmp_path, faults):
    directory = CheckpointDirectory.open(tmp_path / "checkpoints", 3, faults)
    yield directory
    directory.close()


@pytest.fixture
def writer(directory, faults):
    writer = CheckpointWriter(directory)
    yield writer
    faults.go_on.set()
    writer.close()


@pytest.fixture
def full_disk(monkeypatch):
    """Make all writing fail; `reason.append` changes why."""
    reason = [errno.ENOSPC]

    def refuse(*_):
        raise OSError(reason[-1], os.strerror(reason[-1]))

    monkeypatch.setattr(os, "writev", refuse)
    return reason


def test_it_writes_beside_the_caller_and_says_when_the_arrays_are_free(directory, writer):
    done = []
    writer.begin(snapshot(10), lambda: done.append(threading.current_thread()))
    assert writer.wait(PATIENCE_S)
    assert not writer.busy
    assert [thread.name for thread in done] == ["weighmaster-checkpoint"]
    assert (writer.last_step, writer.failures, writer.last_error) == (10, 0, "")
    assert_same(snapshot(10), directory.newest())


def test_one_at_a_time(writer, faults):
    faults.point = "file"
    writer.begin(snapshot(10), lambda: None)
    assert faults.reached.wait(PATIENCE_S)
    assert writer.busy
    assert not writer.wait(0.0)
    with pytest.raises(LocalProtocolError, match="another is written"):
        writer.begin(snapshot(20), lambda: None)
    faults.go_on.set()
    assert writer.wait(PATIENCE_S)
    writer.begin(snapshot(20), lambda: None)
    writer.wait()
    assert writer.last_step == 20


@pytest.mark.parametrize(("point", "count"), [("file", 0), ("manifest", 1)])
def test_the_arrays_are_free_once_they_are_written_and_before_all_is_synced(writer, faults, point, count):
    faults.point = point
    done = []
    writer.begin(snapshot(10), lambda: done.append(1))
    assert faults.reached.wait(PATIENCE_S)
    assert len(done) == count
    faults.go_on.set()
    writer.wait()
    assert len(done) == 1


def test_after_a_failure_training_goes_on_and_the_arrays_are_free(writer, full_disk, directory, caplog):
    done = []
    for step in (10, 20):
        writer.begin(snapshot(step), lambda: done.append(1))
        writer.wait()
    assert len(done) == 2
    assert (writer.failures, writer.last_step) == (2, None)
    assert (
        writer.last_error == f"checkpoint of step 20 cannot be written in {directory.path}: No space left on device"
    )


def test_each_reason_is_told_once(writer, full_disk, caplog):
    for reason in (errno.ENOSPC, errno.ENOSPC, errno.EIO, errno.ENOSPC, errno.EIO):
        full_disk.append(reason)
        writer.begin(snapshot(10 + writer.failures), lambda: None)
        writer.wait()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert "step 10 " in warned[0] and "No space left" in warned[0] and "training goes on" in warned[0]
    assert "step 12 " in warned[1] and os.strerror(errno.EIO) in warned[1]
    assert writer.failures == 5


def test_when_there_is_room_again_it_writes_again(writer, directory, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        writer.begin(snapshot(10), lambda: None)
        writer.wait()
    writer.begin(snapshot(20), lambda: None)
    writer.wait()
    assert (writer.failures, writer.last_step) == (1, 20)
    assert directory.newest().step == 20


def test_what_cannot_be_written_by_our_own_mistake_ends_nothing_either(writer, caplog):
    done = []
    writer.begin(Snapshot(1, 1, {}, {"a": object()}), lambda: done.append(1))
    writer.wait()
    assert (len(done), writer.failures) == (1, 1)
    assert "state/a is of type object" in caplog.text
    writer.begin(snapshot(2), lambda: None)
    writer.wait()
    assert writer.last_step == 2


def test_the_last_one_waits_for_the_one_before(writer, faults, directory, monkeypatch):
    faults.point = "file"
    wait = writer.wait

    def let_go_and_wait():
        faults.go_on.set()
        return wait()

    monkeypatch.setattr(writer, "wait", let_go_and_wait)
    writer.begin(snapshot(10), lambda: None)
    assert faults.reached.wait(PATIENCE_S)
    path = writer.write_now(snapshot(20))
    assert path.name.startswith("step-0000000020-")
    assert faults.seen == [(step, point) for step in (10, 20) for point in ("file", "manifest", "rename", "parent")]
    assert (writer.last_step, directory.newest().step) == (20, 20)


def test_the_last_one_that_fails_is_an_error_and_counted(writer, full_disk):
    with pytest.raises(CheckpointError, match="step 20 cannot be written"):
        writer.write_now(snapshot(20))
    assert (writer.failures, writer.last_step) == (1, None)
    assert "step 20" in writer.last_error


def test_closing_finishes_what_was_begun(directory):
    writer = CheckpointWriter(directory)
    writer.begin(snapshot(10), lambda: None)
    writer.close()
    writer.close()
    assert directory.newest().step == 10
    with pytest.raises(LocalProtocolError, match="after the end"):
        writer.begin(snapshot(20), lambda: None)


def test_the_snapshot_is_let_go(writer):
    held = snapshot(10)
    alive = weakref.ref(held)
    writer.begin(held, lambda: None)
    writer.wait()
    del held
    gc.collect()
    assert alive() is None
