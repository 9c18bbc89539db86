"""A worker without TensorFlow whose gradients are arithmetic, and that fails where it is told to.

Rank r pushes (r + 1) / 2^step in every element, so the values of each step are known exactly, and a push that was
lost, or applied twice, shows in bits of its own. It checks all values that it gets, element by element.

    python -m tests.faults.light_worker ADDRESS --rank R ...
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable

import numpy as np

import worker
from protocol.deadlines import Patience
from protocol.errors import WeighmasterError
from protocol.messages import Pull, Push
from worker.client import Server, Update

START = 8.0
"""Initial value of every element of "w"; those of "b" have the other sign."""

NEVER_S = 600.0


def gradient(rank: int, step: int) -> float:
    return (rank + 1) / 2**step


def value_at(step: int, workers: int, ranks_of: Callable[[int], list[int]] | None = None) -> float:
    """What "w" must be at a step: SGD with a learning rate of 1 on the mean.

    Args:
        step: of the values.
        workers: how many push.
        ranks_of: ranks whose push counts in a round; all of them if None.
    """
    value = START
    for number in range(step):
        ranks = list(range(workers)) if ranks_of is None else ranks_of(number)
        value -= sum(gradient(rank, number) for rank in ranks) / max(len(ranks), 1)
    return value


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    options = parse()
    variables = {"w": np.full(options.size, START, np.float32), "b": np.full(3, -START, np.float32)}
    try:
        with worker.connect(
            options.address,
            variables,
            rank=options.rank,
            name=options.name,
            role=options.role,
            connect_timeout=options.connect_timeout,
            reconnect_timeout=options.reconnect_timeout,
            on_event=say,
        ) as server:
            say(f"joined as rank {server.rank}")
            if options.never_read:
                never_read(server, options.pull)
            else:
                train(server, options)
    except WeighmasterError as error:
        print(f"light worker: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def train(server: Server, options: argparse.Namespace) -> None:
    update = server.pull()
    while not update.done:
        check(update, options)
        step = update.step
        fail(server, update, options)
        value = float("nan") if step in options.nan_at or options.nan_always else gradient(server.rank, step)
        gradients = {"w": np.full(options.size, value, np.float32), "b": np.full(3, -value, np.float32)}
        if step in options.die_in_push:
            push_and_die(server, gradients, part=0.5)
        if step in options.die_after_push:
            push_and_die(server, gradients, part=1.0)
        update = server.push(gradients, loss=1.0, accuracy=0.5, examples=8)
        say(f"answered with step {update.step}{', restarted' if update.restarted else ''}")
    check(update, options)
    say(f"done at step {update.step}")


def fail(server: Server, update: Update, options: argparse.Namespace) -> None:
    """Wait, or be stopped, before the push of this step, if the test wants so."""
    if update.step in options.pause_at:
        options.pause_at.remove(update.step)
        say(f"paused at step {update.step}")
        sys.stdin.readline()
    if update.step in options.stop_at:
        options.stop_at.remove(update.step)
        say(f"stopped at step {update.step}")
        os.kill(os.getpid(), signal.SIGSTOP)


def check(update: Update, options: argparse.Namespace) -> None:
    """Fail loudly on values that arithmetic does not give."""
    if options.workers:
        expected = np.float32(value_at(update.step, options.workers))
        w, b = update.values["w"], update.values["b"]
        if not (w == expected).all() or not (b == -expected).all():
            raise AssertionError(f"values({update.step}) are {w[:3]}, {b}, not {expected}")


def push_and_die(server: Server, gradients: dict[str, np.ndarray], part: float) -> None:
    """Send this part of the payload of a push, and end as a crash would, before any answer can be read."""
    link = server._link
    assert link is not None and server._epoch is not None
    payload = b"".join(bytes(buffer) for buffer in server._scattered(gradients))
    push = Push(server._epoch, server._step, server._seq + 1, 1.0, 0.5, 8)
    sent = payload[: int(part * len(payload))]
    link.channel.send([link.connection.send(push), sent], Patience(len(payload), NEVER_S))
    say(f"dies after {len(sent)} of {len(payload)} bytes")
    os.kill(os.getpid(), signal.SIGKILL)


def never_read(server: Server, min_step: int) -> None:
    """Ask for values and read none of them: whoever sends them is stuck."""
    link = server._link
    assert link is not None
    link.send(Pull(min_step))
    link.wait(NEVER_S)
    say("does not read")
    sys.stdin.readline()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--name", default="")
    parser.add_argument("--role", default="worker")
    parser.add_argument("--size", type=int, default=1000, help="elements of the larger variable")
    parser.add_argument("--workers", type=int, default=0, help="check all values against so many workers")
    for option in ("--pause-at", "--stop-at", "--nan-at", "--die-in-push", "--die-after-push"):
        parser.add_argument(option, type=int, nargs="+", default=[])
    parser.add_argument("--nan-always", action="store_true")
    parser.add_argument("--never-read", action="store_true")
    parser.add_argument("--pull", type=int, default=0, help="step to ask for, with --never-read")
    parser.add_argument("--connect-timeout", type=float, default=60.0)
    parser.add_argument("--reconnect-timeout", type=float, default=60.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
