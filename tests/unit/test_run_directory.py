"""The directory of a run: tokens may lie in it, so it must be the user's own; and the files of a run."""

import json
import os
from pathlib import Path

import pytest

from protocol.errors import ConfigurationError
from ps import outcome


def test_it_is_made_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    outcome.make_run_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_one_of_the_users_own_may_be_there(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    (tmp_path / "old").touch()
    outcome.make_run_directory(tmp_path)
    assert (tmp_path / "old").exists()
    assert tmp_path.stat().st_mode & 0o777 == mode, "it is not ours to change"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_one_that_others_can_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"open can be written by others: `chmod go-w .*open` first"):
        outcome.make_run_directory(path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ConfigurationError, match="link is a link: name the directory itself"):
        outcome.make_run_directory(tmp_path / "link")


def test_one_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match="belongs to somebody else: name one of your own"):
        outcome.make_run_directory(tmp_path)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be made: File exists"):
        outcome.make_run_directory(tmp_path / "file")


# ---- files that are written at the end -------------------------------------------------------------------


@pytest.mark.parametrize("length", [256, 255, 250])
def test_a_name_that_is_too_long_is_refused_also_with_what_is_added_to_it_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1234567)
    with pytest.raises(ConfigurationError, match=r"--export .* cannot be written: File name too long"):
        outcome.check_writable("--export", tmp_path / ("x" * length))
    with pytest.raises(ConfigurationError, match=r"--export .* cannot be written: File name too long"):
        outcome.check_writable("--export", tmp_path / ("x" * 300) / "file")


def test_the_longest_name_that_is_not_refused_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * (255 - len(f"..{os.getpid()}")))
    outcome.check_writable("--export", path)
    outcome.write_whole(path, b"values")
    assert path.read_bytes() == b"values"


def test_a_directory_that_may_not_be_entered_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, whom no mode keeps out."""

    def deny(path: object, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", deny)
        with pytest.raises(ConfigurationError, match=r"--summary .*file cannot be written: Permission denied"):
            outcome.check_writable("--summary", tmp_path / "closed" / "file")


@pytest.mark.parametrize("below", ["file/one", "file/two/three", "none/one"])
def test_a_parent_that_is_no_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigurationError, match=r"--port-file .*: the directory .* is missing or cannot be written"
    ):
        outcome.check_writable("--port-file", tmp_path / below)


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a directory; name a file"):
        outcome.check_writable("--export", tmp_path)


# ---- initial values ------------------------------------------------------------------------------------


def of_dtype(tag: str, item_bytes: int) -> bytes:
    """Return a file of safetensors with two elements."""
    entry = {"dtype": tag, "shape": [2], "data_offsets": [0, 2 * item_bytes]}
    header = json.dumps({"fine": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "w": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(2 * item_bytes)


@pytest.mark.parametrize(
    ("tag", "item_bytes"), [("BF16", 2), ("F16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("C64", 8)]
)
def test_a_dtype_that_no_variable_can_have_is_refused_by_name(tmp_path: Path, tag: str, item_bytes: int) -> None:
    (tmp_path / "values").write_bytes(of_dtype(tag, item_bytes))
    with pytest.raises(ConfigurationError, match=rf"--init .*values: tensor 'w' is {tag}, and the server"):
        outcome.load_initial_values(tmp_path / "values")


@pytest.mark.parametrize(
    ("tag", "item_bytes", "dtype"),
    [("F32", 4, "float32"), ("F64", 8, "float64"), ("I64", 8, "int64"), ("U8", 1, "uint8"), ("BOOL", 1, "bool")],
)
def test_the_others_are_read(tmp_path: Path, tag: str, item_bytes: int, dtype: str) -> None:
    (tmp_path / "values").write_bytes(of_dtype(tag, item_bytes))
    assert outcome.load_initial_values(tmp_path / "values")["w"].dtype.name == dtype


@pytest.mark.parametrize(
    "content", [b"", b"no tensors at all", of_dtype("F32", 4)[:-1], of_dtype("F32", 4)[8:], of_dtype("Q7", 4)]
)
def test_what_is_no_file_of_tensors_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "values").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"--init .*values cannot be read as safetensors: "):
        outcome.load_initial_values(tmp_path / "values")


def test_a_file_that_is_not_there_or_no_file_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigurationError, match="is no plain file"):
            outcome.load_initial_values(path)
    for name in ("none", "x" * 300):
        with pytest.raises(ConfigurationError, match="cannot be read as safetensors"):
            outcome.load_initial_values(tmp_path / name)
