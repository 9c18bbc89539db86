"""From options to parts, and what the server says of the memory that they take."""

import logging

import numpy as np
import pytest

from protocol.errors import ConfigurationError
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps import build
from ps.build import make_optimizer, make_rule, make_schedule, make_store, size_text
from ps.rules.aggregation import ClippedMean, CosineTrust, Krum, Mean, Median, MultiKrum, TrimmedMean
from ps.rules.evidence import Evidence
from ps.rules.master import Master
from ps.settings.combinations import CHOICES
from ps.settings.config import DEFAULT_WEIGHT_DECAY, ServerConfig
from ps.storage.optimizers import SGD, Adam, AdamW
from ps.storage.schedules import Constant, Cosine, ExponentialDecay


def layout(*sizes: int) -> Layout:
    specs = [VariableSpec(f"v{number}", (size,), "float32", Kind.TRAINABLE) for number, size in enumerate(sizes)]
    return Layout.of(Manifest(tuple(specs)))


@pytest.mark.parametrize(
    ("asked", "decay"), [({}, DEFAULT_WEIGHT_DECAY), ({"weight_decay": 0.0}, 0.0), ({"weight_decay": 0.3}, 0.3)]
)
def test_adamw_decays_unless_it_is_told_not_to(asked: dict[str, float], decay: float) -> None:
    """With decay 0 it would be Adam, which nobody means who asks for it."""
    optimizer = make_optimizer(ServerConfig(workers=1, steps=1, optimizer="adamw", **asked))
    assert isinstance(optimizer, AdamW)
    assert optimizer.weight_decay == decay
    assert type(make_optimizer(ServerConfig(workers=1, steps=1))) is Adam


def test_whatever_can_be_asked_for_is_made_and_nothing_else() -> None:
    """What is forgotten in a table must not silently become something else."""
    assert set(build.OPTIMIZERS) == set(CHOICES["optimizer"])
    assert set(build.RULES) == set(CHOICES["aggregation"])
    assert set(build.SCHEDULES) == set(CHOICES["schedule"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("mean", Mean), ("clipped_mean", ClippedMean), ("median", Median), ("trimmed_mean", TrimmedMean)],
        *[("krum", Krum), ("multi_krum", MultiKrum), ("cosine_trust", CosineTrust)],
        *[("evidence", Evidence), ("master", Master)],
    ],
)
def test_each_rule_is_the_one_of_its_name(name: str, kind: type) -> None:
    assert type(make_rule(ServerConfig(workers=5, steps=1, aggregation=name))) is kind


def test_each_optimizer_and_schedule_is_the_one_of_its_name() -> None:
    for optimizer, kind in {"adam": Adam, "adamw": AdamW, "sgd": SGD}.items():
        assert type(make_optimizer(ServerConfig(workers=1, steps=1, optimizer=optimizer))) is kind
    decay = {"decay_steps": 10, "decay_rate": 0.5}
    for name, made, numbers in (
        ("constant", Constant, {}),
        ("exponential", ExponentialDecay, decay),
        ("cosine", Cosine, {"decay_steps": 10}),
    ):
        config = ServerConfig(workers=1, steps=1, schedule=name, **numbers)
        assert type(make_schedule(config)) is made


def test_an_epsilon_that_float32_may_take_for_zero_is_refused_with_the_options() -> None:
    """Not when the first worker has said what the model is."""
    smallest = float(np.finfo(np.float32).tiny)
    assert make_optimizer(ServerConfig(workers=1, steps=1, epsilon=smallest)) == Adam(epsilon=smallest)
    for epsilon in (float(np.nextafter(smallest, 0.0)), 1e-40):
        with pytest.raises(ConfigurationError, match=f"--epsilon must be at least 1.175.*e-38, not {epsilon}"):
            ServerConfig(workers=1, steps=1, epsilon=epsilon)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0.0 kB"), (12, "0.0 kB"), (203_200, "203.2 kB"), (72e6, "72.0 MB"), (8e9, "8000.0 MB")],
)
def test_sizes_are_written_as_people_write_them(size_bytes: float, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("sizes", "asked", "words"),
    [
        ((1000,), {"workers": 1}, ("1 variable of 4.0 kB; ", "(gradients of 1 worker, 3 versions, moments)")),
        ((500, 500), {"workers": 3}, ("2 variables of ", "(gradients of 3 workers, 3 versions, moments)")),
        (
            (1000,),
            {"workers": 3, "aggregation": "cosine_trust"},
            ("(gradients of 3 workers and 1 validator, 3 versions, moments)",),
        ),
    ],
)
def test_what_the_server_will_hold_is_said(caplog, sizes, asked, words):
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        make_store(ServerConfig(steps=1, **asked), layout(*sizes), None).close()
    (message,) = caplog.messages
    for word in words:
        assert word in message


def test_a_model_that_does_not_fit_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigurationError, match=r"needs \d+\.\d MB on the server, above --max-memory 2\.0 MB"):
        make_store(ServerConfig(workers=3, steps=1, max_memory=2_000_000), layout(10**6), None)
