"""Who waits before the door: connections that have not proved themselves, and addresses whose proofs failed.

Pure: time is an argument, and a caller may be anything.
"""

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_UNPROVEN = 32
"""Connections that are served and have not proved themselves: a thread and at most one offer of 16 MB each."""

MAX_UNPROVEN_OF_SOURCE = 4
"""Of these from one address; loopback is exempt, where many workers of one machine come from."""

MAX_WAITING = 128
"""Connections that wait for their turn, a descriptor each: workers that start together, and no flood."""

PATIENCE_S = 10.0
"""A client gives each step of the handshake so long: whoever has waited longer has given up."""

FREE_FAILURES = 3
"""Failed proofs of an address that cost nothing: a token file with a slip in it is soon mended."""

FIRST_S = 0.5
"""How long connections wait after the next failure; it doubles with each further one."""

LONGEST_S = 5.0
"""Well within a client's patience, so that one with the right token is delayed and never locked out."""

FORGOTTEN_S = 300.0
"""An address without a failure for so long begins anew."""

MAX_SOURCES = 1024
"""Addresses whose failures are remembered; the one that failed longest ago is forgotten first."""


@dataclass(frozen=True)
class Source:
    """Where connections come from: an IPv4 address, or the 64 bits of an IPv6 network, which one host may fill."""

    network: str
    is_local: bool = False


def source_of(peer: str) -> Source:
    """Return the source of a peer, given as `host:port` or `[host]:port`."""
    host = peer.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Source(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            network = ipaddress.ip_network((address, 64), strict=False)
            return Source(str(network), address.is_loopback)
        address = address.ipv4_mapped
    return Source(str(address), address.is_loopback)


class BackOff:
    """How long connections of a source wait, by the failed proofs that came from it."""

    def __init__(self) -> None:
        self._failures: OrderedDict[Source, tuple[int, float]] = OrderedDict()

    def failed(self, source: Source, now: float) -> None:
        """Note a failed proof."""
        count = self._count(source, now) + 1
        self._failures[source] = count, now
        self._failures.move_to_end(source)
        if len(self._failures) > MAX_SOURCES:
            self._failures.popitem(last=False)

    def wait_s(self, source: Source, now: float) -> float:
        """Return how many seconds a connection waits from its arrival until it is served."""
        beyond = self._count(source, now) - FREE_FAILURES
        if beyond <= 0:
            return 0.0
        doublings = min(beyond - 1, 32)  # enough for any bound, and no overflow
        return min(FIRST_S * float(2**doublings), LONGEST_S)

    def _count(self, source: Source, now: float) -> int:
        count, last = self._failures.get(source, (0, now))
        return count if now - last < FORGOTTEN_S else 0


C = TypeVar("C")


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[C]):
    caller: C
    source: Source
    since: float


class Doorstep(Generic[C]):
    """Callers that wait for their turn, in the order in which they came, and how many are being served.

    Those of one source never keep out those of another: they are served few at a time, and where there is no more
    room to wait, whoever came last of the source with the most waiting callers has to go.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting[C]] = []
        self._unproven: Counter[Source] = Counter()
        self._back_off = BackOff()

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    def arrive(self, caller: C, source: Source, now: float) -> C | None:
        """Let a caller wait for its turn; return who must go for lack of room, which may be the caller itself."""
        self._waiting.append(_Waiting(caller, source, now))
        if len(self._waiting) <= MAX_WAITING:
            return None
        counts = Counter(waiting.source for waiting in self._waiting)
        most = max(counts.values())
        at = max(at for at, waiting in enumerate(self._waiting) if counts[waiting.source] == most)
        return self._waiting.pop(at).caller

    def next(self, now: float) -> tuple[C, Source] | None:
        """Take the first caller whose turn it is, if there is one; it counts as unproven until `leave`."""
        if self._unproven.total() >= MAX_UNPROVEN:
            return None
        for at, waiting in enumerate(self._waiting):
            source = waiting.source
            is_full = not source.is_local and self._unproven[source] >= MAX_UNPROVEN_OF_SOURCE
            if not is_full and now - waiting.since >= self._back_off.wait_s(source, now):
                del self._waiting[at]
                self._unproven[source] += 1
                return waiting.caller, source
        return None

    def failed(self, source: Source, now: float) -> None:
        """Note that the proof of a caller of `source` was wrong; it is there until it leaves."""
        self._back_off.failed(source, now)

    def leave(self, source: Source) -> None:
        """Note that a caller of `source` has proved itself, or has gone."""
        self._unproven[source] -= 1
        if self._unproven[source] <= 0:
            del self._unproven[source]

    def give_up(self, now: float) -> list[C]:
        """Take out and return those who have waited longer than any client does."""
        tired = [waiting.caller for waiting in self._waiting if now - waiting.since >= PATIENCE_S]
        self._keep(waiting for waiting in self._waiting if now - waiting.since < PATIENCE_S)
        return tired

    def clear(self) -> list[C]:
        """Take out and return all who wait."""
        left = [waiting.caller for waiting in self._waiting]
        self._keep(())
        return left

    def _keep(self, those: Iterable[_Waiting[C]]) -> None:
        self._waiting = list(those)
