"""docs/PROTOCOL.md says what the code does: its tables and its worked examples are checked against it."""

import dataclasses
import hashlib
import re
from enum import StrEnum
from pathlib import Path
from typing import get_type_hints

import pytest

from protocol import codec, deadlines, frames, link, messages, tensors
from protocol.connection import OPTIONAL, ROLES, SENDERS, TRANSITIONS, WITH_PAYLOAD, State
from protocol.messages import (
    MESSAGES,
    Between,
    Challenge,
    Hello,
    Kind,
    Number,
    Octets,
    Printable,
    Push,
    RefusalCode,
    Role,
    Side,
    Status,
    Words,
    checks_of,
)
from protocol.proof import prove
from protocol.tensors import Layout, Manifest, SideSpec, VariableSpec
from ps.connections.session import HOLD_SLACK
from tests.unit.exchange import frame_of, padded

TEXT = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()


def section(heading):
    """The text under a heading, up to the next of any level."""
    (found,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def table(heading):
    """The rows of the first table under a heading, cells without back-ticks."""
    rows = [line for line in section(heading).splitlines() if line.startswith("|")]
    assert len(rows) > 2, f"no table under {heading!r}"
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows[2:]]


def example(heading):
    """The named hexadecimal strings of the code block under a heading."""
    (block,) = re.findall(r"```hex\n(.*?)```", section(heading), re.DOTALL)
    values = {}
    for line in block.splitlines():
        name, _, digits = line.partition(" ")
        if name:
            values[name] = ""
        values[list(values)[-1]] += digits.replace(" ", "")
    return {name: bytes.fromhex(digits) for name, digits in values.items()}


def power(number):
    """A number as the document writes it."""
    if number + 1 == 2**31 or number + 1 == 2**63:
        return f"2^{(number + 1).bit_length() - 1}-1"
    return str(number)


def describe(cls, field):
    """The limit of a field in the document's words."""
    check, optional = next((check, optional) for name, check, optional in checks_of(cls) if name == field)
    hint = get_type_hints(cls)[field]
    match check:
        case Between(low, high):
            text = f"integer {low} to {power(high)}"
        case Printable(characters):
            text = f"text ≤ {characters}"
        case Octets(length, at_most):
            text = f"binary {'≤ ' if at_most else ''}{length}"
        case Words(count):
            text = f"list of ≤ {count} texts ≤ 32"
        case Number(nan=True):
            text = "float"
        case Number(low, high):
            text = f"float {low:.0f} to {high:.0f}"
        case _ if isinstance(hint, type) and issubclass(hint, StrEnum):
            text = {Role: "role", RefusalCode: "refusal code", Status: "status"}[hint]
        case _:
            assert hint is bool
            text = "boolean"
    return f"{text}, or nil" if optional else text


def test_the_prefix():
    widths = {"4 bytes": 4, "u16": 2, "u32": 4, "u64": 8}
    rows = table("Frames")
    assert [int(row[0]) for row in rows] == [0, 4, 6, 8, 12]
    assert sum(widths[row[1]] for row in rows) == frames.PREFIX_BYTES
    assert frames.MAGIC.decode() in rows[0][2]
    assert str(frames.VERSION) in rows[1][2]
    assert f"a multiple of {frames.ALIGNMENT}" in section("Frames")


def test_the_table_of_messages():
    rows = {row[1]: row for row in table("Messages")}
    assert list(rows) == [kind.name for kind in Kind]
    for kind in Kind:
        number, _, sender, role, payload, _ = rows[kind.name]
        assert int(number) == kind
        assert sender == {None: "both", Side.WORKER: "client", Side.SERVER: "server"}[SENDERS[kind]], kind.name
        assert role == (", ".join(ROLES[kind]) if kind in ROLES else "any"), kind.name
        special = {Kind.PUSH: "payload_bytes"} | dict.fromkeys(OPTIONAL, "answers")
        assert payload == special.get(kind, "values_bytes" if kind in WITH_PAYLOAD else "none")


def test_the_table_of_fields():
    """Every field of every message, in order, with the limit that the code enforces."""
    documented = [(message, field, limit) for message, field, limit, _ in table("Fields")]
    assert documented == [
        (kind.name, field.name, describe(cls, field.name))
        for kind, cls in sorted(MESSAGES.items())
        for field in dataclasses.fields(cls)
    ]


def test_the_table_of_states():
    documented = {(State(state), Kind[message]): State(leads_to) for state, message, leads_to in table("States")}
    assert documented == TRANSITIONS


def test_the_lists_of_roles_codes_and_statuses():
    assert [row[0] for row in table("Refusal codes")] == list(RefusalCode)
    assert [row[0] for row in table("Statuses")] == list(Status)
    assert all(f"`{role}`" in section("Identity") for role in Role)
    assert f"held for {HOLD_SLACK:g} heartbeat intervals" in section("Identity")


def test_the_table_of_limits():
    documented = {row[0]: row[1] for row in table("Limits")}
    assert documented == {
        "header, before the proof": f"{frames.MAX_HEADER_UNPROVEN} bytes",
        "header, after it": f"{frames.MAX_HEADER} bytes",
        "header of OFFER and WELCOME": f"{frames.MAX_HEADER_MANIFEST} bytes",
        "fields of a header": str(codec.MAX_FIELDS),
        "name of a field": f"{codec.MAX_KEY_BYTES} bytes",
        "encoded field that is not binary": f"{codec.MAX_VALUE_BYTES} bytes",
        "name of a client or host": f"{messages.MAX_NAME_CHARACTERS} characters",
        "reason": f"{messages.MAX_REASON_CHARACTERS} characters",
        "rank": str(messages.MAX_RANK),
        "variables of a manifest": str(tensors.MAX_VARIABLES),
        "row of a manifest": f"{tensors.MAX_ROW_BYTES} bytes",
        "name of a variable": f"{tensors.MAX_NAME_BYTES} bytes",
        "dimensions of a variable": str(tensors.MAX_DIMENSIONS),
        "step of the handshake": f"{link.HANDSHAKE_S:.0f} s",
        "rate of a transfer": f"{deadlines.MIN_BYTES_PER_S} bytes/s after {deadlines.GRACE_S:.0f} s",
    }


def test_the_table_of_dtypes():
    assert [(row[0], int(row[1])) for row in table("Dtypes")] == list(tensors.ITEM_BYTES.items())
    assert [row[2] for row in table("Dtypes")] == [
        "yes" if dtype in tensors.FLOATING else "no" for dtype in tensors.ITEM_BYTES
    ]


# ---- worked examples -----------------------------------------------------------------------------------

HELLO = Hello("site-north", "host-a", 0, Role.WORKER, incarnation=7, nonce=bytes(range(32)))
CHALLENGE = Challenge(bytes(range(32, 64)), token_required=True)
TOKEN = b"correct-horse-battery-staple"


def test_the_handshake_worked_out():
    assert not frame_of(HELLO).endswith(codec.encode_header(HELLO)), "a client that hashes no padding must fail"
    assert not frame_of(CHALLENGE).endswith(codec.encode_header(CHALLENGE))
    hellos = hashlib.sha256(frame_of(HELLO) + frame_of(CHALLENGE)).digest()
    assert example("The proof, worked out") == {
        "hello": frame_of(HELLO),
        "challenge": frame_of(CHALLENGE),
        "hellos": hellos,
        "worker-mac": prove(TOKEN, Side.WORKER, HELLO.nonce, CHALLENGE.nonce, hellos),
        "server-mac": prove(TOKEN, Side.SERVER, HELLO.nonce, CHALLENGE.nonce, hellos),
    }
    assert TOKEN.decode() in section("The proof, worked out")


def test_the_frame_worked_out():
    push = Push(epoch=5, step=0, seq=1, loss=0.5, accuracy=None, examples=32)
    frame = example("A frame, worked out")
    assert list(frame) == ["prefix", "header", "padding"]
    assert frame["header"] == codec.encode_header(push)
    assert frame["prefix"] == frames.Prefix(Kind.PUSH, len(frame["header"]), 320).pack()
    assert b"".join(frame.values()) == padded(frame["prefix"] + frame["header"])
    assert f"{len(frame['padding'])} zero bytes" in section("A frame, worked out")


EXAMPLE = Manifest(
    (
        VariableSpec("steps", (), "int64", tensors.Kind.STATE),
        VariableSpec("embedding", (1024, 256), "float32"),
        VariableSpec("kernel", (17,), "float32"),
        VariableSpec("mean", (16,), "float32", tensors.Kind.STATE),
        VariableSpec("bias", (), "float32"),
    )
)


def test_the_layout_worked_out():
    layout = Layout.of(EXAMPLE, sides=(SideSpec("logits", (3, 10), "float32"),))
    documented = [(row[0], int(row[4]), int(row[5])) for row in table("The layout, worked out")]
    slots = (*layout.slots, *layout.sides)
    assert documented == [(slot.spec.name, slot.offset, slot.end) for slot in slots]
    for row, slot in zip(table("The layout, worked out"), slots, strict=True):
        assert row[1] == slot.spec.dtype
        assert row[2] == str(list(slot.spec.shape))
    text = section("The layout, worked out")
    assert f"`values_bytes` = {layout.values_bytes}" in text
    assert f"`payload_bytes` = {layout.payload_bytes}" in text
    assert str(tensors.SMALL_BYTES) in section("Layout")
    assert str(tensors.ALIGNMENT) in section("Layout")


def test_the_rows_worked_out():
    rows = example("The rows, worked out")
    assert b"".join(rows.values()) == EXAMPLE.to_wire()
    assert list(rows) == [variable.name for variable in EXAMPLE.variables]


@pytest.mark.parametrize(
    "word", ["incarnation", "heartbeat_timeout", "BYE", "ENDED", "ASK_INITIAL", "little endian"]
)
def test_what_a_client_must_know_is_mentioned(word):
    assert word in TEXT
