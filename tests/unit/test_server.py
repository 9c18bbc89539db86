"""What the server tells its operator: whom a run waits for, and what its address exposes."""

import io
import logging
from types import SimpleNamespace

import pytest

from ps.__main__ import _warn_of_exposure
from ps.coordination.policy import Phase
from ps.monitoring.console import Console
from ps.monitoring.narration import WAITING_S, Narration
from ps.settings.config import ServerConfig


def test_a_wait_is_told_once_it_has_lasted_and_rounds_that_close_are_not(caplog):
    """Every round waits for its last push for a moment; only one that stays open is news."""
    narration = Narration(Console(100, io.StringIO(), interactive=False))
    run = SimpleNamespace(phase=Phase.RUNNING, step=0)
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        for second in range(5 * int(WAITING_S)):
            run.step = second
            narration.whom_we_wait_for(run, f"round {second} waits", float(second))
        assert not caplog.messages
        narration.whom_we_wait_for(run, f"round {run.step} waits", run.step + WAITING_S)
    assert caplog.messages == [f"round {run.step} waits"]


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({}, []),
        ({"insecure": True}, ["admits anyone"]),
        ({"host": "0.0.0.0", "insecure": True}, ["admits anyone", "neither secret nor tamper-proof"]),
        ({"host": "0.0.0.0", "token_file": "tokens"}, ["neither secret nor tamper-proof"]),
    ],
)
def test_each_start_warns_of_what_an_address_exposes(caplog, options, warnings):
    """Tokens say who may join; they keep nothing secret."""
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        _warn_of_exposure(ServerConfig(workers=1, steps=1, **options))
    assert len(caplog.messages) == len(warnings)
    assert all(warning in message for warning, message in zip(warnings, caplog.messages, strict=True))
