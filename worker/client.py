"""The worker's side of a run: pull values, push gradients, survive a broken connection.

Needs no TensorFlow. One thread uses a `Server`; a second one of its own keeps it alive with heartbeats.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from protocol.arena import Arena, aligned_empty
from protocol.connection import State
from protocol.deadlines import Deadline
from protocol.ensemble import Weighting, labels_digest, side_payload, side_views
from protocol.errors import (
    LocalProtocolError,
    NetworkError,
    RemoteProtocolError,
    WeighmasterError,
)
from protocol.injection import Point
from protocol.link import Link
from protocol.messages import (
    AskInitial,
    Bye,
    Heartbeat,
    Initial,
    Logits,
    Pull,
    Push,
    Report,
    TestLogits,
    Values,
    Weights,
    Welcome,
)
from protocol.tensors import Layout
from worker.handshake import hear
from worker.reconnect import Caller, ClientConfig
from worker.scatter import Buffers, Scatter

BEAT_GRAIN = 0.1
"""Part of a heartbeat interval by which a beat may be late; the server allows for more before it acts."""

LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class Update:
    """What the server answered.

    Attributes:
        step: of the values.
        arena: the values; good until the second next answer, then its memory is used again.
        applied: whether the push that this answers was taken into its round; the rule may still give it weight 0.
        reason: why not.
        restarted: whether the server has started anew since the last answer (`step` may be smaller).
        done: whether these are the final values.
    """

    step: int
    arena: Arena
    applied: bool
    reason: str
    restarted: bool
    done: bool

    @cached_property
    def values(self) -> dict[str, NDArray[Any]]:
        """All variables by name, as read-only views."""
        return self.arena.views()


class Server:
    """The parameter server as its client sees it; a context manager that says goodbye at the end."""

    def __init__(self, config: ClientConfig) -> None:
        """Connect and shake hands, retrying until `connect_timeout_s`.

        Raises:
            PeerLost: the server could not be reached in time.
            Refused: it said no.
            ConfigurationError: what this client would say of itself cannot be said.
        """
        self._config = config
        self._faults = config.faults
        self._caller = Caller(config)
        self._seq = 0
        self._epoch: int | None = None
        self._step = 0
        self._closing = threading.Event()
        self._link: Link | None = self._caller.call(config.connect_timeout_s)
        self._scatter = Scatter(self.layout)
        self._arenas = [Arena(self.layout, aligned_empty(self.layout.values_bytes)) for _ in range(2)]
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    # ---- what a user calls -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank that the server handed out (-1 for a validator and for an evaluator, which have none)."""
        return self.welcome.rank

    @property
    def welcome(self) -> Welcome:
        """What was agreed at the last handshake: rank, seed, shards, steps, threads."""
        return self._caller.welcome

    @property
    def layout(self) -> Layout:
        """Where each variable, called as here, lies in an arena; in ensemble mode side arrays follow."""
        return self._caller.layout

    @property
    def weighting(self) -> Weighting | None:
        """In ensemble mode, what a weight is of; None in other modes."""
        return self._caller.weighting

    def pull(self, min_step: int = 0) -> Update:
        """Return the current values, once their step is at least `min_step` or the run is done.

        Values of a server that has started anew come at once, whatever their step: it may be smaller.
        """
        return self._ask_values(lambda link: link.send(Pull(min_step)), seq=0)

    def push(
        self,
        gradients: Mapping[str, NDArray[Any]],
        *,
        loss: float | None = None,
        accuracy: float | None = None,
        examples: int = 1,
        logits: NDArray[Any] | None = None,
        labels: NDArray[np.int32] | None = None,
    ) -> Update:
        """Push one gradient and return the next values.

        Args:
            gradients: by name, each with shape and dtype of its variable; of state variables the change
                (integers: the new value). They must have been computed at the values of the last answer.
            loss: mean loss of the batch at those values.
            accuracy: likewise.
            examples: size of the batch.
            logits: [B, C], in ensemble mode with weights of batches.
            labels: int32 [B], in ensemble mode.

        Raises:
            ManifestMismatch: a gradient is missing, unknown, or of another shape or dtype.
            PeerLost: the server has not come back in time.
            Diverged, NoProgress: the run has ended otherwise than by its last step.
        """
        return self.push_buffers(
            self._scattered(gradients),
            loss=loss,
            accuracy=accuracy,
            examples=examples,
            logits=logits,
            labels=labels,
        )

    def push_buffers(
        self,
        payload: Buffers,
        *,
        loss: float | None,
        accuracy: float | None,
        examples: int,
        logits: NDArray[Any] | None = None,
        labels: NDArray[np.int32] | None = None,
    ) -> Update:
        """Push a gradient whose arena is given as buffers in order, gaps included; see `push`."""
        if self._epoch is None:
            raise LocalProtocolError("pull values before the first push")
        if (self.weighting is None) != (labels is None):
            raise LocalProtocolError("labels go with every push in ensemble mode, and with none in other modes")
        if self.layout.sides:
            if logits is None or labels is None:
                raise LocalProtocolError("this mode needs logits and labels with every push")
            payload = [*payload, *side_payload(self.layout, {"logits": logits, "labels": labels})]
        self._seq += 1
        push = Push(
            epoch=self._epoch,
            step=self._step,
            seq=self._seq,
            loss=None if loss is None else float(loss),
            accuracy=None if accuracy is None else float(accuracy),
            examples=int(examples),
            labels=None if labels is None else labels_digest(labels),
        )
        return self._ask_values(lambda link: self._send_push(link, push, payload), self._seq)

    def weigh(self, logits: NDArray[Any], labels: NDArray[np.int32]) -> NDArray[Any] | Update:
        """Show logits to the master before the push of the same step, in ensemble mode with weights of examples.

        Args:
            logits: [B, C], computed at the values of the last answer.
            labels: int32 [B].

        Returns:
            The weight of each example [B], in the dtype of the logits: push the gradient of the mean of weight x
            loss. Or newer values: this step is over, go on from them.

        Raises:
            ManifestMismatch: logits or labels are of another shape or dtype than was offered.
        """
        if self.weighting is not Weighting.SAMPLE or self._epoch is None or self._config.answers is None:
            raise LocalProtocolError("this run does not weigh single examples, or nothing was pulled yet")
        seq = self._seq + 1
        message = Logits(self._epoch, self._step, seq, labels_digest(labels))
        payload = side_payload(self._config.answers.batch, {"logits": logits, "labels": labels})
        answer = self._ask(lambda link: link.send(message, payload), seq)
        if isinstance(answer, Update) and not answer.restarted:
            self._seq = seq  # it was answered as a push would have been, and its number is spent
        return answer

    def vote(self, logits: NDArray[Any], labels: NDArray[np.int32]) -> None:
        """Give this member's logits [M, C] on the test set at the last values; lost ones are not repeated."""
        answers = self._config.answers
        if self.weighting is None or answers is None or not answers.test_examples:
            raise LocalProtocolError("only a member that offered a test set can vote, in ensemble mode")
        if self._link is None or self._epoch is None:
            return
        payload = side_payload(answers.test, {"logits": logits, "labels": labels})
        try:
            self._link.send(TestLogits(self._epoch, self._step), payload)
        except NetworkError as error:
            self._drop(error)

    def report(self, step: int, loss: float, accuracy: float | None, examples: int) -> None:
        """Report a measurement on test data; an evaluator's only way to speak. A lost report is not repeated."""
        if self._link is None or self._epoch is None:
            return
        try:
            share = None if accuracy is None else float(accuracy)
            self._link.send(Report(self._epoch, step, float(loss), share, int(examples)))
        except NetworkError as error:
            self._drop(error)

    def close(self, goodbye: bool = True) -> None:
        """End the connection; without `goodbye` the server treats this worker as lost."""
        self._closing.set()
        link, self._link = self._link, None
        if link is not None:
            try:
                if goodbye:
                    link.send(Bye())
            except (NetworkError, LocalProtocolError):  # it is broken, or the server has ended it already
                goodbye = False
            link.close(LAST_WORDS_S if goodbye else 0.0)
        self._heart.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(goodbye=kind is None)

    # ---- asking ----------------------------------------------------------------------------------------

    def _ask_values(self, send: Callable[[Link], None], seq: int) -> Update:
        answer = self._ask(send, seq)
        if not isinstance(answer, Update):
            raise RemoteProtocolError("the server sent weights where values were due")
        return answer

    def _ask(self, send: Callable[[Link], None], seq: int) -> Update | NDArray[Any]:
        """Send a request and wait for its answer; after a broken connection, ask again with the same identity."""
        if self._closing.is_set():
            raise LocalProtocolError("the connection to the server was closed; connect again")
        while True:
            if self._link is None:
                self._link = self._caller.call(self._config.reconnect_timeout_s)
            link = self._link
            try:
                if self._epoch is not None and self.welcome.epoch != self._epoch:
                    # What was computed in the old epoch is worth nothing, and the step that was waited for may be
                    # far ahead again: go on from the current values.
                    link.send(Pull(0))
                    return self._answer(link, 0)
                self._say(link, send)
                return self._answer(link, seq)
            except NetworkError as error:
                self._drop(error)

    def _say(self, link: Link, send: Callable[[Link], None]) -> None:
        """Send a request; when that fails, why the server hung up may still lie unread, and is raised instead."""
        try:
            send(link)
        except NetworkError:
            connection = link.connection
            while connection.state is State.OPEN and not connection.payload_bytes and link.wait(0):
                hear(link, Deadline(LAST_WORDS_S))
            raise

    def _send_push(self, link: Link, push: Push, payload: Buffers) -> None:
        faults, rank, step = self._faults, self.rank, push.step
        if not faults.is_armed:
            link.send(push, payload)
            return
        faults.on(link, Point.BEFORE_PUSH, rank, step)
        link.send(push, payload, faults.midway(link, Point.MID_PUSH, rank, step))
        if faults.on(link, Point.AFTER_PUSH, rank, step):
            link.send(push, payload)

    def _receive_values(self, link: Link, values: Values) -> Arena:
        """Receive a reply into the arena whose turn it is; one that breaks off leaves the last answer as it was."""
        arena = self._arenas[0]
        midway = self._faults.midway(link, Point.MID_REPLY, self.rank, values.step)
        link.receive_payload(arena.buffer[: self.layout.values_bytes].data, midway=midway)
        return arena

    def _answer(self, link: Link, seq: int) -> Update | NDArray[Any]:
        while True:
            message = hear(link)
            match message:
                case Values(seq=answered):
                    arena = self._receive_values(link, message)
                    if answered != seq:
                        continue  # the answer to a request that was repeated
                    return self._took(message, arena)
                case Weights(seq=answered):
                    weights = self._receive_weights(link)
                    if answered == seq:
                        return weights
                case AskInitial():
                    self._send_initial(link)
                case Heartbeat(waiting):
                    if waiting:
                        self._config.on_waiting(waiting)
                case _:
                    raise LocalProtocolError(f"a client does not expect {type(message).__name__}")

    def _receive_weights(self, link: Link) -> NDArray[Any]:
        answers = self._config.answers
        assert answers is not None  # else the message was not agreed upon
        buffer = aligned_empty(answers.weights.payload_bytes)
        link.receive_payload(buffer.data)
        return side_views(answers.weights, buffer)["weights"]

    def _took(self, values: Values, arena: Arena) -> Update:
        restarted = self._epoch is not None and values.epoch != self._epoch
        self._epoch, self._step = values.epoch, values.step
        self._arenas.reverse()
        return Update(values.step, arena, values.applied, values.reason, restarted, values.done)

    def _send_initial(self, link: Link) -> None:
        arena = Arena.zeros(self.layout)
        arena.fill(self._config.initial_values())
        payload = [arena.buffer[: self.layout.values_bytes].data]
        self._say(link, lambda asked: asked.send(Initial(), payload))

    def _scattered(self, gradients: Mapping[str, NDArray[Any]]) -> Buffers:
        return self._scatter.buffers(gradients)

    # ---- the connection --------------------------------------------------------------------------------

    def _drop(self, error: NetworkError) -> None:
        if self._link is not None:
            self._link.abort()
            self._link.close()
            self._link = None
        self._config.on_event(f"the connection to the server is lost: {error}")

    def _beat(self) -> None:
        while not self._closing.wait(min(BEAT_GRAIN * self.welcome.heartbeat_interval, 1.0)):
            link = self._link
            if link is not None:
                try:
                    link.send_if_quiet(Heartbeat(), self.welcome.heartbeat_interval)
                except WeighmasterError:
                    continue  # the thread that asks will find the connection broken and mend it
