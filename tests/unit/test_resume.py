"""What may change when a run goes on from a checkpoint: one table, and every option is in it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigurationError
from ps.checkpoints.resume import OPTIONS, Change, check_resumable, reason_not_comparable, settings_of
from ps.settings.config import ServerConfig
from tests.unit.authority import Authority

FIELDS = [field.name for field in dataclasses.fields(ServerConfig)]


def made(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"workers": 5, "steps": 10, "threads": 2, "run_dir": Path("here")} | changes)


def kept(**changes: Any) -> dict[str, object]:
    """What a checkpoint of such a run gives back."""
    saved: dict[str, object] = json.loads(json.dumps(settings_of(made(**changes))))
    return saved


def test_every_option_is_in_the_table_and_nothing_else() -> None:
    assert sorted(OPTIONS) == sorted(FIELDS)
    assert all(option.why for option in OPTIONS.values())


def test_nothing_is_said_of_a_run_that_goes_on_unchanged() -> None:
    for changes in (
        {},
        {"learning_rate": 0.1 + 0.2, "clip_norm": 1e-300},
        {"workers": None, "shards": 7, "quorum": 3},
        {"mode": "ensemble", "aggregation": "master", "weighting": "sample"},
        {"consistency": "ssp", "max_staleness": 4, "staleness_discount": 0.1},
        {"aggregation": "krum", "faulty_workers": 1},
        {"optimizer": "adamw"},
    ):
        assert check_resumable(kept(**changes), made(**changes)) == []
        assert reason_not_comparable(kept(**changes), made(**changes)) is None


def test_what_is_kept_is_what_values_depend_on_and_no_path() -> None:
    saved = kept()
    assert set(saved) == {name for name, option in OPTIONS.items() if option.change is not Change.FREE}
    assert saved["shards"] == 5, "what a default came to, which another number of workers would change"
    assert not {"token_file", "run_dir", "init", "checkpoint_dir", "host", "inject", "threads"} & set(saved)


FREE = {
    "host": "localhost",
    "port": 1,
    "port_file": Path("p"),
    "run_dir": Path("elsewhere"),
    "export": Path("e.safetensors"),
    "summary": Path("s"),
    "token_file": Path("t"),
    "insecure": True,
    "congestion_control": "system",
    "status_port": 0,
    "log_format": "json",
    "tensorboard": Path("t"),
    "threads": 3,
    "evaluators": 1,
    "on_worker_loss": "shrink",
    "gather_timeout": 1.0,
    "start_timeout": 1.0,
    "round_timeout": 1.0,
    "rejoin_timeout": 1.0,
    "idle_timeout": 1.0,
    "drain_timeout": 1.0,
    "heartbeat_interval": 1.0,
    "heartbeat_timeout": 6.0,
    "init": Path("i"),
    "checkpoint_dir": Path("c"),
    "inject": ("kill@before-apply",),
    "max_memory": 1 << 30,
    "max_model_bytes": 1 << 20,
}
"""One other value for each option that is free, unless it needs another option."""

FREE_WITH_ANOTHER = {"checkpoint_every", "keep", "resume", "validator_seed_file"}
FREE_WITH_ANOTHER |= {"tls_cert", "tls_key", "tls_ca", "status_host", "status_port_file"}


def test_each_free_option_is_tried() -> None:
    assert FREE.keys() | FREE_WITH_ANOTHER == {n for n, option in OPTIONS.items() if option.change is Change.FREE}


@pytest.mark.parametrize("name", FREE)
def test_a_free_option_may_change_and_nothing_is_said(name: str) -> None:
    assert check_resumable(kept(), made(**{name: FREE[name]})) == []


def test_tls_and_the_place_of_the_page_may_change(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    options = {"tls_cert": issued.certificate, "tls_key": issued.key, "tls_ca": authority.file}
    options |= {"status_port": 1, "status_host": "localhost", "status_port_file": Path("p")}
    assert check_resumable(kept(), made(**options)) == []


def test_options_of_checkpoints_and_the_secrets_file_may_change_as_well() -> None:
    options = {"checkpoint_dir": Path("c"), "checkpoint_every": 3, "keep": 9, "resume": True}
    assert check_resumable(kept(), made(**options)) == []
    judged = {"aggregation": "evidence", "validator_every": 4}
    assert check_resumable(kept(**judged), made(**judged, validator_seed_file=Path("v"))) == []


ENSEMBLE = {"mode": "ensemble", "aggregation": "master"}
OWN = {"aggregation": "master", "master": "mine.py:master"}
ELASTIC = {"workers": None, "shards": 8}

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, ENSEMBLE, "--mode shared and cannot go on with --mode ensemble"),
    ({"seed": 1}, {"seed": 2}, "--seed 1 and cannot go on with --seed 2"),
    ({}, {"consistency": "async"}, "--consistency sync and cannot go on with --consistency async"),
    ({}, {"aggregation": "median"}, "--aggregation mean and cannot go on with --aggregation median"),
    ({}, {"optimizer": "sgd"}, "--optimizer adam and cannot go on with --optimizer sgd"),
    ({"beta1": 0.5}, {}, "--beta1 0.5 and cannot go on with --beta1 0.9"),
    ({"beta2": 0.5}, {}, "--beta2 0.5 and cannot go on with --beta2 0.999"),
    (
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9},
        "--momentum 0.0 and cannot go on with --momentum 0.9",
    ),
    (OWN, {"aggregation": "master"}, "--master mine.py:master and cannot go on with no --master"),
    (ENSEMBLE, ENSEMBLE | {"head": "sigmoid"}, "--head softmax and cannot go on with --head sigmoid"),
    (ENSEMBLE, ENSEMBLE | {"weighting": "sample"}, "--weighting batch and cannot go on with --weighting sample"),
    (ENSEMBLE, ENSEMBLE | {"weight_acts_on": "update"}, "--weight-acts-on gradient and cannot go on"),
    (ENSEMBLE, ENSEMBLE | {"workers": 6}, "--workers 5 and cannot go on with --workers 6"),
    (OWN, OWN | {"workers": 6}, "--workers 5 and cannot go on with --workers 6"),
    (OWN | ELASTIC, OWN | ELASTIC | {"shards": 9}, "--shards 8 and cannot go on with --shards 9"),
    ({}, {"ema_decay": 0.9}, "no --ema-decay and cannot go on with --ema-decay 0.9"),
    ({"ema_decay": 0.9}, {}, "--ema-decay 0.9 and cannot go on with no --ema-decay"),
    (
        {"aggregation": "evidence", "validators": 2},
        {"aggregation": "evidence", "validators": 0},
        "--validators 2 and cannot go on with --validators 0",
    ),
]


@pytest.mark.parametrize(
    ("before", "now", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_must_not_change_is_named_with_both_values_and_what_to_do(
    before: dict[str, Any], now: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)) as caught:
        check_resumable(kept(**before), made(**now))
    first = says.split(" and cannot")[0]
    assert f"start with {first}, or give another --checkpoint-dir" in str(caught.value)


def test_each_option_that_must_not_change_is_tried() -> None:
    tried = {re.search(r"--([a-z0-9-]+)", says)[1].replace("-", "_") for _, _, says in REFUSED}  # type: ignore[index]
    assert {name for name, option in OPTIONS.items() if option.change is Change.NEVER} <= tried


CHOSEN: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"steps": 20}, ["--steps 20"]),
    ({}, {"learning_rate": 0.5}, ["--learning-rate 0.5"]),
    ({}, {"schedule": "cosine", "decay_steps": 9}, ["--schedule cosine", "--decay-steps 9"]),
    ({}, {"warmup_steps": 4}, ["--warmup-steps 4"]),
    ({"clip_norm": 1.0}, {}, ["no --clip-norm"]),
    ({"ema_decay": 0.9}, {"ema_decay": 0.99}, ["--ema-decay 0.99"]),
    (
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "sgd", "momentum": 0.5, "nesterov": True},
        ["--momentum 0.5", "--nesterov"],
    ),
    (
        {"consistency": "ssp"},
        {"consistency": "ssp", "ssp_bound": 5, "max_staleness": 7, "staleness_discount": 1.0},
        ["--max-staleness 7", "--staleness-discount 1.0", "--ssp-bound 5"],
    ),
    ({"optimizer": "adamw"}, {"optimizer": "adamw", "weight_decay": 0.01}, []),
    ({"aggregation": "evidence", "validator_every": 1}, {"aggregation": "evidence", "validators": 1}, []),
]


@pytest.mark.parametrize(("before", "now", "named"), CHOSEN, ids=lambda value: str(value))
def test_a_choice_is_told_and_leaves_the_run_comparable(
    before: dict[str, Any], now: dict[str, Any], named: list[str]
) -> None:
    told = check_resumable(kept(**before), made(**now))
    assert sorted(sentence.split(",")[0] for sentence in told) == sorted(f"going on with {name}" for name in named)
    assert not any("differ" in sentence for sentence in told)
    assert reason_not_comparable(kept(**before), made(**now)) is None


APART: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"shards": 8}, {"shards": 8, "workers": 4}, ["--workers"]),
    ({}, {"workers": 4}, ["--workers", "--shards"]),
    ({"shards": 8}, {"workers": None, "shards": 8}, ["--workers"]),
    ({}, {"shards": 8}, ["--shards"]),
    ({}, {"quorum": 4}, ["--quorum"]),
    ({"quorum": 4}, {}, ["--quorum"]),
    (
        {"aggregation": "evidence", "validators": 1},
        {"aggregation": "evidence", "validators": 2},
        ["--validators"],
    ),
]


@pytest.mark.parametrize(("before", "now", "named"), APART, ids=lambda value: str(value))
def test_values_that_are_no_longer_comparable_are_told_with_the_reason(
    before: dict[str, Any], now: dict[str, Any], named: list[str]
) -> None:
    told = check_resumable(kept(**before), made(**now))
    assert len(told) == len(named)
    for name in named:
        assert [sentence for sentence in told if f"{name} " in sentence or f"{name}," in sentence]
    assert all("values will differ from those of a run that was never stopped" in sentence for sentence in told)
    reason = reason_not_comparable(kept(**before), made(**now))
    assert reason is not None
    assert all(name in reason for name in named)


def test_one_option_that_must_not_change_is_enough_whatever_else_may() -> None:
    with pytest.raises(ConfigurationError, match="--optimizer adam"):
        check_resumable(kept(), made(workers=3, learning_rate=0.1, optimizer="adamw"))


def test_an_option_that_a_checkpoint_does_not_know_of_counts_as_left_out() -> None:
    saved = kept()
    for name in ("staleness_discount", "shards", "head"):
        del saved[name]
    assert check_resumable(saved, made()) == []
    del saved["consistency"]
    with pytest.raises(ConfigurationError, match="--consistency sync and cannot go on with --consistency ssp"):
        check_resumable(saved, made(consistency="ssp"))
