"""What the sub-commands tell of checkpoints."""

import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from protocol.errors import CheckpointError, ConfigurationError
from ps.__main__ import main
from ps.checkpoint_report import describe, export
from ps.checkpoints.directory import CheckpointDirectory, Snapshot
from tests.unit.checkpoints import EPOCH, snapshot


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory.open(tmp_path / "checkpoints", 9)
    yield directory
    directory.close()


def damage(path):
    with (path / "values.safetensors").open("r+b") as file:
        file.truncate(100)


def test_a_checkpoint_is_told_in_full(directory):
    report = describe(directory.write(snapshot(10)))
    text = report.text
    assert report.damage == ""
    for part in (
        "step 10",
        f"{EPOCH:016x}",
        "written 20",
        "verifies",
        "optimizer adam, rule master",
        "dense/kernel  float32 [4, 10]",
        "scale         float64 []",
        "optimizer.safetensors",
    ):
        assert part in text, part
    assert "DAMAGED" not in text


def test_a_damaged_one_is_told_too(directory):
    path = directory.write(snapshot(10))
    damage(path)
    report = describe(path)
    text = report.text
    assert report.damage.startswith(f"checkpoint {path} cannot be used: values.safetensors is damaged")
    assert "step 10" in text
    assert "DAMAGED" in text and "values.safetensors is damaged: it is 100 bytes long" in text
    assert "verifies" not in text


def test_of_a_directory_each_has_a_line_and_the_newest_good_one_all_of_them(directory):
    paths = [directory.write(snapshot(step)) for step in (10, 20, 30)]
    damage(paths[2])
    lines = describe(directory.path).text.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [path.name for path in reversed(paths)]
    assert "DAMAGED" in lines[0] and "verifies" in lines[1] and "verifies" in lines[2]
    assert lines[4] == f"checkpoint {paths[1]}"
    assert sum(line.startswith("checkpoint ") for line in lines) == 1


@pytest.mark.parametrize(
    ("damaged", "code"), [((), 0), ((10,), 0), ((10, 20), 0), ((30,), 6), ((20, 30), 6), ((10, 20, 30), 6)]
)
@pytest.mark.parametrize("file", ["values.safetensors", "manifest.json"])
def test_the_command_ends_with_an_error_when_the_newest_is_damaged(directory, capsys, damaged, code, file):
    paths = {step: directory.write(snapshot(step)) for step in (10, 20, 30)}
    for step in damaged:
        (paths[step] / file).write_bytes(b"{")
    assert main(["inspect", str(directory.path)]) == code
    told = capsys.readouterr()
    assert told.out.count("DAMAGED") == len(damaged)
    assert (
        told.err == "" if code == 0 else told.err.startswith(f"weighmaster-ps: the newest checkpoint {paths[30]}")
    )
    for step, path in paths.items():
        assert main(["inspect", str(path)]) == (6 if step in damaged else 0)


def test_a_directory_that_may_not_be_read_is_one_sentence(directory, monkeypatch):
    """Tests may run as root, whom no mode keeps out."""
    directory.write(snapshot(10))

    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", deny)
    for call in (describe, lambda path: export(path, "npz", path / "out.npz")):
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be read: Permission denied"):
            call(directory.path)


def test_one_without_settings_or_tensors_is_told(directory):
    assert "optimizer not told" in describe(directory.write(Snapshot(1, 1, {}, {"settings": 3}))).text


@pytest.mark.parametrize("call", [describe, lambda path: export(path, "npz", path / "out.npz")])
def test_where_there_is_none_that_is_told(directory, tmp_path, call):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        call(directory.path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        call(tmp_path / "nowhere")


def read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_values_are_exported_by_name_and_averages_where_there_are_some(directory, tmp_path, to):
    out = tmp_path / f"values.{to}"
    export(directory.write(snapshot(10)), to, out)
    values = read(out)
    assert sorted(values) == ["dense/kernel", "scale"]
    assert values["dense/kernel"].tobytes() == snapshot(10).tensors["optimizer"]["average/dense/kernel"].tobytes()
    assert values["scale"].tobytes() == snapshot(10).tensors["values"]["scale"].tobytes()
    assert values["scale"].shape == ()


def test_of_a_directory_the_newest_good_one_is_exported(directory, tmp_path):
    paths = [directory.write(snapshot(step)) for step in (10, 20)]
    damage(paths[1])
    export(directory.path, "npz", tmp_path / "out.npz")
    assert read(tmp_path / "out.npz")["scale"] == 10 / 3
    damage(paths[0])
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*20-.*values.safetensors"):
        export(directory.path, "npz", tmp_path / "out.npz")


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_any_name_and_dtype_is_exported(directory, tmp_path, to):
    names = ["file", "allow_pickle", "../../x", "/root", "ü 🦙", "a/b", "a\\b"]
    values = {name: np.full(index, index, np.int64) for index, name in enumerate(names)}
    values |= {"flag": np.array(True), "half": np.float16([1.5])}
    path = directory.write(Snapshot(1, 1, {"values": values}, {}))
    export(path, to, tmp_path / f"out.{to}")
    back = read(tmp_path / f"out.{to}")
    assert {name: (array.dtype, array.tolist()) for name, array in values.items()} == {
        name: (array.dtype, array.tolist()) for name, array in back.items()
    }


def test_numpys_format_has_no_bfloat16(directory, tmp_path):
    values = {"x": np.array([1.5, np.inf, -3e38]).astype(ml_dtypes.bfloat16)}
    export(directory.write(Snapshot(1, 1, {"values": values}, {})), "npz", tmp_path / "out.npz")
    back = read(tmp_path / "out.npz")["x"]
    assert back.dtype == np.float32
    assert back.tolist() == values["x"].astype(np.float32).tolist()


def test_other_formats_are_refused(directory, tmp_path):
    with pytest.raises(ConfigurationError, match="'onnx'; use npz or safetensors"):
        export(directory.write(snapshot(10)), "onnx", tmp_path / "out")


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_a_place_that_cannot_be_written_is_told(directory, tmp_path, to):
    with pytest.raises(CheckpointError, match=r"out cannot be written: No such file"):
        export(directory.write(snapshot(10)), to, tmp_path / "nowhere" / "out")
