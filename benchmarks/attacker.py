"""Attacks a run on loopback in one way, without pause, until its server is gone; prints how often it struck."""

import contextlib
import itertools
import json
import random
import socket
import time
from collections.abc import Callable, Iterator

import click

from benchmarks.workload import initial_values
from protocol.addresses import Address
from protocol.connection import Connection
from protocol.errors import WeighmasterError
from protocol.link import Link, expect
from protocol.messages import (
    AUTO_RANK,
    Challenge,
    Hello,
    Kind,
    Message,
    Offer,
    Proof,
    Pull,
    Push,
    Role,
    ServerProof,
    Side,
    Values,
    Welcome,
)
from protocol.proof import NO_PROOF
from protocol.tensors import Layout, Manifest
from protocol.transport import connect

HALF_OPEN = 1000
"""Connections that are held open at once, and say nothing."""

DRIPPING = 16
"""Connections into which a byte drips now and then."""

DRIP_S = 0.5
"""Seconds between two bytes: well within the time that a silent peer has."""

PATIENCE_S = 5.0
"""For a connection, and for each answer."""

PAUSE_S = 0.05
"""After a refusal: who is not let in tries again."""

UNOPENED_STEP = 10**6
"""A step that is not open, so that nothing that a member pushes can count."""


def call(port: int) -> socket.socket:
    """Connect as a stranger.

    Raises:
        ConnectionRefusedError: nobody listens any more.
        OSError: the connection failed otherwise.
    """
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def hello(rank: int = AUTO_RANK) -> Hello:
    return Hello("", "elsewhere", rank, Role.WORKER, random.getrandbits(62), bytes(32))


# ---- strangers; each yields when it has struck ----------------------------------------------------------


def say_hello(port: int) -> Iterator[None]:
    """Say hello, read the challenge, hang up."""
    with call(port) as sock:
        sock.sendall(Connection(Side.WORKER).send(hello()))
        sock.recv(1 << 12)
        yield


def hold_open(port: int) -> Iterator[None]:
    """Open many connections, say nothing for a while, and hang up."""
    with contextlib.ExitStack() as held:
        for _ in range(HALF_OPEN):
            held.enter_context(call(port))
            yield
        time.sleep(1)


def drip(port: int) -> Iterator[None]:
    """Say hello byte by byte, in several connections at once."""
    words = Connection(Side.WORKER).send(hello())
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(call(port)) for _ in range(DRIPPING)]
        for byte in words:
            for sock in socks:
                with contextlib.suppress(OSError):  # the server has ended this one
                    sock.send(bytes([byte]))
                    yield
            time.sleep(DRIP_S)
            call(port).close()


# ---- a member, that holds the one rank which no round waits for ----------------------------------------


def join(port: int, parameters: int, rank: int) -> tuple[Link, Welcome]:
    """Shake hands as a worker.

    Raises:
        NetworkError: nobody listens, or not for long.
        WeighmasterError: the server refuses.
    """
    link = Link(connect(Address("127.0.0.1", port), PATIENCE_S), Side.WORKER, PATIENCE_S)
    manifest = Manifest.of(initial_values(parameters))
    said: tuple[tuple[Message, type[Message]], ...] = (
        (hello(rank), Challenge),
        (Proof(NO_PROOF), ServerProof),
        (Offer(manifest.to_wire(), 1), Welcome),
    )
    heard: Message | None = None
    for message, answer in said:
        link.send(message)
        while not isinstance(heard := link.receive(), answer):  # a heartbeat while it is busy
            pass
    link.connection.agree(Layout.of(manifest))
    return link, expect(heard, Welcome)


def push_on(link: Link, welcome: Welcome) -> Iterator[None]:
    """Push for a step that is not open, read the answer, and again until the server ends it."""
    payload = bytes(link.connection.payload_of(Kind.PUSH))
    for seq in itertools.count(1):
        link.send(Push(welcome.epoch, UNOPENED_STEP, seq, 1.0, None, 8), [payload])
        yield
        while not isinstance(link.receive(), Values):
            pass
        link.discard_payload()


def never_read(link: Link, welcome: Welcome) -> Iterator[None]:
    """Ask for values again and again, and read none, until the server ends it."""
    while True:
        link.send(Pull(0))
        yield


STRANGERS: dict[str, Callable[[int], Iterator[None]]] = {"hellos": say_hello, "half-open": hold_open, "drip": drip}
MEMBERS: dict[str, Callable[[Link, Welcome], Iterator[None]]] = {"pushes": push_on, "deaf": never_read}


def strike(attack: str, port: int, parameters: int, rank: int) -> Iterator[None]:
    """Attack until these connections are done with; yields when it has struck."""
    if attack in STRANGERS:
        yield from STRANGERS[attack](port)
        return
    link, welcome = join(port, parameters, rank)
    try:
        yield from MEMBERS[attack](link, welcome)
    finally:
        link.close()


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--attack", type=click.Choice([*STRANGERS, *MEMBERS]), required=True)
@click.option("--rank", type=int, required=True, help="Of a member.")
@click.option("--parameters", type=int, required=True)
def main(port: int, attack: str, rank: int, parameters: int) -> None:
    """Attack again and again until nobody listens any more."""
    struck = 0
    while True:
        try:
            call(port).close()
            for _ in strike(attack, port, parameters, rank):
                struck += 1
        except ConnectionRefusedError:
            break
        except (OSError, WeighmasterError):
            time.sleep(PAUSE_S)
    print(json.dumps({"struck": struck}), flush=True)
    raise SystemExit(0 if struck else 1)


if __name__ == "__main__":
    main()
