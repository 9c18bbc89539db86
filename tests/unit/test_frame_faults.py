"""Faults of the proxy as text: what is understood, what is refused with which words, and which frame is struck."""

import pytest

from protocol.errors import ConfigurationError
from protocol.frame_faults import KINDS, Action, Fault, FrameFaults, Part, Way
from protocol.messages import Kind


def test_all_parts_of_a_fault_are_read() -> None:
    assert Fault.parse("cut:header@push,number=3") == Fault(
        "cut:header@push,number=3", Action.CUT, Kind.PUSH, 3, Part.HEADER
    )
    assert Fault.parse(" delay:0.5@server-proof ").seconds == 0.5
    hole = Fault.parse("blackhole:20@push,way=up,number=4")
    assert (hole.kind, hole.number, hole.seconds, hole.ways) == (Kind.PUSH, 4, 20.0, (Way.UP,))


def test_what_is_left_out_is_the_first_frame_its_half_both_ways_and_for_ever() -> None:
    assert (Fault.parse("cut@values").number, Fault.parse("cut@values").part) == (0, Part.HALF)
    hole = Fault.parse("blackhole@values")
    assert (hole.seconds, set(hole.ways)) == (None, set(Way))


def test_every_kind_of_frame_can_be_named() -> None:
    assert {Fault.parse(f"double@{name}").kind for name in KINDS} == set(Kind)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cut", "is not a fault: write ACTION"),
        ("cut@push;double@push", "is not a fault: write ACTION"),
        (
            "break@push",
            "'break' in 'break@push' is not known; there are cut, delay, double, hold, swallow, blackhole",
        ),
        ("cut@gradient", "'gradient' .* is not a kind of frame; there are hello, .*test-logits"),
        ("cut:most@push", "'most' .* is not known; there are start, header, half, last"),
        ("delay@push", "does not say how long: write the seconds"),
        ("delay:-1@push", "'-1' .* is not a number of seconds"),
        ("delay:inf@push", "'inf' .* is not a number of seconds"),
        ("delay:999999999@push", "is not a number of seconds"),
        ("double:2@push", "double takes no argument"),
        ("hold@values", "hold goes with frames of workers only .*push"),
        ("hold@heartbeat", "hold goes with frames of workers only"),
        ("cut@push,number=-1", "'-1' .* is not the number of a frame; count from 0"),
        ("cut@push,number=9999999999999", "is not the number of a frame"),
        ("cut@push,rank=1", "'rank' .* does not go with cut, only number"),
        ("cut@push,way=up", "'way' .* does not go with cut, only number"),
        ("blackhole@push,way=left", "'left' .* is not a way; there are up, down, both"),
        ("blackhole@push,rank=1", "'rank' .* does not go with blackhole, only number and way"),
        ("cut@push,number=1,number=2", "number stands twice"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_would_go(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Fault.parse(text)


@pytest.mark.parametrize(
    ("part", "passes"), [("start", 0), ("1", 1), ("header", 128), ("half", 514), ("last", 1027), ("5000", 1028)]
)
def test_a_cut_passes_what_it_says_and_never_more_than_there_is(part: str, passes: int) -> None:
    assert Fault.parse(f"cut:{part}@push").passes_bytes(header_end=128, size=1028) == passes


def test_frames_of_each_kind_are_counted_and_one_is_struck() -> None:
    third, first = Fault.parse("cut@push,number=2"), Fault.parse("double@values")
    faults = FrameFaults([third, first])
    struck = [
        faults.strike(kind) for kind in (Kind.PUSH, Kind.VALUES, Kind.PUSH, Kind.PUSH, Kind.VALUES, Kind.PUSH)
    ]
    assert struck == [None, first, None, third, None, None]
    assert faults.seen == {Kind.PUSH: 4, Kind.VALUES: 2}


def test_two_faults_of_one_frame_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'cut@push' and 'double@push,number=0' strike the same frame"):
        FrameFaults([Fault.parse("cut@push"), Fault.parse("double@push,number=0")])
