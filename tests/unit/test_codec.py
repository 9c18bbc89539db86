"""Headers: a flat msgpack map of exactly the message's fields, decoded without trust and without much memory."""

import dataclasses
import math
import tracemalloc

import msgpack
import pytest

from protocol.codec import MAX_FIELDS, MAX_KEY_BYTES, MAX_VALUE_BYTES, SHORT_HEADER, decode_header, encode_header
from protocol.errors import RemoteProtocolError
from protocol.frames import MAX_HEADER_MANIFEST
from protocol.messages import MESSAGES, Kind, Offer, Push, Role
from tests.unit.exchange import SAMPLES

MEGABYTE = 1 << 20


def header_of(kind, **fields):
    """The header of the sample with some fields replaced by whatever msgpack can carry."""
    return msgpack.packb(msgpack.unpackb(encode_header(SAMPLES[kind])) | fields)


def refused(kind, header, match=None):
    with pytest.raises(RemoteProtocolError, match=match) as caught:
        decode_header(kind, header)
    text = str(caught.value)
    assert len(text) < 300
    assert text.isprintable()


@pytest.mark.parametrize("kind", Kind)
def test_every_message_survives_the_trip(kind):
    decoded = decode_header(kind, encode_header(SAMPLES[kind]))
    assert decoded == SAMPLES[kind]
    assert type(decoded) is type(SAMPLES[kind])


def test_a_header_is_this_msgpack():
    """Names, order and encodings as another language sees them."""
    message = Push(epoch=5, step=0, seq=1, loss=0.5, accuracy=None, examples=32)
    assert encode_header(message) == (
        b"\x87\xa5epoch\x05\xa4step\x00\xa3seq\x01\xa4loss\xcb\x3f\xe0\0\0\0\0\0\0\xa8accuracy\xc0\xa8examples\x20"
        b"\xa6labels\xc0"
    )


def test_enumerations_travel_as_their_text_and_words_as_a_list():
    fields = msgpack.unpackb(encode_header(SAMPLES[Kind.HELLO]))
    assert fields["role"] == "worker"
    assert fields["codecs"] == ["raw"]
    assert decode_header(Kind.HELLO, header_of(Kind.HELLO, role="evaluator")).role is Role.EVALUATOR


def test_the_order_of_fields_and_the_width_of_numbers_are_free():
    """Clients in other languages may sort their maps and send 64-bit integers or 32-bit floats."""
    fields = msgpack.unpackb(encode_header(SAMPLES[Kind.PUSH]))
    backwards = msgpack.packb(dict(reversed(fields.items())), use_single_float=True)
    assert decode_header(Kind.PUSH, backwards) == SAMPLES[Kind.PUSH]
    wide = b"\x81\xa8min_step\xcf" + (3).to_bytes(8, "big")
    assert decode_header(Kind.PULL, wide).min_step == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_can_be_reported(loss):
    push = dataclasses.replace(SAMPLES[Kind.PUSH], loss=loss)
    decoded = decode_header(Kind.PUSH, encode_header(push))
    assert decoded.loss == loss or (math.isnan(decoded.loss) and math.isnan(loss))


@pytest.mark.parametrize("kind", [0, 20, 65_535])
def test_unknown_kinds_are_refused(kind):
    refused(kind, b"\x80", "unknown kind")


FIELDS = {kind: [field.name for field in dataclasses.fields(cls)] for kind, cls in MESSAGES.items()}
FOREIGN = [None, True, 1, -1, 2**64 - 1, 0.5, "text", b"octets", [], [1], [[]], {}, {"a": 1}]


def types_of(kind, field):
    return {
        "epoch": (int,), "step": (int,), "seq": (int,), "steps": (int,), "min_step": (int,), "rank": (int,),
        "incarnation": (int,), "threads": (int,), "workers": (int,), "shards": (int,), "examples": (int,),
        "seed": (int, type(None)) if kind is Kind.OFFER else (int,),
        "loss": (float, type(None)) if kind is Kind.PUSH else (float,),
        "accuracy": (float, type(None)),
        "heartbeat_interval": (float,), "heartbeat_timeout": (float,),
        "applied": (bool,), "done": (bool,), "token_required": (bool,),
        "nonce": (bytes,), "mac": (bytes,), "manifest": (bytes,),
        "name": (str,), "host": (str,), "mode": (str,), "codec": (str,), "reason": (str,), "waiting": (str,),
        "role": (str,), "code": (str,), "status": (str,),
        "codecs": (list,),
        "classes": (int,), "test_examples": (int,), "logits_dtype": (str,), "weighting": (str,),
        "software": (str,),
        "labels": (bytes, type(None)) if kind is Kind.PUSH else (bytes,),
    }[field]  # fmt: skip


@pytest.mark.parametrize("kind", Kind)
def test_no_field_takes_a_value_of_another_type(kind):
    """Each field takes exactly the types of the document, whatever else msgpack can carry."""
    for field in FIELDS[kind]:
        for value in FOREIGN:
            if type(value) not in types_of(kind, field):
                refused(kind, header_of(kind, **{field: value}), rf"{field}|is not a valid|not valid")


@pytest.mark.parametrize("kind", Kind)
def test_a_missing_field_is_named(kind):
    for field in FIELDS[kind]:
        fields = msgpack.unpackb(encode_header(SAMPLES[kind]))
        del fields[field]
        refused(kind, msgpack.packb(fields), f"without the field '{field}'")


@pytest.mark.parametrize("kind", Kind)
def test_an_unknown_field_is_refused_and_named(kind):
    refused(kind, header_of(kind, surprise=1), "unknown field 'surprise'")


def test_a_field_that_comes_twice_is_refused():
    """Two parsers must not be able to read two different messages from the same bytes."""
    refused(Kind.PULL, b"\x82\xa8min_step\x01\xa8min_step\x02", "twice")


@pytest.mark.parametrize(
    "key", [b"\x01", b"\xc0", b"\x90", b"\x80", b"\xc4\x08min_step", b"\xd9\x50" + b"k" * 80, b"\xd4\x01\0"]
)
def test_keys_are_short_texts_only(key):
    refused(Kind.PULL, b"\x81" + key + b"\x01")


@pytest.mark.parametrize(
    "value",
    [
        msgpack.ExtType(5, b"abcd"),
        msgpack.ExtType(5, b""),
        msgpack.ExtType(127, b"x" * 300),
        msgpack.Timestamp(1, 0),
        msgpack.Timestamp(2**40, 5),
        msgpack.Timestamp(1, 5),
    ],
)
@pytest.mark.parametrize(
    ("kind", "field"), [(Kind.PULL, "min_step"), (Kind.HELLO, "name"), (Kind.OFFER, "manifest")]
)
def test_extension_types_and_timestamps_are_refused(kind, field, value):
    refused(kind, header_of(kind, **{field: value}))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x90",
        b"\x01",
        b"\xa1x",
        b"\x81",
        b"\x81\xa8min_step",
        b"\xdf\xff\xff\xff\xff",
        b"\xde",
    ],
)
def test_what_is_not_one_whole_map_is_refused(header):
    refused(Kind.PULL, header)


def test_bytes_after_the_map_are_refused():
    refused(Kind.PULL, header_of(Kind.PULL) + b"\0", "extra data")
    refused(Kind.PULL, header_of(Kind.PULL) + bytes(SHORT_HEADER), "bytes after the map")


def test_too_many_fields_are_refused_by_their_number_alone():
    for lead in (b"\xde" + (MAX_FIELDS + 1).to_bytes(2, "big"), b"\xdf" + (MAX_FIELDS + 1).to_bytes(4, "big")):
        refused(Kind.PULL, lead, "33 exceeds max_map_len")
        refused(Kind.PULL, lead + bytes(SHORT_HEADER), "33 fields")


def test_text_that_is_not_utf8_is_refused():
    refused(Kind.HEARTBEAT, b"\x81\xa7waiting\xa2\xff\xfe")


def test_words_are_bounded_in_number_and_length():
    assert decode_header(Kind.HELLO, header_of(Kind.HELLO, codecs=["x" * 32] * 8)).codecs == ("x" * 32,) * 8
    refused(Kind.HELLO, header_of(Kind.HELLO, codecs=["x"] * 9))
    refused(Kind.HELLO, header_of(Kind.HELLO, codecs=["x" * 33]))
    refused(Kind.HELLO, header_of(Kind.HELLO, codecs=[["x"]]))


def test_the_longest_text_of_widest_characters_passes():
    """The limit on a value's bytes never cuts what the message itself allows."""
    header = header_of(Kind.HEARTBEAT, waiting="😀" * 4096)
    assert len(header) > MAX_VALUE_BYTES
    assert decode_header(Kind.HEARTBEAT, header).waiting == "😀" * 4096
    refused(Kind.HEARTBEAT, header_of(Kind.HEARTBEAT, waiting="😀" * 4097))


# ---- short headers, which are decoded at once, and long ones ---------------------------------------------


def offer_of(size, **fields):
    """An offer whose header has exactly `size` bytes, with some fields replaced or added; its manifest fills it."""
    rest = {
        "threads": 2,
        "seed": None,
        "examples": 0,
        "classes": 0,
        "logits_dtype": "",
        "test_examples": 0,
        "software": "",
    } | fields
    filler = size - len(msgpack.packb(rest | {"manifest": bytes(300)})) + 300
    assert filler > 255, "shorter manifests have another lead"
    header = msgpack.packb(rest | {"manifest": bytes(filler)})
    assert len(header) == size
    return header


BOTH_SIDES = pytest.mark.parametrize("size", [SHORT_HEADER - 1, SHORT_HEADER, SHORT_HEADER + 1, 2 * SHORT_HEADER])


@BOTH_SIDES
def test_headers_on_both_sides_of_a_short_one_say_the_same(size):
    decoded = decode_header(Kind.OFFER, offer_of(size, threads=7))
    assert (decoded.threads, decoded.seed) == (7, None)
    assert decoded.manifest == bytes(len(decoded.manifest))
    assert len(encode_header(decoded)) == size


@BOTH_SIDES
def test_on_both_sides_a_field_that_comes_twice_is_refused(size):
    """Also when both say the same, and when one more field hides a missing one."""
    once = b"\xa7threads\x02"
    header = offer_of(size - len(once))
    assert header[:1] == b"\x88"
    refused(Kind.OFFER, b"\x89" + header[1:] + once, "field 'threads' comes twice")
    instead = header.replace(b"\xa4seed\xc0", once)
    refused(Kind.OFFER, instead, "field 'threads' comes twice")


@BOTH_SIDES
@pytest.mark.parametrize(
    "name", ["surprise", "", "Threads", "threads\0", "k" * MAX_KEY_BYTES, "\x1b[2J", b"threads", 7, None]
)
def test_on_both_sides_an_unknown_field_is_refused(size, name):
    """A name that is binary or a number is not one, whatever it says."""
    header = offer_of(size - len(msgpack.packb(name)) - 1)
    refused(Kind.OFFER, b"\x89" + header[1:] + msgpack.packb(name) + b"\x02", "not valid")


@BOTH_SIDES
@pytest.mark.parametrize("value", [{}, {"a": 1}, {"threads": 2}, [], [{}], [[1]], [2], msgpack.ExtType(5, b"")])
@pytest.mark.parametrize("field", ["threads", "seed"])
def test_on_both_sides_maps_lists_and_extensions_within_are_refused(size, field, value):
    refused(Kind.OFFER, offer_of(size, **{field: value}), "header is not valid|invalid Offer")


@pytest.mark.parametrize("name", ["site", "😀" * 128], ids=["short", "long"])
def test_on_both_sides_maps_in_place_of_words_are_refused(name):
    """The one field that takes a list takes nothing that looks like one when it is decoded."""
    good = header_of(Kind.HELLO, name=name, host=name)
    assert (len(good) > SHORT_HEADER) == (len(name) == 128)
    assert decode_header(Kind.HELLO, good).codecs == ("raw",)
    for words in ({}, {"raw": "raw"}, [{}], [{"raw": 1}], ["raw", {}], [[]], [["raw"]], msgpack.ExtType(5, b"")):
        refused(Kind.HELLO, header_of(Kind.HELLO, name=name, host=name, codecs=words), "is not valid|invalid Hello")


@pytest.mark.parametrize("top", [b"\x90", b"\x92\x92\xa8min_step\x01\xc0", b"\x91\x92\xa8min_step\x01"])
def test_a_list_of_pairs_is_no_map(top):
    refused(Kind.PULL, top, "no map")


# ---- allocation ----------------------------------------------------------------------------------------


def peak_of(decode):
    """Bytes that Python held at most while `decode` ran; it must refuse."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError) as caught:
            decode()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300
    return peak


def nested(depth):
    """A tree of lists, eight to a node: one byte on the wire for each, sixty in memory."""
    return b"\x90" if depth == 0 else b"\x98" + nested(depth - 1) * 8


def offer_with(field, value):
    fields = {"manifest": b"\xc4\0", "threads": b"\x01", "seed": b"\xc0"} | {field: value}
    return b"\x83" + b"".join(msgpack.packb(name) + packed for name, packed in fields.items())


def long(lead, body, count=None):
    """A value with a 32-bit length."""
    return lead + (len(body) if count is None else count).to_bytes(4, "big") + body


LONG = 15 << 20
BOMBS = {
    "a tree of empty lists": lambda: offer_with("manifest", b"\x97" + nested(7) * 6 + nested(0)),
    "a flat list of empty lists": lambda: offer_with("seed", long(b"\xdd", b"\x90" * LONG)),
    "lists a million deep": lambda: offer_with("seed", b"\x91" * LONG),
    "a text four times as wide for one character": lambda: offer_with(
        "seed", long(b"\xdb", b"a" * LONG + "😀".encode())
    ),
    "text that is not UTF-8": lambda: offer_with("seed", long(b"\xdb", b"\xff" * LONG)),
    "a binary in place of a number": lambda: offer_with("threads", long(b"\xc6", bytes(LONG))),
    "a map of millions of entries": lambda: offer_with("seed", long(b"\xdf", b"\x00" * LONG, LONG // 2)),
    "an extension": lambda: offer_with("seed", long(b"\xc9", bytes(LONG + 1), LONG)),
    "a key as long as the header": lambda: b"\x81" + long(b"\xdb", b"k" * LONG) + b"\x01",
    "bytes after the map": lambda: offer_with("seed", b"\xc0") + bytes(LONG),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_the_largest_hostile_header_cannot_make_us_hold_more_than_a_few_times_its_size(bomb):
    """16 MB of nested empty lists are 1.1 GB as Python objects; they must be refused before they become any."""
    header = BOMBS[bomb]()
    assert 13 * MEGABYTE < len(header) <= MAX_HEADER_MANIFEST
    assert peak_of(lambda: decode_header(Kind.OFFER, header)) < 2.5 * MAX_HEADER_MANIFEST


def test_a_small_hostile_header_stays_small():
    """What a stranger may send before the proof, 4 KB, costs less than a megabyte whatever it is."""
    header = (b"\x81\xa6codecs\x97" + nested(4))[:4096]
    assert peak_of(lambda: decode_header(Kind.HELLO, header)) < MEGABYTE


def filled(start, unit, size):
    """A header of `size` bytes that opens `unit` again and again."""
    return (start + unit * size)[:size]


SMALL_BOMBS = {
    "a tree of empty lists": lambda size: filled(b"\x81\xa6codecs\x97" + nested(4), b"\x90", size),
    "lists within lists": lambda size: filled(b"\x81\xa6codecs", b"\x91", size),
    "lists of eight within lists": lambda size: filled(b"\x81\xa6codecs", b"\x98", size),
    "maps within maps": lambda size: filled(b"\x81\xa6codecs", b"\x8f\xa0", size),
    "maps of 32 within maps": lambda size: filled(b"\x81\xa6codecs", b"\xde\x00\x20\xa0", size),
    "empty maps": lambda size: filled(b"\x81\xa6codecs\x98", b"\x80", size),
    "a list of four billion": lambda size: filled(b"\x81\xa6codecs\xdd\xff\xff\xff\xff", b"\x90", size),
    "a map of four billion": lambda size: filled(b"\x81\xa6codecs\xdf\xff\xff\xff\xff", b"\x90", size),
    "a text of four billion": lambda size: filled(b"\x81\xa6codecs\xdb\xff\xff\xff\xff", b"a", size),
    "a binary of four billion": lambda size: filled(b"\x81\xa6codecs\xc6\xff\xff\xff\xff", b"a", size),
    "an extension of four billion": lambda size: filled(b"\x81\xa6codecs\xc9\xff\xff\xff\xff\x05", b"a", size),
    "many fields": lambda size: filled(b"\xde\x00\x20", b"\x90\x90", size),
}
ALLOWANCE = 64 << 10
"""Error, traceback and the unpacker's own buffers."""


@pytest.mark.parametrize("size", [SHORT_HEADER, SHORT_HEADER + 1])
@pytest.mark.parametrize("bomb", SMALL_BOMBS)
def test_a_header_that_is_decoded_at_once_grows_no_more_than_a_hundredfold(bomb, size):
    """What is not measured first is so short that it need not be."""
    header = SMALL_BOMBS[bomb](size)
    assert len(header) == size
    assert peak_of(lambda: decode_header(Kind.HELLO, header)) < 100 * SHORT_HEADER + ALLOWANCE


def test_a_whole_manifest_fits_into_an_offer():
    rows = bytes(MAX_HEADER_MANIFEST - 64)
    assert decode_header(Kind.OFFER, encode_header(Offer(rows, 1))).manifest == rows
