"""What a session makes of texts before they travel."""

import pytest

from protocol.messages import MAX_REASON_CHARACTERS, Ended, Heartbeat, Refusal, RefusalCode, Status
from ps.connections.session import _as_reason


@pytest.mark.parametrize(
    "text", ["", "rank 1 is lost", "a\nb\x1b[31m", "x" * (MAX_REASON_CHARACTERS + 1), "\n" * 9999]
)
def test_any_text_can_travel_as_a_reason(text):
    """A sentence that breaks a limit must not end the thread, or the run, that wants to say it."""
    reason = _as_reason(text)
    for message in (Ended(Status.FAILED, reason), Refusal(RefusalCode.MANIFEST, reason), Heartbeat(reason)):
        assert message


def test_a_text_that_fits_is_not_changed_and_a_long_one_keeps_its_beginning():
    assert _as_reason("Größe é") == "Größe é"
    assert _as_reason("a" * MAX_REASON_CHARACTERS) == "a" * MAX_REASON_CHARACTERS
    assert _as_reason("ab" * MAX_REASON_CHARACTERS).startswith("abab")
    assert _as_reason("a\nb") == "a?b"
