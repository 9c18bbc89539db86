"""The evidence rule: whom it trusts, when, and what it remembers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from ps.rules.alarm import LASTS, ODD_ROUNDS
from ps.rules.claims import CLAIM_WARM_UP
from ps.rules.evidence import Evidence
from ps.rules.fitting import copies_of, nonnegative_fit, off_diagonal_of_rank_one
from ps.rules.geometry import weighted_median
from ps.rules.master import Master

from .judged_rounds import alarms_of, noisy_rounds, round_view

V = np.array([1.0, 0.0, 0.0, 0.0])
ACROSS = np.array([0.0, 1.0, 0.0, 0.0])


def decide_all(rule, views):
    return [rule.decide(view) for view in views]


def trust(rule, name):
    return rule.ledger["trust"][rule.ledger.row(name)]


# ---- who is trusted --------------------------------------------------------------------------------------


def test_the_first_validation_already_mutes_whoever_points_away():
    decision = Evidence(True).decide(round_view(0, [V, V + 0.1 * ACROSS, -V, -3 * V], V))
    np.testing.assert_allclose(decision.weights, [0.5, 0.5, 0, 0], atol=1e-12)


def test_four_of_five_may_be_bad():
    *_, last = decide_all(Evidence(True), noisy_rounds(60, [1.0, -3.0, -3.0, -1.0, 0.0]))
    assert last.weights[0] > 0.99


def test_workers_with_unlike_data_keep_equal_weights():
    # Each holds one class: their gradients are orthogonal, and the validator's is the mean of all.
    gradients = np.eye(5)
    decision = Evidence(True).decide(round_view(0, gradients, gradients.mean(axis=0)))
    np.testing.assert_allclose(decision.weights, [0.2] * 5)


def test_a_worker_that_is_needed_less_but_well_keeps_full_weight():
    # 60 degrees and 0 degrees off: trust in proportion to the cosine would give 0.33 and 0.67.
    aside = 0.5 * V + math.sqrt(0.75) * ACROSS
    mirrored = 0.5 * V - math.sqrt(0.75) * ACROSS
    decision = Evidence(True).decide(round_view(0, [V, aside, mirrored], V))
    np.testing.assert_allclose(decision.weights, [1 / 3] * 3)


def test_a_zero_gradient_earns_nothing():
    *_, last = decide_all(Evidence(True), (round_view(step, [V, 0 * V, V], V) for step in range(5)))
    np.testing.assert_allclose(last.weights, [0.5, 0, 0.5], atol=1e-12)


@pytest.mark.parametrize("make", [Evidence, lambda validated: Master(validated, 0)])
def test_copies_of_one_gradient_share_the_weight_of_one(make):
    # All are needed, so all are trusted; the length of a copy does not matter.
    gradients = np.eye(4)[[0, 1, 2, 2]] * [[1.0], [1.0], [1.0], [2.0]]
    decision = make(True).decide(round_view(0, gradients, np.array([1.0, 1.0, 1.0, 0.0])))
    np.testing.assert_allclose(decision.weights, [1 / 3, 1 / 3, 1 / 6, 1 / 6])


def test_four_who_push_the_same_have_no_majority():
    # Hidden as "a little is enough" hides: well aligned, and longer than the only honest gradient.
    hidden = 2.0 * (V + 0.8 * ACROSS)
    decision = Evidence(True).decide(round_view(0, [V - 0.3 * ACROSS, *[hidden] * 4], V))
    assert decision.weights[0] >= 0.5
    np.testing.assert_allclose(decision.weights[1:], decision.weights[1], rtol=0.1)


def test_copies_that_keep_their_last_weights_are_not_halved_again():
    rule = Evidence(True)
    gradients = np.eye(4)[[0, 1, 1]]
    for step in range(3):
        decision = rule.decide(round_view(step, gradients, gradients[0] + gradients[1]))
    rule.ledger["trust"][:] = -1.0  # nobody is trusted any more
    kept = rule.decide(round_view(3, gradients, gradients[0], fresh=False))
    np.testing.assert_allclose(kept.weights, decision.weights)


def test_copies_are_counted_among_those_who_count():
    near = np.array([0.98, math.sqrt(1 - 0.98**2), 0.0, 0.0])
    gradients = np.array([V, 3 * V, -V, 0 * V, 0 * V, near])
    gram = gradients @ gradients.T
    np.testing.assert_array_equal(copies_of(gram, np.full(6, True)), [2, 2, 1, 1, 1, 1])
    np.testing.assert_array_equal(copies_of(gram, np.array([True, False, True, True, True, True])), np.ones(6))


def test_trust_outlasts_rounds_without_a_validator():
    rule = Evidence(True)
    rule.decide(round_view(0, [V, V, -V], V))
    for step in range(1, 50):  # the reference is stale: what is pushed now proves nothing
        decision = rule.decide(round_view(step, [V, -V, V], V, fresh=False))
    np.testing.assert_allclose(decision.weights, [0.5, 0.5, 0], atol=1e-12)


def test_a_worker_that_turns_is_muted_and_one_that_comes_back_is_trusted_again():
    def factors(step):
        return [1.0, 1.0, 1.0, -3.0 if 60 <= step < 130 else 1.0]

    weights = np.array([d.weights for d in decide_all(Evidence(True), noisy_rounds(260, factors))])
    assert weights[59, 3] > 0.2
    assert weights[100:130, 3].max() < 0.05
    assert weights[-1, 3] > 0.2


def test_a_worker_that_turned_is_never_used_as_a_counterweight():
    # With a Gram matrix fresher than the agreements, the fit subtracts what the honest seem to have too much of.
    rule = Evidence(True)
    for step in range(200):
        turned = 1.0 if step < 100 else -3.0
        rule.decide(round_view(step, [V + 0.3 * ACROSS, turned * V, turned * (V - 0.1 * ACROSS)], V))
        if rule.ledger["agreement"][1] < -0.05:
            assert trust(rule, "w1") == 0.0
    assert rule.ledger["agreement"][1] < -0.5


def test_rounds_that_are_mostly_noise_do_not_mute_the_honest():
    rule = Evidence(True)
    decide_all(rule, noisy_rounds(60, [1.0] * 5))
    weights = np.array([d.weights for d in decide_all(rule, noisy_rounds(300, [0.0] * 5, seed=4, size=8))])
    assert weights.mean(axis=0).min() > 0.15


# ---- who is new, missing or refused ----------------------------------------------------------------------


def test_a_new_name_has_no_trust_before_a_validation_and_then_its_own_at_once():
    rule = Evidence(True)
    views = list(noisy_rounds(42, [1.0, 1.0, 1.0]))
    for view in views[:40]:
        rule.decide(replace(view, usable=(True, True, False)))
    assert rule.ledger.row("w2") is None
    stale = replace(views[40], geometry=replace(views[40].geometry, fresh=False))
    assert rule.decide(stale).weights.tolist() == [0.5, 0.5, 0.0]
    np.testing.assert_allclose(rule.decide(views[41]).weights, [1 / 3] * 3, atol=0.01)


def test_a_crowd_of_new_names_gains_nothing():
    rule = Evidence(True)
    rule.decide(round_view(0, [V], V))
    for step in range(1, 30):
        names = ["w0", *(f"crowd {step} {i}" for i in range(9))]
        assert rule.decide(round_view(step, [V] + [-3 * V] * 9, V, names=names)).weights[0] == 1.0


def test_what_is_known_of_an_absent_worker_stays():
    rule = Evidence(True)
    decide_all(rule, noisy_rounds(40, [1.0, 1.0, -1.0]))
    row = rule.ledger.row("w2")
    before = {column: values[row] for column, values in rule.ledger.columns.items()}
    pairs = rule.ledger.pairs[row].copy()
    for view in noisy_rounds(20, [1.0, 1.0], seed=9):
        rule.decide(view)
    assert {column: rule.ledger[column][row] for column in before} == pytest.approx(before, nan_ok=True)
    assert rule.ledger.pairs[row].tolist() == pairs.tolist()


def test_memory_is_of_the_name_and_not_of_the_rank():
    rule = Evidence(True)
    rule.decide(round_view(0, [V, V, -V], V, names=["a", "b", "bad"]))
    decision = rule.decide(round_view(1, [-V, V, V], V, fresh=False, names=["bad", "b", "a"]))
    np.testing.assert_allclose(decision.weights, [0, 0.5, 0.5], atol=1e-12)


def test_a_refused_push_is_as_if_absent():
    with_refused, without = Evidence(True), Evidence(True)
    for view in noisy_rounds(10, [1.0, 1.0, -1.0]):
        with_refused.decide(view)
        without.decide(view)
    refused = round_view(10, [V, 5 * V, -V], V, usable=[True, False, True])
    absent = round_view(10, [V, -V], V, names=["w0", "w2"])
    one, other = with_refused.decide(refused), without.decide(absent)
    assert one.weights.tolist() == [other.weights[0], 0.0, other.weights[1]]
    assert one.factors[[0, 2]].tolist() == other.factors.tolist()
    assert with_refused.ledger["trust"].tolist() == without.ledger["trust"].tolist()


@pytest.mark.parametrize("validated", [True, False])
def test_a_lone_worker_has_all_the_weight(validated):
    rule = Evidence(validated)
    for view in noisy_rounds(60, [1.0]):
        assert rule.decide(view).weights.tolist() == [1.0]
    lone = Evidence(True)
    assert lone.decide(round_view(0, [-V], V)).weights.tolist() == [1.0]


def test_with_nothing_usable_nothing_is_applied():
    decision = Evidence(True).decide(round_view(0, [V, V], V, usable=[False, False]))
    assert decision.weights.tolist() == [0.0, 0.0]
    assert decision.factors.tolist() == [1.0, 1.0]


def test_the_muted_do_not_take_over_when_the_trusted_are_away():
    rule = Evidence(True)
    decide_all(rule, noisy_rounds(40, [1.0, 1.0, -1.0, -1.0]))
    away = round_view(40, [-V, -V], V, fresh=False, names=["w2", "w3"])
    assert rule.decide(away).weights.tolist() == [0.0, 0.0]
    newcomer = round_view(41, [-V, -V, V], V, fresh=False, names=["w2", "w3", "new"])
    assert rule.decide(newcomer).weights.tolist() == [0.0, 0.0, 1.0]


def test_when_nobody_helps_the_trust_stays_as_it_was():
    rule = Evidence(True)
    for step in range(100):
        decision = rule.decide(round_view(step, [V, V, -V], V if step < 40 else -ACROSS + 1e-3 * V))
    np.testing.assert_allclose(decision.weights, [0.5, 0.5, 0.0], atol=1e-12)


# ---- lengths ---------------------------------------------------------------------------------------------


def test_before_the_first_validator_gradient_all_weigh_the_same_and_are_clipped_to_the_median():
    rule = Evidence(True)
    decision = rule.decide(round_view(0, [V, -2 * V, 100 * V]))
    assert decision.weights.tolist() == [1 / 3] * 3
    np.testing.assert_allclose(decision.factors, [1.0, 1.0, 0.02])
    assert "no validator" in decision.fallback
    decision = rule.decide(round_view(1, [V, -2 * V, V], V))
    np.testing.assert_allclose(decision.weights, [0.5, 0.0, 0.5], atol=1e-12)
    assert decision.fallback == ""


def test_a_validator_that_comes_unexpectedly_is_heard_from_then_on():
    rule = Evidence(False)
    rule.decide(round_view(0, [V, V, -V]))
    assert not rule.validated
    assert rule.decide(round_view(1, [V, V, -V], V)).weights[2] == 0.0
    assert rule.validated
    assert rule.decide(round_view(2, [V, V, -V], V, fresh=False)).weights[2] == 0.0


def test_the_norm_bound_grows_by_five_percent_a_round_at_most_and_up_to_ten_times():
    rule = Evidence(True)
    applied = []
    for step in range(80):
        decision = rule.decide(round_view(step, [50 * V, 50 * V, V], V))
        applied.append(50 * decision.factors[0])
    assert applied[0] == pytest.approx(1.5 * 1.05)
    ratios = np.array(applied[1:]) / np.array(applied[:-1])
    assert ratios.max() <= 1.05 + 1e-12
    assert applied[-1] == pytest.approx(10.0)


def test_the_norm_bound_follows_the_trusted_median():
    rule = Evidence(True)
    for step in range(40):
        decision = rule.decide(round_view(step, [3 * V, 3 * V, 3 * V, -100 * V], V))
    np.testing.assert_allclose(decision.factors, [1, 1, 1, 4.5 / 100])


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_any_length_is_judged_alike(validated, scale):
    one, other = Evidence(validated), Evidence(validated)
    for view in noisy_rounds(50, [1.0, 0.0, -1.0]):
        g = view.geometry
        huge = replace(
            g,
            norms=g.norms * scale,
            gram=g.gram * scale**2,
            reference_norm=g.reference_norm * scale,
            with_reference=g.with_reference * scale**2,
        )
        huge_view = replace(view, norms=tuple(huge.norms.tolist()), geometry=huge)
        a, b = one.decide(view), other.decide(huge_view)
        np.testing.assert_allclose(b.weights, a.weights, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(b.factors, a.factors, rtol=1e-9)


@pytest.mark.parametrize("validated", [True, False])
def test_zeros_from_all_break_nothing(validated):
    rule = Evidence(validated)
    for step in range(3):
        decision = rule.decide(round_view(step, np.zeros((3, 4)), np.zeros(4) if validated else None))
        assert np.isfinite(decision.weights).all()
        assert (decision.factors > 0).all()


# ---- between validations -----------------------------------------------------------------------------------


def test_a_validation_is_wanted_when_the_trusted_gradients_grow_at_once_and_not_in_honest_runs():
    def wanted(factors, **noisy):
        rule = Evidence(True)
        for view in noisy_rounds(100, factors, every=10, **noisy):
            rule.decide(replace(view, losses=(1.0,) * 5))
            yield rule.wants_validation

    assert not any(wanted([1.0] * 5))
    turned = list(wanted(lambda step: [1.0] * 5 if step < 55 else [1.0] + [-5.0] * 4, noise=0.3))
    assert turned.index(True) == 55


@pytest.mark.parametrize("loss", [1.0, np.nan])
@pytest.mark.parametrize("rule", [lambda: Evidence(True), lambda: Master(True, 1)], ids=["evidence", "master"])
def test_an_alarm_that_a_changed_worker_rang_ends_when_nothing_else_is_wrong(rule, loss):
    judge = rule()
    raised = alarms_of(judge, loss)
    assert raised.index(True) == 20 + ODD_ROUNDS - 1
    assert sum(raised) == LASTS - 1  # the round that rings is the first of them, and is over when it is looked at
    assert not raised[-1]


def test_the_record_of_a_worker_that_suddenly_pushes_more_counts_little():
    def rounds_until_muted(factor):
        rule = Evidence(True)
        views = noisy_rounds(200, lambda step: [1.0, 1.0, 1.0, 1.0 if step < 100 else factor], noise=0.5)
        weights = [rule.decide(view).weights[3] for view in views]
        assert weights[99] > 0.2
        return next(step for step in range(100) if weights[100 + step] < 0.01)

    assert rounds_until_muted(-3.0) <= 6 < rounds_until_muted(-1.0)


def test_where_all_have_fitted_their_examples_one_that_fits_them_better_is_still_needed():
    """The validator's gradient is long, since nobody trains on its examples, and workers' lengths differ much."""

    def weight_of_the_shortest(scale, factor):
        rule = Evidence(True)
        for view in noisy_rounds(240, [1.0] * 4, noise=1.0):
            gradients = scale * np.linalg.cholesky(view.geometry.gram + 1e-9 * np.eye(4))
            along = view.geometry.with_reference * scale
            fitted = np.array([1.0, 1.0, 1.0, factor])
            geometry = replace(
                view.geometry,
                norms=view.geometry.norms * scale * fitted,
                gram=gradients @ gradients.T * np.outer(fitted, fitted),
                with_reference=along * fitted,
            )
            decision = rule.decide(replace(view, geometry=geometry, norms=tuple(geometry.norms.tolist())))
        return decision.weights[3]

    assert weight_of_the_shortest(0.02, 0.1) > 0.1
    assert weight_of_the_shortest(1.0, 0.0) == weight_of_the_shortest(0.02, 0.0) == 0.0  # zeros help nobody


def test_growth_below_the_validators_length_is_no_change():
    rule = Evidence(True)
    for step in range(120):
        length = 0.9 if step >= 60 else 0.01
        rule.decide(round_view(step, [0.9 * V, 0.9 * V, length * V], V))
    assert rule.ledger["validations"][:3].tolist() == [120.0] * 3
    assert not rule.wants_validation


# ---- no validator ----------------------------------------------------------------------------------------


def test_without_a_validator_claims_count_after_a_warm_up():
    rule = Evidence(False)
    weights = [
        rule.decide(round_view(step, [V, V, ACROSS], accuracies=[0.9, 0.85, 0.1])).weights for step in range(120)
    ]
    for early in weights[:CLAIM_WARM_UP]:
        np.testing.assert_allclose(early, [1 / 3] * 3)
    np.testing.assert_allclose(weights[-1], [0.5, 0.5, 0.0], atol=1e-12)


def test_a_task_without_accuracies_is_judged_by_losses():
    rule = Evidence(False)
    for step in range(120):
        view = round_view(step, [V, V, V], accuracies=[math.nan] * 3, losses=[0.1, 0.3, 5.0])
        decision = rule.decide(view)
    np.testing.assert_allclose(decision.weights, [0.5, 0.5, 0.0], atol=1e-12)


@pytest.mark.parametrize("claim", [math.nan, math.inf, -math.inf, 1e300, -5.0])
def test_absurd_claims_break_nothing(claim):
    rule = Evidence(False)
    for step in range(60):
        view = round_view(step, [V, V, V], accuracies=[0.9, 0.8, claim], losses=[0.1, 0.2, claim])
        decision = rule.decide(view)
        assert decision.weights.sum() == pytest.approx(1.0)
    assert decision.weights[:2].min() > 0.3


def test_a_late_worker_starts_with_the_mean_claim_of_the_others():
    rule = Evidence(False)
    for step in range(60):
        rule.decide(round_view(step, [V, V], accuracies=[0.9, 0.7]))
    decision = rule.decide(round_view(60, [V, V, V], accuracies=[0.9, 0.7, 0.0]))
    np.testing.assert_allclose(decision.weights, [1 / 3] * 3)


# ---- form ------------------------------------------------------------------------------------------------


def test_the_order_of_ranks_does_not_matter():
    order = np.array([3, 0, 2, 1])
    one, other = Evidence(True), Evidence(True)
    for view in noisy_rounds(50, [1.0, -1.0, 0.5, 0.0], every=3):
        g = view.geometry
        turned = replace(
            view,
            names=tuple(np.array(view.names)[order].tolist()),
            norms=tuple(np.array(view.norms)[order].tolist()),
            geometry=replace(
                g,
                norms=g.norms[order],
                gram=g.gram[np.ix_(order, order)],
                with_reference=g.with_reference[order],
            ),
        )
        a, b = one.decide(view), other.decide(turned)
        np.testing.assert_allclose(b.weights, a.weights[order], atol=1e-9)
        np.testing.assert_allclose(b.factors, a.factors[order], rtol=1e-9)


@pytest.mark.parametrize("validated", [True, False])
def test_weights_sum_to_one_and_factors_only_shorten(validated):
    rule = Evidence(validated)
    for view in noisy_rounds(80, [1.0, -1.0, 0.3, -100.0, 0.0], every=4):
        decision = rule.decide(view)
        assert decision.weights.dtype == decision.factors.dtype == np.float64
        assert decision.weights.sum() == pytest.approx(1.0)
        assert (decision.weights >= 0).all()
        assert ((decision.factors > 0) & (decision.factors <= 1)).all()


def test_a_state_that_went_through_json_goes_on_bit_for_bit():
    views = list(noisy_rounds(60, [1.0, -1.0, 0.3, 0.0], every=3))
    whole = Evidence(True)
    expected = [decision.weights.tolist() for decision in decide_all(whole, views)]
    first = Evidence(True)
    decide_all(first, views[:30])
    resumed = Evidence(True)
    resumed.restore(json.loads(json.dumps(first.state(), default=lambda array: array.tolist())))
    assert [d.weights.tolist() for d in decide_all(resumed, views[30:])] == expected[30:]


def test_a_round_without_inner_products_is_our_own_mistake():
    view = round_view(0, [V, V], V)
    with pytest.raises(LocalProtocolError, match="without inner products"):
        Evidence(True).decide(replace(view, geometry=replace(view.geometry, gram=None)))


# ---- many workers: projections only ----------------------------------------------------------------------


def test_projections_lead_to_the_same_whom_to_trust():
    factors = [1.0] * 7 + [-3.0, -1.0, 0.0, -100.0, -1.0]
    exact, guessed = Evidence(True), Evidence(True)
    generator = np.random.default_rng(0)
    for step in range(40):
        gradients = np.array(factors)[:, None] * V + 0.3 * generator.normal(size=(12, 4))
        a = exact.decide(round_view(step, gradients, V))
        coefficients = guessed.coefficients(round_view(step, gradients, V))
        b = guessed.decide(round_view(step, gradients, V, coefficients=coefficients))
    np.testing.assert_allclose(a.weights, [1 / 7] * 7 + [0.0] * 5, atol=1e-12)
    np.testing.assert_allclose(b.weights, a.weights, atol=1e-12)


def test_the_coefficients_are_those_of_the_clipped_gradients():
    rule = Evidence(True)
    rule.decide(round_view(0, [V, V, -V], V))
    view = round_view(1, [4 * V, V / 2, V, V], V, usable=[True, True, True, False])
    assert rule.coefficients(view).tolist() == [0.5 / 4, 0.5, 0.0, 0.0]


# ---- the small pieces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_the_optimum_that_no_weight_could_leave(seed):
    generator = np.random.default_rng(seed)
    basis = generator.normal(size=(5, 8))
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    gram, target = basis @ basis.T, generator.normal(size=5)
    weights = nonnegative_fit(gram, target, 0.1)
    slopes = (gram + 0.1 * np.eye(5)) @ weights - target
    assert (weights >= 0).all()
    np.testing.assert_allclose(slopes[weights > 0], 0.0, atol=1e-6)
    assert (slopes[weights == 0] >= -1e-6).all()


@pytest.mark.parametrize(
    ("values", "weights", "median"),
    [
        ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 2.0),
        ([1.0, 2.0], [1.0, 1.0], 1.0),
        ([1.0, 2.0, 9.0], [0.1, 0.2, 0.7], 9.0),
        ([5.0, 1.0], [1.0, 0.0], 5.0),
        ([7.0], [0.3], 7.0),
        ([4.0, 3.0, 9.0, 1.0], [0.0, 0.0, 0.0, 0.0], 3.0),
        ([], [], 0.0),
    ],
)
def test_weighted_median(values, weights, median):
    assert weighted_median(np.array(values), np.array(weights)) == median


def test_the_guessed_gram_matrix_keeps_the_known_products():
    along = np.array([0.6, 0.5, 0.7, -0.4, 0.1, 0.6])
    lengths, parts = np.ones(6), np.array([0.3, 0.3, 0.3, 0.0, 0.05, 0.05])
    truth = np.outer(along, along)
    np.fill_diagonal(truth, 1.0)
    sums = truth @ parts - parts
    guess = off_diagonal_of_rank_one(sums, parts, lengths)
    np.testing.assert_allclose(guess, truth, atol=1e-3)
    np.testing.assert_allclose(guess @ parts - parts, sums, atol=1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_the_guessed_gram_matrix_is_positive_semi_definite(seed):
    generator = np.random.default_rng(seed)
    lengths = generator.random(7)
    guess = off_diagonal_of_rank_one(generator.normal(size=7), generator.random(7), lengths)
    assert np.linalg.eigvalsh(guess).min() > -1e-12
    np.testing.assert_allclose(np.diagonal(guess), lengths**2)


# ---- what people are told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (V, "help to rebuild"),
        (-V, "point away from the validator's (agreement -"),
        (-97 * V, "97 times as long"),
        (0.01 * ACROSS, "next to nothing"),
        (ACROSS, "without its gradients"),
    ],
)
def test_a_reason_names_what_the_trust_rests_on(gradient, words):
    rule = Evidence(True)
    for step in range(10):
        view = round_view(step, [V, V, np.asarray(gradient) + 1e-3 * V], V)
        rule.decide(view)
    assert words in rule.reasons(view, "w2")


def test_reasons_for_the_new_the_refused_and_the_modest():
    rule = Evidence(True)
    rule.decide(round_view(0, [V], V))
    view = round_view(1, [V, V, V], V, fresh=False, usable=[True, True, False])
    rule.decide(view)
    assert rule.reasons(view, "w1") == "no validator has judged it yet"
    assert rule.reasons(view, "w2") == "its gradient was refused"
    claims = Evidence(False)
    for step in range(100):
        view = round_view(step, [V, V], accuracies=[0.8, 0.1])
        claims.decide(view)
    assert "far below the best (0.1" in claims.reasons(view, "w1")
    assert "close to the best" in claims.reasons(view, "w0")
