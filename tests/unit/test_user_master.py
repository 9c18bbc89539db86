"""A user's own master: what is refused and how it is said, what it gets and learns, what outlasts a restart."""

import random
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import CheckpointError, ConfigurationError, ExitCode
from ps.rules.alarm import LASTS
from ps.rules.evidence import Evidence
from ps.rules.geometry import from_products
from ps.rules.rule import RoundView
from ps.rules.user_master import SHARED_FEATURES, UserMaster, shared_samples, target_weights
from ps.rules.user_network import UserNetwork, load_user_master

from .judged_rounds import alarms_of, noisy_rounds

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 4
SEED = 7

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HEAD = "import tensorflow as tf\n"

EVIDENCE_AGAIN = """
def master(features, num_workers):
    share = tf.sigmoid(8.0 * (features[:, -1] - 0.5))
    share = tf.where(share < 0.1 * tf.reduce_max(share), tf.zeros_like(share), share)
    return share / tf.reduce_sum(share)
"""

LEARNER = """
def master(features, num_workers):
    kernel = tf.Variable(tf.random.normal([9, 6], stddev=0.3), name="kernel")
    top = tf.Variable(tf.zeros([6, 1]), name="top")
    bias = tf.Variable(tf.zeros([num_workers]), name="bias")
    return tf.nn.softmax(tf.matmul(tf.tanh(tf.matmul(features, kernel)), top)[:, 0] + bias)
"""


@pytest.fixture
def user(tmp_path):
    """Return a function that loads `master` from a source text."""

    def load(source, name="master"):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + textwrap.dedent(source))
        return load_user_master(f"{path}:{name}")

    return load


@pytest.fixture
def made():
    """Return a function that makes a shared master which is closed in the end."""
    masters = []

    def make(function, workers=WORKERS, **options):
        master = UserMaster(function, workers, **{"validated": True, "seed": SEED, **options})
        masters.append(master)
        return master

    yield make
    for master in masters:
        master.close()


def a_round(step, gradients, validator=None, *, ranks=None, names=None, usable=None):
    """Return what is seen of a round of gradients [W, P], measured against a validator's of the same step."""
    gradients = np.asarray(gradients, np.float64)
    count = len(gradients)
    ranks = tuple(range(count)) if ranks is None else ranks
    usable = (True,) * count if usable is None else usable
    rows = [g for g, use in zip(gradients, usable, strict=True) if use]
    if validator is not None:
        rows.append(validator)
    products = np.array(rows) @ np.array(rows).T
    geometry = from_products(products, usable, int(validator is not None), fresh=validator is not None)
    return RoundView(
        step,
        ranks,
        tuple(f"w{rank}" for rank in ranks) if names is None else names,
        usable,
        (8,) * count,
        tuple(geometry.norms.tolist()),
        (1.0,) * count,
        (0.5,) * count,
        geometry,
    )


def rounds(count, bad=(3,), workers=WORKERS, ranks=None):
    """Yield rounds in which the gradients of the bad point away from the validator's."""
    generator = np.random.default_rng(3)
    ranks = tuple(range(workers)) if ranks is None else ranks
    for step in range(count):
        truth = generator.normal(size=30)
        gradients = truth + generator.normal(size=(len(ranks), 30))
        for place, rank in enumerate(ranks):
            if rank in bad:
                gradients[place] *= -3.0
        yield a_round(step, gradients, truth + 0.5 * generator.normal(size=30), ranks=ranks)


# ---- what cannot be used is refused --------------------------------------------------------------------


WRONG = {
    "returned weights of shape [4, 1] instead of [4]": "return tf.ones_like(features[:, :1]) / 4.0",
    "returned weights of shape [] instead of [4]": "return tf.constant(1.0)",
    "returned a weight of -0.5": "return tf.constant([-0.5, 0.5, 0.5, 0.5])",
    "returned a weight of nan": "return features[:, -1] / tf.reduce_sum(features[:, -1])",
    "returned weights with sum 4 instead of 1": "return tf.ones([num_workers])",
    "it must return a tensor: weights [4]": "return [0.25] * 4",
    "returned something of type ndarray": "import numpy; return numpy.ones(4) / 4",
    "returned nothing": "pass",
    "returned weights of dtype int32": "return tf.constant([1, 0, 0, 0])",
    "not part of the graph": "\n    with tf.Graph().as_default():\n        return tf.constant([1.0])",
    "returned other weights when it was asked again": "return tf.nn.softmax(tf.random.normal([num_workers]))",
    "failed with KeyError at line 4: 'no such'": "return {}['no such']",
    "failed with SystemExit at line 4: 3": "raise SystemExit(3)",
    "failed in operation": "return tf.debugging.check_numerics(features[:, 0] / 0.0, 'boom')",
}


@pytest.mark.parametrize("complaint", WRONG)
def test_a_function_that_returns_no_weights_is_refused_by_name(user, complaint):
    function = user(f"def master(features, num_workers):\n    x = 0\n    {WRONG[complaint]}\n")
    with pytest.raises(ConfigurationError) as error:
        UserMaster(function, WORKERS, validated=True, seed=SEED)
    text = str(error.value)
    assert complaint in text
    assert text.startswith(f"--master {function.spec} ")
    assert "mine.py:master" in text
    assert "\n" not in text
    assert error.value.exit_code == ExitCode.CONFIGURATION


@pytest.mark.parametrize(
    ("source", "name", "complaint"),
    [
        ("def other(features, num_workers): pass", "master", "has no function 'master'"),
        ("master = 3", "master", "has something else called 'master'"),
        ("import no_such_module", "master", "failed with ModuleNotFoundError at line 2: No module named"),
        ("def master(:", "master", "failed with SyntaxError at line 2"),
    ],
)
def test_a_file_without_the_function_is_refused(user, source, name, complaint):
    with pytest.raises(ConfigurationError, match=r"^--master .*mine\.py:master cannot be used, because") as error:
        user(source, name)
    assert complaint in str(error.value)


@pytest.mark.parametrize("spec", ["mine.py", ":master", "mine.py:", "mine.py:not a name"])
def test_a_spec_that_names_no_function_is_refused(spec):
    with pytest.raises(ConfigurationError, match=r"write file\.py:function"):
        load_user_master(spec)


@pytest.mark.parametrize("file", ["x" * 300 + ".py", "~nobody-of-that-name/mine.py"])
def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(file):
    with pytest.raises(ConfigurationError, match=r"^--master \S+ cannot be used: "):
        load_user_master(f"{file}:master")


def test_a_file_that_is_missing_is_refused_before_tensorflow_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ConfigurationError, match="because there is no file"):
        load_user_master(f"{tmp_path}/none.py:master")


def test_without_tensorflow_it_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(HEAD)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ConfigurationError, match=r"not installed: pip install 'weighmaster\[tensorflow\]'"):
        load_user_master(f"{path}:master")


def test_tensorflow_is_not_loaded_without_a_master_of_the_users():
    program = "import sys, ps.rules.user_master, ps.rules.user_vote; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=100)


def test_a_function_that_takes_other_arguments_is_refused(user):
    with pytest.raises(ConfigurationError, match=r"failed with TypeError: master\(\) takes 1 positional"):
        UserMaster(user("def master(features): pass"), WORKERS, validated=True, seed=SEED)


# ---- what it gets and what becomes of its weights ------------------------------------------------------


def test_a_function_that_repeats_the_evidence_decides_as_the_evidence_rule_does(user, made):
    master, evidence = made(user(EVIDENCE_AGAIN)), Evidence(True)
    muted = 0
    for view in rounds(30):
        mine, theirs = master.decide(view), evidence.decide(view)
        np.testing.assert_allclose(mine.weights, theirs.weights, atol=1e-6)
        np.testing.assert_allclose(mine.factors, theirs.factors, rtol=1e-6)
        assert mine.fallback == ""
        muted += mine.weights[3] == 0.0
    assert muted > 20  # it was no run in which there was nothing to tell


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_the_features_are_tried_for_the_number_of_workers_that_was_asked_for(user, made, workers):
    master = made(user(LEARNER), workers)
    for sample in shared_samples(workers):
        assert sample.features.shape == (workers, len(SHARED_FEATURES))
        assert master.graph.weights(sample.features).sum() == pytest.approx(1.0, abs=1e-12)


def test_rows_are_ranks_and_absent_ones_weigh_nothing(user, made):
    """With weights 1 : 2 : 3 : 4 by rank, ranks 1 and 3 share 2 : 4 whoever else is there in name."""
    source = """
    def master(features, num_workers):
        return tf.range(1.0, num_workers + 1.0) / tf.reduce_sum(tf.range(1.0, num_workers + 1.0))
    """
    master = made(user(source))
    views = list(rounds(3, bad=(), ranks=(1, 3)))
    for view in views[:2]:
        np.testing.assert_allclose(master.decide(view).weights, [2 / 6, 4 / 6], rtol=1e-6)
    full = next(rounds(1, bad=()))
    refused = a_round(2, np.eye(4, 30) + 1.0, np.ones(30), usable=(True, False, True, True))
    np.testing.assert_allclose(master.decide(full).weights, [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(master.decide(refused).weights, [1 / 8, 0, 3 / 8, 4 / 8], rtol=1e-6)


def test_features_of_absent_ranks_are_zero_and_the_others_in_their_rows(user, made):
    master = made(user(LEARNER))
    seen = []
    weights = master.graph.weights
    master.graph.weights = lambda features: seen.append(features) or weights(features)
    for view in rounds(3, bad=(3,), ranks=(1, 3)):
        master.decide(view)
    assert not seen[-1][[0, 2]].any()
    assert seen[-1][1, -1] == 1.0  # the evidence: the good one is trusted
    assert seen[-1][3, -1] == 0.0


def test_a_lone_gradient_counts_fully_and_the_function_is_not_asked(user, made):
    master = made(user(LEARNER))
    master.graph.weights = None
    assert master.decide(a_round(0, np.ones((1, 5)), np.ones(5), ranks=(2,))).weights.tolist() == [1.0]


def test_until_a_validator_has_spoken_the_evidence_rule_judges(user, made):
    master = made(user("def master(features, n):\n    return tf.one_hot(0, n)\n"))
    decision = master.decide(a_round(0, np.eye(4, 30)))
    assert decision.weights.tolist() == [0.25] * 4
    assert "no validator" in decision.fallback


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("return tf.one_hot(0, n)", "gave all weight to workers that are absent from this round"),
        # Right for what was made up, where a worker alone is at rank 0; wrong for one at the last rank.
        (
            "e = features[:, -1]; bad = tf.equal(features[0, -1], 0.0) & (e[-1] > 0.0)\n"
            "    return tf.where(bad, tf.ones_like(e), tf.one_hot(1, n))",
            "returned weights with sum 4 instead of 1",
        ),
    ],
)
def test_a_round_that_the_function_cannot_judge_is_judged_by_the_evidence(user, made, source, why):
    function = user(f"def master(features, n):\n    {source}\n")
    master, evidence = made(function), Evidence(True)
    for view in rounds(4, bad=(2,), ranks=(2, 3)):
        mine, theirs = master.decide(view), evidence.decide(view)
        assert mine.weights.tolist() == theirs.weights.tolist()
        assert mine.yardstick.tolist() == theirs.yardstick.tolist()
        assert "gives it a weight" not in master.reasons(view, "w3")
        assert mine.fallback == f"--master {function.spec} {why}: the evidence rule judged the round"


def test_norms_are_bounded_as_by_the_evidence_rule(user, made):
    """A worker that is far too long is cut to at most 1.5 x the validator's norm, although it has all weight."""
    master = made(user("def master(features, n):\n    return tf.one_hot(3, n)\n"))
    gradients = np.ones((4, 25))
    gradients[3] *= 1000.0
    decision = master.decide(a_round(0, gradients, np.ones(25)))
    assert decision.weights.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert 5000.0 * decision.factors[3] <= 1.05 * 1.5 * 5.0 + 1e-9
    assert decision.factors[:3].tolist() == [1.0] * 3


def test_an_alarm_that_a_changed_worker_rang_ends_when_nothing_else_is_wrong(user, made):
    raised = alarms_of(made(user(EVIDENCE_AGAIN)))
    assert raised == alarms_of(Evidence(True))
    assert sum(raised) == LASTS - 1


def test_a_rising_loss_raises_the_alarm_as_with_the_evidence_rule(user, made):
    mine, theirs = made(user(EVIDENCE_AGAIN)), Evidence(True)
    raised = []
    for view in noisy_rounds(40, [1.0] * 4, noise=0.3, every=20):
        judged = replace(view, losses=(1.0 if view.step < 30 else 5.0,) * 4)
        mine.decide(judged)
        theirs.decide(judged)
        assert mine.wants_validation == theirs.wants_validation
        raised.append(mine.wants_validation)
    assert not raised[29] and raised[39]


# ---- learning ------------------------------------------------------------------------------------------


def test_the_target_is_where_the_built_in_loss_is_least():
    """Nudging any share of the target raises the summed loss; silence leaves the weights of the evidence."""
    generator = np.random.default_rng(0)
    beta, anchors = generator.uniform(-1, 1, 5), generator.uniform(-1, 1, 5)
    silent = 1 / (1 + np.exp(-anchors))

    def loss(p):
        def bce(y):
            return -(y * np.log(p) + (1 - y) * np.log(1 - p))

        return np.sum(beta**2 * bce((beta > 0) * 1.0) + bce(silent))

    shares = (beta**2 * (beta > 0) + silent) / (beta**2 + 1)
    for index in range(5):
        for nudge in (-1e-3, 1e-3):
            moved = shares.copy()
            moved[index] += nudge
            assert loss(moved) > loss(shares)
    np.testing.assert_allclose(target_weights(beta, anchors), shares / shares.sum())
    np.testing.assert_allclose(target_weights(np.zeros(5), anchors), silent / silent.sum())


def test_a_small_share_is_no_part_of_the_target():
    assert target_weights(np.array([1.0, 1.0, -1.0]), np.array([4.0, 4.0, -4.0])).tolist() == [0.5, 0.5, 0.0]


def test_its_variables_are_trained_to_mute_who_points_away(user, made):
    """Untrained it weighs all the same; after a hundred rounds the bad worker has next to nothing."""
    master = made(user(LEARNER))
    assert master.graph.variables == 3
    first = last = None
    for view in rounds(100):
        decision = master.decide(view)
        master.learn()
        first = decision if first is None else first
        last = decision
    np.testing.assert_allclose(first.weights, 0.25, atol=1e-6)
    assert last.weights[3] < 0.03
    assert last.weights[:3].min() > 0.25
    assert "away from the validator's" in master.reasons(view, "w3")


def test_what_was_learned_of_a_name_follows_it_to_another_rank(user, made):
    """A round is learned in the rows of the ranks that its names have now."""
    master = made(user("def master(features, n):\n    return tf.nn.softmax(tf.Variable(tf.zeros([n])))\n"))
    for view in rounds(3):
        master.decide(view)
        master.learn()
    taught = []
    master.graph.train = lambda features, target, present, rate: taught.append((target, present, features))
    master.decide(replace(view, names=("w3", "w1", "new", "w0")))
    master.learn()
    target, present, features = taught[-1]  # a round of before: w0, w1, w3 are known, w2 has left
    assert present.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert target[0] < 0.05
    assert target[1] == pytest.approx(0.5, abs=0.2)
    assert target[2] == 0.0
    assert features[2].tolist() == [0.0] * len(SHARED_FEATURES)


def test_reasons_name_the_function_where_it_overrules_the_evidence(user, made):
    master = made(user("def master(features, n):\n    return tf.one_hot(3, n)\n"))
    for view in rounds(12):
        master.decide(view)
    assert master.reasons(view, "w3").startswith("--master ")
    assert "gives it a weight of 1.00, although its gradients point away" in master.reasons(view, "w3")
    assert "gives it a weight of 0.00, although its gradients help" in master.reasons(view, "w0")


def test_a_gradient_that_is_not_finite_changes_no_variable(user, made):
    """The slope of a square root is infinite at 0: the step is left out, not the run."""
    source = """
    def master(features, num_workers):
        scale = tf.Variable(0.0)
        return tf.nn.softmax(features[:, 0] + tf.sqrt(tf.abs(scale)))
    """
    master = made(user(source))
    assert master.graph.variables == 1
    for view in rounds(3):
        assert np.isfinite(master.decide(view).weights).all()
        master.learn()
    assert all(np.isfinite(value).all() for value in master.graph.state().values())


def test_a_function_without_variables_is_not_trained(user, made):
    master = made(user(EVIDENCE_AGAIN))
    assert master.graph.variables == 0
    for view in rounds(3):
        master.decide(view)
        master.learn()


def test_integer_variables_and_those_not_to_be_trained_stay(user, made):
    source = """
    def master(features, n):
        count = tf.Variable(3)
        fixed = tf.Variable(1.0, trainable=False, name="fixed")
        free = tf.Variable(tf.zeros([n]), name="free")
        return tf.nn.softmax(free * fixed + tf.cast(count, tf.float32))
    """
    master = made(user(source))
    assert master.graph.variables == 1
    for view in rounds(5):
        master.decide(view)
        master.learn()
    state = master.graph.state()
    assert state["fixed"] == 1.0
    assert state["free"].any()


# ---- determinism and checkpoints -----------------------------------------------------------------------


def test_equal_seeds_give_equal_bits_and_other_seeds_other_ones(user, made):
    function = user(LEARNER)
    runs = []
    for seed in (SEED, SEED, SEED + 1):
        master = made(function, seed=seed)
        weights = []
        for view in rounds(10):
            weights.append(master.decide(view).weights)
            master.learn()
        runs.append(np.array(weights))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_it_leaves_everybody_elses_random_numbers_alone(user, made):
    random.seed(1)
    np.random.seed(1)
    expected = random.getstate(), np.random.get_state()[1].tolist()
    made(user(LEARNER))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected


def test_keras_layers_work_and_start_alike(user, made):
    source = """
    import keras
    def master(features, num_workers):
        hidden = keras.layers.Dense(5, activation="tanh")(features)
        return tf.nn.softmax(keras.layers.Dense(1)(hidden)[:, 0])
    """
    function = user(source)
    sample = shared_samples(WORKERS)[0].features
    one, other = made(function), made(function)
    assert one.graph.variables == 4
    assert one.graph.weights(sample).tolist() == other.graph.weights(sample).tolist()


def test_a_restored_master_goes_on_to_the_bit(user, made):
    function = user(LEARNER)
    whole, first, second = made(function), made(function), made(function)
    views = list(rounds(12))
    for view in views[:6]:
        for master in (whole, first):
            master.decide(view)
    second.restore(first.state())
    for view in views[6:]:
        assert second.decide(view).weights.tolist() == whole.decide(view).weights.tolist()
        whole.learn()  # when it learns makes no difference
    for name, value in whole.graph.state().items():
        second.learn()
        assert np.array_equal(second.graph.state()[name], value)


def test_a_checkpoint_of_another_function_is_refused_by_name(user, made):
    old = made(user(LEARNER))
    state = old.state()
    path = Path(old._who.removeprefix("--master ").rpartition(":")[0])
    (path.parent / "new.py").write_text(HEAD + LEARNER.replace("6", "7"))
    new = made(load_user_master(f"{path.parent / 'new.py'}:master"))
    with pytest.raises(CheckpointError, match=r"variable kernel is of shape \[9, 6\].*\[9, 7\] in the function"):
        new.restore(state)


def test_the_session_has_one_thread_and_a_graph_that_is_finished(user, made):
    master = made(user(LEARNER))
    assert isinstance(master.graph, UserNetwork)
    config = master.graph._session._config
    assert (config.intra_op_parallelism_threads, config.inter_op_parallelism_threads) == (1, 1)
    assert config.device_count["GPU"] == 0
    assert master.graph._graph.finalized
