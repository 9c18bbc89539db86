"""The worker's options: what each is by default, where it comes from, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import pytest

from protocol.addresses import Address, parse_address
from protocol.errors import ConfigurationError
from protocol.injection import Plan
from protocol.messages import MAX_NAME_CHARACTERS, MAX_RANK, Role
from tests.unit.authority import Authority
from worker.command_line import build_command, execute, parse
from worker.config import ROLES, ClusterTask, WorkerConfig, available_cpus, parse_tf_config
from worker.faults import FAULTS

CLUSTER = {"ps": ["ps.example:7000"], "worker": ["a:1", "b:1", "c:1"]}
WITH_CHIEF = {**CLUSTER, "chief": ["d:1"]}


def ignore(_: WorkerConfig) -> int:
    return 0


def options() -> list[click.Option]:
    return [
        parameter
        for parameter in build_command(ignore).params
        if isinstance(parameter, click.Option) and parameter.name not in ("help", "version")
    ]


def tf_config(cluster: object, job: str = "worker", index: object = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [str(option.envvar) for option in options()] + ["TF_CONFIG"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_every_option_has_its_variable_its_help_and_its_default(option: click.Option) -> None:
    assert option.envvar == f"WEIGHMASTER_{str(option.name).upper()}"
    assert option.help
    _, text = option.get_help_record(click.Context(build_command(ignore))) or ("", "")
    assert f"env var: {option.envvar}" in text
    assert "default: " in text


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    assert {option.name for option in options()} == {field.name for field in dataclasses.fields(WorkerConfig)}


def test_options_not_given_are_the_fields_defaults() -> None:
    assert parse([]) == WorkerConfig()
    assert parse([]) == WorkerConfig(
        ps=Address("127.0.0.1", 5014),
        rank=None,
        name=None,
        role="worker",
        model="mlp",
        dataset="digits",
        data_dir=None,
        batch_size=None,
        trusted_examples=100,
        own_data=False,
        threads=available_cpus(),
        legacy_keras=False,
        seed=None,
        token_file=None,
        tls_ca=None,
        tls_fingerprint=None,
        tls_cert=None,
        tls_key=None,
        log_format="text",
        evaluate_every=20,
        fault=None,
        inject=(),
        connect_timeout=60,
        reconnect_timeout=120,
        congestion_control="auto",
        dry_run=False,
    )


def test_every_option_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("worker", is_client=True)
    given: dict[str, Any] = {
        "tls_ca": authority.file,
        "tls_cert": issued.certificate,
        "tls_key": issued.key,
        "log_format": "json",
        "name": "w",
        "role": "evaluator",
        "model": "m.py:build",
        "dataset": "npz:d.npz",
        "data_dir": Path("data"),
        "batch_size": 8,
        "trusted_examples": 0,
        "threads": 3,
        "legacy_keras": True,
        "seed": 5,
        "token_file": Path("t"),
        "evaluate_every": 7,
        "connect_timeout": 1.5,
        "reconnect_timeout": 2.5,
        "congestion_control": "cubic",
        "dry_run": True,
    }
    assert given.keys() | {"ps", "rank", "fault", "inject", "tls_fingerprint", "own_data"} == {
        field.name for field in dataclasses.fields(WorkerConfig)
    }
    monkeypatch.setenv("WEIGHMASTER_PS", "[::1]:9")
    for name, value in given.items():
        monkeypatch.setenv(f"WEIGHMASTER_{name.upper()}", str(value))
    assert parse([]) == WorkerConfig(ps=Address("::1", 9), **given)
    monkeypatch.delenv("WEIGHMASTER_ROLE")
    monkeypatch.delenv("WEIGHMASTER_EVALUATE_EVERY")
    monkeypatch.setenv("WEIGHMASTER_RANK", "4")
    monkeypatch.setenv("WEIGHMASTER_FAULT", "scale:-10")
    monkeypatch.setenv("WEIGHMASTER_OWN_DATA", "1")
    assert parse([]).own_data and not parse(["--no-own-data"]).own_data
    assert (parse([]).rank, parse([]).fault) == (4, "scale:-10")
    monkeypatch.delenv("WEIGHMASTER_TLS_CA")
    monkeypatch.setenv("WEIGHMASTER_TLS_FINGERPRINT", "ab" * 32)
    assert parse([]).tls_fingerprint == "ab" * 32 and parse([]).tls is not None
    monkeypatch.setenv("WEIGHMASTER_INJECT", "kill@mid-push,step=3; stop@mid-reply")
    assert len(Plan.parse(parse([]).inject).injections) == 2


def test_faults_on_purpose_are_given_once_or_often_and_must_be_a_workers() -> None:
    given = ["--inject", "kill@mid-push,step=3;cut@mid-reply", "--inject", "stop@before-push"]
    assert parse(given).inject == ("kill@mid-push,step=3;cut@mid-reply", "stop@before-push")
    with pytest.raises(ConfigurationError, match="names no point of a worker"):
        parse(["--inject", "kill@before-apply"])


def test_command_line_then_environment_then_tf_config_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse([]).ps, parse([]).rank) == (Address("127.0.0.1", 5014), None)
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER, "worker", 2))
    assert (parse([]).ps, parse([]).rank) == (Address("ps.example", 7000), 2)
    monkeypatch.setenv("WEIGHMASTER_PS", "env:1")
    monkeypatch.setenv("WEIGHMASTER_RANK", "auto")
    assert (parse([]).ps, parse([]).rank) == (Address("env", 1), None)
    told = parse(["--ps", "line:2", "--rank", "1"])
    assert (told.ps, told.rank) == (Address("line", 2), 1)


@pytest.mark.parametrize(
    ("cluster", "job", "index", "rank", "role"),
    [
        (CLUSTER, "worker", 0, 0, "worker"),
        (CLUSTER, "worker", 2, 2, "worker"),
        (WITH_CHIEF, "chief", 0, 0, "worker"),
        (WITH_CHIEF, "worker", 0, 1, "worker"),
        (WITH_CHIEF, "worker", 2, 3, "worker"),
        (WITH_CHIEF, "evaluator", 0, None, "evaluator"),
    ],
)
def test_tf_config_gives_address_rank_and_role(
    cluster: object, job: str, index: int, rank: int | None, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tf_config(cluster, job, index)
    assert parse_tf_config(text) == ClusterTask(Address("ps.example", 7000), rank, role)
    monkeypatch.setenv("TF_CONFIG", text)
    told = parse([])
    assert (told.ps, told.rank, told.role) == (Address("ps.example", 7000), rank, role)


@pytest.mark.parametrize("role", ["validator", "evaluator"])
def test_who_has_no_rank_takes_none_from_tf_config(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER, "worker", 1))
    told = parse(["--role", role])
    assert (told.ps, told.role, told.rank) == (Address("ps.example", 7000), role, None)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_place_in_the_help_and_is_accepted(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(["--fault", fault]).fault == fault
    assert execute(build_command(ignore), ["--help"]) == 0
    assert fault in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", " ", "{}", '{"cluster": {}}'])
def test_an_empty_tf_config_says_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert parse([]) == WorkerConfig()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"cluster": []}', "needs objects"),
        ('{"task": 3}', "needs objects"),
        (tf_config({"ps": "h:1"}), "list of host:port for 'ps'"),
        (tf_config({"ps": [1]}), "list of host:port for 'ps'"),
        (tf_config({"ps": ["h:1", "i:1"]}), "2 parameter servers"),
        (tf_config({"ps": ["nowhere"]}), "'nowhere' is not HOST:PORT"),
        (tf_config(CLUSTER, "worker", 3), "lists only 3"),
        (tf_config(CLUSTER, "worker", -1), "number from 0"),
        (tf_config(CLUSTER, "worker", "0"), "number from 0"),
        (tf_config(CLUSTER, "worker", True), "number from 0"),
        (tf_config(CLUSTER, "chief", 1), "no chief, worker or evaluator"),
        (tf_config(CLUSTER, "master", 0), "no chief, worker or evaluator"),
        (tf_config(CLUSTER, "ps", 0), "start the server (`python -m ps`)"),
        ('{"task": {"type": ["worker"]}}', "no chief, worker or evaluator"),
        (tf_config({"worker": ["a:1"]}), "lists no 'ps'"),
    ],
)
def test_a_malformed_tf_config_is_one_sentence(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert execute(build_command(ignore), []) == 2
    error = capsys.readouterr().err
    assert error.startswith("weighmaster-worker: TF_CONFIG ")
    assert reason in error
    assert error.count("\n") == 1
    for complete in (["--rank", "0"], ["--rank", "auto"], ["--role", "validator"], ["--role", "evaluator"]):
        assert execute(build_command(ignore), ["--ps", "h:1", *complete]) == 0, "nothing is asked of TF_CONFIG"


@pytest.mark.parametrize("job", ["evaluator", "master", "ps", "chief"])
def test_a_given_rank_is_a_workers_whatever_task_tf_config_has(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the address is asked of it, and of what is not asked for nothing need be right."""
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER, job, 7))
    told = parse(["--rank", "1"])
    assert (told.ps, told.rank, told.role) == (Address("ps.example", 7000), 1, "worker")
    monkeypatch.setenv("TF_CONFIG", tf_config({"ps": ["a:1", "b:1"]}, "worker", 1))
    assert (parse(["--ps", "h:1"]).ps, parse(["--ps", "h:1"]).rank) == (Address("h", 1), 1)


def test_what_does_not_go_with_the_role_of_tf_config_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER, "evaluator"))
    with pytest.raises(
        ConfigurationError, match=r"--fault and --role evaluator exclude .*; the role is TF_CONFIG's"
    ):
        parse(["--fault", "zero"])
    with pytest.raises(ConfigurationError, match=r"leave one out$"):
        parse(["--fault", "zero", "--role", "evaluator"])
    with pytest.raises(ConfigurationError, match=r"not 0$"):
        parse(["--batch-size", "0"])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:5014", ("host", 5014)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("a-b.example:9", ("a-b.example", 9)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == Address(*address)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":5014", "::1:5014", "[::1]", "h:0", "h:65536", "h:x", "h:-1", "a b:1", "h:1\n"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--role", "evaluator", "--rank", "1"], ["--role evaluator", "--rank"]),
        (["--role", "validator", "--rank", "1"], ["--role validator", "--rank"]),
        (["--role", "validator", "--evaluate-every", "5"], ["--evaluate-every", "--role validator"]),
        (["--fault", "gremlins"], ["'gremlins'", *FAULTS]),
        (["--fault", "zero:1"], ["--fault zero:1", "no number"]),
        (["--fault", "scale", "--role", "validator"], ["--fault", "--role validator"]),
        (["--fault", "scale", "--role", "evaluator"], ["--fault", "--role evaluator"]),
        (["--own-data", "--role", "validator"], ["--own-data", "--role validator", "--trusted-examples 0"]),
        (["--own-data", "--role", "evaluator"], ["--own-data", "--role evaluator"]),
        (["--own-data", "--trusted-examples", "50"], ["--own-data and --trusted-examples exclude"]),
        (["--rank", "-1"], ["--rank", "-1"]),
        (["--rank", "first"], ["--rank", "first"]),
        (["--ps", "nowhere"], ["--ps", "nowhere"]),
        (["--model", "resnet"], ["--model", "mlp", "resnet"]),
        (["--model", "m.py"], ["--model", "file.py:function"]),
        (["--dataset", "npz:"], ["--dataset", "npz:FILE"]),
        (["--dataset", "imagenet"], ["--dataset", "digits"]),
        (["--batch-size", "0"], ["--batch-size"]),
        (["--trusted-examples", "-1"], ["--trusted-examples"]),
        (["--threads", "0"], ["--threads"]),
        (["--name", "two words"], ["--name"]),
        (["--name", "*"], ["--name"]),
        (["--congestion-control", "no such"], ["--congestion-control"]),
        (["--log-format", "xml"], ["--log-format", "text", "json"]),
        (["--tls-ca", "a", "--tls-fingerprint", "ab" * 32], ["--tls-ca", "--tls-fingerprint", "exclude"]),
        (["--tls-fingerprint", "ab" * 31], ["--tls-fingerprint", "64 hexadecimal digits", "openssl x509"]),
        (["--tls-fingerprint", "ab" * 32, "--tls-key", "k"], ["--tls-cert", "--tls-key", "both"]),
        (["--tls-cert", "c", "--tls-key", "k"], ["--tls-cert", "--tls-ca", "--tls-fingerprint"]),
        (["--tls-ca", "no-such-file"], ["--tls-ca", "no-such-file", "No such file"]),
        (["--connect-timeout", "nan"], ["--connect-timeout"]),
        (["--reconnect-timeout", "0"], ["--reconnect-timeout"]),
        (["--role", "tester"], ["--role", "worker", "validator", "evaluator"]),
        (["stray"], ["stray"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(build_command(ignore), arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    for name in named:
        assert name in output.err
    with pytest.raises(ConfigurationError):
        parse(arguments)


def test_the_highest_rank_is_the_protocols() -> None:
    assert WorkerConfig(rank=MAX_RANK).rank == MAX_RANK
    with pytest.raises(ConfigurationError, match=f"--rank must be from 0 to {MAX_RANK}, not {MAX_RANK + 1}"):
        WorkerConfig(rank=MAX_RANK + 1)
    longest = "n" * MAX_NAME_CHARACTERS
    assert WorkerConfig(name=longest).name == longest
    with pytest.raises(ConfigurationError, match="--name must be 1 to 128 printable"):
        WorkerConfig(name=longest + "n")


def test_roles_are_those_of_the_protocol() -> None:
    assert set(ROLES) == {role.value for role in Role}
    with pytest.raises(ConfigurationError, match="--role must be worker, validator or evaluator, not tester"):
        WorkerConfig(role="tester")


def test_the_exit_code_is_the_handlers() -> None:
    assert execute(build_command(lambda _: 4), []) == 4
    assert execute(build_command(ignore), ["--help"]) == 0
