"""Who trains on what, and when: shards of the training data, and the batch of each step.

Every worker computes the same partition by itself, on machines whose NumPy may differ. All draws are
therefore sorts of raw Philox numbers, which NumPy promises to keep, and not `Generator` methods, which may
change.

Source of the counter-based generator: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigurationError
from worker.definitions import Dataset

SEED_LIMIT = 1 << 64
"""Seeds are below this: one half of the key of Philox."""

_KEY = int.from_bytes(b"wm batch", "little")
"""The other half, so that no other user of Philox with the same seed draws the same numbers."""


OWN_TRUSTED_BATCH = 100
"""Examples of a validator's batch when its whole data set is trusted: as many as are held out by default."""


class _Purpose(IntEnum):
    PARTITION = 0
    PASS = 1
    TRUSTED = 2


def _permutation(size: int, seed: int, purpose: _Purpose, rank: int = 0, pass_index: int = 0) -> NDArray[np.int64]:
    """Return a permutation of 0..size-1, the same on every machine for the same arguments."""
    counter = np.array([0, pass_index, rank, purpose], np.uint64)
    key = np.array([seed, _KEY], np.uint64)
    numbers = np.random.Philox(counter=counter, key=key).random_raw(size)
    return np.argsort(numbers, kind="stable").astype(np.int64, copy=False)


def hold_out(n: int, trusted_examples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the trusted examples, which belong to no shard.

    Args:
        n: number of training examples.
        trusted_examples: how many to hold out, 0 to n - 1.
        seed: the run's seed, 0 to 2**64 - 1.

    Returns:
        The trusted ids, and all others in the drawn order; both int64, together a permutation of 0..n-1.

    Raises:
        ConfigurationError: the seed is out of range, or nothing would be left to train on.
    """
    _check_seed(seed)
    if trusted_examples < 0:
        raise ConfigurationError(f"{trusted_examples} trusted examples cannot be held out: give 0 or more")
    if trusted_examples >= n:
        raise ConfigurationError(
            f"{trusted_examples:,} trusted examples cannot be held out of {_examples(n)}, because none "
            f"would be left to train on: lower --trusted-examples or bring more data"
        )
    order = _permutation(n, seed, _Purpose.PARTITION)
    return order[:trusted_examples], order[trusted_examples:]


def _check_seed(seed: int) -> None:
    if not 0 <= seed < SEED_LIMIT:
        raise ConfigurationError(f"the seed {seed} is out of range: give one from 0 to 2**64 - 1")


@dataclass(frozen=True, eq=False)
class Shard:
    """The training examples of one rank, and the order in which it takes them. Made by `of` or `own`.

    Shards of a common data set are disjoint, differ in size by at most one, and together hold every example that
    is not trusted; a data set that is a worker's own is one shard as a whole. A pass takes each example at most
    once, in an order of its own, and leaves out what does not fill a batch.

    Attributes:
        ids: int64 [size], positions in the training arrays, in the drawn order; read-only.
        rank: whose shard it is.
        shards: into how many the data set is divided; 1 of a worker's own.
        seed: the run's seed.
        sharded_examples: examples of all shards together.
        trusted_examples: examples that were held out of all shards.
        is_own: whether the data set is this rank's alone.
    """

    ids: NDArray[np.int64]
    rank: int
    shards: int
    seed: int
    sharded_examples: int
    trusted_examples: int
    is_own: bool = False
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, n_examples: int, rank: int, shards: int, seed: int, trusted_examples: int) -> "Shard":
        """Compute the shard of one rank.

        Args:
            n_examples: number of training examples.
            rank: 0 to shards - 1.
            shards: number of shards; it does not follow the live workers.
            seed: the run's seed, 0 to 2**64 - 1.
            trusted_examples: how many examples are held out of all shards.

        Raises:
            ConfigurationError: an argument is out of range, or there are fewer examples than shards.
        """
        if shards < 1:
            raise ConfigurationError(f"the data cannot be divided into {shards} shards: give 1 or more")
        if not 0 <= rank < shards:
            raise ConfigurationError(
                f"there is no shard for rank {rank}: with {_count(shards, 'shard')}, ranks go from 0 to "
                f"{shards - 1}; give the worker one of these, or start the server with more --shards"
            )
        _, rest = hold_out(n_examples, trusted_examples, seed)
        if len(rest) < shards:
            raise ConfigurationError(
                f"{_examples(len(rest))} cannot be divided into {shards:,} shards, because some would "
                f"be empty: use fewer workers (--shards), lower --trusted-examples, or bring more data"
            )
        ids = np.ascontiguousarray(rest[rank::shards])
        ids.flags.writeable = False
        return cls(ids, rank, shards, seed, len(rest), trusted_examples)

    @classmethod
    def own(cls, n_examples: int, rank: int, seed: int) -> "Shard":
        """Take a data set as a whole, which no other worker has.

        The rank enters into the order, so that workers with data sets of one size do not take them in step.

        Args:
            n_examples: number of training examples, 1 or more.
            rank: of the worker, 0 or more.
            seed: the run's seed, 0 to 2**64 - 1.

        Raises:
            ConfigurationError: the seed is out of range.
        """
        _check_seed(seed)
        ids = _permutation(n_examples, seed, _Purpose.PARTITION, rank)
        ids.flags.writeable = False
        return cls(ids, rank, 1, seed, n_examples, 0, is_own=True)

    def of_rank(self, rank: int) -> "Shard":
        """Return the shard of another rank of this data set; of a worker's own what that rank would take of it."""
        if rank == self.rank:
            return self
        n_examples = self.sharded_examples + self.trusted_examples
        if self.is_own:
            return Shard.own(n_examples, rank, self.seed)
        return Shard.of(n_examples, rank, self.shards, self.seed, self.trusted_examples)

    def batches_per_pass(self, batch_size: int) -> int:
        """Return how many whole batches the shard gives, at least 1.

        Raises:
            ConfigurationError: the batch is empty or larger than the shard.
        """
        if batch_size < 1:
            raise ConfigurationError(f"a batch cannot have {batch_size} examples: give --batch-size 1 or more")
        if batch_size > len(self.ids):
            share = "own data" if self.is_own else "shard"
            cure = " or bring more data" if self.is_own else ", use fewer workers, or bring more data"
            raise ConfigurationError(
                f"a batch of {batch_size:,} is larger than the {share} of rank {self.rank}, which has "
                f"{_examples(len(self.ids))}: lower --batch-size to {len(self.ids)} or less{cure}"
            )
        return len(self.ids) // batch_size

    def batch_ids(self, step: int, batch_size: int) -> NDArray[np.int64]:
        """Return the examples of one step: a pure function of (seed, rank, step) and the sizes.

        Args:
            step: the step of the values at which the gradient is computed, 0 or more; any order of calls.
            batch_size: examples in a batch.

        Returns:
            int64 [batch_size], positions in the training arrays; read-only.

        Raises:
            ConfigurationError: the batch is empty or larger than the shard.
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        pass_index, batch = divmod(step, self.batches_per_pass(batch_size))
        return self._order_of(pass_index)[batch * batch_size : (batch + 1) * batch_size]

    def _order_of(self, pass_index: int) -> NDArray[np.int64]:
        order = self._orders.get(pass_index)
        if order is None:
            order = self.ids[_permutation(len(self.ids), self.seed, _Purpose.PASS, self.rank, pass_index)]
            order.flags.writeable = False
            self._orders.clear()
            self._orders[pass_index] = order
        return order

    def describe(self, batch_size: int) -> str:
        """Return the line that a worker prints when it starts: its share, its batches, what is held out."""
        batches = _count(self.batches_per_pass(batch_size), "batch", "batches")
        first = ", ".join(str(example) for example in self.ids[:3])
        share = f"rank {self.rank} of {self.shards}: {len(self.ids):,} of {_examples(self.sharded_examples)}"
        if self.is_own:
            share = f"rank {self.rank}: all {_examples(len(self.ids))} of a data set of its own"
        line = f"{share}, {batches} of {batch_size:,} a pass; first ids {first}"
        if self.trusted_examples:
            line += f"; {_count(self.trusted_examples, 'trusted example')} held out"
        return line


@dataclass(frozen=True, eq=False)
class TrustedBatches:
    """The examples on which a validator computes its gradients. Made by `TrustedBatches.of`.

    Attributes:
        ids: int64 [trusted], positions in the training arrays, in the drawn order; read-only.
        batch_size: examples of one gradient.
        seed: the run's seed.
        sharded_examples: examples of the same data set that workers may train on.
    """

    ids: NDArray[np.int64]
    batch_size: int
    seed: int
    sharded_examples: int

    @classmethod
    def of(cls, n_examples: int, trusted_examples: int, batch_size: int | None, seed: int) -> "TrustedBatches":
        """Take the examples that every worker with the same seed and data leaves out of its shard.

        Args:
            n_examples: number of training examples.
            trusted_examples: how many are held out; 0: all examples are trusted, because no worker has them.
            batch_size: None: all trusted examples, or `OWN_TRUSTED_BATCH` of a data set that is trusted as a whole.
            seed: the run's seed, 0 to 2**64 - 1.

        Raises:
            ConfigurationError: an argument is out of range, or the batch is larger than what is trusted.
        """
        trusted, rest = hold_out(n_examples, trusted_examples, seed)
        ids, sharded = (trusted, len(rest)) if trusted_examples else (rest, 0)
        if batch_size is None:
            batch_size = len(ids) if trusted_examples else min(OWN_TRUSTED_BATCH, len(ids))
        if not 0 < batch_size <= len(ids):
            raise ConfigurationError(
                f"a validator's batch cannot have {batch_size:,} examples, because {len(ids):,} are trusted: give "
                f"--batch-size 1 to {len(ids)}, or leave it out"
            )
        ids = np.ascontiguousarray(ids)
        ids.flags.writeable = False
        return cls(ids, batch_size, seed, sharded)

    def batch_ids(self, step: int) -> NDArray[np.int64]:
        """Return the examples of one step: all of them, or as many as fill a batch, drawn by (seed, step).

        Returns:
            int64 [batch_size], positions in the training arrays, none twice; read-only.

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        if self.batch_size == len(self.ids):
            return self.ids
        order = _permutation(len(self.ids), self.seed, _Purpose.TRUSTED, pass_index=step)
        drawn = self.ids[order[: self.batch_size]]
        drawn.flags.writeable = False
        return drawn

    def describe(self) -> str:
        """Return the line that a validator prints when it starts: what it trusts, and its batches."""
        first = ", ".join(str(example) for example in self.ids[:3])
        among = f"{_count(len(self.ids), 'trusted example')}, which no worker with this seed and data trains on"
        if not self.sharded_examples:
            among = f"all {_examples(len(self.ids))}, which no worker may train on"
        return f"validator: batches of {self.batch_size:,} from {among}; first ids {first}"


def gather(dataset: Dataset, ids: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Copy one batch out of the training arrays.

    Args:
        dataset: validated arrays.
        ids: int64 [B], positions in the training arrays.

    Returns:
        Features [B, ...] in the dtype of the data set and labels int32 [B], both C-contiguous copies.
    """
    return dataset.train_features.take(ids, axis=0), dataset.train_labels.take(ids)


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _examples(number: int) -> str:
    return _count(number, "training example")
