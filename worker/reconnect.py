"""Reach the server: call it until it answers, shake hands, agree on the variables; at first and after each loss.

What the values are and how long the run is may differ when a server has started anew; what a worker has built
itself upon may not.
"""

import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from protocol.addresses import Address
from protocol.certificates import ClientTls
from protocol.deadlines import Deadline
from protocol.ensemble import MODE, Answers, Weighting, as_member, as_worker
from protocol.errors import (
    ConfigurationError,
    ManifestMismatch,
    NetworkError,
    PeerLost,
    RemoteProtocolError,
    WeighmasterError,
)
from protocol.injector import NONE, Faults
from protocol.link import HANDSHAKE_S, Link
from protocol.messages import AUTO_RANK, NONCE_BYTES, Hello, Kind, Offer, Role, Side, Welcome
from protocol.tensors import Layout, Manifest, SideSpec
from protocol.transport import Channel
from protocol.transport import connect as open_channel
from worker.handshake import shake_hands

FIRST_PAUSE_S = 0.1
SHORT_PAUSE_S = 1.0
LONG_PAUSE_S = 5.0
"""Pauses between attempts double from the first to the short one, and to the long one when `HOPEFUL_S` are over."""

HOPEFUL_S = 30.0
"""A server that is started again is back within this time, and is to be found within a second."""

ATTEMPT_S = 3.0
"""Longest attempt to open a connection: a first packet that was lost is repeated after one second, then two."""

REPORT_S = 5.0
"""How often somebody is told that the server is waited for."""

LASTING = ("rank", "seed", "shards", "threads", "mode", "weighting")
"""What a worker chooses its batches, its model and its threads by: once welcomed, it cannot go on with another."""

InitialValues = Callable[[], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class ClientConfig:
    """Who joins, and how patiently (seconds).

    Attributes:
        address: of the server; its name is resolved anew at each attempt.
        manifest: variables of this side.
        initial_values: called if the server asks this client for them.
        token: shared secret, or None.
        threads: offered; the server's record for this rank comes back in `welcome`.
        seed: None takes the server's.
        answers: sizes of the logits that this client can push in ensemble mode; None if it cannot.
        tls: this side of TLS; None: the connection is neither secret nor tamper-proof.
        software: on what it computes; the server records it, and says when it changes.
        faults: on purpose, at the points of a step.
        on_event: told, in words, of losses, returns and attempts.
        on_waiting: told about once a second for whom the server waits while this client waits for it.
    """

    address: Address
    manifest: Manifest
    initial_values: InitialValues
    rank: int = AUTO_RANK
    name: str = ""
    role: Role = Role.WORKER
    token: str | None = None
    threads: int = 1
    seed: int | None = None
    answers: Answers | None = None
    software: str = ""
    connect_timeout_s: float = 60.0
    reconnect_timeout_s: float = 120.0
    congestion_control: str = "auto"
    tls: ClientTls | None = None
    faults: Faults = NONE
    on_event: Callable[[str], None] = lambda text: None
    on_waiting: Callable[[str], None] = lambda text: None


def pause_s(attempt: int, without_s: float, chance: float) -> float:
    """Return how long to wait before the next attempt (seconds).

    Args:
        attempt: number of attempts that have failed so far, less one.
        without_s: how long the server has been away (seconds).
        chance: uniform in [0, 1): many clients that lost a server at one moment must not come back at one moment.
    """
    longest_s = SHORT_PAUSE_S if without_s < HOPEFUL_S else LONG_PAUSE_S
    return min(FIRST_PAUSE_S * 2.0 ** min(attempt, 32), longest_s) * (0.5 + chance / 2)


class Caller:
    """Calls the server, as one incarnation of one client.

    Attributes:
        welcome: what was agreed at the last handshake.
        layout: where each variable, called as here, lies in an arena; in ensemble mode side arrays follow.
        weighting: in ensemble mode, what a weight is of; None in other modes.
    """

    welcome: Welcome
    layout: Layout
    weighting: Weighting | None = None

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._manifest, self._threads = config.manifest, config.threads
        self._incarnation = random.SystemRandom().getrandbits(63)
        self._host = platform.node()[:128]
        self._rank, self._name = config.rank, config.name
        self._held = False

    @property
    def is_known(self) -> bool:
        """Whether the server has welcomed this client before."""
        return hasattr(self, "welcome")

    def call(self, timeout_s: float) -> Link:
        """Connect and shake hands, retrying until `timeout_s` have passed without the server.

        Raises:
            PeerLost: it could not be reached in time, or what came back is another run.
            Refused: it said no.
            ConfigurationError: what this client would say of itself cannot be said.
        """
        config, returns = self._config, self.is_known
        began = told_at = time.monotonic()
        deadline, attempt, told = Deadline(timeout_s), 0, False
        while True:
            try:
                link = self._shake_hands(deadline)
                if returns or told:
                    config.on_event(f"connected to the server at {config.address}")
                return link
            except NetworkError as error:
                if self._held:  # it was there until now: only from here on we are without it
                    began, deadline, attempt = time.monotonic(), Deadline(timeout_s), 0
                wait_s = pause_s(attempt, time.monotonic() - began, random.random())
                if deadline.left_s <= wait_s:
                    raise PeerLost(
                        f"the server at {config.address} could not be reached for {timeout_s:g} s: {error}"
                    ) from error
                if not told or time.monotonic() - told_at >= REPORT_S:
                    told, told_at = True, time.monotonic()
                    config.on_event(
                        f"waiting for the server at {config.address}, {deadline.left_s:.0f} s left: {error}"
                    )
            time.sleep(wait_s)
            attempt += 1

    def _shake_hands(self, deadline: Deadline) -> Link:
        config, self._held = self._config, False
        hello, offer = self._introduction()
        link = Link(self._open(min(deadline.left_s, ATTEMPT_S)), Side.WORKER, HANDSHAKE_S)
        try:
            link.secure(Deadline(HANDSHAKE_S))
            self._agree(link, shake_hands(link, hello, offer, config.token, self._hold))
            return link
        except BaseException:
            link.abort()
            link.close()
            raise

    def _introduction(self) -> tuple[Hello, Offer]:
        """Say who this is and what it holds, before there is a connection.

        Raises:
            ConfigurationError: what the user gave is beyond the protocol's limits.
        """
        config, answers, nonce = self._config, self._config.answers, os.urandom(NONCE_BYTES)
        try:
            hello = Hello(self._name, self._host, self._rank, config.role, self._incarnation, nonce)
            offer = Offer(self._manifest.to_wire(), self._threads, config.seed, software=config.software)
            if answers is not None:
                offer = replace(
                    offer,
                    examples=answers.examples,
                    classes=answers.classes,
                    logits_dtype=answers.dtype,
                    test_examples=answers.test_examples,
                )
        except ValueError as error:
            raise ConfigurationError(f"this worker cannot introduce itself to a server: {error}") from error
        return hello, offer

    def _open(self, timeout_s: float) -> Channel:
        config = self._config
        channel = open_channel(config.address, timeout_s, config.congestion_control)
        if config.tls is None:
            return channel
        try:
            return config.tls.wrap(channel, config.address)
        except WeighmasterError:
            channel.close()
            raise

    def _hold(self, waiting: str) -> None:
        """Take note that the server is there, but waits for somebody before it can welcome this client."""
        self._held = True
        self._config.on_waiting(waiting)

    def _agree(self, link: Link, welcome: Welcome) -> None:
        if self.is_known:
            self._check_same_run(welcome)
        manifest = Manifest.from_wire(welcome.manifest)
        ours, answers = self._config.manifest, self._config.answers
        sides: tuple[SideSpec, ...] = ()
        payloads: Mapping[Kind, int] = {}
        if welcome.mode == MODE:
            self.weighting = _weighting_of(welcome)
            if answers is None:
                raise RemoteProtocolError("the server takes this worker for a member, which it did not offer to be")
            try:
                ours = as_member(ours, welcome.rank)
            except ValueError as error:
                raise ConfigurationError(f"this worker can be no member of an ensemble: {error}") from error
            sides, payloads = answers.push_sides(self.weighting), answers.payloads(self.weighting)
        ours.check_same_variables(manifest, "this worker", "the server")
        if welcome.mode == MODE:
            manifest = as_worker(manifest)
        if not self.is_known:
            self.layout = Layout.of(manifest, sides)
        elif manifest != self.layout.manifest:
            raise ManifestMismatch(
                f"the server at {self._config.address} has started anew with its variables in another order; "
                "start this worker again"
            )
        self.welcome = welcome
        self._rank, self._name, self._threads = welcome.rank, welcome.name, welcome.threads
        if welcome.mode != MODE:
            self._manifest = manifest  # in the order agreed: whoever comes first to a new server decides on it
        link.connection.agree(self.layout, payloads)
        link.silence_s = welcome.heartbeat_timeout

    def _check_same_run(self, welcome: Welcome) -> None:
        for name in LASTING:
            before, now = getattr(self.welcome, name), getattr(welcome, name)
            if before != now:
                raise PeerLost(
                    f"the server that came back at {self._config.address} is another: its {name} is {now}, "
                    f"and was {before}; start this worker again"
                )


def _weighting_of(welcome: Welcome) -> Weighting:
    try:
        return Weighting(welcome.weighting)
    except ValueError as error:
        raise RemoteProtocolError(f"the server weighs by {welcome.weighting!r}, which is not known here") from error
