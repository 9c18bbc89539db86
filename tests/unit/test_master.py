"""The master network: what it is before it has learned, what it learns, and that it replays."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ps.rules import alarm, evidence, fitting, master
from ps.rules.evidence import Evidence
from ps.rules.master import (
    BETA1,
    BETA2,
    EPSILON,
    FEATURES,
    LEARNING_RATE,
    PENALTY,
    Master,
    _adam_step,
    _reputation_step,
    leave_one_out,
)
from ps.rules.network import Adam

from .judged_rounds import noisy_rounds, round_view

V = np.array([1.0, 0.0, 0.0, 0.0])
ACROSS = np.array([0.0, 1.0, 0.0, 0.0])
MIXED = (1.0, 1.0, -3.0, 0.2, 0.0)


class Untrained(Master):
    """A master that never learns."""

    def learn(self):
        pass


def weights(rule, views):
    return [rule.decide(view).weights.tolist() for view in views]


def features_of(view, rule=None):
    rule = rule or Master(True, 0)
    standing = rule.evidence.measure(view)
    return rule._features(standing, view)


@pytest.mark.parametrize(("validated", "every"), [(True, 1), (True, 4), (False, 1)])
def test_untrained_it_is_the_evidence_rule_bit_for_bit(validated, every):
    master, evidence = Untrained(validated, 5), Evidence(validated)
    for view in noisy_rounds(100, MIXED, every=every):
        if not validated:
            view = replace(view, geometry=replace(view.geometry, reference_norm=None, with_reference=None))
        one, other = master.decide(view), evidence.decide(view)
        assert one.weights.tolist() == other.weights.tolist()
        assert one.factors.tolist() == other.factors.tolist()


def test_its_first_judgement_is_the_evidence_rule_bit_for_bit():
    view = next(noisy_rounds(1, MIXED))
    assert weights(Master(True, 5), [view]) == weights(Evidence(True), [view])


def test_learning_moves_the_network_and_only_as_far_as_bounded_by_the_evidence():
    master, evidence = Master(True, 5), Evidence(True)
    for view in noisy_rounds(150, MIXED):
        one, other = master.decide(view), evidence.decide(view)
    assert np.abs(master.network.output_kernel).max() > 1e-3
    assert one.weights.tolist() != other.weights.tolist()
    np.testing.assert_allclose(one.weights, other.weights, atol=0.1)


def test_it_learns_to_tell_the_rounds_in_which_a_worker_does_not_help():
    # One worker is bad in half of the rounds, and then its loss is high: its record is the same in both.
    master = Master(True, 5)
    generator = np.random.default_rng(2)
    for step in range(300):
        bad = generator.random() < 0.5
        gradients = [V, V, V, -V if bad else V] + 0.2 * generator.normal(size=(4, 4))
        master.decide(round_view(step, gradients, V, losses=[1, 1, 1, 6 if bad else 1]))
    bad = features_of(round_view(300, [V, V, V, -V], V, losses=[1, 1, 1, 6]), master)
    good = features_of(round_view(301, [V] * 4, V), master)
    assert float(master.network.forward(bad)[1][3, 0]) < float(master.network.forward(good)[1][3, 0]) - 1.0


def test_reputation_falls_for_whoever_does_not_help_and_fades_when_nothing_confirms_it():
    master = Master(True, 5)
    weights(master, noisy_rounds(100, [1.0, 1.0, -1.0]))
    master.learn()
    reputation = dict(zip("abc", master.evidence.ledger["reputation"][:3], strict=True))
    assert reputation["c"] < min(reputation["a"], reputation["b"])


def test_the_reputation_of_an_absent_worker_stays():
    master = Master(True, 5)
    weights(master, noisy_rounds(60, [1.0, 1.0, -1.0]))
    master.learn()
    ledger = master.evidence.ledger
    row = ledger.row("w2")
    before = [ledger[column][row] for column in ("reputation", "habit", "first", "second")]
    assert before[0] != 0.0
    weights(master, noisy_rounds(30, [1.0, 1.0], seed=8))
    master.learn()
    assert [ledger[column][row] for column in ("reputation", "habit", "first", "second")] == before
    assert ledger["reputation"][ledger.row("w0")] != 0.0


def test_learning_at_once_or_at_the_next_round_is_the_same():
    one, other = Master(True, 5), Master(True, 5)
    for view in noisy_rounds(80, MIXED, every=3):
        first, second = one.decide(view), other.decide(view)
        one.learn()
        one.learn()
        assert first.weights.tolist() == second.weights.tolist()


def test_equal_seeds_give_equal_bits_and_others_do_not():
    views = list(noisy_rounds(100, MIXED))
    assert weights(Master(True, 5), views) == weights(Master(True, 5), views)
    assert weights(Master(True, 5), views) != weights(Master(True, 6), views)


@pytest.mark.parametrize("learned", [False, True])
def test_a_state_that_went_through_json_goes_on_bit_for_bit(learned):
    views = list(noisy_rounds(160, MIXED, every=2))
    expected = weights(Master(True, 5), views)
    first = Master(True, 5)
    weights(first, views[:90])
    if learned:
        first.learn()
    resumed = Master(True, 5)
    resumed.restore(json.loads(json.dumps(first.state(), default=lambda array: array.tolist())))
    assert weights(resumed, views[90:]) == expected[90:]
    assert weights(first, views[90:]) == expected[90:]


def test_the_order_of_ranks_does_not_matter():
    order = np.array([3, 0, 4, 2, 1])
    one, other = Master(True, 5), Master(True, 5)
    for view in noisy_rounds(100, MIXED):
        g = view.geometry

        def turned(values):
            return tuple(np.array(values)[order].tolist())

        view_turned = replace(
            view,
            names=turned(view.names),
            norms=turned(view.norms),
            losses=turned(view.losses),
            accuracies=turned(view.accuracies),
            geometry=replace(
                g,
                norms=g.norms[order],
                gram=g.gram[np.ix_(order, order)],
                with_reference=g.with_reference[order],
                with_momentum=g.with_momentum[order],
            ),
        )
        a, b = one.decide(view), other.decide(view_turned)
        np.testing.assert_allclose(b.weights, a.weights[order], atol=1e-6)


def test_the_number_of_workers_may_change_from_round_to_round():
    master = Master(True, 5)
    generator = np.random.default_rng(0)
    for step, view in enumerate(noisy_rounds(150, [1.0] * 6 + [-1.0] * 3)):
        kept = generator.random(9) < 0.6 if step else np.ones(9, bool)
        kept[0] = True
        decision = master.decide(replace(view, usable=tuple(kept.tolist())))
        assert decision.weights.sum() == pytest.approx(1.0)
        assert not decision.weights[~kept].any()
    assert decision.weights[6:].sum() < 0.05


def test_a_name_that_was_forgotten_is_not_learned_from(monkeypatch):
    monkeypatch.setattr("ps.rules.ledger.MOST_ABSENT", 0)
    master = Master(True, 5)
    weights(master, noisy_rounds(20, [1.0, 1.0, -1.0], names=["a", "b", "bad"]))
    weights(master, noisy_rounds(2, [1.0, 1.0], names=["a", "b"]))
    weights(master, noisy_rounds(20, [1.0, 1.0, 1.0], names=["a", "b", "good"], seed=7))
    master.learn()
    ledger = master.evidence.ledger
    assert ledger.row("bad") is None
    assert ledger["reputation"][ledger.row("good")] > -0.01


@pytest.mark.parametrize("scale", [0.0, 1e-150, 1e150])
def test_any_length_gives_finite_weights(scale):
    master = Master(True, 5)
    for step in range(20):
        gradients = np.array([V, V + ACROSS, -V]) * scale
        view = round_view(step, gradients, V * scale, momentum=V * scale, losses=[1, math.inf, math.nan])
        decision = master.decide(view)
        assert np.isfinite(decision.weights).all()
    assert np.isfinite(master.network.parameters).all()


@pytest.mark.parametrize("values", [[math.nan] * 3, [math.inf, -math.inf, 1.0], [1e308, -1e308, 0.0]])
def test_absurd_claims_give_finite_features(values):
    features = features_of(round_view(0, [V, V, V], V, losses=values, accuracies=values))
    assert np.isfinite(features).all()
    assert np.abs(features).max() <= 2.0


def test_the_features_are_what_they_are_called():
    master = Master(True, 5)
    gradients = np.array([2 * V, V / 10, V + ACROSS, -V])
    momentum = V + 3 * ACROSS
    claims = {"losses": [1.0, 2.0, 3.0, 6.0], "accuracies": [0.9, 0.5, 0.7, 0.1]}
    master.decide(round_view(0, gradients, V, momentum=momentum, **claims))
    weight = master.evidence.ledger["weight"][:4].copy()
    x = features_of(round_view(1, gradients, V, momentum=momentum, **claims), master)
    norms = np.linalg.norm(gradients, axis=1)
    clipped = gradients / np.maximum(norms, 1.0)[:, None]
    for i in range(4):
        rest = sum(weight[j] * clipped[j] for j in range(4) if j != i)
        agreement = gradients[i] @ rest / norms[i] / np.linalg.norm(rest) * (1 - weight[i])
        cosines = [gradients[i] @ gradients[j] / norms[i] / norms[j] for j in range(4) if j != i]
        direct = [
            math.tanh(math.log(norms[i]) / 2),
            min(max(-math.log(norms[i]), 0.0), 3.0) / 3,
            2 * agreement,
            x[i, 3],  # below
            2 * gradients[i] @ momentum / norms[i] / np.linalg.norm(momentum),
            max(0.0, *cosines),
            math.tanh(claims["losses"][i] - 2.5),
            2 * (claims["accuracies"][i] - 0.6),
        ]
        assert len(direct) == len(FEATURES)
        np.testing.assert_allclose(x[i], direct, atol=1e-9)
    # In the first round no weights were known and all agreements were 0; the habit has not followed yet.
    np.testing.assert_allclose(x[:, 3], x[:, 2], atol=1e-12)


def test_without_momentum_and_gram_matrix_their_features_are_silent():
    view = round_view(0, [V, V, -V], V, coefficients=np.ones(3) / 3)
    features = features_of(view)
    assert features[:, [4, 5]].tolist() == [[0.0, 0.0]] * 3


def test_leave_one_out_is_the_cosine_to_the_sum_of_the_others():
    generator = np.random.default_rng(4)
    gradients, weight = generator.normal(size=(5, 9)), generator.random(5)
    gradients[3] = 0.0
    cosines = leave_one_out(gradients @ gradients.T, weight)
    for i in range(5):
        rest = sum(weight[j] * gradients[j] for j in range(5) if j != i)
        length = np.linalg.norm(gradients[i]) * np.linalg.norm(rest)
        assert cosines[i] == pytest.approx(gradients[i] @ rest / length if length else 0.0)
    assert leave_one_out(np.eye(1), np.ones(1)).tolist() == [0.0]


def test_its_steps_are_those_of_adam_with_a_penalty():
    generator = np.random.default_rng(7)
    adam, mine = Adam(6, LEARNING_RATE, BETA1, BETA2, EPSILON), Adam(6, LEARNING_RATE, BETA1, BETA2, EPSILON)
    parameters = generator.normal(size=6)
    others = parameters.copy()
    for gradient in generator.normal(size=(20, 6)):
        adam.step(parameters, gradient + PENALTY * parameters)
        _adam_step(others, gradient, mine.first, mine.second, np.arange(6), mine.next_size())
    np.testing.assert_array_equal(others, parameters)
    np.testing.assert_array_equal([mine.first, mine.second], [adam.first, adam.second])


def test_reputations_of_the_absent_stay_as_they_are():
    reputation, first, second = np.ones((3, 4))
    slopes = np.array([0.5, -2.0, 1.0, 0.5])
    _reputation_step(reputation, first, second, np.array([3, 1, 0, 3]), slopes, np.array([3, 1]), 0.1)
    assert [column[[0, 2]].tolist() for column in (reputation, first, second)] == [[1.0, 1.0]] * 3
    assert reputation[3] < reputation[1] < 1.0
    assert first[3] == pytest.approx(1.0 + (1.0 - BETA1) * PENALTY)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_loop_is_compiled_once_rounds_have_begun(count, every):
    """A loop that is called with other types than `load` has called it with is compiled then, and all wait."""
    rule = Master(True, 5)
    generator = np.random.default_rng(8)
    for view in noisy_rounds(12, [1.0] * count, every=every):
        usable = (generator.random(count) < 0.8).tolist()
        weights(rule, [view, replace(view, usable=tuple(usable))])
    coefficients = np.ones(count) / count
    weights(rule, [round_view(24, np.ones((count, 4)), V, momentum=V, coefficients=coefficients)])
    rule.learn()
    loops = [loop for module in (alarm, evidence, fitting, master) for loop in vars(module).values()]
    loops = [loop for loop in loops if hasattr(loop, "signatures")]
    assert {loop.__name__: len(loop.signatures) for loop in loops} == {loop.__name__: 1 for loop in loops}
    assert len(loops) == 9


def test_reasons_are_those_of_the_evidence_unless_the_network_overrules_it():
    master = Master(True, 5)
    views = list(noisy_rounds(20, [1.0, 1.0, -1.0]))
    weights(master, views)
    assert master.reasons(views[-1], "w2") == master.evidence.reasons(views[-1], "w2")
    master.learn()
    master.evidence.ledger["reputation"][master.evidence.ledger.row("w0")] = -20.0
    assert "its reputation" in master.reasons(views[-1], "w0")
    master.evidence.ledger["reputation"][:] = 0.0
    master.network.hidden_kernel[:] = 0.0
    master.network.hidden_kernel[6, 0] = 5.0
    master.network.output_kernel[0] = -50.0
    view = round_view(20, [V, V, V], V, fresh=False, losses=[1.0, 1.0, 9.0])
    master.evidence.ledger["trust"][:3] = 1.0
    master._to_learn = None
    master.decide(view)
    assert "its claimed loss" in master.reasons(view, "w2")
