"""Faults: what each pushes, that it is a pure function, and that it leaves alone what is not its own."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigurationError
from worker.corruption import Draw, Purpose, add_noise, flip_labels, normal, randomise_labels
from worker.faults import FAULTS, LIAR_LOSS, Contribution, Situation, parse_fault

ROOT = Path(__file__).parents[2]
CLASSES = 3
WORKERS = 5
STEPS = 400
COUNTER = np.array([7, 8], np.int64)
"""Integer state of the toy model: no fault may touch it."""

PINNED_LABELS = [0, 3, 3, 5, 4, 6, 4, 8]
PINNED_NORMAL = [0.7572326661037785, -0.9631805421043165, 0.8100128174771104]

DATA = {"flipped_labels", "random_labels", "noisy_inputs", "copycat", "liar"}
"""Faults that spoil the batch; all others spoil the gradient or the time."""


def at(step=3, rank=1, seed=11):
    return Situation(seed, rank, step, STEPS, WORKERS, CLASSES)


class Model:
    """A toy whose gradients are sums over the batch; all that it hands out is read-only, and it notes each call."""

    def __init__(self, step=3, loss=0.5, accuracy=0.25):
        self.step, self.loss, self.accuracy = step, loss, accuracy
        self.calls = []

    def batch(self, rank):
        noise = np.random.RandomState(1000 * rank + self.step)
        features, labels = noise.rand(6, 4).astype(np.float32), noise.randint(0, CLASSES, 6).astype(np.int32)
        return frozen(features), frozen(labels)

    def __call__(self, rank, corrupt):
        features, labels = self.batch(rank)
        if corrupt is not None:
            features, labels = corrupt(features, labels)
        self.calls.append((rank, features, labels))
        one_hot = np.eye(CLASSES, dtype=np.float32)[labels]
        arrays = [features.T @ one_hot, one_hot.sum(axis=0).astype(np.float64), COUNTER, np.float16(labels[0])]
        return Contribution([frozen(np.asarray(array)) for array in arrays], self.loss, self.accuracy)


def frozen(array):
    view = array.view()
    view.flags.writeable = False
    return view


def push(text, situation=None, model=None):
    situation = situation or at()
    return parse_fault(text).push(situation, model or Model(situation.step))


def honest(rank=1, step=3):
    return Model(step)(rank, None)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))


# ---- what holds for all --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("step", [3, STEPS - 1])
def test_a_fault_is_a_pure_function_that_keeps_shapes_dtypes_and_integers(name, step):
    """Asked twice, the bits are equal; the batch and the honest gradient are read-only, so writing would fail."""
    first, again, plain = push(name, at(step)), push(name, at(step)), honest(step=step)
    assert [a.tobytes() for a in first.gradients] == [a.tobytes() for a in again.gradients]
    assert (first.loss, first.accuracy) == (again.loss, again.accuracy)
    for pushed, expected in zip(first.gradients, plain.gradients, strict=True):
        assert (pushed.shape, pushed.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(first.gradients[2], COUNTER)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_differs_from_honesty_in_the_second_half(name):
    """In every one of ten steps for most, in some for the intermittent; `slow` differs by its delay alone."""
    steps = range(STEPS // 2, STEPS // 2 + 100, 10)
    differing = [not same(push(name, at(step)), honest(step=step)) for step in steps]
    if name == "slow":
        assert not any(differing)
        assert FAULTS[name].delay_s > 0
    elif name == "intermittent":
        assert any(differing)
    else:
        assert all(differing)
        assert FAULTS[name].delay_s == 0


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"liar"}))
def test_only_a_liar_lies(name):
    """The claims of all others are those of the batch that they computed."""
    pushed = push(name)
    assert (pushed.loss, pushed.accuracy) == (0.5, 0.25)


def test_every_fault_is_documented():
    """Each row says what it does, and its function says what in the world looks like that."""
    for name, fault in FAULTS.items():
        assert fault.does, name
        assert "In the world: " in fault.act.__doc__, name


# ---- each by itself ------------------------------------------------------------------------------------


def test_flipped_labels_train_on_the_opposite_classes():
    model = Model()
    pushed = push("flipped_labels", model=model)
    features, labels = model.batch(1)
    ((rank, used, flipped),) = model.calls
    assert rank == 1
    assert used is features or np.array_equal(used, features)
    assert (flipped + labels).tolist() == [CLASSES - 1] * 6
    assert flipped.dtype == np.int32
    assert not same(pushed, honest())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 20))
def test_random_labels_are_classes_and_depend_on_seed_rank_and_step(seed, step, rank, classes):
    """All drawn labels lie in range, and another seed, rank or step draws other ones."""
    labels = np.zeros(200, np.int32)

    def drawn(*key):
        return randomise_labels(Draw(*key, Purpose.LABELS), classes)(labels, labels)[1]

    first = drawn(seed, rank, step)
    assert first.dtype == np.int32
    assert set(first.tolist()) <= set(range(classes))
    others = [drawn((seed + 1) % 2**64, rank, step), drawn(seed, rank + 1, step), drawn(seed, rank, step + 1)]
    if classes > 1:
        assert all(first.tolist() != other.tolist() for other in others)


def test_the_draws_never_change():
    """Pinned values: if this fails, runs with faults can no longer be compared with older ones."""
    labels = np.zeros(8, np.int32)
    drawn = randomise_labels(Draw(1, 2, 3, Purpose.LABELS), 10)(labels, labels)[1]
    assert drawn.tolist() == PINNED_LABELS
    assert normal(Draw(1, 2, 3, Purpose.GRADIENT).words(), 3).tolist() == pytest.approx(PINNED_NORMAL, rel=1e-14)


def test_normal_numbers_look_normal():
    """Mean, variance, skewness and tails of 100,000; kurtosis is that of twelve uniforms, 3 - 0.1."""
    numbers = normal(Draw(5, 0, 0, Purpose.GRADIENT).words(), 100_000)
    assert abs(numbers.mean()) < 0.015
    assert abs(numbers.var() - 1) < 0.02
    assert abs((numbers**3).mean()) < 0.05
    assert abs((numbers**4).mean() - 2.9) < 0.1
    assert abs((abs(numbers) > 1.96).mean() - 0.05) < 0.004


def test_noise_is_in_units_of_the_features_and_keeps_integers_in_range():
    features = (np.arange(3000).reshape(300, 10) % 17).astype(np.float32)
    noisy, labels = add_noise(Draw(1, 0, 0, Purpose.FEATURES), 2.0)(features, np.zeros(300, np.int32))
    assert labels.tolist() == [0] * 300
    assert (noisy - features).std() == pytest.approx(2 * features.std(), rel=0.05)
    pixels, _ = add_noise(Draw(1, 0, 0, Purpose.FEATURES), 2.0)(features.astype(np.uint8), labels)
    assert pixels.dtype == np.uint8
    assert (pixels.min(), pixels.max()) == (0, 16)
    assert (pixels != features).mean() > 0.5


@pytest.mark.parametrize(("text", "factor"), [("sign_flip", -3), ("scale", -100), ("scale:0.5", 0.5)])
def test_scaled_gradients(text, factor):
    for pushed, plain in zip(push(text).gradients, honest().gradients, strict=True):
        if pushed.dtype != np.int64:
            assert pushed == pytest.approx(factor * plain, rel=1e-3)


def test_gaussian_noise_has_the_norm_asked_for_and_no_direction():
    """Ten times the gradient's norm, over all floating arrays together; nearly orthogonal to the gradient."""
    gradient = np.linspace(-1, 1, 40_000, dtype=np.float32)

    def large(rank, corrupt):
        return Contribution([gradient[:30_000], COUNTER, gradient[30_000:]], 1.0, None)

    pushed = parse_fault("gaussian_noise").push(at(), large)
    noise = np.concatenate([pushed.gradients[0], pushed.gradients[2]]).astype(float)
    assert np.linalg.norm(noise) == pytest.approx(10 * np.linalg.norm(gradient), rel=0.05)
    assert abs(noise @ gradient) < 0.03 * np.linalg.norm(noise) * np.linalg.norm(gradient)


@pytest.mark.parametrize(("text", "z"), [("little_is_enough", 1.5), ("little_is_enough:-0.4", -0.4)])
def test_little_is_enough_is_mean_minus_z_deviations_of_all_ranks(text, z):
    model = Model()
    pushed = push(text, model=model)
    assert sorted(rank for rank, _, _ in model.calls) == list(range(WORKERS))
    everyone = np.stack([honest(rank).gradients[0] for rank in range(WORKERS)]).astype(float)
    expected = everyone.mean(axis=0) - z * everyone.std(axis=0)
    assert pushed.gradients[0] == pytest.approx(expected, rel=1e-5)


def test_zero_and_nan_fill_all_floating_arrays():
    assert [float(abs(array).sum()) for array in push("zero").gradients] == [0, 0, COUNTER.sum(), 0]
    assert [bool(np.isnan(array).all()) for array in push("nan").gradients] == [True, True, False, True]


@pytest.mark.parametrize(("text", "turn"), [("sleeper", STEPS // 2), ("sleeper:7", 7), ("sleeper:0", 0)])
def test_a_sleeper_is_honest_until_its_turn(text, turn):
    for step in {0, max(turn - 1, 0), turn, STEPS - 1}:
        expected = push("sign_flip", at(step)) if step >= turn else honest(step=step)
        assert same(push(text, at(step)), expected)


def test_the_intermittent_are_bad_in_whole_stretches_each_in_its_own():
    """Every stretch of 20 steps is all good or all bad; about half are bad; two ranks are not bad together."""

    def bad(rank, stretch_steps=20):
        text = f"intermittent:{stretch_steps}"
        steps = range(0, STEPS, 5)
        return [same(push(text, at(step, rank)), push("sign_flip", at(step, rank))) for step in steps]

    first, second = bad(0), bad(1)
    for run in (first, second):
        stretches = [run[start : start + 4] for start in range(0, len(run), 4)]
        assert all(len(set(stretch)) == 1 for stretch in stretches)
        assert 0.2 < np.mean([stretch[0] for stretch in stretches]) < 0.8
    assert first != second
    assert bad(0, 50) != first


@pytest.mark.parametrize("name", ["colluding", "copycat"])
def test_those_who_conspire_push_the_very_same(name):
    """From every rank the same bits; from an honest rank other ones."""
    pushes = [push(name, at(rank=rank)) for rank in range(WORKERS)]
    assert all(same(pushes[0], other) for other in pushes[1:])
    assert not same(honest(1), honest(2))


def test_the_colluding_push_against_an_honest_gradient():
    assert push("colluding:2", at(rank=4)).gradients[0] == pytest.approx(-2 * honest(0).gradients[0])


def test_a_liar_trains_on_flipped_labels_and_claims_to_be_the_best():
    pushed = push("liar")
    assert same(pushed, push("flipped_labels"))
    assert (pushed.loss, pushed.accuracy) == (LIAR_LOSS, 1.0)
    without = parse_fault("liar").push(at(), Model(accuracy=None))
    assert without.accuracy is None, "where nobody claims an accuracy, it does not either"


def test_the_slow_are_honest_and_wait():
    assert same(push("slow"), honest())
    assert parse_fault("slow:0.25").delay_s == 0.25
    assert parse_fault("scale:3").delay_s == 0


def test_an_overflow_is_no_warning():
    """A fault in half precision may become infinite; the server's check is what must notice."""

    def large(rank, corrupt):
        return Contribution([np.full(3, 6e4, np.float16)], 1.0, None)

    assert np.isinf(parse_fault("scale").push(at(), large).gradients[0]).all()


@pytest.mark.parametrize("name", sorted(DATA))
def test_faults_of_data_keep_the_batch_they_were_given(name):
    """They ask for one gradient, of a corrupted copy; `Model` would raise if its own batch were written to."""
    model = Model()
    push(name, model=model)
    assert len(model.calls) == 1
    assert flip_labels(CLASSES)(*model.batch(1))[1] is not model.batch(1)[1]


# ---- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flipped", ["'flipped'", *FAULTS]),
        ("", ["there is no fault ''"]),
        ("Scale", ["'Scale'"]),
        ("zero:1", ["zero:1", "takes no number"]),
        ("scale:", ["scale:", "the factor"]),
        ("scale:ten", ["scale:ten", "the factor"]),
        ("scale:nan", ["the factor"]),
        ("scale:inf", ["the factor"]),
        ("slow:-1", ["delay in seconds", "at least 0"]),
        ("intermittent:0", ["length of a stretch", "at least 1"]),
        ("sleeper:-1", ["step", "at least 0"]),
        ("noisy_inputs:-1", ["noise", "at least 0"]),
    ],
)
def test_what_is_no_fault_is_one_sentence(text, words):
    with pytest.raises(ConfigurationError) as caught:
        parse_fault(text)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_the_table_holds_what_a_plain_name_means(name):
    assert parse_fault(name) == FAULTS[name]


def test_the_documented_table_is_the_table():
    """docs/RUNNING.md lists all faults, and for each that takes a number its default."""
    lines = [line for line in (ROOT / "docs/RUNNING.md").read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    numbers = {row[0].strip("`"): row[2] for row in rows if row[0].strip("`") in FAULTS}
    assert numbers.keys() == FAULTS.keys()
    for name, fault in FAULTS.items():
        if np.isfinite(fault.number):
            assert numbers[name].endswith(f"({fault.number:g})"), name
        else:
            assert (numbers[name] == "") == (fault.parameter is None), name
