"""What the tests of hostile clients share: an honest run that goes on step by step, and what its server holds."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import psutil

import worker
from protocol.addresses import Address
from protocol.errors import WeighmasterError
from protocol.link import Link
from protocol.messages import AUTO_RANK, Challenge, Hello, Message, Offer, Proof, Role, ServerProof, Side, Welcome
from protocol.proof import NO_PROOF
from protocol.tensors import Layout, Manifest, VariableSpec
from protocol.transport import connect
from ps.connections.doorstep import MAX_UNPROVEN, MAX_WAITING
from tests.faults.light_worker import START, gradient, value_at
from tests.faults.runs import assert_done
from tests.integration.processes import ServerProcess

PATIENCE_S = 60.0
STEPS = 8
WORKERS = 2
SIZE = 1000
MANIFEST = Manifest((VariableSpec("w", (SIZE,), "float32"), VariableSpec("b", (3,), "float32")))
LAYOUT = Layout.of(MANIFEST)

BEFORE, DURING = 2, 5
"""Steps that the honest workers have made when an attack begins, by when every file is open, and when it ends."""

DESCRIPTORS_EACH = 3
"""Of a session: its connection and the two of its alarm clock."""

SLACK = 4
"""Threads and descriptors that come and go with a run."""

MEMORY_BYTES = 96 << 20
"""What an attack may cost for a while: stacks, buffers of TLS, and what the allocator keeps of them."""

INCARNATIONS = itertools.count(1000)


class Honest:
    """Two workers in threads with gradients of arithmetic, who check every value and go as far as they may."""

    def __init__(self, address: str, **options) -> None:
        self._address, self._options = address, options
        self._changed = threading.Condition()
        self._allowed = 0
        self._reached = dict.fromkeys(range(WORKERS), -1)
        self._pool = ThreadPoolExecutor(WORKERS)
        self._running = [self._pool.submit(self._train, rank) for rank in range(WORKERS)]

    def _train(self, rank: int) -> None:
        with worker.connect(self._address, self.variables(), rank=rank, **self._options) as server:
            update = server.pull()
            while not update.done:
                self._check(update)
                self._wait(rank, update.step)
                value = np.float32(gradient(rank, update.step))
                pushed = {name: np.full_like(old, value) for name, old in update.values.items()}
                pushed["b"] = -pushed["b"]
                update = server.push(pushed, loss=1.0, examples=8)
            self._check(update)
            self._wait(rank, STEPS)

    @staticmethod
    def variables() -> dict[str, np.ndarray]:
        return {"w": np.full(SIZE, START, np.float32), "b": np.full(3, -START, np.float32)}

    @staticmethod
    def _check(update) -> None:
        expected = np.float32(value_at(update.step, WORKERS))
        assert (update.values["w"] == expected).all()
        assert (update.values["b"] == -expected).all()

    def _wait(self, rank: int, step: int) -> None:
        with self._changed:
            self._reached[rank] = step
            self._changed.notify_all()
            if step < STEPS:
                self._changed.wait_for(lambda: self._allowed > step)

    def reach(self, step: int) -> None:
        """Let them train until both have the values of a step."""
        with self._changed:
            self._allowed = step
            self._changed.notify_all()
            for _ in range(int(PATIENCE_S)):
                if self._changed.wait_for(lambda: min(self._reached.values()) >= step, 1.0):
                    return
                for running in self._running:
                    if running.done():
                        running.result()
        raise AssertionError(f"the honest workers are at {self._reached}, not at step {step}")

    def finish(self) -> None:
        """Let them train to the end."""
        self.reach(STEPS)
        for running in self._running:
            running.result(PATIENCE_S)

    def close(self) -> None:
        """End them, also in mid-run."""
        with self._changed:
            self._allowed = STEPS
            self._changed.notify_all()
        self._pool.shutdown()


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    descriptors: int
    memory_bytes: int


def held(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(process.num_threads(), process.num_fds(), process.memory_info().rss)
    return Held(process.num_threads(), process.num_fds(), process.memory_info().rss)


def eventually(condition, patience_s: float = 20.0) -> bool:
    """Ask again and again whether something has become true; only a test that fails waits long."""
    tick, tries = threading.Event(), int(patience_s / 0.02)
    return any(condition() or tick.wait(0.02) for _ in range(tries))


# ---- clients that mean harm ----------------------------------------------------------------------------


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def hello(rank: int = AUTO_RANK, role: Role = Role.WORKER) -> Hello:
    return Hello("", "elsewhere", rank, role, next(INCARNATIONS), bytes(32))


def offer() -> Offer:
    return Offer(MANIFEST.to_wire(), 1)


@contextlib.contextmanager
def linked(port: int):
    """A link that has said nothing yet."""
    link = Link(connect(Address("127.0.0.1", port), PATIENCE_S), Side.WORKER, PATIENCE_S)
    try:
        yield link
    finally:
        link.close()


def shake_hands(link: Link, *, until: type[Message] = Welcome, rank: int = AUTO_RANK, role=Role.WORKER) -> Message:
    """Go through the handshake without a token until the server has said this."""
    message: Message = hello(rank, role)
    for said, answer in ((message, Challenge), (Proof(NO_PROOF), ServerProof), (offer(), Welcome)):
        link.send(said)
        message = link.receive()
        while not isinstance(message, answer):
            message = link.receive()
        if answer is until:
            link.connection.agree(LAYOUT)
            break
    return message


def is_ended(sock: socket.socket) -> bool:
    """Read until the server ends the connection; false when it does not."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def drip(sock: socket.socket, data: bytes, over: threading.Event) -> bool:
    """Send byte by byte until the server ends the connection; say whether it did."""
    sock.settimeout(0.2)
    for byte in data:
        try:
            sock.send(bytes([byte]))
            if not sock.recv(1 << 16):
                return True
        except TimeoutError:
            if over.is_set():
                return False
        except OSError:
            return True
    return False


ENDINGS = (WeighmasterError, OSError)
"""What a client that is cut off meets."""


# ---- an attack ------------------------------------------------------------------------------------------


@dataclass
class Siege:
    """A server under attack, and what it held before."""

    server: ServerProcess
    honest: Honest
    before: Held
    over: threading.Event
    pool: ThreadPoolExecutor

    @property
    def port(self) -> int:
        return self.server.port

    def attack(self, body: Callable[..., int], times: int = 1) -> list:
        """Run an attack beside the honest workers until `over` is set; each returns how often it struck."""
        return [self.pool.submit(body, self.port, self.over) for _ in range(times)]

    def bounded(self) -> None:
        """Fail if the server holds more than the limits allow."""
        now = held(self.server.pid)
        assert now.threads <= self.before.threads + MAX_UNPROVEN + SLACK
        descriptors = DESCRIPTORS_EACH * MAX_UNPROVEN + MAX_WAITING + SLACK
        assert now.descriptors <= self.before.descriptors + descriptors
        assert now.memory_bytes <= self.before.memory_bytes + MEMORY_BYTES

    def recovers(self) -> None:
        """Wait until the server holds what it held before."""
        assert eventually(
            lambda: (
                (now := held(self.server.pid)).threads <= self.before.threads
                and now.descriptors <= self.before.descriptors
            )
        ), f"{held(self.server.pid)}; before: {self.before}"
        self.bounded()


@contextlib.contextmanager
def besieged(server: ServerProcess, **options) -> Iterator[Siege]:
    """Attack within this block; the honest workers pass through it and then train to the end."""
    over, pool = threading.Event(), ThreadPoolExecutor(16)
    honest = Honest(server.address, **options)
    try:
        if server.options["workers"] > WORKERS:  # a run begins when all are there
            with linked(server.port) as third:
                shake_hands(third, rank=WORKERS)
                honest.reach(BEFORE)
            server.says("rank 2 .* is lost")
        honest.reach(BEFORE)
        siege = Siege(server, honest, held(server.pid), over, pool)
        yield siege
        over.set()
        pool.shutdown()
        siege.recovers()
        honest.finish()
        assert_done(server, WORKERS, STEPS)
    finally:
        over.set()
        honest.close()
        pool.shutdown()
