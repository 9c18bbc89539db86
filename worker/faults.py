"""Misbehave on purpose: what a broken or hostile worker would push. Needs no TensorFlow, no socket and no clock.

    fault = parse_fault("scale:-10")                   # a name of `FAULTS`, or name:number
    time.sleep(fault.delay_s)
    pushed = fault.push(Situation(seed, rank, step, steps, workers, classes), gradient_at)

`gradient_at(rank, corrupt)` is the caller's: it computes, at the current values, gradients, loss and accuracy of
the batch that `rank` takes at this step, after `features, labels = corrupt(features, labels)` (None: as they
are). A fault calls it as often as it needs (`little_is_enough` for every rank) and never writes to its arrays.
What `push` returns is the caller's to send.

Every fault is a pure function of the situation and of what `gradient_at` returns.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigurationError
from worker.corruption import Corrupt, Draw, Purpose, add_noise, flip_labels, normal, randomise_labels

SIGN_FLIP = -3.0
"""Factor of `sign_flip`, `sleeper` and `intermittent`."""

LIAR_LOSS = 0.01
"""What a liar claims, beside an accuracy of 1: a loss that goes with it."""


@dataclass(frozen=True)
class Situation:
    """Where in a run a push is made.

    Attributes:
        seed: of the run, 0 to 2**64 - 1.
        rank: of the worker that misbehaves.
        step: of the values at which it computes.
        steps: of the whole run.
        workers: number of ranks, from 0, for which `gradient_at` can be asked.
        classes: number of classes; labels are 0 to classes - 1.
    """

    seed: int
    rank: int
    step: int
    steps: int
    workers: int
    classes: int

    def draw(self, purpose: Purpose, rank: int | None = None) -> Draw:
        """Name the random numbers of this step, of this rank or of the one given."""
        return Draw(self.seed, self.rank if rank is None else rank, self.step, purpose)


@dataclass(frozen=True, eq=False)
class Contribution:
    """What a worker pushes, honest or not.

    Attributes:
        gradients: arrays of any shapes. Faults change floating ones; all others pass as they are.
        loss: claimed mean loss of the batch.
        accuracy: claimed share of right answers; None where the task has no classes.
    """

    gradients: list[NDArray[Any]]
    loss: float
    accuracy: float | None


GradientAt = Callable[[int, Corrupt | None], Contribution]
Act = Callable[[float, Situation, GradientAt], Contribution]


@dataclass(frozen=True)
class Parameter:
    """The number that may follow a fault's name, after a colon: any finite one from `low` on.

    `meaning` says what it is, in messages. A default of NaN leaves the choice to the fault.
    """

    meaning: str
    default: float
    low: float = -math.inf


@dataclass(frozen=True)
class Fault:
    """A fault: a row of `FAULTS`, or one with a number that was given, as `parse_fault` makes it.

    Attributes:
        does: what it does, as a phrase that follows "this worker".
        act: makes the push from number, situation and `gradient_at`.
        parameter: what its number means; None: it takes none.
        given: the number; None takes the default.
        delays: whether the number is a delay, seconds.
    """

    does: str
    act: Act
    parameter: Parameter | None = None
    given: float | None = field(default=None, kw_only=True)
    delays: bool = field(default=False, kw_only=True)

    @property
    def number(self) -> float:
        """The number that counts; NaN for a fault without one."""
        default = math.nan if self.parameter is None else self.parameter.default
        return default if self.given is None else self.given

    @property
    def delay_s(self) -> float:
        """How long to wait before each push."""
        return self.number if self.delays else 0.0

    def push(self, at: Situation, gradient_at: GradientAt) -> Contribution:
        """Return what this fault pushes in a situation."""
        return self.act(self.number, at, gradient_at)


def parse_fault(text: str) -> Fault:
    """Read `name` or `name:number`.

    Raises:
        ConfigurationError: there is no such fault, or the number does not go with it.
    """
    name, colon, number = text.partition(":")
    fault = FAULTS.get(name)
    if fault is None:
        raise ConfigurationError(f"there is no fault {name!r}: --fault is one of {', '.join(FAULTS)}")
    return replace(fault, given=_number(text, number, fault.parameter)) if colon else fault


def _number(text: str, number: str, wanted: Parameter | None) -> float:
    if wanted is None:
        raise ConfigurationError(f"--fault {text}: this fault takes no number; leave out what follows the name")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= wanted.low):
        least = "" if wanted.low == -math.inf else f" of at least {wanted.low:g}"
        raise ConfigurationError(f"--fault {text}: the colon is followed by {wanted.meaning}, a number{least}")
    return value


def _changed(honest: Contribution, change: Callable[[int, NDArray[Any]], NDArray[Any]]) -> Contribution:
    """Replace each floating array by `change(index, array)` in the array's own dtype; keep all others."""
    with np.errstate(over="ignore", invalid="ignore"):  # a fault may overflow: it is one
        gradients = [
            np.asarray(change(index, array)).astype(array.dtype, copy=False) if _is_floating(array) else array
            for index, array in enumerate(honest.gradients)
        ]
    return replace(honest, gradients=gradients)


def _is_floating(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f"


# ---- honest mistakes -----------------------------------------------------------------------------------


def flipped_labels(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Train on labels y turned into C - 1 - y.

    In the world: a site whose export numbers the classes the other way round, or one that poisons its labels.
    Loss and accuracy are those of the flipped batch.
    Source: Fang et al., "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", 2020.
    """
    return gradient_at(at.rank, flip_labels(at.classes))


def random_labels(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Train on labels that are drawn anew for each batch.

    In the world: labels joined to the wrong rows, or annotators who click at random.
    Source: Zhang et al., "Understanding deep learning requires rethinking generalization", 2017.
    """
    return gradient_at(at.rank, randomise_labels(at.draw(Purpose.LABELS), at.classes))


def noisy_inputs(deviations: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Train on features with noise of so many standard deviations of the batch's features.

    In the world: a bad sensor, or preprocessing with wrong constants.
    Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions", 2019.
    """
    return gradient_at(at.rank, add_noise(at.draw(Purpose.FEATURES), deviations))


def zero(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push zeros, with honest claims.

    In the world: a loss that is cut off from its model, or a free rider who takes values and gives nothing.
    Source: Lin et al., "Free-riders in Federated Learning: Attacks and Defenses", 2019.
    """
    return _changed(gradient_at(at.rank, None), lambda _, array: np.zeros(array.shape))


def not_a_number(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push NaN everywhere, with honest claims; the server must refuse it.

    In the world: an overflow in half precision, or a division by the size of an empty batch.
    """
    return _changed(gradient_at(at.rank, None), lambda _, array: np.full(array.shape, np.nan))


def honest_but_slow(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push the honest gradient; the fault is the delay before it.

    In the world: a weak or overloaded machine, or a bad network.
    """
    return gradient_at(at.rank, None)


def intermittent(stretch: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push -3 times the gradient in about half of all stretches of `stretch` steps, drawn by each rank for itself.

    In the world: a loose contact, a machine that overheats, an attacker who lets suspicion cool down.
    """
    drawn = Draw(at.seed, at.rank, at.step // max(int(stretch), 1), Purpose.STRETCH).words().random_raw()
    return scaled(SIGN_FLIP, at, gradient_at) if drawn >> 63 else gradient_at(at.rank, None)


# ---- attacks -------------------------------------------------------------------------------------------


def scaled(factor: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push `factor` times the honest gradient, with honest claims.

    In the world: a sign that is wrong in someone's loss, a batch that is summed and not averaged, or an attacker
    who walks the others back (-3) or outweighs them all (-100).
    Source: Li et al., "RSA: Byzantine-Robust Stochastic Aggregation Methods", 2019.
    """
    return _changed(gradient_at(at.rank, None), lambda _, array: factor * array)


def gaussian_noise(multiple: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push noise alone, with about `multiple` times the norm of the honest gradient, and honest claims.

    In the world: bad memory, a buffer that was never filled, an attacker who knows nothing.
    Source: Blanchard et al., "Machine Learning with Adversaries", 2017, there with one large variance for all.
    """
    honest = gradient_at(at.rank, None)
    floating = [array for array in honest.gradients if _is_floating(array)]
    squares = sum(float(np.square(array, dtype=np.float64).sum()) for array in floating)
    deviation = multiple * math.sqrt(squares / max(sum(array.size for array in floating), 1))
    words = at.draw(Purpose.GRADIENT).words()
    return _changed(honest, lambda _, array: deviation * normal(words, array.size).reshape(array.shape))


def little_is_enough(z: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push, in each coordinate, the mean minus `z` standard deviations of all ranks' honest gradients.

    In the world: an attacker who knows all data and hides within the spread of the honest, where median and Krum
    choose him. Claims are those of his own honest batch. Costs a gradient for each rank.
    Source: Baruch et al., "A Little Is Enough: Circumventing Defenses For Distributed Learning", 2019.
    """
    everyone = [gradient_at(rank, None) for rank in range(at.workers)]

    def hidden(index: int, _: NDArray[Any]) -> NDArray[Any]:
        stack = np.stack([other.gradients[index] for other in everyone]).astype(np.float64)
        return np.asarray(stack.mean(axis=0) - z * stack.std(axis=0))

    return _changed(everyone[at.rank], hidden)


def sleeper(turn: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Be honest before step `turn` (without one: half of all steps), and push -3 times the gradient from there on.

    In the world: a machine that breaks in mid-run, or an attacker who earns trust first.
    """
    awake = at.step >= (at.steps / 2 if math.isnan(turn) else turn)
    return scaled(SIGN_FLIP, at, gradient_at) if awake else gradient_at(at.rank, None)


def colluding(multiple: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push minus `multiple` times the honest gradient and the claims of rank 0's batch, as all who collude do.

    In the world: workers who agree to the last bit, against all others. A rule that looks for the densest group,
    such as Krum, takes them for the majority.
    Source: Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in Byzantium", 2018.
    """
    return _changed(gradient_at(0, None), lambda _, array: -multiple * array)


def copycat(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Push gradient and claims of rank 0's batch with random labels, the very same from all copycats.

    In the world: sites that were given copies of one spoilt file, or one attacker under many names.
    Source: Fung et al., "Mitigating Sybils in Federated Learning Poisoning", 2018.
    """
    return gradient_at(0, randomise_labels(at.draw(Purpose.LABELS, rank=0), at.classes))


def liar(_: float, at: Situation, gradient_at: GradientAt) -> Contribution:
    """Train on flipped labels, and claim accuracy 1 and a small loss.

    In the world: the best worker of all, for whoever believes what he is told.
    """
    pushed = gradient_at(at.rank, flip_labels(at.classes))
    return Contribution(pushed.gradients, LIAR_LOSS, None if pushed.accuracy is None else 1.0)


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "flipped_labels": Fault("trains on labels y turned into C - 1 - y", flipped_labels),
        "random_labels": Fault("trains on random labels", random_labels),
        "noisy_inputs": Fault(
            "adds noise to its features",
            noisy_inputs,
            Parameter("the noise in standard deviations of the features", 3.0, low=0.0),
        ),
        "sign_flip": Fault("pushes its gradient with the sign turned", scaled, Parameter("the factor", SIGN_FLIP)),
        "gaussian_noise": Fault(
            "pushes noise",
            gaussian_noise,
            Parameter("the norm of the noise in norms of the gradient", 10.0, low=0.0),
        ),
        "scale": Fault("pushes a multiple of its gradient", scaled, Parameter("the factor", -100.0)),
        "little_is_enough": Fault(
            "pushes the mean of all ranks' gradients minus a few standard deviations",
            little_is_enough,
            Parameter("the number of standard deviations", 1.5),
        ),
        "zero": Fault("pushes zeros", zero),
        "sleeper": Fault(
            "is honest at first, and later pushes its gradient with the sign turned",
            sleeper,
            Parameter("the step at which it turns", math.nan, low=0.0),
        ),
        "intermittent": Fault(
            "pushes its gradient with the sign turned in random stretches of steps",
            intermittent,
            Parameter("the length of a stretch in steps", 20.0, low=1.0),
        ),
        "colluding": Fault(
            "pushes the same vector against the others as all who collude",
            colluding,
            Parameter("its length in honest gradients", 1.0),
        ),
        "copycat": Fault("pushes the gradient of one bad batch, the same as all copycats", copycat),
        "liar": Fault("trains on flipped labels and claims accuracy 1", liar),
        "nan": Fault("pushes NaN", not_a_number),
        "slow": Fault("pushes late", honest_but_slow, Parameter("the delay in seconds", 1.0, low=0.0), delays=True),
    }
)
"""Every fault by the name that `--fault` takes, ready for use with its default number."""
