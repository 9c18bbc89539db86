"""How gradients lie to each other: inner products of rows of the slab, in float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.errors import LocalProtocolError
from ps.storage.runs import TrainableRun, gram_calls, piece_count, projection_calls
from ps.storage.thread_team import ThreadTeam


class Comparison:
    """Measures rows of a store's slab; like the store's updates, from one thread at a time.

    Args:
        trainable: the runs that are compared.
        row_count: rows of the slab, references included.
        has_moment: whether the optimizer keeps a first moment to compare with.
        team: the threads that share the work.
        elements: of all values, from which the team knows how much there is to do.
    """

    def __init__(
        self, trainable: Sequence[TrainableRun], row_count: int, has_moment: bool, team: ThreadTeam, elements: int
    ) -> None:
        self._trainable = trainable
        self._row_count = row_count
        self._has_moment = has_moment
        self._team = team
        self._elements = elements

    def inner_products(
        self, slots: Sequence[int], references: Sequence[int] = (), with_momentum: bool = False
    ) -> NDArray[np.float64]:
        """Return the inner products of all pairs of gradients, over the trainable variables.

        They are sums in float64, the same bits for any number of threads. Time: one pass over the rows, and n^2 / 2
        products of each parameter, which hide behind the memory up to about six rows.

        Args:
            slots: rows that hold usable gradients, in rank order.
            references: rows that hold gradients to compare with.
            with_momentum: compare with the optimizer's first moment too.

        Returns:
            float64 [n, n], symmetric: slots, references, moment, in this order.

        Raises:
            LocalProtocolError: a row does not exist, or the optimizer keeps no moment.
        """
        rows = self.rows((*slots, *references), with_momentum)
        count = rows.size + with_momentum
        parts = np.zeros((piece_count(self._trainable), count, count))
        self._team.run(gram_calls(self._trainable, rows, with_momentum, parts), self._elements)
        upper: NDArray[np.float64] = parts.sum(axis=0)
        both = upper + upper.T
        np.fill_diagonal(both, upper.diagonal())
        return both

    def projections(
        self,
        slots: Sequence[int],
        coefficients: Sequence[float],
        references: Sequence[int] = (),
        with_momentum: bool = False,
    ) -> NDArray[np.float64]:
        """Return the inner products of all gradients with a few vectors: linear in their number.

        The few are the references, the moment, and the total: the sum of coefficient times gradient, which is
        formed in float64 and nowhere kept. Time: one pass over the rows.

        Args:
            slots: rows that hold usable gradients, in rank order.
            coefficients: of the total, one per slot.
            references: rows that hold gradients to compare with.
            with_momentum: compare with the optimizer's first moment too.

        Returns:
            float64 [n + 1, k + 1]: slots, references, moment, total (rows); references, moment, total (columns).

        Raises:
            LocalProtocolError: a row does not exist, the optimizer keeps no moment, or the lengths differ.
        """
        if len(slots) != len(coefficients):
            raise LocalProtocolError("a total needs one coefficient for each slot")
        rows = self.rows((*slots, *references), with_momentum)
        few = len(references) + with_momentum
        parts = np.zeros((piece_count(self._trainable), len(slots) + few + 1, few + 1))
        counts = np.array(coefficients, np.float64)
        self._team.run(projection_calls(self._trainable, rows, with_momentum, counts, parts), self._elements)
        return np.asarray(parts.sum(axis=0))

    def rows(self, rows: Sequence[int], with_momentum: bool = False) -> NDArray[np.int64]:
        """Return the rows as int64 [k]: what is handed to loops that check nothing.

        Raises:
            LocalProtocolError: a row does not exist, or the optimizer keeps no moment.
        """
        if with_momentum and not self._has_moment:
            raise LocalProtocolError("this optimizer keeps no first moment to compare with")
        bad = [row for row in rows if not 0 <= row < self._row_count]
        if bad:
            raise LocalProtocolError(f"the store has {self._row_count} rows, and none of number {bad[0]}")
        return np.array(rows, np.int64)
