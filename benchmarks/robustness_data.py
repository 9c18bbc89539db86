"""The two data sets of the robustness benchmark, and who holds which examples.

This file is also a `--dataset` for real workers: `benchmarks/robustness_data.py:fashion`.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.batches import Shard, hold_out
from worker.datasets import load_dataset
from worker.definitions import Dataset

FASHION_IMAGES = 10_000

FOREIGN_EVERY = 10
"""In unlike shards every tenth example goes to a worker that does not own its class."""


def fashion(data_dir: Path | None) -> Dataset:
    """Load Fashion-MNIST with its first 10,000 training images only."""
    whole = load_dataset("fashion_mnist", data_dir)
    return Dataset(
        whole.train_features[:FASHION_IMAGES],
        whole.train_labels[:FASHION_IMAGES],
        whole.test_features,
        whole.test_labels,
    )


def load(name: str, data_dir: Path | None) -> Dataset:
    """Load `digits` or `fashion`.

    Raises:
        ConfigurationError: its files are missing.
    """
    return fashion(data_dir) if name == "fashion" else load_dataset("digits", None)


def save(dataset: Dataset, directory: Path) -> None:
    """Write the arrays as `.npy` files, so that many processes can share one copy in memory."""
    directory.mkdir()
    for part in fields(dataset):
        np.save(directory / f"{part.name}.npy", getattr(dataset, part.name))


def opened(directory: Path) -> Dataset:
    """Return what `save` wrote, mapped into memory."""
    return Dataset(*(np.load(directory / f"{part.name}.npy", mmap_mode="r") for part in fields(Dataset)))


def shard_of(labels: NDArray[np.int32], rank: int, shards: int, seed: int, trusted: int, alike: bool) -> Shard:
    """Return the training examples of one rank; none of them is trusted.

    Args:
        labels: int32 [N] of the training data.
        rank: whose.
        shards: how many there are.
        seed: of the run.
        trusted: examples held out of all shards.
        alike: whether shards are drawn alike, as the product does it. If not, each class belongs to one rank, which
            holds nine tenths of it, and the other ranks share the rest.
    """
    if alike:
        return Shard.of(len(labels), rank, shards, seed, trusted)
    _, rest = hold_out(len(labels), trusted, seed)
    ids = rest[holders(labels[rest], shards, seed) == rank]
    ids.flags.writeable = False
    return Shard(ids, rank, shards, seed, len(rest), trusted)


def holders(labels: NDArray[np.int32], shards: int, seed: int) -> NDArray[np.int64]:
    """Return the rank that holds each example when shards are unlike, int64 [N]."""
    classes = int(labels.max()) + 1
    owner_of_class = np.empty(classes, np.int64)
    owner_of_class[np.random.default_rng([seed, 0x6E6F]).permutation(classes)] = np.arange(classes) % shards
    owner = owner_of_class[labels]
    position = np.arange(len(labels))
    stranger = (owner + 1 + position // FOREIGN_EVERY % max(shards - 1, 1)) % shards
    return np.where(position % FOREIGN_EVERY == 0, stranger, owner)


def trusted_examples(dataset: Dataset, trusted: int, seed: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return features [trusted, ...] and labels int32 [trusted] of the examples that no shard has."""
    ids, _ = hold_out(len(dataset.train_labels), trusted, seed)
    return dataset.train_features.take(ids, axis=0), dataset.train_labels.take(ids)
