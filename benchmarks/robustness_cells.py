"""The cells of the robustness grid: what one run is, and which runs a question needs. Pure."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

RULES = (
    "mean",
    "clipped_mean",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "cosine_trust",
    "evidence",
    "master",
)
VALIDATED_RULES = ("cosine_trust", "evidence", "master")
"""Rules that use a validator; of these, `evidence` and `master` work without one too."""

FAULTS = (
    "flipped_labels",
    "random_labels",
    "noisy_inputs",
    "sign_flip",
    "gaussian_noise",
    "scale",
    "little_is_enough",
    "zero",
    "sleeper",
    "intermittent",
    "colluding",
    "copycat",
    "liar",
    "nan",
)
HONEST_FAULTS = ("flipped_labels", "random_labels", "noisy_inputs")
"""Faults of workers that mean well: they tell the accuracy that they see."""

NONE = "none"
ABSENT = "absent"
"""In place of a fault: the bad ranks do not take part at all, and the mean is over the good ones."""

DATASETS = ("digits", "fashion")
SEEDS = (11, 12, 13)
WORKERS = 5
BAD = (2, 4)
TRUSTED = 100
NEVER = 0
"""In place of a distance between validated rounds: there is no validator."""

EVERY = (1, 10)
NUMPY, TENSORFLOW = "numpy", "tensorflow"
EVALUATE_EVERY = 10
EVALUATIONS = 5


@dataclass(frozen=True)
class Training:
    """How a data set is trained on: rounds, learning rate, examples per batch of each worker."""

    steps: int
    learning_rate: float
    batch_size: int = 32

    def evaluated_steps(self) -> tuple[int, ...]:
        """Return the steps whose values are measured: the last five of every tenth."""
        first = self.steps - (EVALUATIONS - 1) * EVALUATE_EVERY
        return tuple(range(first, self.steps + 1, EVALUATE_EVERY))


TRAININGS = {"digits": Training(400, 2e-3), "fashion": Training(300, 1e-3)}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        dataset: `digits` or `fashion`.
        rule: aggregation rule.
        fault: of the bad ranks, `none` or `absent`; several kinds joined by `+` are handed out in turn.
        bad: how many ranks are bad.
        validator_every: mean distance of validated rounds, 0 without a validator.
        alike: whether the workers' shards are drawn alike, or each holds a few classes.
        seed: of data, initial values, faults and the choice of bad ranks.
        workers: ranks, bad ones included.
        trusted: examples of the validator, held out of all shards in any case.
        framework: what the workers compute in.
    """

    dataset: str
    rule: str
    fault: str
    bad: int
    validator_every: int
    alike: bool
    seed: int
    workers: int = WORKERS
    trusted: int = TRUSTED
    framework: str = NUMPY

    @property
    def training(self) -> Training:
        """How it is trained."""
        return TRAININGS[self.dataset]

    @property
    def bad_ranks(self) -> tuple[int, ...]:
        """Return the bad ranks, ascending: drawn by the seed, the same for all rules and faults."""
        return tuple(sorted(random.Random(f"bad ranks {self.seed}").sample(range(self.workers), self.bad)))

    def fault_of(self, rank: int) -> str:
        """Return the fault of a rank, or `none`."""
        if rank not in self.bad_ranks:
            return NONE
        kinds = self.fault.split("+")
        return kinds[self.bad_ranks.index(rank) % len(kinds)]

    @property
    def clean(self) -> "Cell":
        """The run that this one is measured against: the mean over the good workers only."""
        fault = ABSENT if self.bad else NONE
        return replace(self, rule="mean", fault=fault, validator_every=NEVER, framework=NUMPY)

    @property
    def told_faulty(self) -> int | None:
        """How many bad workers the rule is told: the true number, or the largest that it allows; at least 1.

        Trimmed mean needs W > 2f, Krum and multi-Krum W >= 2f + 3. None: the rule is not told.
        """
        limit = {"trimmed_mean": (self.workers - 1) // 2}
        limit |= dict.fromkeys(("krum", "multi_krum"), (self.workers - 3) // 2)
        return max(1, min(self.bad, limit[self.rule])) if self.rule in limit else None

    def describe(self) -> str:
        """Return the cell in words."""
        kind = "nobody bad" if not self.bad else f"{self.bad} of {self.workers} {self.fault}"
        asked = f" K={self.validator_every}" if self.validator_every else ""
        data = "" if self.alike else ", unlike shards"
        others = "" if self.trusted == TRUSTED else f", {self.trusted} trusted"
        made = "" if self.framework == NUMPY else f", {self.framework}"
        return f"{self.dataset}, {self.rule}{asked}, {kind}{data}{others}{made}, seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """What to vary; the grid is the product, with the clean run of every cell."""

    rules: Sequence[str] = RULES
    faults: Sequence[str] = FAULTS
    bad: Sequence[int] = (0, *BAD)
    every: Sequence[int] = EVERY
    datasets: Sequence[str] = DATASETS
    seeds: Sequence[int] = SEEDS
    alike: Sequence[bool] = (True, False)
    workers: int = WORKERS
    trusted: int = TRUSTED


def distances(rule: str, every: Sequence[int]) -> tuple[int, ...]:
    """Return the distances of validated rounds that make sense for a rule."""
    if rule not in VALIDATED_RULES:
        return (NEVER,)
    return tuple(k for k in every if k != NEVER or rule != "cosine_trust")


def situations(choice: Choice) -> list[tuple[str, int, bool]]:
    """Return (fault, bad, alike): nobody bad with shards of both kinds, each fault with shards that are alike."""
    nobody = [(NONE, 0, alike) for alike in choice.alike] if 0 in choice.bad else []
    return [*nobody, *((fault, bad, True) for bad in choice.bad if bad for fault in choice.faults)]


def grid(choice: Choice) -> list[Cell]:
    """Return the cells of a choice, each once, with the clean run before those that need it."""
    cells: list[Cell] = []
    for seed in choice.seeds:
        for fault, bad, alike in situations(choice):
            for dataset in choice.datasets:
                first = Cell(dataset, "mean", fault, bad, NEVER, alike, seed, choice.workers, choice.trusted)
                cells.append(first.clean)
                for rule in choice.rules:
                    for k in distances(rule, choice.every):
                        cells.append(replace(first, rule=rule, validator_every=k))
    return once(cells)


def claims(seeds: Sequence[int] = SEEDS, datasets: Sequence[str] = DATASETS) -> list[Cell]:
    """Return the cells behind every figure that is claimed of the master."""
    with_validator = Choice(rules=("master", "cosine_trust", "evidence"), seeds=seeds, datasets=datasets)
    without = replace(
        with_validator, rules=("master", "evidence", "mean"), faults=HONEST_FAULTS, bad=(0, 2), every=(NEVER,)
    )
    return sorted(once([*grid(with_validator), *grid(without)]), key=lambda cell: seeds.index(cell.seed))


TENSORFLOW_CHECK = (
    ("mean", NONE, 0, NEVER),
    ("mean", "flipped_labels", 2, NEVER),
    ("master", "sleeper", 2, 1),
    ("master", "noisy_inputs", 4, 10),
)
"""Rule, fault, bad ranks and validation of the cells that are repeated with TensorFlow workers."""


def tensorflow_pairs(seeds: Sequence[int], datasets: Sequence[str] = DATASETS) -> list[Cell]:
    """Return a few cells, each with NumPy workers and with TensorFlow workers."""
    pairs = [
        Cell(dataset, rule, fault, bad, k, True, seed, framework=framework)
        for seed in seeds
        for dataset in datasets
        for rule, fault, bad, k in TENSORFLOW_CHECK
        for framework in (NUMPY, TENSORFLOW)
    ]
    return once(pairs)


def once(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells in order, each once."""
    return list(dict.fromkeys(cells))
