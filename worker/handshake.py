"""The worker's half of the handshake, and what the server may say to end a connection."""

from collections.abc import Callable

from protocol.deadlines import Deadline
from protocol.errors import (
    ConnectionLost,
    Diverged,
    NoProgress,
    PeerLost,
    PeerSilent,
    Refused,
    RemoteProtocolError,
    VersionMismatch,
    WeighmasterError,
)
from protocol.link import Link, expect
from protocol.messages import (
    Challenge,
    Ended,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Proof,
    Refusal,
    RefusalCode,
    ServerProof,
    Side,
    Status,
    Welcome,
)
from protocol.proof import NO_PROOF, check_token, prove, proves


def shake_hands(
    link: Link, hello: Hello, offer: Offer, token: str | None, on_waiting: Callable[[str], None]
) -> Welcome:
    """Introduce this client, prove that both sides hold the token, offer the variables; return the welcome.

    Args:
        link: a fresh connection.
        hello: who this is.
        offer: what it holds.
        token: shared secret, or None.
        on_waiting: told whom the server waits for before it can welcome this client.

    Raises:
        Refused: the server said no, or cannot prove itself.
        NetworkError: the connection broke; worth another attempt.
    """
    _prove(link, hello, _introduce(link, hello), token)
    link.send(offer)
    message = hear(link)
    while isinstance(message, Heartbeat):
        on_waiting(message.waiting)
        message = hear(link)
    return expect(message, Welcome)


def _introduce(link: Link, hello: Hello) -> Challenge:
    """Say hello and receive the challenge; another service at this address may hang up, or never say a word."""
    try:
        link.send(hello)
        return expect(hear(link), Challenge)
    except (ConnectionLost, PeerSilent) as error:
        raise type(error)(f"{error} (before any answer; is it a weighmaster server?)") from error


def hear(link: Link, deadline: Deadline | None = None) -> Message:
    """Receive one message; what ends the connection on purpose is raised.

    Raises:
        Refused: the server said no.
        Diverged, NoProgress, PeerLost: the run has ended otherwise than by its last step.
        RemoteProtocolError: whoever answers is no server of this version.
        NetworkError: the connection broke, or the server fell silent.
    """
    try:
        message = link.receive(deadline)
    except VersionMismatch as error:
        raise VersionMismatch(
            f"the server at {link.peer} is of another version: {error}; install the same one on both sides"
        ) from error
    except RemoteProtocolError as error:
        raise RemoteProtocolError(
            f"what answers at {link.peer} is no server that can be understood: {error}; check the address"
        ) from error
    match message:
        case Refusal(code, reason):
            raise Refused(code, f"the server at {link.peer} refused: {reason}")
        case Ended(status, reason):
            raise _end_of_run(status, f"the server at {link.peer} ended the run: {reason}")
    return message


def _prove(link: Link, hello: Hello, challenge: Challenge, token: str | None) -> None:
    if challenge.token_required and token is None:
        raise Refused(
            RefusalCode.TOKEN_REQUIRED,
            f"the server at {link.peer} asks for a token: give --token-file with this worker's line",
        )
    if not challenge.token_required:
        if token is not None:
            raise Refused(
                RefusalCode.PROOF,
                f"the server at {link.peer} asks for no token, so it cannot prove that it is the right one: "
                "give the server a --token-file, or leave it out here",
            )
        link.send(Proof(NO_PROOF))
        expect(hear(link), ServerProof)
        return
    assert token is not None
    secret = check_token(token, "the token of this worker")
    covered = (hello.nonce, challenge.nonce, link.connection.hellos_digest, link.certificate)
    link.send(Proof(prove(secret, Side.WORKER, *covered)))
    answer = expect(hear(link), ServerProof)
    if not proves(answer.mac, prove(secret, Side.SERVER, *covered)):
        raise Refused(RefusalCode.PROOF, f"the server at {link.peer} does not hold this worker's token")


def _end_of_run(status: Status, text: str) -> WeighmasterError:
    match status:
        case Status.DIVERGED:
            return Diverged(text)
        case Status.LOST | Status.NO_PROGRESS:
            return NoProgress(text)
        case _:
            return PeerLost(text)
