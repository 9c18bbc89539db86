"""What ensemble mode adds to the contract: names, owners, and the arrays beside gradients."""

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.ensemble import Answers, Weighting, as_member, as_worker, labels_digest, side_views
from protocol.messages import Kind, Offer
from protocol.tensors import SHARED, Layout, Manifest, VariableSpec
from protocol.tensors import Kind as VariableKind

MANIFEST = Manifest(
    (
        VariableSpec("dense/kernel", (3, 2), "float32"),
        VariableSpec("shared/embedding", (5,), "float32"),
        VariableSpec("shared_not/bias", (2,), "float32"),
        VariableSpec("norm/mean", (2,), "float32", VariableKind.STATE),
    )
)


def test_all_but_the_shared_scope_belongs_to_the_rank():
    member = as_member(MANIFEST, 2)
    assert [(v.name, v.owner) for v in member.variables] == [
        ("member_2/dense/kernel", 2),
        ("shared/embedding", SHARED),
        ("member_2/shared_not/bias", 2),
        ("member_2/norm/mean", 2),
    ]
    assert [v.kind for v in member.variables] == [v.kind for v in MANIFEST.variables]


def test_the_worker_keeps_its_names_and_the_offsets_are_the_servers():
    member = as_member(MANIFEST, 2)
    ours, theirs = Layout.of(as_worker(member)), Layout.of(member)
    assert [v.name for v in as_worker(member).variables] == [v.name for v in MANIFEST.variables]
    assert [(slot.offset, slot.end) for slot in ours.slots] == [(slot.offset, slot.end) for slot in theirs.slots]
    assert ours.slots[0].spec.name == "shared/embedding", "what is shared comes first, for every rank"


def test_a_members_part_is_two_pieces_of_the_whole():
    """So the server can send it out of its own arena without copying: the shared part, then the owner's."""
    parts = [as_member(MANIFEST, rank) for rank in range(3)]
    seen = {v.name: v for part in parts for v in part.variables}
    whole = Layout.of(Manifest(tuple(seen.values())))
    for part in parts:
        layout = Layout.of(part)
        first = whole.by_name[layout.slots[1].spec.name].offset
        for slot in layout.slots[1:]:
            assert whole.by_name[slot.spec.name].offset - first == slot.offset - layout.slots[1].offset
        assert whole.by_name["shared/embedding"].offset == layout.by_name["shared/embedding"].offset == 0


def test_a_variable_called_like_a_members_is_still_the_ranks_own():
    named = Manifest((VariableSpec("member_0/kernel", (), "float32"),))
    assert as_member(named, 1).variables[0].name == "member_1/member_0/kernel"
    assert as_worker(as_member(named, 1)).variables[0].name == "member_0/kernel"


def test_a_name_that_becomes_too_long_is_an_error():
    with pytest.raises(ValueError, match="512"):
        as_member(Manifest((VariableSpec("n" * 512, (), "float32"),)), 0)


def test_equal_labels_have_equal_digests_whatever_their_dtype_and_strides():
    labels = np.arange(20, dtype=np.int32)
    assert len(labels_digest(labels)) == 16
    assert labels_digest(labels[::2]) == labels_digest(labels[::2].astype(">i4"))
    assert labels_digest(labels) != labels_digest(labels[::-1])


def test_payloads_by_weighting():
    """64-byte places: 6 x 3 float64 logits are 144 bytes, labels 24, weights 48."""
    answers = Answers(6, 3, "float64", test_examples=10)
    assert answers.payloads(Weighting.BATCH) == {Kind.TEST_LOGITS: 256 + 64}
    assert answers.payloads(Weighting.SAMPLE) == {Kind.TEST_LOGITS: 320, Kind.LOGITS: 192 + 64, Kind.WEIGHTS: 64}
    assert Answers(6, 3).payloads(Weighting.BATCH) == {}
    assert [side.name for side in answers.push_sides(Weighting.BATCH)] == ["logits", "labels"]
    assert answers.push_sides(Weighting.SAMPLE) == ()


def test_side_arrays_are_views_of_the_payload():
    layout = Layout.of(as_member(MANIFEST, 0), Answers(2, 2).push_sides(Weighting.BATCH))
    arena = Arena.zeros(layout)
    views = side_views(layout, arena.buffer)
    views["logits"][...] = [[1, 2], [3, 4]]
    views["labels"][...] = [0, 1]
    assert views["logits"].dtype == np.float32
    assert views["labels"].dtype == np.int32
    assert arena.buffer[layout.values_bytes :].any()
    assert not arena.buffer[: layout.values_bytes].any()


@pytest.mark.parametrize(
    "sizes", [(0, 3, "float32"), (4, 1, "float32"), (4, 3, "float16"), (4, 3, "object"), (4, 3, "int32")]
)
def test_what_cannot_be_answered_is_an_error(sizes):
    with pytest.raises(ValueError, match=r"cannot be weighted|must be float32 or float64"):
        Answers(*sizes)
    with pytest.raises(ValueError):
        Answers.in_offer(Offer(b"", 1, None, *sizes))


def test_an_offer_says_what_it_answers_or_nothing():
    assert Answers.in_offer(Offer(b"", 1)) is None
    assert Answers.in_offer(Offer(b"", 1, None, 4, 3, "float32", 7)) == Answers(4, 3, "float32", 7)
