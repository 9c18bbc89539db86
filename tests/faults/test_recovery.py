"""Checkpoints over real processes: what is damaged is passed over, what must not go on is refused."""

import resource
import signal
import subprocess
from pathlib import Path

import pytest

from protocol.addresses import Address
from protocol.frame_faults import Fault
from protocol.proxy import FaultProxy
from tests.faults.scenes import WAIT, Mode, Scene, checkpoints
from tests.integration.processes import PATIENCE_S

ALONE = Mode("sync, wait", 1, {})

SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
"""Run a command where a file system of 1 MB is mounted on the directory after it."""

MOUNTED = 'directory=$0; mount -t tmpfs -o size=1m none "$directory" && exec "$@"'


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


@pytest.fixture
def stopped(processes, kept):
    """Return a run of one worker whose server was killed after four steps of six, with all checkpoints."""
    scene = Scene(processes, ALONE)
    scene.open(steps=6, checkpoint_dir=kept, checkpoint_every=1, keep=9)
    for _ in range(4):
        scene.turn()
    scene.server.kill()
    return scene


def newest_of(kept):
    return sorted(path for path in kept.glob("step-*") if path.suffix != ".abandoned")[-1]


def flip(checkpoint):
    """Change one bit in the middle of the largest file of a checkpoint."""
    path = max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def contents_of(directory):
    """Return the bytes of all files of all checkpoints; an unfinished one is none."""
    return {path: path.read_bytes() for path in directory.glob("step-*/*")}


def goes_on(scene, **changes):
    """Start the server again, let the workers go to the end, and check that no bit differs."""
    scene.server = scene.processes.again(scene.server, resume=True, **changes)
    scene.go()
    scene.ends_well()
    scene.is_same()


# ---- damage --------------------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(stopped, kept):
    newest = newest_of(kept)
    flip(newest)
    step = checkpoints(kept)[-1]
    goes_on(stopped)
    stopped.server.says(rf"{newest}.*; it is passed over")
    stopped.server.says(rf"going on from step {step - 1} of 6")


def test_a_checkpoint_without_one_of_its_files_is_passed_over(stopped, kept):
    newest = newest_of(kept)
    max(newest.iterdir(), key=lambda file: file.stat().st_size).unlink()
    goes_on(stopped)
    stopped.server.says(rf"{newest}.*; it is passed over")


def test_with_no_good_checkpoint_nothing_starts_afresh(stopped, kept):
    for path in kept.glob("step-*"):
        flip(path)
    before = contents_of(kept)
    anew = stopped.processes.again(stopped.server, resume=True)
    anew.fails(6, f"none of the {len(checkpoints(kept))} checkpoints in {kept} can be used")
    assert contents_of(kept) == before and "listening" not in anew.log


# ---- what is refused -----------------------------------------------------------------------------------


def test_what_must_not_go_on_is_refused_before_anybody_is_let_in(stopped, kept):
    before = contents_of(kept)
    for changes, words in (
        ({}, (f"there are checkpoints in {kept}", "--resume")),
        ({"resume": True, "optimizer": "adam"}, ("--optimizer", "sgd", "adam")),
        ({"resume": True, "seed": 8}, ("--seed",)),
    ):
        anew = stopped.processes.again(stopped.server, **changes)
        anew.fails(2, *words)
        assert contents_of(kept) == before and "listening" not in anew.log
    goes_on(stopped)


def test_a_second_server_on_a_directory_is_refused_naming_the_first(processes, kept):
    first = processes.server(workers=1, steps=1, checkpoint_dir=kept)
    first.says("listening")
    for resume in (False, True):
        second = processes.server(workers=1, steps=1, checkpoint_dir=kept, resume=resume)
        second.fails(2, f"in use by another server, process {first.pid};")


def test_a_worker_with_other_variables_is_refused_by_a_server_that_goes_on(stopped):
    port = stopped.server.port
    stopped.server = stopped.processes.again(stopped.server, resume=True)
    other = stopped.processes.python(
        "other", "-m", "tests.faults.marked_worker", f"127.0.0.1:{port}", "--rank", 0, "--variable", "v"
    )
    other.fails(3, "variable 'w' differs", "the worker has no such variable")
    stopped.go()
    stopped.ends_well()
    stopped.is_same()


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(processes, tmp_path):
    (tmp_path / "file").write_text("no directory")
    path = tmp_path / "file" / "kept"
    server = processes.server(workers=1, steps=1, checkpoint_dir=path)
    server.fails(6, f"the checkpoint directory {path} cannot be written")


# ---- disks ---------------------------------------------------------------------------------------------


def limit_files(server, size_bytes):
    """Let no file of a server grow beyond a size, as on a disk that is full."""
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_training_goes_on_when_checkpoints_cannot_be_written_and_they_are_counted(processes, kept):
    scene = Scene(processes, ALONE)
    scene.open(steps=6, checkpoint_dir=kept, checkpoint_every=1)
    scene.turn()
    limit_files(scene.server, 4000)
    for _ in range(3):
        scene.turn()
    scene.server.says(r"checkpoint of step \d cannot be written in .*: File too large; training goes on without it")
    limit_files(scene.server, resource.RLIM_INFINITY)
    scene.go()
    scene.ends_well()
    scene.is_same()
    assert 1 <= scene.server.summary()["checkpoint_failures"] <= 3
    assert checkpoints(kept)[-1] == scene.server.summary()["checkpoint_step"] == 6
    assert scene.server.log.count("training goes on without it") == 1


def can_mount(directory: Path) -> bool:
    try:
        return not subprocess.run([*SMALL_DISK, MOUNTED, directory, "true"], capture_output=True).returncode
    except OSError:
        return False


def test_a_full_disk_does_not_stop_the_training_and_a_last_checkpoint_that_is_lost_is_told(processes, tmp_path):
    """Two checkpoints of 0.4 MB find room on a disk of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no file system can be mounted here")
    scene = Scene(processes, ALONE)
    options = {"optimizer": "sgd", "learning_rate": 1.0, "workers": 1, "steps": 5}
    under = (*SMALL_DISK, MOUNTED, str(disk))
    kept = {"checkpoint_dir": disk / "kept", "checkpoint_every": 1}
    scene.server = processes.server(under=under, **options, **kept)
    worker = scene.start(0, None, None, "--size", 50_000)
    scene.go()
    worker.ends_with(0)
    scene.server.fails(6, "checkpoint of step 5 cannot be written", "No space left on device")
    scene.server.says("No space left on device; training goes on without it")
    summary = scene.server.summary()
    assert (summary["status"], summary["steps"], summary["checkpoint_step"]) == ("done", 5, 1)
    assert summary["checkpoint_failures"] == 5, "those of steps 2 to 5, and the last one a second time"
    scene.is_same()


# ---- going on ------------------------------------------------------------------------------------------


def test_sigterm_leaves_a_last_checkpoint_from_which_another_server_goes_on(processes, kept):
    scene = Scene(processes, ALONE)
    scene.open(checkpoint_dir=kept)
    for _ in range(3):
        scene.turn()
    scene.server.send(signal.SIGTERM)
    scene.server.ends_with(143)
    assert checkpoints(kept) == [0, 3]
    scene.push(0)
    scene.workers[0].fails(4, "the server was stopped by SIGTERM")
    scene.start(0)
    goes_on(scene)
    scene.server.says("going on from step 3 of 5")


def test_more_steps_go_on_after_the_end_and_without_more_all_get_the_last_values(processes, kept):
    scene = Scene(processes, WAIT)
    scene.open(steps=3, checkpoint_dir=kept)
    scene.go()
    scene.ends_well()
    for steps in (3, 5):
        for rank in scene.workers:
            scene.start(rank)
        scene.server = processes.again(scene.server, resume=True, steps=steps)
        scene.go()
        scene.ends_well()
        scene.is_same()
        scene.server.says(rf"going on from step 3 of {steps}")
        scene.workers[0].says(f"done at step {steps}")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_workers_goes_on(processes, kept, before, after):
    scene = Scene(processes, Mode("sync, wait", before, {}))
    scene.open(checkpoint_dir=kept, checkpoint_every=1, shards=2)
    scene.turn()
    scene.turn()
    scene.server.kill()
    scene.server = processes.again(scene.server, resume=True, workers=after)
    if after < before:
        scene.workers[1].tell("go")
        scene.workers.pop(1).fails(3, "rank 1 is not one of this run's ranks 0 to 0")
    else:
        scene.start(1)
    scene.go()
    scene.ends_well()
    scene.server.says(
        r"going on from step 2 of 5"
    )  # with a checkpoint of every step, what a worker has is on the disk
    assert scene.ranks() == [list(range(before))] * 2 + [list(range(after))] * 3
    assert scene.server.summary()["deterministic"] is False


def test_a_push_that_was_held_over_a_restart_from_a_checkpoint_is_dropped(processes, kept):
    """It is of the very step that the new server begins with: only the epoch tells that it is old."""
    held = Fault.parse("hold@push")
    scene = Scene(processes, ALONE)
    scene.server = processes.server(
        workers=1, steps=5, optimizer="sgd", learning_rate=1.0, checkpoint_dir=kept, checkpoint_every=1
    )
    with FaultProxy(Address("127.0.0.1", scene.server.port), held) as proxy:
        scene.address = str(proxy.address)
        scene.start(0)
        scene.push(0)
        assert proxy.await_fired(held, PATIENCE_S)
        scene.server.kill()
        scene.workers[0].says("the connection to the server is lost")
        goes_on(scene)
    scene.workers[0].says(r"answered with step 0, restarted")
    (row,) = scene.server.summary()["workers"]
    assert (row["pushes"], row["stale"]) == (5, 1)
