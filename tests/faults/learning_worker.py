"""A worker or validator without TensorFlow that trains a small perceptron: any slip changes all later values.

A batch is drawn from (rank, step), and a gradient depends on every bit of the values: what was computed at other
values, of another step, or counted twice, shows in the final ones.

    python -m tests.faults.learning_worker ADDRESS --rank R [--role validator] [--inject FAULTS]
"""

import argparse
import sys

import numpy as np

import worker
from benchmarks.numpy_mlp import compute, initial_values
from protocol.errors import WeighmasterError
from protocol.messages import AUTO_RANK

INPUTS, BATCH, SEED = 12, 8, 5


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a batch: the label is where the first ten features are greatest."""
    inputs = np.random.default_rng([SEED, rank - AUTO_RANK, step]).normal(size=(BATCH, INPUTS)).astype(np.float32)
    return inputs, np.argmax(inputs[:, :10], axis=1).astype(np.int32)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--role", default="worker")
    parser.add_argument("--inject")
    options = parser.parse_args()
    name = options.role if options.rank is None else f"worker-{options.rank}"
    try:
        with worker.connect(
            options.address,
            initial_values(INPUTS, SEED),
            rank=options.rank,
            name=name,
            role=options.role,
            inject=options.inject,
            connect_timeout=60,
            reconnect_timeout=60,
            on_event=say,
        ) as server:
            say(f"joined as rank {server.rank}")
            update = server.pull()
            while not update.done:
                made = compute(update.values, *batch(server.rank, update.step))
                update = server.push(made.gradients, loss=made.loss, accuracy=made.accuracy, examples=BATCH)
            say(f"done at step {update.step}")
    except WeighmasterError as error:
        print(f"light-worker: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
