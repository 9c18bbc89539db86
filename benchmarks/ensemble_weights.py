"""What a member's weight does under Adam: three members start alike, see the same batches, and weigh differently.

Run `python -m benchmarks.ensemble_weights`; it takes a few seconds and needs scikit-learn for digits. The gradients
go through the server's own store. Printed is how far each member has moved, and how far it ends from the first.
"""

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from protocol.arena import Arena
from protocol.ensemble import as_member
from protocol.tensors import Layout, Manifest, VariableSpec
from ps.rules.ensemble import ActsOn, member_factors
from ps.storage.member_store import MemberStore, MemberWeights
from ps.storage.optimizers import Adam
from ps.storage.store_config import StoreConfig

WEIGHTS = (1.0, 1 / 3, 0.01)
STEPS, BATCH, RATE, HIDDEN = 300, 32, 0.001, 64

SHAPES = {"kernel1": (64, HIDDEN), "bias1": (HIDDEN,), "kernel2": (HIDDEN, 10), "bias2": (10,)}

Values = dict[str, NDArray[np.float64]]


def gradients_of(values: Values, features: NDArray[np.float64], labels: NDArray[np.int64]) -> Values:
    """Return the gradients of the mean cross entropy of a network of two layers."""
    hidden = np.maximum(features @ values["kernel1"] + values["bias1"], 0.0)
    scores = hidden @ values["kernel2"] + values["bias2"]
    error = np.exp(scores - scores.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1.0
    error /= len(labels)
    inner = (error @ values["kernel2"].T) * (hidden > 0)
    found = (features.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0))
    return dict(zip(SHAPES, found, strict=True))


def moved(acts_on: ActsOn) -> tuple[list[float], list[float]]:
    """Train; return how far each member moved, and how far it ended from the first (Euclidean)."""
    digits = load_digits()
    features, labels = digits.data / 16.0, digits.target
    manifest = Manifest(tuple(VariableSpec(name, shape, "float64") for name, shape in SHAPES.items()))
    parts = [Layout.of(as_member(manifest, rank)) for rank in range(len(WEIGHTS))]
    store = MemberStore(parts, StoreConfig(Adam(), slots=len(WEIGHTS)))
    random = np.random.default_rng(0)
    start = {name: random.normal(size=shape) / np.sqrt(shape[0]) for name, shape in SHAPES.items()}
    for rank, part in enumerate(parts):
        arena = Arena.zeros(part)
        arena.fill({f"member_{rank}/{name}": value for name, value in start.items()})
        store.initialise_part(rank, arena.buffer[: part.values_bytes])
    own, steps = member_factors(np.array(WEIGHTS), acts_on)
    weights = MemberWeights(range(len(WEIGHTS)), WEIGHTS, own.tolist(), steps.tolist())
    for _ in range(STEPS):
        batch = random.integers(0, len(labels), BATCH)
        for rank, part in enumerate(parts):
            now = {name: store.export()[f"member_{rank}/{name}"] for name in SHAPES}
            arena = Arena(part, store.row(rank))
            found = gradients_of(now, features[batch], labels[batch])
            arena.fill({f"member_{rank}/{name}": value for name, value in found.items()})
        store.apply_members(weights, RATE)
    ends = [
        np.concatenate([store.export()[f"member_{r}/{n}"].ravel() for n in SHAPES]) for r in range(len(WEIGHTS))
    ]
    store.close()
    first = np.concatenate([value.ravel() for value in start.values()])
    away = [float(np.linalg.norm(end - first)) for end in ends]
    apart = [float(np.linalg.norm(end - ends[0])) for end in ends]
    return away, apart


def main() -> None:
    """Print the table."""
    print("weight acts on   weight   moved   from the member of weight 1")
    for acts_on in ActsOn:
        for weight, away, apart in zip(WEIGHTS, *moved(acts_on), strict=True):
            print(f"{acts_on:14} {weight:8.2f} {away:7.3f}   {apart:.2g}")


if __name__ == "__main__":
    main()
