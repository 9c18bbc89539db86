"""The directory of a run: tokens may lie in it, so it must be the user's own."""

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
