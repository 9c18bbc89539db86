"""Be one or more light workers of a run: push the gradients of `benchmarks.tally`, check every answer, tell of it.

Each rank has a thread and a connection of its own; the server cannot tell them from processes. Standard output gets
a line of JSON now and then, or for each answer; the first answer that is wrong ends the process with code 1.
"""

import json
import os
import random
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import click

import worker
from benchmarks.tally import Counting, Tally
from protocol.errors import WeighmasterError

CONNECT_TIMEOUT_S = 60.0


class WrongAnswerError(Exception):
    """What the server has answered cannot be; the text says in what."""


@dataclass(frozen=True)
class Manner:
    """How a worker goes about it.

    Attributes:
        port: of the server on this machine.
        tally: what to push and to check.
        pause_s: length of a step's computation.
        longest_pause_s: if it is more, lengths are drawn between the two.
        say_s: seconds between two lines; 0: a line for each answer.
        reconnect_timeout_s: how long to look for a lost server.
    """

    port: int
    tally: Tally
    pause_s: float
    longest_pause_s: float
    say_s: float
    reconnect_timeout_s: float

    def drawn_pause_s(self, chance: random.Random) -> float:
        """Return the length of the next computation."""
        return chance.uniform(self.pause_s, max(self.pause_s, self.longest_pause_s))


class Voice:
    """Writes lines, of any thread, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, **line: Any) -> None:
        """Write a line of JSON."""
        with self._lock:
            print(json.dumps(line), flush=True)


def work(rank: int, manner: Manner, voice: Voice) -> None:
    """Take part in a run until it is done, as one rank.

    Raises:
        WrongAnswerError: values are not what they must be.
        WeighmasterError: the run has ended otherwise, or the server is lost.
    """
    tally = manner.tally
    gradients = tally.gradients(rank)
    chance, said_at = random.Random(rank), 0.0
    with worker.connect(
        f"127.0.0.1:{manner.port}",
        variables=tally.initial_values(),
        rank=rank,
        connect_timeout=CONNECT_TIMEOUT_S,
        reconnect_timeout=manner.reconnect_timeout_s,
        on_event=lambda text: print(f"rank {rank}: {text}", file=sys.stderr, flush=True),
    ) as server:
        update, pushes, before = server.pull(), 0, 0.0
        while True:
            now, own = time.monotonic_ns(), float(update.values["tally"][rank])
            problem = tally.problem(update.values, update.step)
            if pushes and not update.restarted:
                problem = problem or tally.progress_problem(rank, before, own, update.applied)
            if problem:
                raise WrongAnswerError(problem)
            if update.done or update.restarted or now / 1e9 - said_at >= manner.say_s:
                said_at = now / 1e9
                voice.say(
                    rank=rank,
                    step=update.step,
                    at_ns=now,
                    pushes=pushes,
                    applied=update.applied,
                    restarted=update.restarted,
                    done=update.done,
                )
            if update.done:
                return
            if (pause_s := manner.drawn_pause_s(chance)) > 0:
                time.sleep(pause_s)
            tally.mark(gradients, update.step)
            before, pushes = own, pushes + 1
            update = server.push(gradients, loss=1.0, examples=1)


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--ranks", required=True, help="Of this process, as in 0,1,2.")
@click.option("--workers", type=int, required=True, help="Ranks of the run.")
@click.option("--parameters", type=int, required=True)
@click.option("--dtype", default="float64")
@click.option("--counting", type=click.Choice([str(counting) for counting in Counting]), default="all")
@click.option("--pause", default=0.0, help="Seconds that a step's computation takes.")
@click.option("--longest-pause", default=0.0, help="If it is more, the pauses are drawn between the two.")
@click.option("--say-every", default=0.0, help="Seconds between two lines; 0: each answer.")
@click.option("--reconnect-timeout", default=120.0)
def main(
    port: int,
    ranks: str,
    workers: int,
    parameters: int,
    dtype: str,
    counting: str,
    pause: float,
    longest_pause: float,
    say_every: float,
    reconnect_timeout: float,
) -> None:
    """Work as some ranks of a run until it is done."""
    tally = Tally(workers, parameters, Counting(counting), dtype)
    manner = Manner(port, tally, pause, longest_pause, say_every, reconnect_timeout)
    voice, mine = Voice(), [int(rank) for rank in ranks.split(",")]
    with ThreadPoolExecutor(len(mine)) as pool:
        futures = {pool.submit(work, rank, manner, voice): rank for rank in mine}
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            error = future.exception()
            if error is None:
                continue
            voice.say(rank=futures[future], problem=f"{type(error).__name__}: {error}")
            sys.stderr.flush()
            # Not by an exception: the other threads would be waited for.
            os._exit(int(error.exit_code) if isinstance(error, WeighmasterError) else 1)


if __name__ == "__main__":
    main()
