"""A worker or validator without TensorFlow that pushes a constant (rank + 1); codes and sentences are as of ours.

Run by the tests of this folder: python light_worker.py HOST:PORT [options]. Each event is a line of JSON or text.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import worker
from protocol.errors import WeighmasterError

POLL_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--name", default="")
    parser.add_argument("--role", default="worker")
    parser.add_argument("--gradient", type=float, help="what to push instead of rank + 1")
    parser.add_argument("--state", default="", help="the variable that is state")
    parser.add_argument("--change", type=float, default=0.0, help="what to push for it")
    parser.add_argument("--token")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--variables", type=json.loads, default={"w": [3]}, help="JSON object, name -> shape")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--examples", type=int, default=1, help="size of each batch")
    parser.add_argument("--loss", type=float, default=1.0)
    parser.add_argument("--die-after", type=int, help="end at once, without a word, after so many pushes")
    parser.add_argument("--linger", type=Path, help="when done, hold the connection until this file is there")
    parser.add_argument("--connect-timeout", type=float, default=60.0)
    parser.add_argument("--reconnect-timeout", type=float, default=60.0)
    options = parser.parse_args()
    try:
        train(options)
    except WeighmasterError as error:
        print(f"light-worker: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def train(options: argparse.Namespace) -> None:
    with worker.connect(
        options.address,
        {name: np.zeros(shape, options.dtype) for name, shape in options.variables.items()},
        rank=options.rank,
        name=options.name,
        role=options.role,
        token=options.token,
        state=[options.state] if options.state else [],
        seed=options.seed,
        connect_timeout=options.connect_timeout,
        reconnect_timeout=options.reconnect_timeout,
        on_event=say,
    ) as server:
        say(f"joined as rank {server.rank}")
        update = server.pull()
        say(f"pulled step {update.step}")
        pushed = 0
        while not update.done:
            constant = server.rank + 1 if options.gradient is None else options.gradient
            gradients = {name: np.full_like(value, constant) for name, value in update.values.items()}
            if options.state:
                gradients[options.state].fill(options.change)
            update = server.push(gradients, loss=options.loss, examples=options.examples)
            pushed += 1
            if pushed == options.die_after:
                os._exit(1)
        say(f"done at step {update.step} after {pushed} pushes")
        say(json.dumps({name: value.ravel()[:3].tolist() for name, value in update.values.items()}))
        while options.linger and not options.linger.exists():
            time.sleep(POLL_S)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
