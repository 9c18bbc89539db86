"""What must hold all along a soak: the history is whole, the server does not grow, nobody waits for ever. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tally import TOLERANCE, tally_of_rounds

GROWTH = 1.05
"""Resident memory may be so many times its largest value of the first minutes."""

SPARE = 2
"""Threads and descriptors above those of the first minutes, beside two for each worker: a connection that was lost
may stay until it is given up, while the next is there already."""


@dataclass(frozen=True)
class Sample:
    """What the system says of a server.

    Attributes:
        at_s: seconds since the beginning.
        life: which start of the server this is, from 1.
        age_s: seconds since that start.
        resident_bytes: memory.
        threads: of the process.
        descriptors: open files and sockets.
    """

    at_s: float
    life: int
    age_s: float
    resident_bytes: int
    threads: int
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """The largest figures after the first minutes, against the largest in them.

    Attributes:
        resident: ratio of the memory.
        threads: how many more.
        descriptors: how many more.
        base_bytes: largest memory in the first minutes.
        peak_bytes: largest memory after them.
    """

    resident: float
    threads: int
    descriptors: int
    base_bytes: int
    peak_bytes: int

    def problems(self, workers: int) -> list[str]:
        """Return what grows."""
        spare, found = 2 * workers + SPARE, []
        if self.resident > GROWTH:
            found.append(
                f"the server's memory grows: {self.peak_bytes / 1e6:.1f} MB after the first minutes, "
                f"{self.base_bytes / 1e6:.1f} MB in them"
            )
        for what, more in (("threads", self.threads), ("descriptors", self.descriptors)):
            if more > spare:
                found.append(f"the server's {what} grow: {more} more than in the first minutes")
        return found


def growth(samples: Sequence[Sample], settled_s: float) -> Growth | None:
    """Compare what came after `settled_s` with what came before; None without samples of both.

    Maxima over all lives, because servers start anew: a young one is smaller than an old one.
    """
    early = [sample for sample in samples if sample.at_s <= settled_s]
    late = [sample for sample in samples if sample.at_s > settled_s]
    if not early or not late:
        return None
    base, peak = (max(s.resident_bytes for s in part) for part in (early, late))
    return Growth(
        resident=peak / base,
        threads=max(s.threads for s in late) - max(s.threads for s in early),
        descriptors=max(s.descriptors for s in late) - max(s.descriptors for s in early),
        base_bytes=base,
        peak_bytes=peak,
    )


def read_rounds(text: str) -> list[dict[str, Any]]:
    """Return the lines of `rounds.jsonl`; the last one may be torn, by a kill or because it is being written.

    Raises:
        ValueError: another one cannot be read.
    """
    lines = text.split("\n")
    return [json.loads(line) for line in lines[:-1]]


def history_problem(rounds: Sequence[Mapping[str, Any]], workers: int, all_take_part: bool) -> str:
    """Return in what the rounds are no whole history; empty if each step from 0 on is there once and in order.

    Args:
        rounds: lines of `rounds.jsonl`.
        workers: of the run.
        all_take_part: whether each round must hold every rank.
    """
    everyone = list(range(workers))
    for number, line in enumerate(rounds):
        if line["step"] != number:
            return f"line {number} of rounds.jsonl is of step {line['step']}"
        if line["refused"] or not line["ranks"]:
            return f"step {number} has ranks {line['ranks']}, of which {line['refused']} were refused"
        if all_take_part and line["ranks"] != everyone:
            return f"step {number} has ranks {line['ranks']} instead of all {workers}"
    return ""


def values_problem(rounds: Sequence[Mapping[str, Any]], tally: NDArray[Any]) -> str:
    """Return in what the final tallies [W] are not what the rounds say; empty if they agree."""
    told = tally_of_rounds(rounds, tally.size)
    if np.abs(told - tally).max() > TOLERANCE:
        return f"the final tallies are {tally.tolist()}, and rounds.jsonl says {told.tolist()}"
    return ""


@dataclass
class Patience:
    """Notices when somebody waits for too long.

    Attributes:
        limit_s: how long nothing may happen.
    """

    limit_s: float

    def __post_init__(self) -> None:
        self._since: dict[str, float] = {}

    def moved(self, who: str, now_s: float) -> None:
        """Somebody got on, or is not to be watched before now."""
        self._since[who] = max(now_s, self._since.get(who, now_s))

    def problem(self, now_s: float) -> str:
        """Return who has waited for too long; empty if nobody has."""
        for who, since_s in self._since.items():
            if now_s - since_s > self.limit_s:
                return f"{who} has not got on for {now_s - since_s:.0f} s"
        return ""
