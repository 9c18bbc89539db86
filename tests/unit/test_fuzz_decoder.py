"""Bytes from a peer that means harm: a message or a documented error comes of them, and never much memory.

The default profile is quick and the same on every run. The long one looks further, at random:

    HYPOTHESIS_PROFILE=long pytest tests/unit/test_fuzz_decoder.py
"""

import dataclasses
import functools
import itertools
import os
import tracemalloc
from collections import Counter

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.arena import Arena
from protocol.codec import decode_header, encode_header
from protocol.connection import State
from protocol.errors import RemoteProtocolError
from protocol.messages import MESSAGES, Kind, Message, RefusalCode, Role, Side, Status
from protocol.tensors import Layout, Manifest
from tests.unit.exchange import LAYOUT, MANIFEST, SAMPLES, ConnectionPair, frame_of, other, payload_bytes

PROFILE = (
    settings.get_profile(os.environ["HYPOTHESIS_PROFILE"]) if "HYPOTHESIS_PROFILE" in os.environ else settings()
)
LONG = PROFILE.max_examples >= 10_000
LONG_CASES = 100_000
CASES_EACH = 12_000 if LONG else 60
LONG_TIMEOUT_S = 3600

FACTOR = 70
"""Bytes of memory for a byte of input: an empty list is one byte on the wire, a pointer and an object here."""

FIXED_BYTES = 256 << 10
"""Memory that a decoder may take whatever the input: error texts, tracebacks, the unpacker's buffer."""

CASES: Counter[str] = Counter()
FUZZERS: set[str] = set()


def fuzzed(**strategies):
    """Make a test of a function of drawn values, and count the cases that it has run."""

    def decorate(body):
        FUZZERS.add(body.__name__)

        @functools.wraps(body)
        def case(**drawn):
            CASES[body.__name__] += 1
            body(**drawn)

        quiet = settings(
            PROFILE,
            max_examples=CASES_EACH,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        test = quiet(given(**strategies)(case))
        return pytest.mark.timeout(LONG_TIMEOUT_S)(test) if LONG else test

    return decorate


for _message in SAMPLES.values():  # caches fill here, so that no case is charged for them
    decode_header(_message.KIND, encode_header(_message))


def tried(decode, *arguments, size):
    """Return what `decode` makes of `size` hostile bytes, or None when it refuses; anything else fails the case."""
    tracemalloc.start()
    try:
        result = decode(*arguments)
    except RemoteProtocolError as error:
        result = None
        assert len(str(error)) < 400
        assert str(error).isprintable(), f"an error may reach a terminal: {str(error)!r}"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= FACTOR * size + FIXED_BYTES, f"{size} bytes made us hold {peak}"
    return result


def hear(connection, pieces):
    """Drive a connection with a stream that arrives in pieces; return messages until it ends or breaks."""
    buffered, messages = b"", []
    for piece in pieces:
        buffered += piece
        while True:
            if connection.payload_bytes:
                if len(buffered) < connection.payload_bytes:
                    break
                buffered = buffered[connection.payload_bytes :]
                connection.payload_received()
            if len(buffered) < connection.needed:
                break
            needed, data = connection.needed, buffered
            buffered = data[needed:]
            try:
                message = connection.feed(data[:needed])
            except RemoteProtocolError as error:
                assert str(error).isprintable()
                return [*messages, type(error)]
            if message is not None:
                assert isinstance(message, Message)
                messages.append(message)
    return messages


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


# ---- what is drawn -------------------------------------------------------------------------------------

WHERE = {
    Kind.HELLO: State.AWAIT_HELLO,
    Kind.CHALLENGE: State.AWAIT_CHALLENGE,
    Kind.PROOF: State.AWAIT_PROOF,
    Kind.SERVER_PROOF: State.AWAIT_SERVER_PROOF,
    Kind.OFFER: State.AWAIT_OFFER,
    Kind.WELCOME: State.AWAIT_WELCOME,
}
"""Where each kind is due; all others when the connection is open."""

kinds = st.sampled_from(Kind)
places = st.lists(st.integers(0, 2**16), max_size=6)
texts = st.text(st.sampled_from("az/\0\n\x1b\x7fé\u202e😀"), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=80)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**34), st.integers(0, 10**9 - 1))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(texts | st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)
mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "repeat"]),
        st.integers(0, 2**16),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=5,
)
U63 = st.integers(0, 2**63 - 1)
COUNT = st.integers(0, 2**31 - 1)
printable = st.sampled_from('aZ09 _-/<&"éßΩ中😀')
FIELD_VALUES = {
    "name": st.text(printable, max_size=128), "host": st.text(printable, max_size=128),
    "mode": st.text(printable, max_size=20), "codec": st.text(printable, max_size=20),
    "reason": st.text(printable, max_size=200), "waiting": st.text(printable, max_size=200),
    "rank": st.integers(-1, 65_535), "role": st.sampled_from(Role), "code": st.sampled_from(RefusalCode),
    "status": st.sampled_from(Status), "incarnation": U63, "epoch": U63, "step": U63, "steps": U63,
    "min_step": U63, "seed": U63, "seq": st.integers(1, 2**63 - 1), "threads": st.integers(1, 4096),
    "workers": COUNT, "shards": COUNT, "examples": COUNT, "nonce": st.binary(min_size=32, max_size=32),
    "mac": st.binary(min_size=32, max_size=32), "manifest": st.binary(max_size=300),
    "codecs": st.lists(st.text(printable, max_size=32), max_size=8).map(tuple),
    "token_required": st.booleans(), "applied": st.booleans(), "done": st.booleans(),
    "heartbeat_interval": st.floats(0, 1e8), "heartbeat_timeout": st.floats(0, 1e8),
    "classes": COUNT, "test_examples": COUNT, "logits_dtype": st.text(printable, max_size=20),
    "weighting": st.text(printable, max_size=20), "labels": st.binary(min_size=16, max_size=16),
    "software": st.text(printable, max_size=20),
    "loss": st.floats(allow_nan=False), "accuracy": st.none() | st.floats(allow_nan=False),
}  # fmt: skip


def fields_of(kind):
    return [field.name for field in dataclasses.fields(MESSAGES[kind])]


messages = kinds.flatmap(
    lambda kind: st.builds(MESSAGES[kind], **{name: FIELD_VALUES[name] for name in fields_of(kind)})
)


def mutate(data, changes):
    for how, place, extra in changes:
        at = place % (len(data) + 1)
        if how == "flip":
            data = (
                data[:at] + bytes(a ^ b for a, b in zip(data[at:], extra, strict=False)) + data[at + len(extra) :]
            )
        elif how == "insert":
            data = data[:at] + extra + data[at:]
        elif how == "delete":
            data = data[:at] + data[at + len(extra) :]
        else:
            data = data[:at] + data[at : at + len(extra)] + data[at:]
    return data


def listener_of(kind, state=None, role=Role.WORKER):
    """The connection that hears this kind, where it is due."""
    sender = MESSAGES[kind].SENDER or Side.WORKER
    return ConnectionPair(role).open(until=state or WHERE.get(kind, State.OPEN)).sides[other(sender)]


# ---- the decoder of headers ----------------------------------------------------------------------------


@fuzzed(kind=st.integers(0, 20), header=st.binary(max_size=600))
def test_arbitrary_headers(kind, header):
    tried(decode_header, kind, header, size=len(header))


@fuzzed(
    kind=kinds,
    name=st.integers(0, 13),
    value=values,
    extra=st.dictionaries(scalars.filter(lambda v: v is None or isinstance(v, (str, int))), values, max_size=1),
)
def test_headers_with_any_value_in_any_field(kind, name, value, extra):
    """Whatever one field holds, the message is valid or refused; a valid one is stable under encoding."""
    fields = msgpack.unpackb(encode_header(SAMPLES[kind]))
    if fields:
        fields[sorted(fields)[name % len(fields)]] = value
    header = msgpack.packb(fields | extra)
    message = tried(decode_header, kind, header, size=len(header))
    if message is not None:
        assert encode_header(decode_header(kind, encode_header(message))) == encode_header(message)


@fuzzed(kind=kinds, changes=mutations)
def test_mutated_headers(kind, changes):
    header = mutate(encode_header(SAMPLES[kind]), changes)
    tried(decode_header, kind, header, size=len(header))


@fuzzed(message=messages)
def test_valid_messages_of_any_content_survive(message):
    assert decode_header(message.KIND, encode_header(message)) == message


# ---- the connection ------------------------------------------------------------------------------------


@fuzzed(
    side=st.sampled_from(Side),
    state=st.sampled_from(State),
    kind=st.integers(0, 20),
    lengths=st.tuples(
        st.sampled_from([0, 1, 40, 4096, 4097, 65_537, 2**24 + 1, 2**32 - 1]),
        st.sampled_from([0, 128, 192, 2**64 - 1]),
    ),
    rest=st.binary(max_size=300),
    framed=st.booleans(),
    cuts=places,
)
def test_arbitrary_streams_in_any_state(side, state, kind, lengths, rest, framed, cuts):
    """Bytes with or without a plausible prefix, in pieces: messages, then perhaps one documented error."""
    prefix = (
        b"WMPS\1\0"
        + kind.to_bytes(2, "little")
        + lengths[0].to_bytes(4, "little")
        + lengths[1].to_bytes(8, "little")
    )
    stream = (prefix if framed else b"") + rest
    connection = ConnectionPair().open(until=state).sides[side]
    tried(hear, connection, cut(stream, cuts), size=len(stream))
    assert connection.needed < (4096 if state in list(State)[:4] else 1 << 24) + 64


@fuzzed(kind=kinds, changes=mutations, cuts=places)
def test_mutated_frames_in_pieces(kind, changes, cuts):
    """A damaged frame with its payload, where its kind is due; how it is cut makes no difference."""
    stream = mutate(frame_of(SAMPLES[kind]), changes) + bytes(payload_bytes(kind))
    whole = tried(hear, listener_of(kind), [stream], size=len(stream))
    assert repr(hear(listener_of(kind), cut(stream, cuts))) == repr(whole)


@fuzzed(
    order=st.lists(kinds, max_size=12),
    state=st.sampled_from(State),
    side=st.sampled_from(Side),
    role=st.sampled_from(Role),
    filler=st.binary(min_size=1, max_size=1),
    cuts=places,
)
def test_valid_frames_in_any_order(order, state, side, role, filler, cuts):
    """Frames are heard until the first that is out of turn, whatever their padding; nothing is heard after it."""
    connection = ConnectionPair(role).open(until=state).sides[side]
    connection.agree(LAYOUT)
    stream = b"".join(frame_of(SAMPLES[kind], filler) + bytes(payload_bytes(kind)) for kind in order)
    heard = hear(connection, cut(stream, cuts))
    if heard and isinstance(heard[-1], type):
        assert issubclass(heard.pop(), RemoteProtocolError)
        assert len(heard) < len(order)
    else:
        assert len(heard) == len(order)
    assert heard == [SAMPLES[kind] for kind in order[: len(heard)]]


# ---- manifests -----------------------------------------------------------------------------------------

odd = scalars | st.lists(scalars, max_size=3)
rows = st.tuples(
    texts | odd,
    st.lists(st.integers(-1, 2**64 - 1) | st.integers(0, 5), max_size=18) | odd,
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "object", "<f4"]) | odd,
    st.sampled_from(["trainable", "state"]) | odd,
    st.integers(-3, 5) | odd,
)


def rebuilt(data):
    """What a server does with the manifest of an offer: lay it out, and shape it when it is small."""
    manifest = Manifest.from_wire(data)
    layout = Layout.of(manifest)
    if layout.payload_bytes < 4096:
        Arena.zeros(layout).views()
    return manifest


@fuzzed(listed=st.lists(rows | values, max_size=3), changes=mutations | st.just([]))
def test_hostile_manifests(listed, changes):
    """Rows of anything, damaged or not: a manifest that can be laid out and shaped, or a documented error."""
    data = mutate(b"".join(msgpack.packb(row) for row in listed), changes)
    manifest = tried(rebuilt, data, size=len(data))
    if manifest is not None:
        assert Manifest.from_wire(manifest.to_wire()) == manifest


@fuzzed(changes=mutations)
def test_mutated_manifests(changes):
    data = mutate(MANIFEST.to_wire(), changes)
    tried(rebuilt, data, size=len(data))


# ---- the count -----------------------------------------------------------------------------------------


def test_so_many_cases_have_run(capsys, record_property):
    """A fuzz test that ran no cases proves nothing: they are counted where they run."""
    if set(CASES) != FUZZERS:
        pytest.skip("only some of this file's tests ran in this process")
    total = sum(CASES.values())
    record_property("fuzz_cases", total)
    if LONG:
        with capsys.disabled():
            print(f"\n{total:,} fuzz cases, none bad: {dict(CASES)}")
    assert total >= (LONG_CASES if LONG else 40 * len(FUZZERS))
