"""Every rule against what it promises, on real float32 gradients that go through a real store."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arena import Arena, aligned_empty
from protocol.errors import ConfigurationError, LocalProtocolError
from protocol.tensors import Layout, Manifest, VariableSpec
from ps.closing import RoundCloser
from ps.coordination.instructions import CloseRound, Contribution
from ps.rules.aggregation import (
    LONGEST_RESCALE,
    ClippedMean,
    CosineTrust,
    Krum,
    Mean,
    MeanOver,
    Median,
    MultiKrum,
    TrimmedMean,
    clip_factors,
)
from ps.rules.evidence import Evidence
from ps.rules.geometry import Geometry
from ps.rules.master import Master
from ps.rules.rule import Need, RoundView
from ps.storage.optimizers import SGD
from ps.storage.schedules import Constant
from ps.storage.store import Store
from ps.storage.store_config import StoreConfig

SIZE = 60
"""Elements of a gradient; the layout divides them into two variables with a gap between."""

WORKERS = 7


# ---- what each rule is, in plain NumPy -------------------------------------------------------------------
# Of the usable gradients g [W, n] in float64, how many examples stand behind each, and the validator's v [n].


def mean(g, examples, v):
    return g.mean(axis=0)


def mean_over_examples(g, examples, v):
    return np.average(g, axis=0, weights=examples)


def clipped_mean(g, examples, v):
    norms = np.linalg.norm(g, axis=1)
    middle = np.sort(norms)[(len(norms) - 1) // 2]
    return np.mean(
        [row * (min(1, middle / norm) if norm else 1) for row, norm in zip(g, norms, strict=True)], axis=0
    )


def median(g, examples, v):
    return np.median(g, axis=0)


def trimmed_mean_of_2(g, examples, v):
    return np.sort(g, axis=0)[2:-2].mean(axis=0) if len(g) > 4 else clipped_mean(g, examples, v)


def krum_order(g, faulty):
    scores = []
    for i in range(len(g)):
        others = sorted(((g[i] - g[j]) ** 2).sum() for j in range(len(g)) if j != i)
        scores.append(sum(others[: len(g) - faulty - 2]))
    return np.argsort(scores, kind="stable")


def krum_of_2(g, examples, v):
    return g[krum_order(g, 2)[0]] if len(g) >= 7 else clipped_mean(g, examples, v)


def multi_krum_of_1(g, examples, v):
    return g[krum_order(g, 1)[: len(g) - 1]].mean(axis=0) if len(g) >= 5 else clipped_mean(g, examples, v)


def cosine_trust(g, examples, v):
    if len(g) == 1:
        return g[0]
    norms = np.linalg.norm(g, axis=1)
    directions = g / np.where(norms > 0, norms, 1)[:, None]
    trust = np.maximum(directions @ (v / np.linalg.norm(v)), 0)
    return np.linalg.norm(v) * (trust @ directions) / trust.sum() if trust.any() else np.zeros_like(v)


@dataclass(frozen=True)
class Case:
    """A rule of the table. `definition` is None for what has no formula of one round: those that remember."""

    make: Callable[[], object]
    definition: Callable[..., np.ndarray] | None = None
    lengthens: bool = False
    trims: bool = False


RULES = {
    "mean": Case(Mean, mean),
    "mean over examples": Case(lambda: Mean(MeanOver.EXAMPLES), mean_over_examples),
    "clipped_mean": Case(ClippedMean, clipped_mean),
    "median": Case(Median, median, trims=True),
    "trimmed_mean": Case(lambda: TrimmedMean(2), trimmed_mean_of_2, trims=True),
    "trimmed_mean of none": Case(lambda: TrimmedMean(0), mean),
    "krum": Case(lambda: Krum(2), krum_of_2),
    "multi_krum": Case(lambda: MultiKrum(1), multi_krum_of_1),
    "cosine_trust": Case(CosineTrust, cosine_trust, lengthens=True),
    "evidence": Case(lambda: Evidence(validated=True)),
    "evidence without a validator": Case(lambda: Evidence(validated=False)),
    "master": Case(lambda: Master(validated=True, seed=1)),
    "master without a validator": Case(lambda: Master(validated=False, seed=1)),
}
DEFINED = [name for name, case in RULES.items() if case.definition is not None]


# ---- a round through a store -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a rule decided, and what was subtracted from the values for it, at a learning rate of 1."""

    decision: object
    applied: np.ndarray


def layout(dtype):
    sizes = {"kernel": (7, 7), "bias": (SIZE - 49,)}
    return Layout.of(Manifest(tuple(VariableSpec(name, shape, dtype) for name, shape in sizes.items())))


def push(store, slot, gradient):
    receiver = store.receiver(slot)
    receiver.buffer[:] = bytes(len(receiver.buffer))
    Arena(store.layout, np.frombuffer(receiver.buffer, np.uint8)).fill(
        {"kernel": gradient[:49].reshape(7, 7), "bias": gradient[49:]}
    )
    for end in receiver.block_ends:
        receiver.received(end)
    return receiver.finish()


def play(case, gradients, v=None, examples=None, dtype="float32"):
    """Close one round.

    Args:
        case: of the table.
        gradients: [ranks, n]; rows with NaN are refused.
        v: the validator's gradient of this step, [n], or None.
        examples: of each rank; 1 to W if None.
        dtype: of the variables.
    """
    wanted = layout(dtype)
    store = Store(wanted, StoreConfig(SGD(), len(gradients), threads=1, references=1))
    store.initialise(aligned_empty(wanted.values_bytes) * 0)
    examples = examples or range(1, len(gradients) + 1)
    pushes = []
    for rank, gradient in enumerate(gradients):
        check = push(store, rank, gradient.astype(dtype))
        refused = "" if check.finite else "not finite"
        loss, accuracy = 1.0 - 0.01 * rank, 0.5
        pushes.append(Contribution(rank, rank, 1, loss, accuracy, examples[rank], check.gradient_norm, refused))
    references = ()
    if v is not None:
        push(store, len(gradients), v.astype(dtype))
        references = (len(gradients),)
    closer = RoundCloser(case.make(), Constant(1.0))
    closed = closer.close(
        store, CloseRound(0, tuple(pushes), references), [f"worker {i}" for i in range(len(pushes))]
    )
    new = store.export()
    assert {array.dtype.name for array in new.values()} == {dtype}
    assert (new["kernel"].shape, new["bias"].shape) == ((7, 7), (SIZE - 49,))
    applied = -np.concatenate([new["kernel"].reshape(-1), new["bias"]]).astype(np.float64)
    return Outcome(closed.decision, applied)


def usable(gradients):
    return np.isfinite(gradients).all(axis=1)


def defined(case, gradients, v, examples=None):
    """Return what the definition says of float32 gradients, computed in float64."""
    good = usable(gradients)
    examples = np.array(examples or range(1, len(gradients) + 1))[good]
    return case.definition(gradients[good].astype(np.float64), examples, v.astype(np.float64))


def agreeing(seed=0, workers=WORKERS):
    """Return gradients [ranks, n] in float32 that share a direction, and a validator's of that direction."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal(SIZE)
    lengths = random.uniform(0.3, 3, (workers, 1))
    return (
        ((truth + random.standard_normal((workers, SIZE))) * lengths).astype(np.float32),
        (truth + random.standard_normal(SIZE)).astype(np.float32),
    )


def changed(**rows):
    """Return agreeing gradients of which some rows are replaced."""
    g, v = agreeing()
    for rank, row in rows.items():
        g[int(rank[1:])] = row
    return g, v


ROUNDS = {
    "seven that agree": agreeing(),
    "eight": agreeing(1, 8),
    "nine, more than are compared with each other": agreeing(2, 9),
    "two": agreeing(3, 2),
    "one": agreeing(4, 1),
    "all equal": (np.tile(agreeing()[0][:1], (WORKERS, 1)), agreeing()[1]),
    "all zero": (np.zeros((WORKERS, SIZE), np.float32), agreeing()[1]),
    "four of them zero": changed(r0=0, r2=0, r3=0, r6=0),
    "one a million million times too long": changed(r3=agreeing()[0][3] * np.float32(1e12)),
    "one huge": changed(r3=np.float32(-1e30)),
    "all huge": tuple(array * np.float32(1e30) for array in agreeing()),
    "one refused": changed(r2=np.float32(np.nan)),
    "one left": (np.where(np.arange(WORKERS)[:, None] == 4, agreeing()[0], np.float32(np.inf)), agreeing()[1]),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("situation", ROUNDS)
def test_what_is_applied_is_what_the_definition_says(situation, name, dtype):
    g, v = ROUNDS[situation]
    wanted = defined(RULES[name], g, v)
    outcome = play(RULES[name], g, v, dtype=dtype)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(outcome.applied, wanted, rtol=1e-5, atol=1e-5 * scale if scale else 1e-30)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("situation", ROUNDS)
def test_every_decision_is_well_formed_and_what_is_applied_is_finite(situation, name):
    case, (g, v) = RULES[name], ROUNDS[situation]
    outcome = play(case, g, v)
    decision = outcome.decision
    for array in (decision.weights, decision.factors):
        assert array.dtype == np.float64 and array.shape == (len(g),)
        assert np.isfinite(array).all()
    assert (decision.weights >= 0).all()
    assert decision.weights.sum() == pytest.approx(1, abs=1e-12) or not decision.weights.any()
    assert not decision.weights[~usable(g)].any()
    assert (decision.factors > 0).all()
    if not case.lengthens:
        assert (decision.factors <= 1).all()
    if decision.trim is not None:
        assert case.trims and 0 < 2 * decision.trim < usable(g).sum()
    assert np.isfinite(outcome.applied).all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "situation", ["seven that agree", "one huge", "nine, more than are compared with each other"]
)
def test_ranks_are_interchangeable(situation, name):
    """With the ranks permuted the same gradients get the same weights, and the same is applied, to rounding."""
    g, v = ROUNDS[situation]
    examples = list(range(10, 10 + len(g)))
    order = np.random.default_rng(5).permutation(len(g))
    outcome = play(RULES[name], g, v, examples)
    permuted = play(RULES[name], g[order], v, [examples[i] for i in order])
    np.testing.assert_allclose(permuted.decision.weights, outcome.decision.weights[order], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(permuted.decision.factors, outcome.decision.factors[order], rtol=1e-9)
    scale = np.abs(outcome.applied).max()
    np.testing.assert_allclose(permuted.applied, outcome.applied, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("situation", ["one", "one left"])
def test_a_single_usable_gradient_has_all_the_weight(situation, name):
    g, v = ROUNDS[situation]
    weights = play(RULES[name], g, v).decision.weights
    assert weights[usable(g)].tolist() == [1.0]
    assert weights.sum() == 1.0


@pytest.mark.parametrize("name", RULES)
def test_gradients_that_are_all_equal_are_followed(name):
    g, v = ROUNDS["all equal"]
    applied = play(RULES[name], g, v).applied
    length = np.linalg.norm(g[0]) if not RULES[name].lengthens else np.linalg.norm(v)
    assert applied @ g[0] == pytest.approx(np.linalg.norm(applied) * np.linalg.norm(g[0]), rel=1e-6)
    assert 0.1 * length < np.linalg.norm(applied) < 1.001 * length


@pytest.mark.parametrize("name", RULES)
def test_nobody_usable_gives_nothing_to_apply(name):
    g, v = np.full((3, SIZE), np.nan, np.float32), agreeing()[1]
    outcome = play(RULES[name], g, v)
    assert outcome.decision.weights.tolist() == [0.0, 0.0, 0.0]
    assert outcome.decision.trim is None
    assert not outcome.applied.any()


@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith(("mean", "trimmed_mean of none"))])
def test_one_huge_gradient_does_not_carry_the_round_away(name):
    """What is applied stays near the others: only a mean is at the mercy of one."""
    g, v = ROUNDS["one huge"]
    if "validator" in name:
        v = None
    others = np.linalg.norm(np.delete(g, 3, axis=0), axis=1).max()
    assert np.linalg.norm(play(RULES[name], g, v).applied.astype(np.float64)) < 2 * others


def test_what_each_rule_has_measured():
    assert {
        name: {need.value for need in case.make().needs} for name, case in RULES.items() if case.definition
    } == {
        "mean": set(),
        "mean over examples": set(),
        "clipped_mean": set(),
        "median": set(),
        "trimmed_mean": set(),
        "trimmed_mean of none": set(),
        "krum": {Need.GRAM},
        "multi_krum": {Need.GRAM},
        "cosine_trust": {Need.REFERENCE},
    }


# ---- rounds that are too short ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "least", "says"),
    [
        (TrimmedMean(2), 5, "the trimmed mean with 2 faulty needs 5 usable gradients, and there were"),
        (Krum(1), 5, "Krum with 1 faulty needs 5 usable gradients, and there were"),
        (MultiKrum(2), 7, "multi-Krum with 2 faulty needs 7 usable gradients, and there were"),
    ],
)
def test_a_round_too_short_for_its_rule_is_judged_by_the_clipped_mean_and_says_so(rule, least, says):
    case = Case(lambda: rule)
    g, v = agreeing(6, least + 1)
    g[2] = np.nan  # refused: it does not count
    assert play(case, g, v).decision.fallback == ""
    g[0] = np.inf
    short = play(case, g, v)
    assert short.decision.fallback == f"{says} {least - 1}: the clipped mean was applied"
    np.testing.assert_array_equal(short.applied, play(Case(ClippedMean), g, v).applied)
    assert short.decision.trim is None


def test_cosine_trust_falls_back_until_there_is_a_validators_gradient():
    g, _ = agreeing()
    short = play(RULES["cosine_trust"], g)
    assert "needs a validator's gradient" in short.decision.fallback
    np.testing.assert_array_equal(short.applied, play(Case(ClippedMean), g).applied)


def test_cosine_trust_falls_back_when_only_the_length_of_the_reference_is_still_known():
    geometry = Geometry(np.array([1.0, 3.0, 4.0]), reference_norm=2.0)
    decision = CosineTrust().decide(view([True] * 3, norms=[1.0, 3.0, 4.0], geometry=geometry))
    assert "needs a validator's gradient" in decision.fallback
    assert decision.factors.tolist() == [1.0, 1.0, 0.75]


@pytest.mark.parametrize("make", [TrimmedMean, Krum, MultiKrum])
def test_fewer_than_no_faulty_workers_are_refused(make):
    with pytest.raises(ConfigurationError, match="at least 0, not -1"):
        make(-1)


def test_a_round_that_was_not_measured_is_our_own_mistake():
    with pytest.raises(LocalProtocolError, match="was not measured"):
        Krum(0).decide(view([True] * 3))


# ---- what single rules are about -------------------------------------------------------------------------


def view(usable, examples=None, norms=None, geometry=None):
    count = len(usable)
    return RoundView(
        step=7,
        ranks=tuple(range(count)),
        names=tuple(f"worker {rank}" for rank in range(count)),
        usable=tuple(usable),
        examples=tuple(examples or (1,) * count),
        norms=tuple(norms or (1.0,) * count),
        losses=(0.5,) * count,
        accuracies=(0.5,) * count,
        geometry=geometry,
    )


def test_mean_over_examples_counts_each_usable_example_once():
    decision = Mean(MeanOver.EXAMPLES).decide(view([True, False, True], [30, 1000, 10]))
    assert decision.weights.tolist() == [0.75, 0.0, 0.25]


def test_no_examples_at_all_give_weights_of_zero():
    assert Mean(MeanOver.EXAMPLES).decide(view([True, True], [0, 0])).weights.tolist() == [0.0, 0.0]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 10**6)), min_size=1, max_size=64), st.sampled_from(MeanOver)
)
def test_a_mean_gives_a_share_to_each_and_none_to_the_refused(pushes, over):
    flags, examples = zip(*pushes, strict=True)
    weights = Mean(over).decide(view(flags, examples)).weights
    assert all((weight > 0) == flag for weight, flag in zip(weights, flags, strict=True))
    assert weights.sum() == pytest.approx(float(any(flags)), abs=1e-12)


def test_one_of_two_cannot_raise_the_norm_at_which_both_are_clipped():
    decision = ClippedMean().decide(view([True, True, False], norms=[1e30, 2.0, np.inf]))
    assert decision.weights.tolist() == [0.5, 0.5, 0.0]
    assert decision.factors[0] == 2.0 / 1e30 and decision.factors[1] == 1.0


def test_a_clipped_mean_may_count_examples_too():
    decision = ClippedMean(MeanOver.EXAMPLES).decide(view([True, True, True], [1, 2, 1], norms=[1.0, 4.0, 2.0]))
    assert decision.weights.tolist() == [0.25, 0.5, 0.25]
    assert decision.factors.tolist() == [1.0, 0.5, 1.0]


def test_krum_tells_close_gradients_apart_that_are_far_from_0():
    """In float32 the distances would vanish: they are a millionth of the lengths."""
    random = np.random.default_rng(8)
    g = (1000 + 1e-2 * random.standard_normal((9, SIZE))).astype(np.float32)
    g[4] = (g[[0, 1, 2, 3, 5, 6, 7, 8]].astype(np.float64).mean(axis=0)).astype(np.float32)
    assert np.flatnonzero(play(Case(lambda: Krum(1)), g).decision.weights).tolist() == [4]


def test_multi_krum_leaves_out_as_many_as_may_be_faulty():
    g, _ = agreeing(9)
    g[1], g[5] = -5 * g[1], 100 * g[5]
    decision = play(Case(lambda: MultiKrum(2)), g).decision
    assert np.flatnonzero(decision.weights == 0).tolist() == [1, 5]
    assert set(decision.weights[decision.weights > 0].tolist()) == {0.2}


def trusted(norms, cosines, reference_norm=1.0, fresh=True):
    norms = np.array(norms)
    geometry = Geometry(
        norms,
        reference_norm=reference_norm,
        with_reference=np.array(cosines) * np.where(np.isfinite(norms), norms, 0) * reference_norm,
        fresh=fresh,
    )
    return CosineTrust().decide(view(np.isfinite(norms), norms=norms.tolist(), geometry=geometry))


@pytest.mark.parametrize("fresh", [True, False])
def test_cosine_trust_weighs_by_the_cosine_and_brings_each_to_the_reference_norm(fresh):
    decision = trusted([4.0, 0.5, 2.0, np.inf], [0.6, 0.2, -0.9, 0.0], reference_norm=2.0, fresh=fresh)
    assert decision.weights == pytest.approx([0.75, 0.25, 0, 0])
    assert decision.factors == pytest.approx([0.5, 4, 1, 1])


def test_cosine_trust_applies_nothing_when_nobody_agrees():
    assert trusted([1.0, 2.0], [-0.5, -0.1]).weights.tolist() == [0.0, 0.0]
    assert trusted([1.0, 2.0], [0.5, 0.1], reference_norm=0.0).weights.tolist() == [0.0, 0.0]


def test_a_vanishing_gradient_is_not_lengthened_beyond_what_float32_holds():
    """Its cosine may be 1: the factor would be infinite in float32, and so would the values."""
    g, v = agreeing()
    g[2] = v * np.float32(1e-40)
    outcome = play(RULES["cosine_trust"], g, v)
    assert outcome.decision.weights[2] == outcome.decision.weights.max()
    assert outcome.decision.factors[2] == LONGEST_RESCALE
    assert np.isfinite(outcome.applied).all()


def test_clip_factors_bring_long_gradients_down_and_leave_short_ones():
    assert clip_factors([0.0, 1.0, 2.0, 8.0], 2.0).tolist() == [1.0, 1.0, 1.0, 0.25]


def test_a_view_with_columns_of_unequal_length_is_refused():
    with pytest.raises(LocalProtocolError, match="one entry per rank"):
        RoundView(0, (0, 1), ("a", "b"), (True, True), (1,), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))


def test_a_view_out_of_rank_order_is_refused():
    with pytest.raises(LocalProtocolError, match="ascend"):
        RoundView(0, (1, 0), ("b", "a"), (True, True), (1, 1), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
