"""The faults of a soak: which there are, when each comes, and a proxy that does them to connections."""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.addresses import Address
from protocol.frame_faults import Fault
from protocol.messages import Kind
from protocol.proxy import FaultProxy

KILL_WORKER = "kill a worker"
STOP_WORKER = "stop a worker"
KILL_SERVER = "kill the server"
INSIDE_SERVER = "kill the server at a point"
CUT = "cut a connection"
DELAY = "delay a frame"
DOUBLE = "double a push"
BLACKHOLE = "black hole"

WEIGHTS = {
    KILL_WORKER: 4,
    STOP_WORKER: 3,
    KILL_SERVER: 2,
    CUT: 4,
    DELAY: 3,
    DOUBLE: 2,
    BLACKHOLE: 2,
}
"""How often each kind comes, against the others. `INSIDE_SERVER` comes with the server's starts."""

ON_CONNECTION = (CUT, DELAY, DOUBLE, BLACKHOLE)
"""Those that a proxy does."""

POINTS = (
    "before-apply",
    "after-apply",
    "mid-reply",
    "mid-push",
    *(f"mid-checkpoint,part={part}" for part in ("file", "manifest", "rename", "parent")),
)
"""Where a server that has started again kills itself."""


@dataclass(frozen=True)
class Coming:
    """One fault.

    Attributes:
        at_s: seconds since the beginning.
        kind: what happens.
        rank: to whom; of no meaning where it happens to the server.
        chance: uniform in [0, 1), for whatever else is to be drawn.
    """

    at_s: float
    kind: str
    rank: int
    chance: float


def schedule(seed: int, mean_s: float, workers: int, kinds: Sequence[str]) -> Iterator[Coming]:
    """Yield faults without end: each kind once, in an order that is drawn, then at random.

    So that what is measured in the first minutes knows all kinds. The times between are exponential.
    """
    draw = random.Random(seed)
    first = draw.sample(list(kinds), len(kinds))
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1 / mean_s)
        kind = first.pop() if first else draw.choices(kinds, [WEIGHTS[known] for known in kinds])[0]
        yield Coming(at_s, kind, draw.randrange(workers), draw.random())


def fault_on_connection(coming: Coming, heartbeat_timeout_s: float) -> Fault:
    """Return what the proxy is to do to the next frame.

    A black hole lasts up to twice the heartbeat timeout: some are noticed, some heal before.
    """
    draw = random.Random(coming.chance)
    kind = draw.choice(["push", "values"])
    if coming.kind == CUT:
        return Fault.parse(f"cut:{draw.choice(['start', 'header', 'half', 'last'])}@{kind}")
    if coming.kind == DELAY:
        return Fault.parse(f"delay:{draw.uniform(0.1, 0.5 * heartbeat_timeout_s):.2f}@{kind}")
    if coming.kind == DOUBLE:
        return Fault.parse("double@push")
    seconds, way = draw.uniform(0.3, 2.0) * heartbeat_timeout_s, draw.choice(["up", "down", "both"])
    return Fault.parse(f"blackhole:{seconds:.2f}@{kind},way={way}")


def injection_for_start(chance: float, furthest_step: int, checkpoint_every: int) -> str | None:
    """Return the fault that a server which starts again is given, for every second of them; None for the others.

    Args:
        chance: uniform in [0, 1).
        furthest_step: that was ever reached.
        checkpoint_every: steps; the fault's step is that of one of the next twenty checkpoints.
    """
    if chance >= 0.5:
        return None
    draw = random.Random(chance)
    step = (furthest_step // checkpoint_every + draw.randint(2, 20)) * checkpoint_every
    return f"kill@{draw.choice(POINTS)},step={step}"


class ArmedProxy(FaultProxy):
    """A proxy whose faults are not planned ahead, but armed: each strikes the next frame of its kind.

    Attributes:
        struck: how often each kind of fault of a soak has.
    """

    def __init__(self, to: Address) -> None:
        self.struck: Counter[str] = Counter()
        self._armed: list[tuple[str, Fault]] = []
        self._arming = threading.Lock()
        super().__init__(to)

    def arm(self, name: str, fault: Fault) -> None:
        """Let a fault, known to the soak by a name, happen to the next frame of its kind."""
        with self._arming:
            self._armed.append((name, fault))

    def disarm(self) -> None:
        """Forget the faults that have not struck, and pass everything on."""
        with self._arming:
            self._armed.clear()
        self.heal()

    def strike(self, kind: Kind) -> Fault | None:
        """Return the fault that strikes a frame, if one is armed for its kind."""
        with self._arming:
            for armed in self._armed:
                name, fault = armed
                if fault.kind is kind:
                    self._armed.remove(armed)
                    self.struck[name] += 1
                    return fault
        return None
