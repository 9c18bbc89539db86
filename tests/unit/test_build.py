"""From options to parts, and what the server says of the memory that they take."""

import logging

import pytest

from protocol.errors import ConfigurationError
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.build import make_optimizer, make_store, size_text
from ps.config import DEFAULT_WEIGHT_DECAY, ServerConfig
from ps.optimizers import Adam, AdamW


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
