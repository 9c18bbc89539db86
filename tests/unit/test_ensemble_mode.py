"""Ensemble mode on the server without a server: who may be a member, and how members vote."""

import logging

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.ensemble import Answers, Weighting, side_views
from protocol.errors import ConfigurationError, ManifestMismatch, Refused
from protocol.messages import Offer, RefusalCode
from protocol.tensors import Manifest, VariableSpec
from ps.coordination.instructions import CloseRound, Contribution
from ps.ensemble_mode import EnsembleConfig, EnsembleMode
from ps.rules.ensemble import ActsOn, Head
from ps.storage.optimizers import Adam
from ps.storage.schedules import Constant
from ps.storage.store_config import StoreConfig

ANSWERS = Answers(4, 3, "float32", 6)
OURS = Manifest((VariableSpec("kernel", (5,), "float32"), VariableSpec("shared/a", (2,), "float32")))


def offer(manifest=OURS, answers=ANSWERS):
    sizes = (answers.examples, answers.classes, answers.dtype, answers.test_examples) if answers else ()
    return Offer(manifest.to_wire(), 1, None, *sizes)


@pytest.fixture
def made():
    """Return a function that makes the mode; its store is closed at the end."""
    modes = []

    def make(initial_values=None, **changes):
        options = {
            "members": 2,
            "weighting": Weighting.BATCH,
            "acts_on": ActsOn.GRADIENT,
            "head": Head.SOFTMAX,
            "seed": 0,
            "master": None,
            "store": StoreConfig(Adam(), slots=2),
            "max_memory": 1 << 20,
            "max_model_bytes": 1 << 16,
        }
        modes.append(EnsembleMode(EnsembleConfig(**(options | changes)), Constant(0.1), initial_values))
        return modes[-1]

    yield make
    for mode in modes:
        if mode.store is not None:
            mode.store.close()


@pytest.mark.parametrize("how", ["no file", "no function"])
def test_a_master_of_the_users_own_that_cannot_be_loaded_is_told_before_any_member_comes(made, tmp_path, how):
    path = tmp_path / "mine.py"
    if how == "no function":
        pytest.importorskip("tensorflow")
        path.write_text("def other(features, num_workers): pass")
    with pytest.raises(ConfigurationError, match=f"--master .* cannot be used, because .*{how}"):
        made(master=f"{path}:master")


def test_the_last_member_makes_the_store(made):
    mode = made()
    terms = mode.agree(offer(), 1)
    assert mode.store is None
    assert [slot.spec.name for slot in terms.layout.slots] == ["shared/a", "member_1/kernel"]
    mode.agree(offer(), 1)
    mode.agree(offer(), 0)
    assert mode.store is not None
    names = [slot.spec.name for slot in mode.store.layout.slots]
    assert names == ["shared/a", "member_0/kernel", "member_1/kernel"]


def test_shared_variables_lie_in_the_same_order_for_all(made):
    """A member that lists them in another order gets the layout of the first."""
    mode = made()
    two = (VariableSpec("shared/a", (2,), "float32"), VariableSpec("shared/b", (3,), "float32"))
    own = VariableSpec("kernel", (5,), "float32")
    first = mode.agree(offer(Manifest((*two, own))), 0)
    second = mode.agree(offer(Manifest((own, *reversed(two)))), 1)
    assert [s.spec.name for s in first.layout.slots][:2] == [s.spec.name for s in second.layout.slots][:2]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"answers": None}, "trains an ensemble"),
        ({"answers": Answers(5, 3, "float32", 6)}, "must answer alike"),
        ({"manifest": Manifest((OURS.variables[0],))}, "'shared/a'"),
        ({"manifest": Manifest((OURS.variables[1],))}, "no variables of its own"),
        ({"manifest": Manifest((*OURS.variables, VariableSpec("n" * 510, (), "float32")))}, "512"),
        ({"manifest": Manifest((*OURS.variables, VariableSpec("h", (), "float16")))}, "float16"),
    ],
)
def test_who_cannot_be_a_member_defines_nothing(made, changed, words):
    mode = made()
    mode.agree(offer(), 0)
    with pytest.raises(Refused, match=words) as refused:
        mode.agree(offer(**changed), 1)
    assert refused.value.code == RefusalCode.MANIFEST
    mode.agree(offer(), 1)
    assert mode.store is not None


def test_a_rank_that_comes_back_must_hold_what_it_held(made):
    mode = made()
    mode.agree(offer(), 0)
    with pytest.raises(Refused, match="member_0/kernel"):
        mode.agree(offer(Manifest((VariableSpec("kernel", (6,), "float32"), OURS.variables[1]))), 0)


def test_answers_count_against_the_limits(made):
    with pytest.raises(Refused, match="--max-model-bytes") as refused:
        made().agree(offer(answers=Answers(4, 3, "float32", 10_000)), 0)
    assert refused.value.code == RefusalCode.TOO_LARGE
    mode = made(max_memory=1000)
    mode.agree(offer(), 0)
    with pytest.raises(ConfigurationError, match="--max-memory"):
        mode.agree(offer(), 1)


def test_initial_values_that_do_not_fit_are_an_error(made):
    mode = made(initial_values={"member_0/kernel": np.zeros(5, np.float32)})
    mode.agree(offer(), 0)
    with pytest.raises(ManifestMismatch, match="--init does not fit"):
        mode.agree(offer(), 1)


def payload_of(answers, labels):
    """Logits that point at these answers, and the labels, as they travel."""
    arena = Arena.zeros(ANSWERS.test)
    views = side_views(ANSWERS.test, arena.buffer)
    views["logits"][...] = np.eye(3)[answers]
    views["labels"][...] = labels
    return arena.buffer


LABELS = [0, 1, 2, 0, 1, 2]


def voting(made):
    mode = made()
    for rank in range(2):
        mode.agree(offer(), rank)
    return mode


def test_all_members_vote_and_one_alone_does_not(made):
    mode = voting(made)
    mode.tested(0, 7, payload_of(LABELS, LABELS), [0, 1])
    assert mode.votes is None
    mode.tested(1, 7, payload_of([0, 1, 2, 1, 2, 0], LABELS), [0, 1])
    step, result = mode.votes
    assert step == 7
    np.testing.assert_allclose(result.alone, [1.0, 0.5])
    assert mode.summary() == {
        "step": 7,
        "weighted_vote": result.weighted,
        "plain_vote": result.plain,
        "alone": [1.0, 0.5],
    }


def test_answers_of_an_earlier_step_are_no_part_of_a_vote(made):
    mode = voting(made)
    mode.tested(0, 7, payload_of(LABELS, LABELS), [0, 1])
    mode.tested(1, 8, payload_of(LABELS, LABELS), [0, 1])
    assert mode.votes is None
    mode.tested(0, 8, payload_of(LABELS, LABELS), [0, 1])
    assert mode.votes is not None and mode.votes[0] == 8


@pytest.mark.parametrize("broken", ["labels", "logits"])
def test_who_answers_another_test_set_or_with_nan_does_not_vote(made, broken, caplog):
    mode = voting(made)
    mode.tested(0, 7, payload_of(LABELS, LABELS), [0, 1])
    payload = payload_of(LABELS, LABELS if broken == "logits" else LABELS[::-1])
    if broken == "logits":
        side_views(ANSWERS.test, payload)["logits"][0, 0] = np.nan
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        mode.tested(1, 7, payload, [0, 1])
    assert "rank 1 does not vote at step 7" in caplog.text
    mode.vote_now()
    assert mode.summary()["alone"] == [1.0, None]


def test_without_a_vote_the_summary_says_none(made):
    assert made().summary() == {"step": None, "weighted_vote": None, "plain_vote": None, "alone": [None, None]}


def rounds(mode, learns):
    """Train two members for three rounds on made-up pushes; return the weights of each round."""
    for rank in (1, 0):
        mode.agree(offer(), rank)
    for rank in (1, 0):
        mode.store.initialise_part(rank, np.zeros(mode.store.parts[rank].values_bytes, np.uint8))
    weights = []
    for step in range(3):
        draw = np.random.default_rng(step)
        labels = draw.integers(0, 3, 4)
        for rank in (0, 1):
            row = mode.store.row(rank)
            row[:] = 0
            views = side_views(mode.store.parts[rank], row)
            views["logits"][...] = draw.normal(size=(4, 3))
            views["labels"][...] = labels
        pushes = tuple(Contribution(rank, rank, step + 1, 1.0, None, 4, 0.0) for rank in (0, 1))
        weights.append(mode.close(CloseRound(step, pushes)))
        if learns:
            mode.learn()
    return weights


def test_a_round_is_weighed_by_what_the_last_one_taught_whoever_calls_learn_and_when(made):
    """The server lets the master learn after its replies, when it gets to it."""
    at_once, later = rounds(made(), learns=True), rounds(made(), learns=False)
    assert at_once == later
    assert len({weights[0] for weights in at_once}) == 3
