"""What a round means in each mode: one set of variables for all, or a network of its own for each worker.

The server is the same for both. All methods are called under its lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ps.agreement import Agreement
from ps.closing import Closed, RoundCloser
from ps.coordination.instructions import CloseRound
from ps.ensemble_mode import EnsembleMode
from ps.monitoring.metrics import TestResult
from ps.storage.store import Store


class Mode(Protocol):
    """What a server needs to know of its mode."""

    def initialise(self, rank: int, values: NDArray[np.uint8]) -> None:
        """Take over the initial values that a rank was asked for."""

    def problem_of(self, rank: int, labels: bytes | None) -> str:
        """Return why what a rank has pushed cannot be used, beside its gradient; or nothing."""

    def close(self, closing: CloseRound, names: Sequence[str]) -> Closed:
        """Make values(step + 1) of values(step) and the round's gradients."""

    def skip(self) -> None:
        """Close a void round."""

    def learn(self) -> None:
        """Let what judges gradients learn from the last round."""

    def pieces_of(self, buffer: memoryview, rank: int | None) -> list[memoryview]:
        """Return the pieces of the values that a rank gets, or, with None, somebody without one."""

    def voted(self) -> TestResult | None:
        """Return what the members' votes on the test set have come to, if they vote."""

    def vote_now(self) -> None:
        """Vote with the answers that are there, if there are any."""

    def summary(self) -> Mapping[str, Any]:
        """Return what the summary of the run has more, ready for JSON."""


class SharedMode:
    """One set of variables: the rule makes one gradient of all."""

    def __init__(self, agreement: Agreement, closer: RoundCloser) -> None:
        self._agreement = agreement
        self._closer = closer

    @property
    def _store(self) -> Store:
        assert self._agreement.store is not None
        return self._agreement.store

    def initialise(self, rank: int, values: NDArray[np.uint8]) -> None:
        """Take over the initial values: whoever was asked has all of them."""
        self._store.initialise(values)

    def problem_of(self, rank: int, labels: bytes | None) -> str:
        """Return nothing: a push has nothing beside its gradient."""
        return ""

    def close(self, closing: CloseRound, names: Sequence[str]) -> Closed:
        """Have the rule judge the round, and the store apply what it says."""
        return self._closer.close(self._store, closing, names)

    def skip(self) -> None:
        """Close a void round."""
        self._store.skip()

    def learn(self) -> None:
        """Let the rule learn."""
        self._closer.learn()

    def pieces_of(self, buffer: memoryview, rank: int | None) -> list[memoryview]:
        """Return all: everybody gets the same."""
        return [buffer]

    def voted(self) -> TestResult | None:
        """Return None: nobody votes."""
        return None

    def vote_now(self) -> None:
        """Do nothing."""

    def summary(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}


class MembersMode:
    """A network for each worker: the master weighs their answers, and each owner's gradient by them."""

    def __init__(self, ensemble: EnsembleMode) -> None:
        self._ensemble = ensemble

    def initialise(self, rank: int, values: NDArray[np.uint8]) -> None:
        """Take over the initial values of a member's own part."""
        assert self._ensemble.store is not None
        self._ensemble.store.initialise_part(rank, values)

    def problem_of(self, rank: int, labels: bytes | None) -> str:
        """Return why a member's answers cannot be used, or nothing."""
        return self._ensemble.problem_of(rank, labels)

    def close(self, closing: CloseRound, names: Sequence[str]) -> Closed:
        """Have the master weigh the answers, and the store apply each owner's gradient."""
        return Closed(weights=self._ensemble.close(closing))

    def skip(self) -> None:
        """Close a void round."""
        self._ensemble.skip()

    def learn(self) -> None:
        """Let the master learn."""
        self._ensemble.learn()

    def pieces_of(self, buffer: memoryview, rank: int | None) -> list[memoryview]:
        """Return what a member holds; all to somebody whose connection has been replaced: it will not arrive."""
        assert self._ensemble.store is not None
        return [buffer] if rank is None else self._ensemble.store.part_of(buffer, rank)

    def voted(self) -> TestResult | None:
        """Return what the weighted vote has come to."""
        if self._ensemble.votes is None:
            return None
        step, vote = self._ensemble.votes
        return TestResult(step, float("nan"), vote.weighted)

    def vote_now(self) -> None:
        """Vote with the answers that are there, if there are any."""
        self._ensemble.vote_now()

    def summary(self) -> Mapping[str, Any]:
        """Return what became of the members and of their votes."""
        return {"ensemble": self._ensemble.summary()}

    # ---- what only members do --------------------------------------------------------------------------

    def show(self, rank: int, payload: NDArray[np.uint8], labels: bytes) -> str:
        """Take a member's logits on the open batch; return why they cannot be used, or nothing."""
        return self._ensemble.show(rank, payload, labels)

    def weigh(self, ranks: Sequence[int]) -> None:
        """Weigh the logits that these ranks have shown."""
        self._ensemble.weigh(ranks)

    def weights_for(self, rank: int) -> NDArray[np.uint8]:
        """Return the payload that tells a rank what its examples weigh."""
        return self._ensemble.weights_for(rank)

    def tested(self, rank: int, step: int, payload: NDArray[np.uint8], voters: Iterable[int]) -> None:
        """Take a member's logits on the test set; vote when those of all voters are there."""
        self._ensemble.tested(rank, step, payload, voters)
