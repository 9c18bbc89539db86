"""The files of the compose cluster, read without an engine; `scripts/test_compose.sh` runs them with one."""

import ast
import re
import stat
import subprocess
import tomllib
from pathlib import Path

from protocol.messages import Role
from protocol.tokens import candidates, parse_grants
from ps.settings.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SCRIPT = ROOT / "scripts" / "compose_secrets.sh"


def _make(directory: Path) -> None:
    subprocess.run(["bash", str(SCRIPT), str(directory)], check=True, timeout=60, capture_output=True)


def test_the_secrets_are_tokens_of_the_roles_that_the_server_knows(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    _make(directory)
    server = parse_grants((directory / "server_tokens").read_text().splitlines(), "server_tokens")
    for role in Role:
        (own,) = parse_grants((directory / f"{role}_token").read_text().splitlines(), role)
        assert own in candidates(server, "any name", role, 5)
        assert not any(own in candidates(server, "any name", other, 5) for other in Role if other is not role)
    assert len({grant.token for grant in server}) == len(Role)


def test_only_the_owner_enters_and_containers_can_read(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    _make(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in re.findall(r"^  (\w+): \{file: ", COMPOSE, re.MULTILINE):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o444
    assert (directory / ".gitignore").read_text() == "*\n"


def _call(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_tls_files_are_put_where_containers_can_read_them(tmp_path: Path) -> None:
    """They come from where make_test_ca.sh puts them, private; new ones take the place of those that are there."""
    overlay = (ROOT / "docker-compose.tls.yml").read_text()
    wanted = set(re.findall(r"^  (\w+): \{file: ", overlay, re.MULTILINE))
    (tmp_path / "ca").mkdir()
    for time in ("first", "second"):
        for name in ("server.pem", "server.key", "ca.pem"):
            (tmp_path / "ca" / name).write_text(f"{time} {name}")
            (tmp_path / "ca" / name).chmod(0o600)
        told = _call("--tls", "ca", tmp_path / "s", cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        found = {name: (tmp_path / "s" / name).read_text() for name in wanted}
        assert found == {
            "tls_cert": f"{time} server.pem",
            "tls_key": f"{time} server.key",
            "tls_ca": f"{time} ca.pem",
        }
        assert {stat.S_IMODE((tmp_path / "s" / name).stat().st_mode) for name in wanted} == {0o444}
    assert list((tmp_path / "s").glob("*.new")) == []


def test_tls_files_that_are_not_all_there_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "server.pem").touch()
    for words in (["--tls"], ["--tls", tmp_path / "ca", tmp_path / "s"], ["--tsl", tmp_path / "s"]):
        told = _call(*words)
        assert told.returncode == 2
        assert told.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_tokens_that_are_there_stay(tmp_path: Path) -> None:
    _make(tmp_path / "s")
    before = {path.name: path.read_text() for path in (tmp_path / "s").iterdir()}
    _make(tmp_path / "s")
    assert {path.name: path.read_text() for path in (tmp_path / "s").iterdir()} == before


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    command = ["bash", str(SCRIPT), str(tmp_path / "link")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 2
    assert "is a link" in told.stderr
    assert list((tmp_path / "real").iterdir()) == []


def test_the_images_take_groups_that_the_project_has() -> None:
    match = re.search(r"lists = (\{.*?\});", DOCKERFILE)
    assert match is not None
    lists = ast.literal_eval(match[1])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(lists) == {"server", "worker"}
    assert {name for names in lists.values() for name in names} <= set(extras)
    assert not any("tensorflow" in need for name in lists["server"] for need in extras[name])


def test_a_build_sends_no_secret_to_the_engine() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    sent = {line.strip("!/") for line in lines if line.startswith("!")}
    assert sent == {"pyproject.toml", "README.md", "LICENSE", "protocol", "ps", "worker"}


def test_nothing_is_open_to_other_machines_unless_that_is_asked_for() -> None:
    """The port of the server is published by a file of its own alone, at an address that has to be said."""
    published = re.findall(r'ports: \["([^"]*)"\]', COMPOSE)
    assert [port.split(":")[0] for port in published] == ["127.0.0.1"]
    opened = re.findall(r'ports: \["(\S+).*\}:(\d+):(\d+)"\]', (ROOT / "docker-compose.open.yml").read_text())
    assert opened == [("${PS_PUBLISH:?say", "5014", "5014")]


def test_the_file_of_variables_is_nobody_elses() -> None:
    """It is read at every command, so it stays in the checkout; it is neither committed nor part of an image."""
    assert "/.env" in (ROOT / ".gitignore").read_text().split()
    assert not any(line.startswith("!") and ".env" in line for line in (ROOT / ".dockerignore").read_text().split())


def test_no_variable_is_given_before_a_command() -> None:
    """The next command would not have it, and would make the container anew with the default."""
    variables = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE))
    for page in (COMPOSE, (ROOT / "README.md").read_text(), (ROOT / "docs/OPERATIONS.md").read_text()):
        given = re.findall(r"\b([A-Z_]+)=\S+ (?:[A-Z_]+=\S+ )*docker[ -]compose", page)
        assert not variables & set(given)


def test_the_number_of_workers_is_said_in_one_place() -> None:
    """`--scale` alone is enough: the server counts them, and no worker asks for a rank of its own."""
    assert "WEIGHMASTER_WORKERS: ${WORKERS:-auto}" in COMPOSE
    assert "scale: ${WORKERS:-3}" in COMPOSE
    assert "WEIGHMASTER_RANK: auto" in COMPOSE
    assert re.search(r"^# .*: docker compose up --scale worker=\d+$", COMPOSE, re.MULTILINE)
    config = parse(["--workers", "auto", "--steps", "1"])
    match = re.search(r"WEIGHMASTER_GATHER_TIMEOUT: \$\{GATHER_TIMEOUT:-(\d+)\}", COMPOSE)
    assert match is not None
    assert config.gather_timeout < float(match[1]) < 60.0


def test_no_builder_of_the_newest_kind_is_needed() -> None:
    """The classic builder, which old engines have, knows neither mounts nor heredocs."""
    assert "--mount" not in DOCKERFILE
    assert "<<" not in DOCKERFILE
    assert not DOCKERFILE.lower().startswith("# syntax")
    assert not re.search(r"^name:", COMPOSE, re.MULTILINE)
