"""A driver that feeds a coordinator with made-up events at made-up times and records what it says."""

import itertools
from dataclasses import replace

from protocol.messages import Push, Role
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import Announce, Finish, Reply, Take
from ps.coordination.members import Granted, Identity
from ps.coordination.policy import Phase, RunPolicy

EPOCH = 77
POLICY = RunPolicy(
    workers=2,
    steps=3,
    start_timeout_s=60,
    round_timeout_s=30,
    rejoin_timeout_s=20,
    drain_timeout_s=10,
)
NAN = float("nan")


class Client:
    """One process: its connections come and go, its incarnation and its push numbers stay."""

    incarnations = itertools.count(1)

    def __init__(self, rank, role=Role.WORKER):
        self.rank = rank
        self.identity = Identity(f"site-{rank}", f"host-{rank}", rank, role, next(self.incarnations))
        self.session = None
        self.seq = 0


class Run:
    """Feeds a coordinator with events, carries out what it returns, and records it."""

    def __init__(self, policy=POLICY, has_values=False, **changes):
        self.policy = replace(policy, **changes)
        self.now = 1000.0
        self.coordinator = Coordinator(self.policy, EPOCH, self.now, has_values=has_values)
        self.told = []
        self.sessions = itertools.count(1)
        self.by_session = {}

    # ---- events ----

    def carry_out(self, instructions):
        instructions = list(instructions)
        self.told += instructions
        return instructions

    def join(self, client):
        claim = self.coordinator.registry.claim(client.identity)
        assert isinstance(claim, Granted) and claim.replaces is None
        client.session = next(self.sessions)
        self.by_session[client.session] = client
        return self.carry_out(self.coordinator.joined(client.session, client.identity, claim, 1, self.now))

    def lose(self, client, reason="the connection broke"):
        session, client.session = client.session, None
        return self.carry_out(self.coordinator.left(session, reason, self.now))

    def bye(self, client):
        session, client.session = client.session, None
        return self.carry_out(self.coordinator.left(session, "it said goodbye", self.now, on_purpose=True))

    def pull(self, client, min_step=0):
        return self.carry_out(self.coordinator.pulled(client.session, min_step, self.now))

    def give_initial(self, client, problem=""):
        assert self.coordinator.may_initialise(client.session)
        return self.carry_out(self.coordinator.initialised(client.session, problem, self.now))

    def begin(self, client, step=None, epoch=EPOCH, seq=None, loss=1.0, examples=1):
        """The header of a push arrives: a new one, or with `seq` a repetition."""
        if seq is None:
            client.seq += 1
        step = self.coordinator.step if step is None else step
        push = Push(epoch, step, client.seq if seq is None else seq, loss, 0.5, examples)
        decided = self.coordinator.push_begins(client.session, push)
        return push, decided

    def drop(self, client, push, verdict):
        """The payload of a push that is not taken has been read."""
        return self.carry_out(self.coordinator.dropped(client.session, push, verdict, self.now))

    def complete(self, client, push, bad_variable=None):
        return self.carry_out(self.coordinator.push_arrived(client.session, push, 1.0, bad_variable, self.now))

    def push(self, client, bad_variable=None, **header):
        """A whole push arrives; return what was decided of it and what was told."""
        before = len(self.told)
        push, decided = self.begin(client, **header)
        if isinstance(decided, Take):
            self.complete(client, push, bad_variable)
        else:
            self.drop(client, push, decided)
        return decided, self.told[before:]

    def wait(self, seconds):
        self.now += seconds
        return self.carry_out(self.coordinator.tick(self.now))

    # ---- what became of it ----

    def start(self, *clients):
        """Bring the run to round 0."""
        for client in clients:
            self.join(client)
        for client in clients:
            self.pull(client)
        if not self.coordinator.has_values:
            self.give_initial(clients[0])
        assert self.coordinator.phase is Phase.RUNNING
        return self

    def of(self, kind):
        return [instruction for instruction in self.told if isinstance(instruction, kind)]

    @property
    def finish(self):
        finishes = self.of(Finish)
        assert len(finishes) <= 1
        return finishes[0] if finishes else None


def running(workers=2, **changes):
    """A run at round 0 and its workers, all of which wait for nothing."""
    run = Run(workers=workers, **changes)
    clients = [Client(rank) for rank in range(workers)]
    run.start(*clients)
    run.told.clear()
    return run, *clients


def replies(instructions):
    return [instruction for instruction in instructions if isinstance(instruction, Reply)]


def texts(instructions):
    return " | ".join(instruction.text for instruction in instructions if isinstance(instruction, Announce))
