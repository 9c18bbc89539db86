"""Token files: what a line grants, what is refused, and who may read them."""

import os

import pytest

from protocol.errors import ConfigurationError
from protocol.messages import AUTO_RANK, Role
from protocol.own_files import MAX_FILE_BYTES
from protocol.tokens import (
    Grant,
    append_grant,
    candidates,
    new_token,
    parse_grants,
    read_grants,
    read_secret,
)

TOKEN = "a-token-of-more-than-22-characters"
OTHER = "b-token-of-more-than-22-characters"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"site-a worker 0 {TOKEN}\n")
    path.chmod(0o600)
    return path


# ---- lines ---------------------------------------------------------------------------------------------


def test_lines_become_grants_and_stars_mean_any():
    lines = ["# comment", "", f"  site-a  worker 2 {TOKEN} ", f"* evaluator * {OTHER}", f"* worker * {TOKEN}"]
    assert parse_grants(lines, "file") == (
        Grant("site-a", Role.WORKER, 2, TOKEN.encode()),
        Grant(None, Role.EVALUATOR, None, OTHER.encode()),
        Grant(None, Role.WORKER, None, TOKEN.encode()),
    )


def test_a_token_alone_admits_workers_only():
    (grant,) = parse_grants([TOKEN], "file")
    assert grant == Grant(None, Role.WORKER, None, TOKEN.encode())
    assert grant.covers("x", Role.WORKER, 5) and not grant.covers("x", Role.EVALUATOR, AUTO_RANK)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (f"site-a worker {TOKEN}", "expected `name role rank token`"),
        (f"site-a worker 0 {TOKEN} more", "expected `name role rank token`"),
        (f"site-a owner 0 {TOKEN}", "'owner' is not a role"),
        (f"site-a WORKER 0 {TOKEN}", "'WORKER' is not a role"),
        (f"site-a worker -1 {TOKEN}", "'-1' is not a rank"),
        (f"site-a worker 1.0 {TOKEN}", "'1.0' is not a rank"),
        ("site-a worker 0 short", "line 3"),
        ("short", "line 3"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_and_its_token_is_not_shown(line, complaint):
    with pytest.raises(ConfigurationError) as caught:
        parse_grants(["# one", "", line], "the/file")
    assert "the/file, line 3" in str(caught.value) and complaint in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["", "# nothing"]])
def test_a_file_without_a_token_says_how_to_make_one(lines):
    with pytest.raises(ConfigurationError, match=r"the/file holds no token; make one with .* `token`"):
        parse_grants(lines, "the/file")


@pytest.mark.parametrize("name", ["site-a", None])
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("rank", [0, 17, None])
def test_a_grant_survives_its_own_line(name, role, rank):
    grant = Grant(name, role, rank, TOKEN.encode())
    assert parse_grants([grant.line()], "file") == (grant,)


def test_new_tokens_are_long_enough_for_a_line_and_never_the_same():
    made = {new_token() for _ in range(100)}
    assert len(made) == 100 and all(len(token) >= 43 for token in made)
    assert len(parse_grants(sorted(made), "file")) == 100


# ---- whom a grant covers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role", "rank", "covered"),
    [
        ("site-a", Role.WORKER, 2, True),
        ("", Role.WORKER, AUTO_RANK, True),
        ("", Role.WORKER, 2, True),
        ("site-a", Role.WORKER, AUTO_RANK, True),
        ("site-b", Role.WORKER, 2, False),
        ("site-a", Role.WORKER, 1, False),
        ("site-a", Role.EVALUATOR, 2, False),
    ],
)
def test_a_grant_covers_its_own_identity_and_what_is_left_open(name, role, rank, covered):
    assert Grant("site-a", Role.WORKER, 2, b"t").covers(name, role, rank) is covered


def test_an_evaluators_grant_never_covers_a_worker_and_asks_for_no_rank():
    grant = Grant("eval", Role.EVALUATOR, 5, b"t")
    assert grant.covers("eval", Role.EVALUATOR, AUTO_RANK)
    assert not grant.covers("eval", Role.WORKER, 5)


def test_candidates_come_in_file_order():
    grants = parse_grants([f"site-a worker 0 {TOKEN}", f"site-b worker 1 {TOKEN}", OTHER], "file")
    assert candidates(grants, "site-a", Role.WORKER, 0) == [grants[0], grants[2]]
    assert candidates(grants, "site-a", Role.WORKER, 1) == [grants[2]]
    assert candidates(grants, "", Role.WORKER, AUTO_RANK) == list(grants)
    assert candidates(grants, "", Role.EVALUATOR, AUTO_RANK) == []


# ---- files ---------------------------------------------------------------------------------------------


def test_a_file_that_only_its_owner_can_read_is_read(token_file):
    assert read_grants(token_file) == (Grant("site-a", Role.WORKER, 0, TOKEN.encode()),)
    token_file.chmod(0o400)
    assert read_grants(token_file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_touch_is_refused_with_what_to_do(token_file, mode):
    token_file.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"can be read by others: `chmod 600 {token_file}` first"):
        read_grants(token_file)


def test_the_mode_of_a_container_engines_secret_is_not_judged(token_file, monkeypatch):
    token_file.chmod(0o444)
    monkeypatch.setattr("protocol.own_files.SECRETS_DIRECTORY", token_file.parent)
    assert read_grants(token_file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"missing cannot be read: No such file"):
        read_grants(tmp_path / "missing")


def test_a_directory_and_a_huge_file_are_no_token_files(tmp_path):
    huge = tmp_path / "huge"
    huge.touch(0o600)
    os.truncate(huge, MAX_FILE_BYTES + 1)
    for path in (tmp_path, huge):
        with pytest.raises(ConfigurationError, match="is not a plain file of at most 1 MB"):
            read_secret(path)


def test_a_pipe_is_refused_and_never_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigurationError, match="is not a plain file"):
        read_secret(pipe)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        append_grant(pipe, Grant("a", Role.WORKER, 0, TOKEN.encode()))


def test_a_file_that_is_no_text_is_refused(token_file):
    token_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not text"):
        read_secret(token_file)


def test_a_line_that_is_appended_makes_a_file_for_the_owner_alone(tmp_path):
    path = tmp_path / "made"
    first, second = Grant("a", Role.WORKER, 0, TOKEN.encode()), Grant(None, Role.EVALUATOR, None, OTHER.encode())
    append_grant(path, first)
    append_grant(path, second)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_grants(path) == (first, second)


def test_a_link_is_not_followed_when_a_line_is_appended(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("kept")
    link.symlink_to(target)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        append_grant(link, Grant("a", Role.WORKER, 0, TOKEN.encode()))
    assert target.read_text() == "kept"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_no_line_is_appended_to_a_file_that_others_can_read(tmp_path, mode):
    path = tmp_path / "tokens"
    path.write_text("# kept\n")
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="can be read by others: `chmod 600"):
        append_grant(path, Grant("a", Role.WORKER, 0, TOKEN.encode()))
    assert path.read_text() == "# kept\n"


def test_a_line_is_appended_as_a_line_of_its_own_whatever_the_file_ends_with(tmp_path):
    """A file edited by hand may lack the last newline; names may have any letters."""
    path = tmp_path / "tokens"
    first, second = Grant("a", Role.WORKER, 0, TOKEN.encode()), Grant("süd", Role.EVALUATOR, None, OTHER.encode())
    append_grant(path, first)
    path.write_text(path.read_text().rstrip("\n"))
    append_grant(path, second)
    assert read_grants(path) == (first, second)
