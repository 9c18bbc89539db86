"""What is remembered of each worker by name, however ranks and the number of workers change."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Rows = NDArray[np.intp]

MOST_ABSENT = 256
"""Names kept beside those of the present round: whoever may invent names must not fill the server's memory."""

_FIRST_CAPACITY = 16


class Ledger:
    """One row of numbers per name, and one number per pair of names.

    A row is found by name with `rows`; a name that is new gets a row of its own with the start values. When more
    than `MOST_ABSENT` absent names are remembered, the one that has been away longest is forgotten: should it come
    back, it is new. The arrays are replaced when they grow: fetch them anew after each call of `rows`.

    Attributes:
        columns: [capacity] float64 each, by the names of `starts`.
        pairs: [capacity, capacity] float64, for each pair of rows; the identity at the start.
        serials: [capacity] int64, a number that no other name ever had, -1 for a free row.
    """

    def __init__(self, starts: Mapping[str, float]) -> None:
        self._starts = dict(starts)
        self._rows: dict[str, int] = {}
        self._last: tuple[tuple[str, ...], Rows] = ((), np.empty(0, np.intp))
        self._round = 0
        self._next_serial = 0
        self.columns: dict[str, Vector] = {column: np.empty(0) for column in starts}
        self.pairs: Matrix = np.empty((0, 0))
        self.serials: NDArray[np.int64] = np.empty(0, np.int64)
        self._seen: NDArray[np.int64] = np.empty(0, np.int64)
        self._grow(_FIRST_CAPACITY)

    def __len__(self) -> int:
        """Return how many names are remembered."""
        return len(self._rows)

    def __getitem__(self, column: str) -> Vector:
        """Return a column, [capacity]."""
        return self.columns[column]

    def row(self, name: str) -> int | None:
        """Return the row of a name, or None if it is not remembered."""
        return self._rows.get(name)

    def rows(self, names: tuple[str, ...]) -> Rows:
        """Return the rows of the names that take part in a round, [names], and enter those that are new."""
        self._round += 1
        if names != self._last[0]:
            self._last = (names, np.array([self._find(name) for name in names], np.intp))
        rows = self._last[1]
        self._seen[rows] = self._round
        self._forget_absent(len(names))
        return rows

    def _find(self, name: str) -> int:
        row = self._rows.get(name)
        if row is not None:
            return row
        free = np.flatnonzero(self.serials < 0)
        if not free.size:
            self._grow(2 * self.serials.size)
            free = np.flatnonzero(self.serials < 0)
        row = int(free[0])
        self._rows[name] = row
        self.serials[row] = self._next_serial
        self._next_serial += 1
        for column, start in self._starts.items():
            self.columns[column][row] = start
        self.pairs[row, :] = self.pairs[:, row] = 0.0
        self.pairs[row, row] = 1.0
        return row

    def _grow(self, capacity: int) -> None:
        more = capacity - self.serials.size
        for column, values in self.columns.items():
            self.columns[column] = np.concatenate([values, np.full(more, self._starts[column])])
        pairs = np.eye(capacity)
        pairs[: self.serials.size, : self.serials.size] = self.pairs
        self.pairs = pairs
        self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
        self.serials = np.concatenate([self.serials, np.full(more, -1, np.int64)])

    def _forget_absent(self, present: int) -> None:
        while len(self._rows) > present + MOST_ABSENT:
            oldest = min(self._rows, key=self._age)
            self.serials[self._rows.pop(oldest)] = -1

    def _age(self, name: str) -> tuple[int, int]:
        """Order names by when they were seen last, then by when they came: a restored ledger forgets the same."""
        row = self._rows[name]
        return int(self._seen[row]), int(self.serials[row])

    def state(self) -> dict[str, Any]:
        """Return everything as arrays and plain numbers; a free row has the name None."""
        names: list[str | None] = [None] * self.serials.size
        for name, row in self._rows.items():
            names[row] = name
        return {
            "names": names,
            "round": self._round,
            "next_serial": self._next_serial,
            "seen": self._seen.copy(),
            "serials": self.serials.copy(),
            "pairs": self.pairs.copy(),
            "columns": {column: values.copy() for column, values in self.columns.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; rows stay what they were."""
        names: Sequence[str | None] = state["names"]
        self._rows = {name: row for row, name in enumerate(names) if name is not None}
        self._last = ((), np.empty(0, np.intp))
        self._round = int(state["round"])
        self._next_serial = int(state["next_serial"])
        self._seen = np.array(state["seen"], np.int64)
        self.serials = np.array(state["serials"], np.int64)
        self.pairs = np.array(state["pairs"], np.float64)
        self.columns = {column: np.array(state["columns"][column], np.float64) for column in self._starts}
