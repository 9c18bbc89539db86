"""The values that a client is sent: which version, which pieces of it, and that they are held back for now."""

import threading
from functools import partial
from typing import Any

from numpy.typing import NDArray

from protocol.messages import Values
from ps.agreement import Agreement
from ps.checkpointing import Checkpointing
from ps.connections.session import Session
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import Reply
from ps.modes import Mode
from ps.settings.config import ServerConfig
from ps.storage.store import Store
from ps.storage.versions import Hold

HELD_UP = "it held up an update: it was too slow to take the values that it had asked for"
"""Why a reader is cut off whose version of the values is wanted for a new one."""


class Replies:
    """Makes the answers to pulls and pushes; called by the sessions that send them.

    Args:
        config: what the operator asked for.
        epoch: of this start of the server.
        lock: of the server's state.
        course: where the run stands.
        agreement: has the store, once there is one.
        mode: knows whose a variable is.
        checkpoints: for which values are held back, or None.
    """

    def __init__(
        self,
        config: ServerConfig,
        epoch: int,
        lock: threading.RLock,
        course: Coordinator,
        agreement: Agreement,
        mode: Mode,
        checkpoints: Checkpointing | None,
    ) -> None:
        self._steps = config.steps
        self._epoch = epoch
        self._lock = lock
        self._course = course
        self._agreement = agreement
        self._mode = mode
        self._checkpoints = checkpoints

    @property
    def _store(self) -> Store:
        assert self._agreement.store is not None
        return self._agreement.store

    @property
    def are_held_back(self) -> bool:
        """Whether nobody may get the current values yet, since their checkpoint is still to be written."""
        return self._checkpoints is not None and self._checkpoints.holds_back

    def values_for(self, session: Session, reply: Reply) -> tuple[Values, Hold, list[memoryview]] | None:
        """Pin the current values for a reply, and say which pieces of them the client gets.

        Whoever sends them releases the hold. Nothing here may wait for the lock while it holds a version: an update
        that waits for the release of versions has the lock.

        Returns:
            None while they are held back; the session is nudged when they no longer are.
        """
        store = self._store
        with self._lock:
            if self.are_held_back:
                return None
            member = self._course.registry.of(session.number)
            hold = store.hold(partial(session.cut, HELD_UP))
        pieces = self._mode.pieces_of(hold.version.buffer, None if member is None else member.rank)
        return self._values(hold.version.step, reply), hold, pieces

    def smooth_values(self, reply: Reply, out: NDArray[Any]) -> Values | None:
        """Copy the moving average of the values into `out` (uint8 [values_bytes]) for an evaluator's reply.

        Returns:
            None, as `values_for` does.
        """
        store = self._store
        with self._lock:
            if self.are_held_back:
                return None
        step = store.evaluation_values(out).step
        with self._lock:  # asked after the copy: an update that came before it is known here
            return None if self.are_held_back else self._values(step, reply)

    def _values(self, step: int, reply: Reply) -> Values:
        done = step >= self._steps
        return Values(self._epoch, step, reply.seq, reply.applied, reply.reason, done)
