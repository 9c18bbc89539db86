"""What a finished cell gave, and the file that keeps it: a line of JSON each, so that a grid can go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkError
from benchmarks.robustness_cells import Cell

MUTED_BELOW = 0.05
"""Bad workers are muted when all their weights together are below this."""


@dataclass(frozen=True)
class Muting:
    """How the bad workers lost their weight after half of the steps, when sleepers turn.

    Attributes:
        first: rounds until they were first muted, 0 if they were in the round of the turn; None: never.
        lasting: rounds until they were muted to the end of the run; None: never.
        mean_bad_weight: of the second half, all bad workers together.
    """

    first: int | None
    lasting: int | None
    mean_bad_weight: float


@dataclass(frozen=True)
class Outcome:
    """What one run gave.

    Attributes:
        accuracy: on the test data, mean over the last five of every tenth step; of a run that diverged, at its end.
        final_accuracy: at the last values alone.
        done: False when it diverged.
        seconds: for the whole run, with the start of its server.
        refused: pushes of workers that the server did not count.
        validated: rounds with a validator gradient.
        muting: None if the server kept no weights, or nobody is bad.
    """

    accuracy: float
    final_accuracy: float
    done: bool
    seconds: float
    refused: int = 0
    validated: int = 0
    muting: Muting | None = None


Results = dict[Cell, Outcome]


def muting_of(bad_weight: Mapping[int, float], turn: int) -> Muting | None:
    """Measure how bad workers were muted.

    Args:
        bad_weight: sum of the bad workers' weights by step.
        turn: first step that counts.

    Returns:
        None if no step from `turn` on is known.
    """
    after = sorted(step for step in bad_weight if step >= turn)
    if not after:
        return None
    first = next((step - turn for step in after if bad_weight[step] < MUTED_BELOW), None)
    loud = [step for step in after if bad_weight[step] >= MUTED_BELOW]
    lasting = None if loud and loud[-1] == after[-1] else (loud[-1] + 1 - turn if loud else 0)
    return Muting(first, lasting, sum(bad_weight[step] for step in after) / len(after))


def line_of(cell: Cell, outcome: Outcome) -> str:
    """Return the line of a finished cell, newline included."""
    return json.dumps({"cell": cell.as_dict(), "outcome": asdict(outcome)}) + "\n"


def parse(text: str, name: str = "results") -> Results:
    """Read lines back; of a cell that is there twice the later counts, and half a line at the end is dropped.

    Raises:
        BenchmarkError: a line before the end is no result.
    """
    results: Results = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            results[Cell(**row["cell"])] = _outcome(row["outcome"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not text.endswith("\n"):
                break  # the run was killed while it wrote
            raise BenchmarkError(f"{name}, line {number}, is not a result: {error}") from error
    return results


def _outcome(fields: dict[str, Any]) -> Outcome:
    muting = fields.pop("muting")
    return Outcome(**fields, muting=None if muting is None else Muting(**muting))


class ResultFile:
    """Finished cells, kept in a file or, without one, in memory only.

    Attributes:
        results: all that is known.
    """

    def __init__(self, path: Path | None) -> None:
        """Read what is there already.

        Raises:
            BenchmarkError: the file holds something else.
        """
        self._path = path
        self.results: Results = {}
        if path is not None and path.exists():
            text = path.read_text()
            self.results = parse(text, str(path))
            if text and not text.endswith("\n"):
                path.write_text("".join(line_of(cell, outcome) for cell, outcome in self.results.items()))

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep a finished cell."""
        self.results[cell] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line_of(cell, outcome))
