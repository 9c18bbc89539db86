"""A worker without TensorFlow each of whose pushes leaves a bit of its own in the values.

The variable begins as 0, and the server subtracts what is pushed, so the values say which pushes were applied: one
that was lost leaves its bit 0, and one that was applied twice carries into the next. The bit is chosen by rank and
step, or, where each push counts for itself, by process and number of the push.

    python -m tests.faults.marked_worker ADDRESS --rank R [--by-push SLOT] [--commanded] [--inject FAULTS]

Commanded, it reads a line before each push: `push` is one push, `go` all that follow.
"""

import argparse
import sys

import numpy as np

import worker
from protocol.errors import WeighmasterError
from worker.client import Server

PLACES = 17
"""Bits of a rank or process; those of three fit into a float64."""


def mark(slot: int, number: int) -> float:
    """Return what a push adds to the sum of all that were applied."""
    assert number < PLACES and slot < 3
    return 2.0 ** (slot * PLACES + number)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--by-push", type=int, metavar="SLOT")
    parser.add_argument("--commanded", action="store_true")
    parser.add_argument("--inject")
    parser.add_argument("--variable", default="w")
    parser.add_argument("--size", type=int, default=1000, help="elements of the variable")
    options = parser.parse_args()
    try:
        with worker.connect(
            options.address,
            {options.variable: np.zeros(options.size)},
            rank=options.rank,
            name=f"worker-{options.rank}",
            inject=options.inject,
            connect_timeout=30,
            reconnect_timeout=30,
            on_event=say,
        ) as server:
            say(f"joined as rank {server.rank}")
            train(server, options)
    except WeighmasterError as error:
        print(f"light-worker: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def train(server: Server, options: argparse.Namespace) -> None:
    update, number = server.pull(), 0
    say(f"begins with step {update.step}")
    commanded = options.commanded
    while not update.done:
        if commanded:
            line = sys.stdin.readline().strip()
            if not line:  # the test is over
                return
            commanded = line != "go"
        by_push = options.by_push is not None
        bit = mark(options.by_push, number) if by_push else mark(server.rank, update.step)
        update = server.push({options.variable: np.full(options.size, bit)}, loss=1.0, examples=8)
        number += 1
        values = update.values[options.variable]
        assert (values == values[0]).all(), "values of different steps in one answer"
        restarted = ", restarted" if update.restarted else ""
        say(f"answered with step {update.step}{restarted}{'' if update.applied else ', not applied'}")
    say(f"done at step {update.step}")


if __name__ == "__main__":
    sys.exit(main())
