"""An ensemble that starts again from a checkpoint goes on with the same bits; any of its members may be missing."""

import itertools
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.ensemble import Answers, Weighting, labels_digest, side_views
from protocol.errors import ConfigurationError, LocalProtocolError, ManifestMismatch, Refused
from protocol.messages import Offer
from protocol.tensors import Kind, Manifest, VariableSpec
from ps.coordination.instructions import CloseRound, Contribution
from ps.ensemble_mode import EnsembleConfig, EnsembleMode
from ps.rules.ensemble import ActsOn, Head
from ps.storage.optimizers import SGD, Adam
from ps.storage.schedules import ExponentialDecay
from ps.storage.store_config import StoreConfig
from tests.unit.resumed import copied, leaves, without, written_and_read

MEMBERS, ROUNDS = 3, 12
ANSWERS = Answers(4, 3, "float64", 6)
VARIABLES = (
    VariableSpec("kernel", (5, 3), "float32"),
    VariableSpec("shared/table", (7,), "float64"),
    VariableSpec("mean", (3,), "float32", Kind.STATE),
    VariableSpec("shared/count", (), "int64", Kind.STATE),
)
LABELS = np.array([0, 1, 2, 0], np.int32)

SIGMOIDS = """
import tensorflow as tf
def master(features, num_workers):
    kernel = tf.Variable(tf.random.normal([features.shape[1], num_workers], stddev=0.3), name="kernel")
    return tf.sigmoid(tf.matmul(features, kernel))
"""


def offer(rank: int, **changes: int) -> Offer:
    """Rank 2 has a network of another size, and lists the shared variables in another order."""
    extra = (VariableSpec("extra", (4,), "float32"),) if rank == 2 else ()
    manifest = Manifest((*(VARIABLES[::-1] if rank == 2 else VARIABLES), *extra))
    answers = {"examples": 4, "classes": 3, "logits_dtype": "float64", "test_examples": 6} | changes
    return Offer(manifest.to_wire(), 1, None, **answers)


@pytest.fixture
def made():
    """Return a function that makes the mode; all is closed at the end."""
    modes = []

    def make(**changes):
        options = {
            "members": MEMBERS,
            "weighting": Weighting.BATCH,
            "acts_on": ActsOn.GRADIENT,
            "head": Head.SOFTMAX,
            "seed": 5,
            "master": None,
            "store": StoreConfig(changes.pop("optimizer", Adam()), slots=MEMBERS, threads=1, checkpoints=True),
            "max_memory": 1 << 20,
            "max_model_bytes": 1 << 16,
        }
        modes.append(EnsembleMode(EnsembleConfig(**(options | changes)), ExponentialDecay(0.1, 5, 0.5), None))
        return modes[-1]

    yield make
    for mode in modes:
        if mode.store is not None:
            mode.store.close()
        getattr(mode._master, "close", lambda: None)()


def begin(mode):
    for rank in (2, 0, 1):
        mode.agree(offer(rank), rank)
    for rank, part in enumerate(mode.store.parts):
        arena = Arena.zeros(part)
        for view in arena.views(writeable=True).values():
            view[...] = np.random.default_rng([1, rank, view.size]).normal(size=view.shape)
        mode.store.initialise_part(rank, arena.buffer[: part.values_bytes])
    return mode


def receive(mode, rank, step):
    """Let a member's push arrive: gradients that depend on its values, and on its weights where it has them."""
    part, draw = mode.store.parts[rank], np.random.default_rng([2, rank, step])
    arena, values = Arena.zeros(part), mode.store.export()
    weight = 1.0
    if mode.config.weighting is Weighting.SAMPLE:
        weight = side_views(ANSWERS.weights, mode.weights_for(rank))["weights"].mean()
    for slot in part.slots:
        value = values[slot.spec.name]
        arena.slot_view(slot)[...] = 10 * rank + step if value.dtype.kind == "i" else weight * value
        if value.dtype.kind == "f":
            arena.slot_view(slot)[...] += draw.normal(size=value.shape)
    if mode.config.weighting is Weighting.BATCH:
        answer(mode, rank, step, side_views(part, arena.buffer))
    receiver = mode.store.receiver(rank)
    receiver.buffer[:] = arena.buffer.data
    for end in receiver.block_ends:
        receiver.received(end)
    return Contribution(rank, rank, step + 1, 1.0, None, 4, receiver.finish().gradient_norm)


def answer(mode, rank, step, views):
    kernel = mode.store.export()[f"member_{rank}/kernel"]
    views["logits"][...] = np.random.default_rng([3, rank, step]).normal(size=views["logits"].shape)
    views["logits"][...] += kernel.mean(axis=0)
    views["labels"][...] = np.resize(LABELS, views["labels"].shape)


def payload(layout, mode, rank, step):
    arena = Arena.zeros(layout)
    answer(mode, rank, step, side_views(layout, arena.buffer))
    return arena.buffer


def close(mode, step, present):
    """Close a round of some members; with weights of examples one that has answered may be missing in the end."""
    if mode.config.weighting is Weighting.SAMPLE:
        answered = sorted({*present, step % MEMBERS})
        for rank in answered:
            assert mode.show(rank, payload(ANSWERS.batch, mode, rank, step), labels_digest(LABELS)) == ""
        mode.weigh(answered)
    contributions = tuple(receive(mode, rank, step) for rank in present)
    return mode.close(CloseRound(step, contributions))


def a_round(mode, step):
    """Go through a round; return all bits that it has found and left behind."""
    found = holds(mode)
    if step % 4 == 1:
        for rank in range(MEMBERS - step % 2):
            mode.tested(rank, step, payload(ANSWERS.test, mode, rank, step), range(MEMBERS))
    if step == 7:
        mode.skip()
        return found, {}, holds(mode)
    present = [rank for rank in range(MEMBERS) if (rank + step) % 5]
    weights = close(mode, step, present)
    return found, weights, holds(mode)


def holds(mode):
    arrays = mode.store.optimizer_arrays()
    parts = tuple(array.tobytes() for part in arrays.values() for array in part.values())
    return bytes(mode.store.current.buffer), parts, mode.store.updates, repr(mode.summary())


@dataclass(frozen=True)
class Kept:
    """What a checkpoint holds."""

    step: int
    updates: int
    tensors: dict[str, dict[str, Any]]
    state: dict[str, Any]


def checkpoint(mode, stop, learns):
    begin(mode)
    for step in range(stop):
        a_round(mode, step)
        if learns:
            mode.learn()
    snapshot, state = mode.store.snapshot(), mode.state()
    for step in range(stop, ROUNDS):
        a_round(mode, step)
    kept = Kept(snapshot.step, snapshot.updates, copied(snapshot.tensors), written_and_read(state))
    snapshot.release()
    return kept


def goes_on(mode, kept):
    mode.restore(kept.state, kept.step, kept.updates, kept.tensors)
    for rank in (0, 2, 1):
        mode.agree(offer(rank), rank)
    return [a_round(mode, step) for step in range(kept.step, ROUNDS)]


CASES = {
    "batch": {},
    "batch, update": {"acts_on": ActsOn.UPDATE, "optimizer": SGD(0.9)},
    "batch, sigmoid": {"head": Head.SIGMOID},
    "sample": {"weighting": Weighting.SAMPLE},
    "sample, sigmoid": {"weighting": Weighting.SAMPLE, "head": Head.SIGMOID},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("learns", [True, False])
def test_a_resumed_ensemble_ends_with_the_bits_of_one_that_was_never_stopped(made, name, learns):
    case = CASES[name]
    mode = begin(made(**case))
    whole = [a_round(mode, step) for step in range(ROUNDS)]
    for stop in (0, 1, 6, 8, ROUNDS - 1):
        kept = checkpoint(made(**case), stop, learns)
        assert goes_on(made(**case), kept) == whole[stop:], stop


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_with_a_master_of_the_users_own_too(made, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SIGMOIDS))
    case = {"master": f"{path}:master"}
    mode = begin(made(**case))
    whole = [a_round(mode, step) for step in range(ROUNDS)]
    kept = checkpoint(made(**case), 6, True)
    assert goes_on(made(**case), kept) == whole[6:]
    fresh = begin(made(**case)).state()
    changed = Kept(kept.step, kept.updates, kept.tensors, without(kept.state, ("master",), fresh))
    assert goes_on(made(**case), changed) != whole[6:]


def test_every_part_of_the_state_is_needed(made):
    mode = begin(made())
    whole = [a_round(mode, step) for step in range(ROUNDS)]
    kept, fresh = checkpoint(made(), 6, True), begin(made()).state()
    needed = set()
    for place in leaves(kept.state):
        changed = Kept(kept.step, kept.updates, kept.tensors, without(kept.state, place, fresh))
        needed |= {place} if goes_on(made(), changed) != whole[6:] else set()
    # What the members have was compared when they came; names of masters only are; nobody has complained.
    as_offered = {("manifests",), ("answers",), ("master_name",), ("complaint",)}
    assert set(leaves(kept.state)) - needed == as_offered
    for group, tensors in kept.tensors.items():
        for name in tensors:
            tensors = copied(kept.tensors)
            tensors[group][name][...] = 1
            assert goes_on(made(), Kept(kept.step, kept.updates, tensors, kept.state)) != whole[6:], name


# ---- who may go on with it -----------------------------------------------------------------------------


def test_the_store_is_there_before_anybody_has_joined_and_others_are_refused(made):
    kept, mode = checkpoint(made(), 6, True), made()
    mode.restore(kept.state, kept.step, kept.updates, kept.tensors)
    assert mode.store is not None and mode.store.current.step == 6
    terms = mode.agree(offer(2), 2)
    assert {"shared/table", "member_2/extra"} <= {slot.spec.name for slot in terms.layout.slots}
    with pytest.raises(Refused, match="member_2/extra"):
        mode.agree(offer(1), 2)
    with pytest.raises(Refused, match="must answer alike"):
        mode.agree(offer(1, examples=5), 1)


def test_another_number_of_members_is_refused(made):
    kept = checkpoint(made(), 6, True)
    with pytest.raises(ConfigurationError, match="ensemble of 3 members, and --workers is 2"):
        made(members=2).restore(kept.state, kept.step, kept.updates, kept.tensors)


def test_another_optimizer_is_refused_naming_the_first_tensor(made):
    kept = checkpoint(made(), 6, True)
    with pytest.raises(ManifestMismatch, match="of its optimizer, 'm/shared/table' is float64"):
        made(optimizer=SGD()).restore(kept.state, kept.step, kept.updates, kept.tensors)
    del kept.tensors["optimizer"]["updates"]
    with pytest.raises(ManifestMismatch, match=r"'updates' is missing, and here it is int64 \[4\]"):
        made().restore(kept.state, kept.step, kept.updates, kept.tensors)


def test_there_is_no_state_before_all_have_come(made):
    mode = made()
    mode.agree(offer(0), 0)
    with pytest.raises(LocalProtocolError, match="before all its members"):
        mode.state()


# ---- who is missing ------------------------------------------------------------------------------------

SUBSETS = [set(some) for size in (1, 2, 3) for some in itertools.combinations(range(MEMBERS), size)]


@pytest.mark.parametrize("present", SUBSETS, ids=str)
@pytest.mark.parametrize("weighting", list(Weighting))
def test_a_round_closes_with_any_members_and_leaves_the_others_as_they_are(made, present, weighting):
    mode = begin(made(weighting=weighting))
    for step in range(2):
        close(mode, step, range(MEMBERS))
    before = {name: value.copy() for name, value in everything(mode).items()}
    weights = close(mode, 2, sorted(present))
    mode.learn()
    assert weights.keys() == present
    for name, value in everything(mode).items():
        owner = name.partition("member_")[2][:1]
        changed = not np.array_equal(before[name], value)
        assert changed is (not owner or int(owner) in present), name
        assert np.isfinite(value).all()
    answered = present | ({2} if weighting is Weighting.SAMPLE else set())
    scores = mode._master.weights(np.zeros((4, MEMBERS, 3)), np.isin(range(MEMBERS), list(answered)))
    np.testing.assert_allclose(scores.sum(axis=1), 1.0)
    assert not scores[:, sorted(set(range(MEMBERS)) - answered)].any()


def everything(mode):
    moments = mode.store.optimizer_arrays()
    named = {f"{moment}/{name}": array for moment, part in moments.items() for name, array in part.items()}
    return {**mode.store.export(), **named}
