"""Messages cannot hold what the protocol does not allow."""

import dataclasses
import math

import pytest

from protocol.messages import (
    MAX_NAME_CHARACTERS,
    MAX_RANK,
    MAX_REASON_CHARACTERS,
    MESSAGES,
    Challenge,
    Ended,
    Heartbeat,
    Hello,
    Kind,
    Offer,
    Push,
    Refusal,
    RefusalCode,
    Role,
    Side,
    Status,
    Values,
)
from tests.unit.exchange import SAMPLES

WIRE_NUMBERS = {
    "HELLO": (1, Side.WORKER),
    "CHALLENGE": (2, Side.SERVER),
    "PROOF": (3, Side.WORKER),
    "SERVER_PROOF": (4, Side.SERVER),
    "OFFER": (5, Side.WORKER),
    "WELCOME": (6, Side.SERVER),
    "REFUSED": (7, Side.SERVER),
    "PULL": (8, Side.WORKER),
    "VALUES": (9, Side.SERVER),
    "PUSH": (10, Side.WORKER),
    "ASK_INITIAL": (11, Side.SERVER),
    "INITIAL": (12, Side.WORKER),
    "HEARTBEAT": (13, None),
    "REPORT": (14, Side.WORKER),
    "BYE": (15, Side.WORKER),
    "ENDED": (16, Side.SERVER),
    "LOGITS": (17, Side.WORKER),
    "WEIGHTS": (18, Side.SERVER),
    "TEST_LOGITS": (19, Side.WORKER),
}
"""Fixed for ever within version 1: a change here is a new version of the protocol."""


def changed(kind, **fields):
    return dataclasses.replace(SAMPLES[kind], **fields)


def test_numbers_and_senders_never_move():
    assert {kind.name: (kind.value, MESSAGES[kind].SENDER) for kind in Kind} == WIRE_NUMBERS


def test_every_kind_has_a_sample_and_every_message_is_frozen():
    assert set(SAMPLES) == set(Kind)
    for message in SAMPLES.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            message.anything = 1


LIMITS = [
    # kind, field, allowed values, refused values
    (Kind.HELLO, "rank", [-1, 0, MAX_RANK], [-2, MAX_RANK + 1, 1.0, True, "0", None]),
    (Kind.HELLO, "incarnation", [0, 2**63 - 1], [-1, 2**63, True, 7.0, None]),
    (Kind.HELLO, "nonce", [bytes(32)], [bytes(31), bytes(33), bytearray(32), "x" * 32, None]),
    (Kind.HELLO, "role", [Role.WORKER, Role.EVALUATOR], ["worker", "validator", None]),
    (Kind.HELLO, "codecs", [(), ("raw",), ("x" * 32,) * 8], [("x" * 33,), ("x",) * 9, ["raw"], ("a\nb",), (1,)]),
    (Kind.CHALLENGE, "token_required", [True, False], [1, 0, None, "yes"]),
    (Kind.PROOF, "mac", [bytes(32)], [b"", bytes(33), None]),
    (Kind.SERVER_PROOF, "mac", [bytes(32)], [b"", bytes(33), None]),
    (Kind.OFFER, "manifest", [b"", bytes(16 << 20)], [bytes((16 << 20) + 1), "", None, []]),
    (Kind.OFFER, "threads", [1, 4096], [0, 4097, True, None]),
    (Kind.OFFER, "seed", [None, 0, 2**63 - 1], [-1, 2**63, True, 1.0]),
    (Kind.OFFER, "examples", [0, 2**31 - 1], [-1, 2**31, True, None]),
    (Kind.OFFER, "classes", [0, 2**31 - 1], [-1, 2**31, True, None]),
    (Kind.OFFER, "test_examples", [0, 2**31 - 1], [-1, 2**31, True, None]),
    (Kind.OFFER, "software", ["", "a" * 128], ["a" * 129, "two\nlines", None, 1]),
    (Kind.WELCOME, "rank", [-1, MAX_RANK], [-2, MAX_RANK + 1]),
    (Kind.WELCOME, "workers", [0, 2**31 - 1], [-1, 2**31, True]),
    (Kind.WELCOME, "shards", [0, 2**31 - 1], [-1, 2**31, True]),
    (Kind.WELCOME, "threads", [1, 4096], [0, 4097, True]),
    (Kind.WELCOME, "heartbeat_interval", [0.0, 1e8], [-1e-9, 1.1e8, math.inf, math.nan, 5, True]),
    (Kind.WELCOME, "heartbeat_timeout", [0.0, 1e8], [-1e-9, 1.1e8, math.inf, math.nan, 30, True]),
    (Kind.REFUSED, "code", list(RefusalCode), ["proof", "nonsense", None]),
    (Kind.PULL, "min_step", [0, 2**63 - 1], [-1, 2**63, True]),
    (Kind.VALUES, "seq", [0, 2**63 - 1], [-1, 2**63, True]),
    (Kind.VALUES, "applied", [True, False], [0, 1, None]),
    (Kind.VALUES, "done", [True, False], [0, 1, None]),
    (Kind.PUSH, "seq", [1, 2**63 - 1], [0, -1, 2**63, True]),
    (Kind.PUSH, "loss", [None, -1.5, math.nan, math.inf, -math.inf], [1, True, "0.5"]),
    (Kind.PUSH, "accuracy", [None, 0.0, math.nan], [1, True, "0.5"]),
    (Kind.PUSH, "examples", [0, 2**31 - 1], [-1, 2**31, True, 1.0]),
    (Kind.PUSH, "labels", [None, bytes(16)], [b"", bytes(15), bytes(17), "x" * 16]),
    (Kind.LOGITS, "labels", [bytes(16)], [None, bytes(15), bytes(17), "x" * 16]),
    (Kind.LOGITS, "seq", [1, 2**63 - 1], [0, -1, 2**63, True]),
    (Kind.WEIGHTS, "seq", [1, 2**63 - 1], [0, -1, 2**63, True]),
    (Kind.REPORT, "loss", [0.5, math.nan, math.inf], [None, 1, True]),
    (Kind.REPORT, "accuracy", [None, 1.0], [1, True]),
    (Kind.ENDED, "status", list(Status), ["done", "nonsense", None]),
]


@pytest.mark.parametrize(
    ("kind", "field", "allowed", "refused"), LIMITS, ids=lambda v: str(v) if isinstance(v, str) else ""
)
def test_each_field_on_both_sides_of_its_limit(kind, field, allowed, refused):
    for value in allowed:
        assert getattr(changed(kind, **{field: value}), field) is value
    for value in refused:
        with pytest.raises(ValueError, match=rf"{type(SAMPLES[kind]).__name__}\.{field} cannot be"):
            changed(kind, **{field: value})


STEPPED = [Kind.WELCOME, Kind.VALUES, Kind.PUSH, Kind.REPORT, Kind.LOGITS, Kind.WEIGHTS, Kind.TEST_LOGITS]


@pytest.mark.parametrize("field", ["epoch", "step"])
@pytest.mark.parametrize("kind", STEPPED)
def test_epochs_and_steps_are_63_bits_wide(kind, field):
    """63, not 64: they fit a signed integer of any language."""
    changed(kind, **{field: 2**63 - 1})
    for value in (-1, 2**63, True, 1.0):
        with pytest.raises(ValueError, match=field):
            changed(kind, **{field: value})


TEXTS = [
    (Kind.HELLO, "name", MAX_NAME_CHARACTERS),
    (Kind.HELLO, "host", MAX_NAME_CHARACTERS),
    (Kind.WELCOME, "name", MAX_NAME_CHARACTERS),
    (Kind.WELCOME, "mode", MAX_NAME_CHARACTERS),
    (Kind.WELCOME, "codec", MAX_NAME_CHARACTERS),
    (Kind.WELCOME, "weighting", MAX_NAME_CHARACTERS),
    (Kind.OFFER, "logits_dtype", MAX_NAME_CHARACTERS),
    (Kind.REFUSED, "reason", MAX_REASON_CHARACTERS),
    (Kind.VALUES, "reason", MAX_REASON_CHARACTERS),
    (Kind.HEARTBEAT, "waiting", MAX_REASON_CHARACTERS),
    (Kind.ENDED, "reason", MAX_REASON_CHARACTERS),
]


@pytest.mark.parametrize(("kind", "field", "limit"), TEXTS)
def test_texts_are_short_and_printable(kind, field, limit):
    """Nothing that reaches a log, a terminal or a page can carry a newline, an escape or a lone surrogate."""
    for text in ("", "ä" * limit, "<b>😀</b>"):
        changed(kind, **{field: text})
    for text in ("x" * (limit + 1), "a\nb", "\x1b[31m", "a\0", "\u202e", "\ud800", "\u2028", b"bytes", None):
        with pytest.raises(ValueError, match=field):
            changed(kind, **{field: text})


def test_the_tables_above_cover_every_field():
    """A field added to a message without a limit tested here fails this."""
    covered = {(kind, field) for kind, field, *_ in LIMITS} | {(kind, field) for kind, field, _ in TEXTS}
    covered |= {(kind, field) for kind in STEPPED for field in ("epoch", "step")}
    same_type = {
        (Kind.CHALLENGE, "nonce"),
        (Kind.WELCOME, "steps"),
        (Kind.WELCOME, "seed"),
        (Kind.WELCOME, "manifest"),
        (Kind.REPORT, "examples"),
    }
    fields = {(kind, field.name) for kind, cls in MESSAGES.items() for field in dataclasses.fields(cls)}
    assert fields - covered == same_type


@pytest.mark.parametrize(
    ("kind", "field", "bad"),
    [
        (Kind.CHALLENGE, "nonce", bytes(31)),
        (Kind.WELCOME, "steps", True),
        (Kind.WELCOME, "seed", -1),
        (Kind.WELCOME, "manifest", ""),
        (Kind.REPORT, "examples", True),
    ],
)
def test_fields_of_a_type_tested_elsewhere_have_it(kind, field, bad):
    with pytest.raises(ValueError, match=field):
        changed(kind, **{field: bad})


def test_an_error_shows_little_of_a_huge_value():
    """The text of an error stays short, whatever it is about."""
    with pytest.raises(ValueError, match=r"Challenge\.nonce") as caught:
        Challenge(bytes(1 << 20), token_required=False)
    assert len(str(caught.value)) < 200


def test_defaults_are_those_of_the_document():
    assert Hello("", "h", 0, Role.WORKER, 0, bytes(32)).codecs == ("raw",)
    assert Offer(b"", 1).seed is None
    assert Heartbeat().waiting == ""


def test_messages_with_equal_fields_are_equal():
    assert Values(1, 2, 3, True, "", False) == Values(1, 2, 3, True, "", False)
    assert Push(1, 2, 3, 0.5, None, 4) != Push(1, 2, 3, 0.5, None, 5)
    assert Refusal(RefusalCode.FULL, "x") != Ended(Status.FAILED, "x")
