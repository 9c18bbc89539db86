"""A member's loop in ensemble mode: as the worker's, and it shows its answers too. Needs no TensorFlow."""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.ensemble import Weighting
from worker.batches import Shard, gather
from worker.client import Update
from worker.definitions import Dataset
from worker.loop import EVALUATION_BATCH, Computed, Say


class Answered(Computed, Protocol):
    """What a member's trainer returns; see `worker.graph.Gradients`."""

    @property
    def logits(self) -> NDArray[Any] | None:
        """[B, C], or None when they were shown before."""


class Learns(Protocol):
    """What the loop needs of a trainer; see `worker.graph.Trainer`."""

    def compute(
        self,
        values: NDArray[np.uint8],
        features: NDArray[Any],
        labels: NDArray[np.int32],
        draw: tuple[int, int, int],
        weights: NDArray[Any] | None = None,
    ) -> Answered:
        """Compute loss and gradients of one batch at `values`."""

    def answer(
        self,
        values: NDArray[np.uint8],
        features: NDArray[Any],
        labels: NDArray[np.int32],
        draw: tuple[int, int, int],
    ) -> NDArray[Any]:
        """Return the logits of the batch alone."""


class TakesTests(Protocol):
    """What the loop needs of an evaluator; see `worker.graph.Evaluator`."""

    def logits(
        self, values: NDArray[np.uint8], features: NDArray[Any], labels: NDArray[np.int32], batch_size: int
    ) -> NDArray[Any]:
        """Return the logits of many examples."""


class Master(Protocol):
    """What the loop needs of the server; see `worker.client.Server`."""

    def pull(self, min_step: int = 0) -> Update:
        """Return current values."""

    def weigh(self, logits: NDArray[Any], labels: NDArray[np.int32]) -> NDArray[Any] | Update:
        """Return the weights of a batch's examples, or newer values."""

    def push_buffers(
        self,
        payload: list[memoryview | bytes],
        *,
        loss: float | None,
        accuracy: float | None,
        examples: int,
        logits: NDArray[Any] | None = None,
        labels: NDArray[np.int32] | None = None,
    ) -> Update:
        """Push a gradient, return the next values."""

    def vote(self, logits: NDArray[Any], labels: NDArray[np.int32]) -> None:
        """Give logits on the test set."""


def member_seed(seed: int, rank: int) -> int:
    """Return the seed of a member's initial values, 0 to 2**63 - 1: members that start alike would stay alike."""
    digest = hashlib.blake2b(struct.pack("<2Q", seed % 2**64, rank), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, eq=False)
class MemberRun:
    """One member's part in a run.

    Attributes:
        server: the master.
        trainer: computes gradients, and logits.
        tester: computes logits of the test set; None: this member does not vote.
        dataset: the same for all members.
        shard: the whole of its training data, the same for all members: a batch is a function of (seed, step).
        batch_size: B, the same for all members.
        seed: of the run.
        rank: of this member.
        weighting: of batches or examples.
        vote_every: steps between two votes; there is one at the end too.
        say: told what should be known.
    """

    server: Master
    trainer: Learns
    tester: TakesTests | None
    dataset: Dataset
    shard: Shard
    batch_size: int
    seed: int
    rank: int
    weighting: Weighting
    vote_every: int
    say: Say

    def train(self) -> Update:
        """Push gradients and answers until the run is done; return the final values."""
        update = self.server.pull()
        while True:
            if update.step % self.vote_every == 0 or update.done:
                self._vote(update)
            if update.done:
                return update
            answered = self._step(update)
            if answered.restarted:
                self.say(f"the server has started anew: going on from step {answered.step}")
            elif not answered.applied:
                self.say(f"the push of step {update.step} did not count: {answered.reason}")
            update = answered

    def _vote(self, update: Update) -> None:
        if self.tester is not None:
            features, labels = self.dataset.test_features, self.dataset.test_labels
            logits = self.tester.logits(update.arena.buffer, features, labels, EVALUATION_BATCH)
            self.server.vote(logits, labels)

    def _step(self, update: Update) -> Update:
        features, labels = gather(self.dataset, self.shard.batch_ids(update.step, self.batch_size))
        values, draw = update.arena.buffer, (self.seed, self.rank, update.step)
        weights = None
        if self.weighting is Weighting.SAMPLE:
            answer = self.server.weigh(self.trainer.answer(values, features, labels, draw), labels)
            if isinstance(answer, Update):
                return answer
            weights = answer
        gradients = self.trainer.compute(values, features, labels, draw, weights)
        return self.server.push_buffers(
            list(gradients.buffers),
            loss=gradients.loss,
            accuracy=gradients.accuracy,
            examples=gradients.examples,
            logits=gradients.logits,
            labels=labels,
        )
