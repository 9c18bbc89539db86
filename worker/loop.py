"""The worker's loop: pull, compute, push, in the order in which it happens. Needs no TensorFlow."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.batches import gather
from worker.client import Update
from worker.definitions import Dataset

EVALUATION_BATCH = 500
"""Examples in one run of an evaluation; the result does not depend on it but for rounding."""

_NUMBERS = re.compile(r"\d+")

REPEAT_S = 10.0
"""Shortest time between two lines about the same kind of wait, such as those of one round after the other."""


class Computed(Protocol):
    """What a trainer returns; see `worker.graph.Gradients`."""

    @property
    def loss(self) -> float:
        """Mean loss of the batch."""

    @property
    def accuracy(self) -> float | None:
        """Share of right answers, or None."""

    @property
    def examples(self) -> int:
        """Size of the batch."""

    @property
    def buffers(self) -> list[memoryview]:
        """The payload of the push."""


class Computes(Protocol):
    """What the loop needs of a trainer; see `worker.graph.Trainer`."""

    def compute(
        self,
        values: NDArray[np.uint8],
        features: NDArray[Any],
        labels: NDArray[np.int32],
        draw: tuple[int, int, int],
    ) -> Computed:
        """Compute loss and gradients of one batch at `values`."""


class Measured(Protocol):
    """What an evaluator returns; see `worker.graph.Evaluation`."""

    @property
    def loss(self) -> float:
        """Mean loss."""

    @property
    def accuracy(self) -> float | None:
        """Share of right answers, or None."""

    @property
    def examples(self) -> int:
        """How many were measured."""


class Measures(Protocol):
    """What the loop needs of an evaluator; see `worker.graph.Evaluator`."""

    def evaluate(
        self, values: NDArray[np.uint8], features: NDArray[Any], labels: NDArray[np.int32], batch_size: int
    ) -> Measured:
        """Measure the model at `values`."""


class Pushes(Protocol):
    """What the loop needs of the server; see `worker.client.Server`."""

    def pull(self, min_step: int = 0) -> Update:
        """Return current values."""

    def push_buffers(
        self, payload: Sequence[memoryview | bytes], *, loss: float | None, accuracy: float | None, examples: int
    ) -> Update:
        """Push a gradient, return the next values."""

    def report(self, step: int, loss: float, accuracy: float | None, examples: int) -> None:
        """Report a measurement."""


Say = Callable[[str], None]

StepGradient = Callable[[NDArray[np.uint8], int], Computed]
"""Computes what is pushed for a step, from the values of that step (an arena's buffer) and its number."""


def on_batches(
    trainer: Computes, dataset: Dataset, batch_ids: Callable[[int], NDArray[np.int64]], seed: int, rank: int
) -> StepGradient:
    """Compute the gradient of the batch of each step.

    Args:
        trainer: computes one batch.
        dataset: where the batches come from.
        batch_ids: examples of a step, int64 [B].
        seed: of the run; with rank and step it names the random numbers inside the model.
        rank: of this worker; `AUTO_RANK` for a validator.
    """

    def compute(values: NDArray[np.uint8], step: int) -> Computed:
        features, labels = gather(dataset, batch_ids(step))
        return trainer.compute(values, features, labels, (seed, rank, step))

    return compute


def train(server: Pushes, gradient_of: StepGradient, say: Say) -> Update:
    """Push gradients until the run is done; return the final values.

    What is pushed for a step is a function of (seed, rank, step) and its values alone, so a worker that starts
    again, or is sent back to an earlier step, computes the same gradients again. A validator's loop is the same:
    the server lets it wait until a round is to be validated.
    """
    update = server.pull()
    while not update.done:
        gradients = gradient_of(update.arena.buffer, update.step)
        answered = server.push_buffers(
            gradients.buffers, loss=gradients.loss, accuracy=gradients.accuracy, examples=gradients.examples
        )
        if answered.restarted:
            _say_restarted(answered, say)
        elif not answered.applied:
            say(f"the push of step {update.step} did not count: {answered.reason}")
        update = answered
    return update


def evaluate(server: Pushes, evaluator: Measures, dataset: Dataset, every: int, say: Say) -> Measured:
    """Measure values on the test data every `every` steps until the run is done; return the last measurement.

    Values of a server that has started anew are measured whatever their step is: what was reported of later ones is
    not known to it.
    """
    update = server.pull()
    while True:
        measured = evaluator.evaluate(
            update.arena.buffer, dataset.test_features, dataset.test_labels, EVALUATION_BATCH
        )
        server.report(update.step, measured.loss, measured.accuracy, measured.examples)
        accuracy = "" if measured.accuracy is None else f", test accuracy {measured.accuracy:.4f}"
        say(f"step {update.step}: test loss {measured.loss:.4f}{accuracy}")
        if update.done:
            return measured
        update = server.pull(update.step + every)
        if update.restarted:
            _say_restarted(update, say)


def _say_restarted(update: Update, say: Say) -> None:
    say(f"the server has started anew: going on from step {update.step}")


class WaitLog:
    """Passes on what the server says it waits for, but not once a second: a new kind of wait at once."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._said: tuple[str, float] | None = None

    def __call__(self, waiting: str) -> None:
        """Take note of a wait, and say so if nothing was said of its kind for a while."""
        now, kind = self._clock(), _NUMBERS.sub("", waiting.partition(" since ")[0])
        if self._said is None or self._said[0] != kind or now - self._said[1] >= REPEAT_S:
            self._said = kind, now
            self._say(f"waiting: {waiting}")
