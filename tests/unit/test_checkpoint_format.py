"""One checkpoint on the disk: what is there, and that damage of any file is found and named."""

import errno
import json
import os
import resource

import numpy as np
import pytest

from protocol.errors import CheckpointError, LocalProtocolError
from ps.checkpoints import files as checkpoint_files
from ps.checkpoints import tensor_files
from ps.checkpoints.directory import CheckpointDirectory, Snapshot, load
from ps.checkpoints.files import checksum_of
from ps.checkpoints.format import MAX_MANIFEST_BYTES, Listing, directory_name
from tests.unit.checkpoints import EPOCH, assert_same, snapshot

FILES = ["values.safetensors", "optimizer.safetensors", "state.safetensors", "state.json", "manifest.json"]


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory.open(tmp_path / "checkpoints", keep=9)
    yield directory
    directory.close()


@pytest.fixture
def path(directory):
    return directory.write(snapshot())


def test_what_is_on_the_disk(path):
    assert path.name == "step-0000000010-fedcba9876543210"
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert (manifest["step"], manifest["epoch"]) == (10, "fedcba9876543210")
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"bytes": len(data), "xxh3_128": checksum_of(data)}


def test_it_comes_back(path):
    assert_same(snapshot(), load(path))


def test_restored_arrays_are_ones_own(path):
    values = load(path).tensors["values"]["dense/kernel"]
    values[0, 0] = 7.0
    assert_same(snapshot(), load(path))


def test_a_state_without_arrays_and_no_tensors_come_back(directory):
    empty = Snapshot(3, 0, {"values": {}}, {})
    path = directory.write(empty)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.json"]
    assert_same(empty, load(path))


@pytest.mark.parametrize("step", [0, 9_999_999_999, 10_000_000_000])
@pytest.mark.parametrize("epoch", [0, 2**64 - 1])
def test_steps_and_epochs_of_any_size_come_back(directory, step, epoch):
    assert_same(snapshot(step, epoch), load(directory.write(snapshot(step, epoch))))


@pytest.mark.parametrize(("step", "epoch"), [(-1, 0), (0, -1), (0, 2**64)])
def test_others_have_no_name(step, epoch):
    with pytest.raises(LocalProtocolError, match="cannot be the name"):
        directory_name(step, epoch)


@pytest.mark.parametrize("stem", ["state", "manifest/..", "../x", "", "A"])
def test_files_of_tensors_have_plain_names(directory, stem):
    with pytest.raises(LocalProtocolError, match="cannot be named"):
        directory.write(Snapshot(1, 1, {stem: {"x": np.ones(1)}}, {}))
    assert [file.name for file in directory.path.iterdir()] == ["lock"]


# ---- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(path, name, place):
    data = bytearray((path / name).read_bytes())
    data[{"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[place]] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"checkpoint {path} cannot be used: {name} is damaged: "):
        load(path)


def test_every_bit_of_the_manifest_counts(path):
    whole = (path / "manifest.json").read_bytes()
    for index in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[index] ^= 1 << bit
            with pytest.raises((ValueError, TypeError)):
                Listing.decode(bytes(damaged))
    assert Listing.decode(whole).step == 10


@pytest.mark.parametrize("length", ["nothing", "half", "one less", "one more"])
@pytest.mark.parametrize("name", FILES)
def test_another_length_is_found(path, name, length):
    data = (path / name).read_bytes()
    cut = {"nothing": b"", "half": data[: len(data) // 2], "one less": data[:-1], "one more": data + b" "}[length]
    (path / name).write_bytes(cut)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: "):
        load(path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(path, name):
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(path)


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_is_not_followed(path, tmp_path, name):
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: {os.strerror(errno.ELOOP)}"):
        load(path)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: it is not a plain file"):
        load(path)


def test_an_endless_manifest_is_not_read(path):
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it is longer than"):
        load(path)


def _rewritten(path, name, data):
    """Write a file, and a manifest that agrees with it."""
    (path / name).write_bytes(data)
    listing = Listing.decode((path / "manifest.json").read_bytes())
    content = checkpoint_files.Content(len(data), checksum_of(data))
    changed = Listing(listing.step, listing.epoch, listing.written, {**listing.files, name: content})
    (path / "manifest.json").write_bytes(changed.encode())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("values.safetensors", b"no tensors"),
        ("state.json", b"{"),
        ("state.json", b"[]"),
        ("state.json", b"\xff"),
        ("state.json", b"[" * 100_000),
        ("state.json", b'{"a": {"$array": "missing"}}'),
        ("state.safetensors", b"".join(tensor_files.encode({"other": np.ones(1)}))),
    ],
)
def test_what_does_not_parse_is_damaged_though_its_checksum_holds(path, name, data):
    _rewritten(path, name, data)
    named = "state.json" if name.startswith("state") else name
    with pytest.raises(CheckpointError, match=f"{named} is damaged: "):
        load(path)


@pytest.mark.parametrize("name", ["../lock", "/etc/passwd", "manifest.json", "x.pkl", ""])
def test_a_manifest_names_no_files_but_its_own(path, name):
    _rewritten(path, "values.safetensors", (path / "values.safetensors").read_bytes())
    listing = Listing.decode((path / "manifest.json").read_bytes())
    entry = listing.files["state.json"]
    changed = Listing(listing.step, listing.epoch, listing.written, {**listing.files, name: entry})
    (path / "manifest.json").write_bytes(changed.encode())
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: its entry .* is not valid"):
        load(path)


def test_another_version_is_told(path):
    text = (path / "manifest.json").read_text().replace('"version": 1', '"version": 2')
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="it is of version 2, and this program reads version 1"):
        load(path)


def test_a_directory_under_the_name_of_another_step_is_found(path):
    moved = path.rename(path.with_name(directory_name(99, EPOCH)))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: it is of step 10 "):
        load(moved)
    assert load(moved.rename(path.with_name("a copy"))).step == 10


@pytest.mark.parametrize("name", ["nowhere", "checkpoints/lock"])
def test_where_there_is_no_checkpoint_that_is_told(path, tmp_path, name):
    with pytest.raises(CheckpointError, match=f"there is no checkpoint {tmp_path / name}"):
        load(tmp_path / name)


# ---- writing -------------------------------------------------------------------------------------------


def test_partial_writes_are_resumed(directory, monkeypatch):
    write = os.writev
    sizes = []

    def write_a_little(descriptor, buffers):
        assert 0 < len(buffers) <= checkpoint_files.MAX_BUFFERS
        first = buffers[0][: 1 + len(sizes) % 700]
        sizes.append(len(first))
        return write(descriptor, [first])

    monkeypatch.setattr(os, "writev", write_a_little)
    whole = snapshot(elements=4000)
    assert_same(whole, load(directory.write(whole)))
    assert len(sizes) > 50


def test_many_small_and_a_few_large_tensors_go_in_slices(directory, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SLICE_BYTES", 1000)
    write = os.writev
    calls = []

    def watched(descriptor, buffers):
        calls.append((len(buffers), sum(map(len, buffers))))
        return write(descriptor, buffers)

    monkeypatch.setattr(os, "writev", watched)
    small = {f"small {index}": np.full(1, index % 100, np.int8) for index in range(1500)}
    large = {"large": np.arange(3000, dtype=np.float64), "empty": np.empty(0)}
    whole = Snapshot(1, 1, {"values": {**small, **large}}, {})
    assert_same(whole, load(directory.write(whole)))
    assert max(count for count, _ in calls) == checkpoint_files.MAX_BUFFERS
    assert max(size for _, size in calls) == 1000


def test_a_file_that_the_system_cuts_short_is_an_error(directory):
    """A limit on the size of files stands for a full disk: the system writes a part, then refuses."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, old[1]))
    try:
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
            directory.write(snapshot(elements=40_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [file.name for file in directory.path.iterdir()] == ["lock"]
