"""The server's options: what each is by default, where it comes from, and what is refused."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import pytest

from protocol.errors import ConfigurationError
from ps.settings import config
from ps.settings.combinations import (
    AT_EACH_PUSH,
    BOUNDS,
    COLUMNS,
    COMBINATIONS,
    MAX_WORKERS,
    NEEDS,
    Combination,
    check_combination,
)
from ps.settings.command_line import ExportRequest, TokenRequest, build_command, execute, parse
from ps.settings.config import AUTO, ServerConfig, default_of
from ps.settings.machine import memory_limit_bytes
from ps.settings.options import size_bytes
from tests.unit.authority import Authority

NEEDED = ["--workers", "3", "--steps", "10"]
RUN_DIR = ["--run-dir", "here"]


def ignore(_: Any) -> int:
    return 0


def commands() -> list[click.Command]:
    group = build_command(ignore, ignore, ignore, ignore)
    return [group, *group.commands.values()]


def options() -> list[tuple[str, click.Option]]:
    return [
        (command.name or "", parameter)
        for command in commands()
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in ("help", "version")
    ]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, option in options():
        if option.envvar is not None:
            monkeypatch.delenv(str(option.envvar), raising=False)


@pytest.mark.parametrize(("command", "option"), options(), ids=lambda value: getattr(value, "name", value))
def test_every_option_has_its_help_its_default_and_if_it_is_of_serving_its_variable(
    command: str, option: click.Option
) -> None:
    serves = command == commands()[0].name
    assert option.envvar == (f"WEIGHMASTER_{str(option.name).upper()}" if serves else None)
    assert option.help
    context = click.Context(next(one for one in commands() if one.name == command))
    _, text = option.get_help_record(context) or ("", "")
    assert ("env var: " in text) is serves
    assert not serves or f"env var: {option.envvar}" in text
    assert "default: " in text


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    serving = commands()[0].name
    names = {option.name for command, option in options() if command == serving}
    assert names == {field.name for field in dataclasses.fields(ServerConfig)}


def test_options_not_given_are_the_fields_defaults() -> None:
    assert parse([*NEEDED, *RUN_DIR]) == ServerConfig(workers=3, steps=10, run_dir=Path("here"))


def test_the_defaults_are_as_documented() -> None:
    made = parse(NEEDED)
    assert (made.host, made.port, made.shard_count, made.optimizer) == ("127.0.0.1", 5014, 3, "adam")
    assert (made.start_timeout, made.round_timeout, made.rejoin_timeout, made.idle_timeout) == (300, 300, 120, 3600)
    assert (made.checkpoint_dir, made.checkpoint_every, made.keep, made.resume) == (None, 100, 3, False)
    assert (made.consistency, made.quorum, made.max_staleness, made.staleness_discount) == ("sync", None, None, 0)
    assert (made.ssp_bound, made.worker_loss, made.inject) == (3, "wait", ())
    assert (made.drain_timeout, made.heartbeat_interval, made.heartbeat_timeout) == (30, 5, 30)
    assert 1 <= made.threads <= config.MAX_UPDATE_THREADS
    assert made.run_dir.parts[0] == "runs"
    assert made.max_memory == int(0.8 * memory_limit_bytes())
    assert made.max_model_bytes == 8 * 2**30


def test_every_option_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    tls = {"tls_cert": issued.certificate, "tls_key": issued.key, "tls_ca": authority.file}
    given: dict[str, Any] = {
        "workers": 2,
        "steps": 7,
        "host": "localhost",
        "port": 0,
        "port_file": Path("p"),
        "evaluators": 2,
        "validators": 2,
        "validator_every": 5,
        "validator_seed_file": Path("v"),
        "shards": 4,
        "mode": "shared",
        "consistency": "sync",
        "quorum": 1,
        "aggregation": "master",
        "master": "mine.py:master",
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "momentum": 0.9,
        "nesterov": True,
        "schedule": "exponential",
        "decay_steps": 100,
        "decay_rate": 0.5,
        "staircase": True,
        "warmup_steps": 3,
        "clip_worker_norm": 1.5,
        "clip_norm": 2.5,
        "ema_decay": 0.99,
        "seed": 11,
        "threads": 2,
        "on_worker_loss": "wait",
        "gather_timeout": 0.5,
        "start_timeout": 1.0,
        "round_timeout": 2.0,
        "rejoin_timeout": 3.0,
        "idle_timeout": 3.5,
        "drain_timeout": 4.0,
        "heartbeat_interval": 5.5,
        "heartbeat_timeout": 6.5,
        "run_dir": Path("d"),
        "init": Path("i"),
        "checkpoint_dir": Path("c"),
        "checkpoint_every": 7,
        "keep": 2,
        "resume": True,
        "export": Path("e.safetensors"),
        "summary": Path("s"),
        "token_file": Path("t"),
        "max_memory": 64 << 20,
        "max_model_bytes": 1 << 20,
        "congestion_control": "cubic",
        "status_host": "localhost",
        "status_port": 1,
        "status_port_file": Path("sp"),
        "log_format": "json",
        "tensorboard": Path("tb"),
    } | tls
    others = {"beta1": 0.5, "beta2": 0.6, "epsilon": 0.1, "weight_decay": 0.2, "insecure": True}
    others |= {"mean_over": "examples"}
    more = {"faulty_workers": 1}
    ensemble = {"mode": "ensemble", "aggregation": "master", "head": "sigmoid", "weight_acts_on": "update"}
    ensemble |= {"weighting": "batch"}
    at_each_push = {"consistency": "ssp", "ssp_bound": 5, "max_staleness": 9, "staleness_discount": 0.5}
    known = given.keys() | others.keys() | more.keys() | ensemble.keys() | at_each_push.keys() | {"inject"}
    assert known == {field.name for field in dataclasses.fields(ServerConfig)}
    for name, value in given.items():
        monkeypatch.setenv(f"WEIGHMASTER_{name.upper()}", str(value))
    assert parse([]) == ServerConfig(**given)
    for name in given:
        monkeypatch.delenv(f"WEIGHMASTER_{name.upper()}")
    for name, value in others.items():
        monkeypatch.setenv(f"WEIGHMASTER_{name.upper()}", str(value))
    assert parse([*NEEDED, *RUN_DIR, "--optimizer", "adamw"]) == ServerConfig(
        workers=3, steps=10, run_dir=Path("here"), optimizer="adamw", **others
    )
    for name in others:
        monkeypatch.delenv(f"WEIGHMASTER_{name.upper()}")
    monkeypatch.setenv("WEIGHMASTER_FAULTY_WORKERS", "1")
    assert parse([*NEEDED, *RUN_DIR, "--aggregation", "trimmed_mean"]).faulty_workers == 1
    monkeypatch.delenv("WEIGHMASTER_FAULTY_WORKERS")
    for chosen in (ensemble, at_each_push):
        for name, value in chosen.items():
            monkeypatch.setenv(f"WEIGHMASTER_{name.upper()}", str(value))
        assert parse([*NEEDED, *RUN_DIR]) == ServerConfig(workers=3, steps=10, run_dir=Path("here"), **chosen)
        for name in chosen:
            monkeypatch.delenv(f"WEIGHMASTER_{name.upper()}")
    monkeypatch.setenv("WEIGHMASTER_INJECT", "kill@before-apply,step=3;delay:2@mid-push")
    assert parse(NEEDED).inject == ("kill@before-apply,step=3", "delay:2@mid-push")
    assert parse([*NEEDED, "--inject", "a@b,rank=1", "--inject", "c@d"]).inject == ("a@b,rank=1", "c@d")


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHMASTER_PORT", "1111")
    monkeypatch.setenv("WEIGHMASTER_INSECURE", "1")
    assert parse([*NEEDED]).port == 1111
    assert parse([*NEEDED, "--port", "2222"]).port == 2222
    assert parse([*NEEDED]).insecure
    assert not parse([*NEEDED, "--no-insecure"]).insecure


ENSEMBLE = ["--mode", "ensemble", "--aggregation", "master"]


REFUSED = [
    (["--staircase"], ["--staircase", "--schedule"]),
    (["--momentum", "0.9"], ["--momentum", "--optimizer adam"]),
    (["--optimizer", "sgd", "--beta1", "0.5"], ["--beta1", "--optimizer sgd"]),
    (["--optimizer", "sgd", "--weight-decay", "0.1"], ["--weight-decay", "--optimizer sgd"]),
    (["--weight-decay", "0.1"], ["--weight-decay", "--optimizer adam"]),
    (["--optimizer", "sgd", "--nesterov"], ["--nesterov", "--momentum"]),
    (["--nesterov"], ["--nesterov", "--optimizer"]),
    (["--schedule", "cosine"], ["--schedule cosine", "--decay-steps"]),
    (["--schedule", "exponential", "--decay-steps", "5"], ["--schedule exponential", "--decay-rate"]),
    (["--schedule", "exponential", "--decay-rate", "0.5"], ["--schedule exponential", "--decay-steps"]),
    (["--schedule", "cosine", "--decay-steps", "5", "--decay-rate", "0.5"], ["--decay-rate", "--schedule"]),
    (["--decay-steps", "5"], ["--decay-steps", "--schedule constant"]),
    (["--heartbeat-timeout", "5"], ["--heartbeat-timeout", "--heartbeat-interval"]),
    (["--insecure", "--token-file", "t"], ["--insecure", "--token-file"]),
    (["--shards", "2"], ["--shards", "--workers"]),
    (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--token-file", "--insecure"]),
    (["--export", "model.npz"], ["--export", ".safetensors"]),
    (["--summary", "same", "--port-file", "same"], ["--summary", "--port-file"]),
    (["--learning-rate", "nan"], ["--learning-rate", "nan"]),
    (["--learning-rate", "inf"], ["--learning-rate", "inf"]),
    (["--start-timeout", "1e300"], ["--start-timeout"]),
    (["--start-timeout", "0"], ["--start-timeout", "above 0"]),
    (["--steps", "0"], ["--steps must be at least 1"]),
    (["--port", "65536"], ["--port", "65535"]),
    (["--beta2", "1"], ["--beta2", "below 1"]),
    (["--seed", "-1"], ["--seed"]),
    (["--mode", "ensemble", "--aggregation", "mean"], ["--mode ensemble", "--aggregation mean"]),
    (["--mode", "federated"], ["--mode", "shared", "ensemble"]),
    (["--weighting", "sample"], ["--weighting", "--mode"]),
    (["--head", "sigmoid"], ["--head", "--mode"]),
    (["--weight-acts-on", "update"], ["--weight-acts-on", "--mode"]),
    ([*ENSEMBLE, "--weighting", "sample", "--weight-acts-on", "update"], ["--weight-acts-on", "--weighting"]),
    ([*ENSEMBLE, "--head", "sigmoid", "--master", "mine.py:master"], ["--head", "--master"]),
    *(([*ENSEMBLE, option, "1"], [option, "--mode"]) for option in ("--evaluators", "--shards", "--validators")),
    *(([*ENSEMBLE, option, "0.5"], [option, "--mode"]) for option in ("--ema-decay", "--clip-norm")),
    (["--consistency", "eventual"], ["--consistency", "sync", "async", "ssp"]),
    (["--consistency", "async", "--aggregation", "median"], ["--consistency async", "--aggregation median"]),
    (["--consistency", "ssp", "--on-worker-loss", "wait"], ["--consistency ssp", "--on-worker-loss wait"]),
    ([*ENSEMBLE, "--consistency", "async"], ["--mode ensemble", "--consistency async"]),
    ([*ENSEMBLE, "--quorum", "2"], ["--quorum", "--mode"]),
    (["--consistency", "async", "--quorum", "2"], ["--quorum", "--consistency async"]),
    (["--consistency", "ssp", "--mean-over", "examples"], ["--mean-over", "--consistency ssp"]),
    (["--consistency", "async", "--validators", "1"], ["--validators", "--aggregation mean"]),
    (
        ["--aggregation", "evidence", "--validators", "0", "--validator-every", "5"],
        ["--validators 0", "--validator-every"],
    ),
    (
        ["--aggregation", "master", "--validators", "0", "--validator-seed-file", "f"],
        ["--validators 0", "--validator-seed-file"],
    ),
    (["--quorum", "0"], ["--quorum must be at least 1"]),
    (["--quorum", "4"], ["--quorum 4", "--workers", "3"]),
    (["--max-staleness", "4"], ["--max-staleness", "--consistency sync"]),
    (["--staleness-discount", "1"], ["--staleness-discount", "--consistency sync"]),
    (["--consistency", "async", "--staleness-discount", "-1"], ["--staleness-discount must be at least 0"]),
    (["--consistency", "async", "--max-staleness", "-1"], ["--max-staleness must be at least 0"]),
    (["--consistency", "async", "--ssp-bound", "2"], ["--ssp-bound", "--consistency async"]),
    (["--consistency", "ssp", "--ssp-bound", "0"], ["--ssp-bound must be at least 1"]),
    (["--on-worker-loss", "despair"], ["--on-worker-loss", "wait", "shrink"]),
    (["--resume"], ["--resume needs --checkpoint-dir"]),
    (["--checkpoint-every", "5"], ["--checkpoint-every needs --checkpoint-dir"]),
    (["--keep", "5"], ["--keep needs --checkpoint-dir"]),
    (["--checkpoint-dir", "c", "--keep", "0"], ["--keep must be at least 1"]),
    (["--checkpoint-dir", "c", "--checkpoint-every", "0"], ["--checkpoint-every must be at least 1"]),
    (["--checkpoint-dir", "c.safetensors", "--export", "c.safetensors"], ["--checkpoint-dir", "--export"]),
    (["--idle-timeout", "0"], ["--idle-timeout", "above 0"]),
    (["--congestion-control", "no such"], ["--congestion-control"]),
    (["--log-format", "xml"], ["--log-format", "text", "json"]),
    (["--status-port", "65536"], ["--status-port", "at most 65535"]),
    (["--status-host", "localhost"], ["--status-host", "--status-port"]),
    (["--status-port-file", "f"], ["--status-port-file", "--status-port"]),
    (["--port", "5015", "--status-port", "5015"], ["--port", "--status-port", "5015"]),
    (["--status-port", "0", "--status-port-file", "f", "--port-file", "f"], ["--port-file", "--status-port-file"]),
    (["--status-port", "0", "--status-host", "::"], ["--status-host", "--token-file", "--insecure"]),
    (["--tensorboard", "d", "--checkpoint-dir", "d"], ["--tensorboard", "--checkpoint-dir"]),
    (["--tls-cert", "c"], ["--tls-cert", "--tls-key"]),
    (["--tls-key", "k"], ["--tls-key", "--tls-cert"]),
    (["--tls-ca", "a"], ["--tls-ca", "--tls-cert"]),
    (["--tls-cert", "no-such-file", "--tls-key", "k"], ["--tls-cert", "no-such-file", "No such file"]),
    (["--max-memory", "4Q"], ["--max-memory", "4Q"]),
    (["--port", "http"], ["--port", "http"]),
    (["--no-such-option"], ["--no-such-option"]),
    (["no-such-command"], ["no-such-command"]),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=lambda value: " ".join(value))
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(build_command(ignore, ignore), [*NEEDED, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("weighmaster-ps: ")
    for name in named:
        assert name in output.err
    with pytest.raises(ConfigurationError):
        parse([*NEEDED, *arguments])


@pytest.mark.parametrize("missing", ["--workers", "--steps"])
def test_a_missing_option_is_named_with_its_variable(missing: str) -> None:
    index = NEEDED.index(missing)
    with pytest.raises(ConfigurationError, match=f"{missing} is missing.*WEIGHMASTER_{missing[2:].upper()}"):
        parse(NEEDED[:index] + NEEDED[index + 2 :])


def test_what_is_allowed_beyond_loopback() -> None:
    assert parse([*NEEDED, "--host", "0.0.0.0", "--insecure"]).insecure
    assert parse([*NEEDED, "--host", "::", "--token-file", "t"]).token_file == Path("t")


def test_the_table_of_combinations_drives_refusals() -> None:
    """A table of a later server: any two of a row go together, and a clash names the two."""
    table = (
        Combination(("shared",), ("sync",), ("mean", "median"), ("wait", "shrink")),
        Combination(("shared",), ("async",), ("mean",), ("shrink",)),
        Combination(("ensemble",), ("sync",), ("master",), ("wait",)),
    )

    def asked(*values: str) -> dict[str, str]:
        return dict(zip(COLUMNS, values, strict=True))

    for row in table:
        check_combination(asked(*(getattr(row, column)[-1] for column in COLUMNS)), table)
    with pytest.raises(ConfigurationError, match="--consistency async and --aggregation median do not go"):
        check_combination(asked("shared", "async", "median", "shrink"), table)
    with pytest.raises(ConfigurationError, match="--mode ensemble and --consistency async do not go"):
        check_combination(asked("ensemble", "async", "master", "wait"), table)


def test_three_that_clash_only_together_are_all_named() -> None:
    table = (
        Combination(("a",), ("x",), ("1",), ("w",)),
        Combination(("a",), ("y",), ("2",), ("w",)),
        Combination(("b",), ("x",), ("2",), ("w",)),
    )
    with pytest.raises(ConfigurationError, match="--mode a, --consistency x, --aggregation 2 and --on-worker"):
        check_combination(dict(zip(COLUMNS, ("a", "x", "2", "w"), strict=True)), table)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("17", 17), ("2k", 2048), ("1.5M", 3 << 19), ("8G", 8 << 30), ("1t", 1 << 40)]
)
def test_sizes_take_a_suffix(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "8GB", "0x10", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a size"):
        size_bytes(text)


def test_the_memory_limit_is_the_smallest_of_the_cgroups_above(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert memory_limit_bytes(tmp_path) == memory_limit_bytes(tmp_path / "nothing")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("50000000\n")
    assert memory_limit_bytes(tmp_path) == 50_000_000
    (group / "memory.max").write_text("40000000\n")
    assert memory_limit_bytes(tmp_path) == 40_000_000


def test_environment_variables_that_are_meant_for_others_change_nothing_of_sub_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    kept = tmp_path / "kept"
    kept.mkdir()
    elsewhere = {"NAME": "gpu", "ROLE": "validator", "RANK": "7", "FILE": "f", "TO": "npz", "OUT": "x.npz"}
    for name, value in elsewhere.items():
        monkeypatch.setenv(f"WEIGHMASTER_{name}", value)

    def keep(request: object) -> int:
        asked.append(request)
        return 0

    command = build_command(ignore, keep, ignore, keep)
    assert execute(command, ["token"]) == 0
    assert execute(command, ["export", str(kept)]) == 0
    assert asked == [
        TokenRequest("*", "worker", None, None),
        ExportRequest(kept, "safetensors", tmp_path / "kept.safetensors"),
    ]


def test_the_sub_command_makes_a_token_and_serving_options_do_not_go_with_it() -> None:
    asked: list[TokenRequest] = []

    def keep(request: TokenRequest) -> int:
        asked.append(request)
        return 9

    command = build_command(ignore, keep, ignore, ignore)
    assert execute(command, ["token"]) == 9
    assert execute(command, ["token", "--name", "a", "--rank", "4", "--file", "f"]) == 9
    assert execute(command, ["token", "--role", "evaluator", "--name", "e"]) == 9
    assert asked == [
        TokenRequest("*", "worker", None, None),
        TokenRequest("a", "worker", 4, Path("f")),
        TokenRequest("e", "evaluator", None, None),
    ]
    for refused in (
        ["token", "--rank", "x"],
        ["token", "--name", "two words"],
        ["token", "--name", "#"],
        ["token", "--role", "evaluator", "--rank", "1"],
        ["--workers", "2", "token"],
    ):
        assert execute(command, refused) == 2
    assert len(asked) == 3


def test_sub_commands_for_checkpoints_hand_on_what_they_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Path] = []
    exported: list[ExportRequest] = []

    def show(directory: Path) -> int:
        shown.append(directory)
        return 6

    def export(request: ExportRequest) -> int:
        exported.append(request)
        return 0

    command = build_command(ignore, ignore, show, export)
    kept = tmp_path / "kept"
    kept.mkdir()
    assert execute(command, ["inspect", str(kept)]) == 6
    assert shown == [kept]
    assert execute(command, ["export", str(kept)]) == 0
    assert execute(command, ["export", str(kept), "--to", "npz"]) == 0
    assert execute(command, ["export", str(kept), "--to", "npz", "--out", "a.npz"]) == 0
    monkeypatch.chdir(kept)
    assert execute(command, ["export", "."]) == 0
    assert exported == [
        ExportRequest(kept, "safetensors", tmp_path / "kept.safetensors"),
        ExportRequest(kept, "npz", tmp_path / "kept.npz"),
        ExportRequest(kept, "npz", Path("a.npz")),
        ExportRequest(Path(), "safetensors", tmp_path / "kept.safetensors"),
    ]
    for arguments, says in (
        (["export", str(kept), "--out", "a.npz"], "--out must name a file that ends in .safetensors"),
        (["export", str(kept), "--to", "pickle"], "pickle"),
        (["export"], "DIR"),
        (["inspect", str(tmp_path / "none")], "does not exist"),
        (["--workers", "2", "inspect", str(kept)], "--workers is an option of serving"),
    ):
        assert execute(command, arguments) == 2
        assert says in capsys.readouterr().err
    assert (len(shown), len(exported)) == (1, 4)


def test_the_exit_code_is_the_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(build_command(lambda _: 7, ignore), NEEDED) == 7
    assert execute(build_command(ignore, ignore), ["--help"]) == 0
    text = capsys.readouterr().out
    for title in ("The run", "Consistency", "Optimizer", "Time-outs", "Checkpoints", "Faults on purpose"):
        assert f"\n{title}:\n" in text


# ---- rules and validators --------------------------------------------------------------------------------


def made(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"workers": 5, "steps": 10} | changes)


@pytest.mark.parametrize(
    ("changes", "awaited", "slots"),
    [
        ({"aggregation": "mean"}, 0, 0),
        ({"aggregation": "median"}, 0, 0),
        ({"aggregation": "evidence"}, 0, 1),
        ({"aggregation": "evidence", "validator_every": 10}, 1, 1),
        ({"aggregation": "master", "validators": 2}, 2, 2),
        ({"aggregation": "master", "validators": 0}, 0, 0),
        ({"aggregation": "cosine_trust"}, 1, 1),
    ],
)
def test_who_asks_for_validation_waits_for_a_validator(changes: dict[str, Any], awaited: int, slots: int) -> None:
    config = made(**changes)
    assert (config.awaited_validators, config.validator_slots) == (awaited, slots)


@pytest.mark.parametrize(
    ("rule", "workers", "faulty"),
    [("trimmed_mean", 5, 2), ("trimmed_mean", 1, 0), ("krum", 5, 1), ("krum", 3, 0), ("multi_krum", 9, 3)],
)
def test_a_rule_assumes_as_many_faulty_workers_as_it_stands(rule: str, workers: int, faulty: int) -> None:
    assert made(aggregation=rule, workers=workers).assumed_faulty == faulty


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"aggregation": "krum", "workers": 2}, "needs at least 3 workers to stand 0 bad ones, --workers is 2"),
        ({"aggregation": "trimmed_mean", "faulty_workers": 3}, "needs at least 7 workers to stand 3 bad ones"),
        ({"aggregation": "cosine_trust", "validators": 0}, "needs a validator"),
        ({"aggregation": "mean", "validator_every": 3}, "--validator-every works only with --aggregation"),
        ({"aggregation": "evidence", "master": "m.py:f"}, "--master works only with --aggregation master"),
        ({"aggregation": "median", "clip_worker_norm": 1.0}, "--clip-worker-norm works only with --aggregation"),
        ({"aggregation": "krum", "mean_over": "examples"}, "--mean-over works only with --aggregation mean"),
    ],
)
def test_what_a_rule_cannot_do_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        made(**changes)


def test_an_ensemble_has_the_master_without_being_told() -> None:
    assert parse([*NEEDED, *RUN_DIR, "--mode", "ensemble"]).aggregation == "master"
    assert parse([*NEEDED, *RUN_DIR]).aggregation == "mean"
    with pytest.raises(ConfigurationError, match="--mode ensemble and --aggregation mean do not go together"):
        parse([*NEEDED, *RUN_DIR, "--mode", "ensemble", "--aggregation", "mean"])


# ---- who takes part, and when values change --------------------------------------------------------------


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: f"{row.mode[0]}-{row.consistency[0]}")
def test_all_that_the_table_allows_can_be_asked_for(row: Combination) -> None:
    for mode in row.mode:
        for consistency in row.consistency:
            for rule in row.aggregation:
                for loss in row.on_worker_loss:
                    asked = made(mode=mode, consistency=consistency, aggregation=rule, on_worker_loss=loss)
                    assert asked.worker_loss == loss


def test_tables_name_fields_and_refuse_no_default() -> None:
    names = {field.name for field in dataclasses.fields(ServerConfig)}
    assert {name for need in NEEDS for name in (need.option, need.other)} <= names
    assert set(BOUNDS) <= names
    numbers = {field.name for field in dataclasses.fields(ServerConfig) if field.type in (int, float, int | None)}
    assert numbers <= set(BOUNDS), "a number without limits"
    for name, bounds in BOUNDS.items():
        default = default_of(name)
        assert default is None or bounds.allow(default)


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, "wait"),
        ({"on_worker_loss": "shrink"}, "shrink"),
        ({"quorum": 2}, "wait"),
        ({"consistency": "async"}, "shrink"),
        ({"consistency": "ssp"}, "shrink"),
        ({"workers": None, "shards": 4}, "shrink"),
        ({"mode": "ensemble", "aggregation": "master"}, "wait"),
        ({"mode": "ensemble", "aggregation": "master", "on_worker_loss": "shrink"}, "shrink"),
    ],
)
def test_what_a_lost_worker_means_follows_from_the_rest_unless_it_is_said(
    changes: dict[str, Any], loss: str
) -> None:
    assert made(**changes).worker_loss == loss


def test_without_workers_the_shards_are_the_room_and_the_first_one_starts() -> None:
    elastic = parse(["--shards", "8", "--steps", "10"])
    assert elastic.elastic
    assert (elastic.ranks, elastic.start_workers, elastic.shard_count) == (8, 1, 8)
    whole = made(workers=5, shards=8)
    assert not whole.elastic
    assert (whole.ranks, whole.start_workers, whole.shard_count) == (5, 5, 8)
    member = made(workers=2, mode="ensemble", aggregation="master")
    assert (member.ranks, member.start_workers, member.shard_count) == (2, 2, 1)
    assert made(workers=None, shards=8, quorum=8).quorum == 8
    assert made(workers=None, shards=MAX_WORKERS).ranks == MAX_WORKERS


def test_how_many_workers_there_are_may_be_left_to_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHMASTER_WORKERS", "auto")
    monkeypatch.setenv("WEIGHMASTER_GATHER_TIMEOUT", "20")
    config = parse(["--steps", "10"])
    assert (config.workers, config.gathers, config.gather_timeout) == (AUTO, True, 20.0)
    assert not config.elastic
    assert config.worker_loss == "wait"
    assert (config.ranks, config.start_workers) == (MAX_WORKERS, 1)
    assert parse(["--steps", "10", "--shards", "8"]).ranks == 8
    counted = config.for_workers(3)
    assert counted == dataclasses.replace(config, workers=3)
    assert not counted.gathers
    assert (counted.ranks, counted.start_workers, counted.shard_count) == (3, 3, 3)
    assert made(workers=3).gathers is False


@pytest.mark.parametrize(
    ("changes", "count", "says"),
    [
        ({"quorum": 3}, 2, "--quorum 3 is more than there can be; it must be at most --workers, which is 2"),
        ({"shards": 4}, 5, "--shards 4 leaves some of --workers 5 without data; it must be at least 5"),
        (
            {"aggregation": "krum", "faulty_workers": 1},
            4,
            "--aggregation krum needs at least 5 workers to stand 1 bad ones, --workers is 4",
        ),
        ({"aggregation": "krum"}, 2, "--aggregation krum needs at least 3 workers"),
        ({}, MAX_WORKERS + 1, f"--workers must be at least 1 and at most {MAX_WORKERS}"),
    ],
    ids=["quorum", "shards", "faulty workers", "rule", "too many"],
)
def test_what_cannot_be_done_with_so_many_is_refused_once_they_are_counted(
    changes: dict[str, Any], count: int, says: str
) -> None:
    config = made(workers=AUTO, **changes)
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        config.for_workers(count)


def test_an_ensemble_takes_as_many_as_come_too() -> None:
    assert made(workers=AUTO, mode="ensemble", aggregation="master").for_workers(2).ranks == 2


@pytest.mark.parametrize("number", ["some", "1.5", "", "AUTO"])
def test_another_word_is_no_number_of_workers(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(build_command(lambda _: 0, lambda _: 0), ["--steps", "1", "--workers", number]) == 2
    assert f"'{number}' is neither a whole number nor auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shards": None}, "--workers is missing: say how many workers take part, there or in WEIGHMASTER_WORKERS"),
        ({"mode": "ensemble", "aggregation": "master", "shards": None}, "--mode ensemble needs --workers"),
        ({"on_worker_loss": "wait"}, "--on-worker-loss wait needs --workers"),
        ({"quorum": 5}, "--quorum 5 is more than there can be; it must be at most --shards, which is 4"),
        (
            {"shards": MAX_WORKERS + 1},
            f"without --workers is also the number of ranks, which must be at most {MAX_WORKERS}",
        ),
        ({"aggregation": "krum"}, "--aggregation krum without --workers cannot tell how many may be bad"),
        (
            {"aggregation": "krum", "faulty_workers": 1},
            "needs at least 5 workers to stand 1 bad ones, --shards is 4",
        ),
    ],
)
def test_what_needs_a_number_of_workers_is_refused_without(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        made(**{"workers": None, "shards": 4} | changes)


def test_a_rule_stands_as_many_faulty_workers_as_its_quorum_allows() -> None:
    assert made(aggregation="trimmed_mean", workers=9).assumed_faulty == 4
    assert made(aggregation="trimmed_mean", workers=9, quorum=5).assumed_faulty == 2
    assert made(aggregation="krum", workers=None, shards=9, quorum=5).assumed_faulty == 1
    with pytest.raises(ConfigurationError, match="needs at least 7 workers to stand 3 bad ones, --quorum is 5"):
        made(aggregation="trimmed_mean", workers=9, quorum=5, faulty_workers=3)


def test_where_each_push_counts_alone_its_staleness_may_be_bounded_and_discounted() -> None:
    for consistency in AT_EACH_PUSH:
        asked = made(consistency=consistency, max_staleness=0, staleness_discount=0.5, clip_worker_norm=1.0)
        assert (asked.max_staleness, asked.staleness_discount) == (0, 0.5)
    assert made(consistency="ssp", ssp_bound=1).ssp_bound == 1


def test_one_command_line_serves_the_first_start_and_all_others() -> None:
    asked = parse([*NEEDED, "--checkpoint-dir", "c", "--resume", "--init", "i", "--checkpoint-every", "1"])
    assert (asked.checkpoint_dir, asked.resume, asked.init, asked.checkpoint_every) == (
        Path("c"),
        True,
        Path("i"),
        1,
    )
    assert not parse([*NEEDED, "--checkpoint-dir", "c", "--no-resume"]).resume
