"""What a client says when whoever answers at the address hangs up, or never says a word."""

from typing import Any, cast

import numpy as np
import pytest

from protocol.errors import ConnectionLost, NetworkError, PeerSilent
from protocol.link import Link
from protocol.messages import AUTO_RANK, NONCE_BYTES, Challenge, Hello, Message, Offer, Role, ServerProof
from protocol.proof import NO_PROOF
from protocol.tensors import Manifest
from worker.handshake import shake_hands

HELLO = Hello("anna", "host", AUTO_RANK, Role.WORKER, 1, bytes(NONCE_BYTES))
OFFER = Offer(Manifest.of({"w": np.zeros(1, np.float32)}).to_wire(), 1)
CLOSED = ConnectionLost("127.0.0.1:22 closed the connection")
SILENT = PeerSilent("127.0.0.1:22 has been silent for 10 s")


class Answering:
    """A link whose peer says these messages, or fails so; `full` is what sending anything raises."""

    peer = "127.0.0.1:22"

    def __init__(self, *answers: Message | NetworkError, full: NetworkError | None = None) -> None:
        self._answers = list(answers)
        self._full = full

    def send(self, message: Message, payload: Any = ()) -> None:
        if self._full is not None:
            raise self._full

    def receive(self, deadline: Any = None) -> Message:
        answer = self._answers.pop(0)
        if isinstance(answer, NetworkError):
            raise answer
        return answer


def shake(link: Answering) -> None:
    shake_hands(cast(Link, link), HELLO, OFFER, None, lambda waiting: None)


@pytest.mark.parametrize("link", [Answering(CLOSED), Answering(SILENT), Answering(full=CLOSED)])
def test_who_hangs_up_before_the_first_answer_may_be_another_service(link: Answering) -> None:
    """The sentence asks; the error stays one that is retried, because a server that ends hangs up as well."""
    with pytest.raises((ConnectionLost, PeerSilent)) as caught:
        shake(link)
    assert str(caught.value).startswith("127.0.0.1:22 ")
    assert str(caught.value).endswith(" (before any answer; is it a weighmaster server?)")
    assert isinstance(caught.value.__cause__, type(caught.value))


@pytest.mark.parametrize("answers", [(), (ServerProof(NO_PROOF),)], ids=["before the proof", "after it"])
def test_who_has_answered_is_not_doubted(answers: tuple[Message, ...]) -> None:
    with pytest.raises(ConnectionLost) as caught:
        shake(Answering(Challenge(bytes(NONCE_BYTES), False), *answers, CLOSED))
    assert caught.value is CLOSED
