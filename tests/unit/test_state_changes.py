"""What a round's changes of state, batch-norm statistics say, come to under every rule, against plain NumPy."""

import math

import numpy as np
import pytest

from protocol.arena import Arena, aligned_empty
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.closing import RoundCloser
from ps.coordination.instructions import CloseRound, Contribution
from ps.rules.aggregation import STATE_BOUND, state_factors
from ps.storage.optimizers import SGD
from ps.storage.schedules import Constant
from ps.storage.store import Store
from ps.storage.store_config import StoreConfig

from .test_aggregation import RULES, agreeing

LAYOUT = Layout.of(
    Manifest(
        (
            VariableSpec("kernel", (60,), "float32"),
            VariableSpec("mean", (3,), "float32", Kind.STATE),
            VariableSpec("exact", (2,), "float64", Kind.STATE),
            VariableSpec("count", (), "int64", Kind.STATE),
        )
    )
)
JUDGED = [name for name in RULES if not name.startswith("mean")]
RANKS = 7


def play(case, gradients, deltas, v=None):
    """Close one round from values of 0.

    Args:
        case: of the table of rules.
        gradients: [ranks, 60].
        deltas: [ranks, 5], of the floating state; a rank with NaN is refused.
        v: the validator's gradient, or None.

    Returns:
        The decision, the floating state [5] in float64, and the counter.
    """
    store = Store(LAYOUT, StoreConfig(SGD(), len(gradients), threads=1, references=1))
    store.initialise(aligned_empty(LAYOUT.values_bytes) * 0)
    pushes = []
    rows = [*zip(gradients, deltas, strict=True), *([] if v is None else [(v, np.zeros(5))])]
    for rank, (gradient, delta) in enumerate(rows):
        receiver = store.receiver(rank)
        receiver.buffer[:] = bytes(len(receiver.buffer))
        Arena(LAYOUT, np.frombuffer(receiver.buffer, np.uint8)).fill(
            {
                "kernel": np.asarray(gradient, np.float32),
                "mean": np.asarray(delta[:3], np.float32),
                "exact": np.asarray(delta[3:], np.float64),
                "count": np.array(40 + rank, np.int64),
            }
        )
        for end in receiver.block_ends:
            receiver.received(end)
        check = receiver.finish()
        refused = "" if check.finite else "not finite"
        norms = {"gradient_norm": check.gradient_norm, "state_norm": check.state_norm}
        pushes.append(Contribution(rank, rank, 1, 1.0, 0.5, 1, refused=refused, **norms))
    everyone, judges = tuple(pushes[: len(gradients)]), () if v is None else (len(gradients),)
    names = [f"worker {rank}" for rank in range(len(gradients))]
    closed = RoundCloser(case.make(), Constant(1.0)).close(store, CloseRound(0, everyone, judges), names)
    new = store.export()
    return closed.decision, np.concatenate([new["mean"], new["exact"]]).astype(np.float64), int(new["count"])


def clipped(deltas, weights=None):
    """Bring each row down to 1.5 times the least norm at which half of the weight is reached."""
    norms = np.linalg.norm(deltas, axis=1)
    weights = np.ones(len(norms)) if weights is None else weights
    bound = 1.5 * min(norm for norm in norms if weights[norms <= norm].sum() >= weights.sum() / 2)
    return deltas * np.minimum(1.0, bound / np.maximum(norms, 1e-300))[:, None]


def defined(decision, deltas):
    """Return what the decision makes of deltas [usable, 5]; `decision.weights` has these ranks first."""
    usable = len(deltas)
    held = clipped(deltas, None if decision.yardstick is None else decision.yardstick[:usable])
    if decision.trim is not None:
        return np.sort(held, axis=0)[decision.trim : usable - decision.trim].mean(axis=0)
    return decision.weights[:usable] @ held


def honest(seed=0):
    """Return changes of state [RANKS, 5] of much the same length."""
    deltas = np.random.default_rng(seed).normal(1.0, 0.1, (RANKS, 5))
    deltas[:, :3] = deltas[:, :3].astype(np.float32)
    return deltas


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("factor", [1.0, 1.4, -4.0, 1e20])
def test_a_change_of_state_is_bounded_by_the_median_and_trimmed_where_the_rule_trims(name, factor):
    gradients, v = agreeing()
    deltas = honest()
    deltas[2] *= np.float32(factor)
    decision, state, count = play(RULES[name], gradients, deltas, v)
    np.testing.assert_allclose(state, defined(decision, deltas), rtol=1e-5)
    usual = np.linalg.norm(honest(), axis=1).max()
    assert np.linalg.norm(state) <= 1.5 * usual
    assert count == 40 + np.flatnonzero(decision.weights)[0]


@pytest.mark.parametrize("name", ["mean", "mean over examples"])
def test_a_mean_believes_everybody_in_this_too(name):
    gradients, _ = agreeing()
    deltas = honest()
    deltas[2] *= np.float32(1e20)
    _, state, _ = play(RULES[name], gradients, deltas)
    np.testing.assert_allclose(state, deltas.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("name", JUDGED)
def test_who_was_refused_has_no_say_in_what_is_usual(name):
    gradients, v = agreeing()
    deltas = honest()
    deltas[4:] = [[np.nan] * 5, [np.inf] * 5, [np.nan] * 5]
    deltas[0] *= np.float32(50.0)
    decision, state, _ = play(RULES[name], gradients, deltas, v)
    np.testing.assert_allclose(state, defined(decision, deltas[:4]), rtol=1e-5)


@pytest.mark.parametrize("name", ["cosine_trust", "evidence", "master"])
def test_most_workers_cannot_hold_state_still_once_they_are_found_out(name):
    gradients, v = agreeing()
    gradients[:4] *= -1.0
    deltas = honest()
    deltas[:4] = 0.0
    decision, state, _ = play(RULES[name], gradients, deltas, v)
    assert not decision.weights[:4].any()
    np.testing.assert_allclose(state, decision.weights @ deltas, rtol=1e-5)


def test_state_that_most_leave_as_it_is_stays_as_it_is():
    gradients, _ = agreeing()
    deltas = np.zeros((RANKS, 5))
    deltas[6] = 1.0
    for name in ("clipped_mean", "median", "multi_krum"):
        _, state, _ = play(RULES[name], gradients, deltas)
        assert not state.any()


def test_a_round_too_short_for_trimming_is_bounded_all_the_same():
    gradients, _ = agreeing(workers=2)
    deltas = honest()[:2]
    deltas[1] *= np.float32(1e20)
    for name in ("median", "trimmed_mean", "krum", "trimmed_mean of none"):
        decision, state, _ = play(RULES[name], gradients, deltas)
        assert decision.trim is None
        np.testing.assert_allclose(state, clipped(deltas).mean(axis=0), rtol=1e-5)


def test_the_factors_are_those_of_their_definition():
    norms = [0.0, 1.0, 2.0, 3.0, math.inf]
    usable = [True, True, True, True, False]
    assert state_factors(norms, usable)[:4].tolist() == [1.0, 1.0, 0.75, 0.5]
    assert state_factors(norms, usable, np.array([0.0, 0.0, 0.5, 0.5, 0.0]))[:4].tolist() == [1.0] * 4
    assert state_factors([], []).tolist() == []
    assert state_factors([0.0, 0.0], [True, True]).tolist() == [1.0, 1.0]
    assert STATE_BOUND == 1.5
