"""Who is who: ranks, names, incarnations, and which connection speaks for each. Pure: no socket, no clock."""

from dataclasses import dataclass, field

from protocol.messages import AUTO_RANK, MAX_NAME_CHARACTERS, RefusalCode, Role

MAX_RANKS_NAMED = 16
"""A sentence that names ranks stays readable, and short enough to travel as a reason."""

SessionId = int
"""Number that the server gives to each connection it accepts; never used twice."""


@dataclass(frozen=True)
class Identity:
    """Who a connection says it is.

    Attributes:
        name: as given by the user, or empty.
        host: the client's host name.
        rank: as given, or `AUTO_RANK`.
        role: worker, validator or evaluator.
        incarnation: one start of the client's process.
        software: on what it computes, in its own words.
    """

    name: str
    host: str
    rank: int
    role: Role
    incarnation: int
    software: str = ""


@dataclass
class Member:
    """One rank and what the server remembers of it, whether or not it is connected now.

    Validators are members too: theirs are the numbers above those of the workers.

    Attributes:
        session: the connection that speaks for it, or None.
        joined_at: when the last one that did was bound (monotonic seconds).
        last_seq: highest push number taken from this incarnation; 0 before the first.
        last_applied: whether that push counted.
        last_reason: why not.
        lost_at: when its connection ended, or None while it has one (monotonic seconds).
        finished: it said bye before the end of the run.
        threads: recorded when the rank first joined; the same for all its incarnations.
        role: worker or validator.
        excused: a round closed without this validator; it is waited for again once it pushes in time, or returns.
        late_rounds: rounds in a row that closed without this worker because it took too long.
        on_probation: too many of them: it is not waited for until a push of it comes in time.
        since_step: the first round that counts on this worker: who joins in the middle takes part from the next.
        left_early: it said bye before the last step: a run that goes on does not wait for it.
        software: on what its last process computed.
        clock: pushes of this worker that were answered; who returns starts at the slowest one's.
    """

    rank: int
    name: str
    host: str
    incarnation: int
    threads: int
    session: SessionId | None = None
    joined_at: float = 0.0
    last_seq: int = 0
    last_applied: bool = False
    last_reason: str = ""
    lost_at: float | None = None
    lost_reason: str = ""
    finished: bool = False
    role: Role = Role.WORKER
    excused: bool = False
    late_rounds: int = 0
    on_probation: bool = False
    since_step: int = 0
    clock: int = 0
    left_early: bool = False
    software: str = ""

    @property
    def label(self) -> str:
        """Return `rank 1 (name)` or `validator name`, for messages."""
        return f"rank {self.rank} ({self.name})" if self.role is Role.WORKER else labelled(self.role, self.name)


def labelled(role: Role, name: str) -> str:
    """Return `evaluator name`, or the name alone when it begins with that word."""
    return name if name.startswith(role) else f"{role} {name}"


@dataclass(frozen=True)
class Granted:
    """The identity is free; `replaces` is a connection of the same incarnation that must be cut first."""

    rank: int
    name: str
    replaces: SessionId | None = None


@dataclass(frozen=True)
class Contested:
    """Another incarnation holds the rank over a connection that may or may not be alive."""

    holder: SessionId
    label: str


@dataclass(frozen=True)
class Denied:
    """The identity cannot be had."""

    code: RefusalCode
    reason: str


Claim = Granted | Contested | Denied


@dataclass
class Registry:
    """All members of a run, by rank; evaluators have no rank and are kept by connection.

    Attributes:
        workers: number of ranks.
        validator_slots: how many validators there is room for; their numbers follow the workers'.
        members: the workers, by rank.
        validators: by number.
    """

    workers: int
    validator_slots: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    validators: dict[int, Member] = field(default_factory=dict)
    evaluators: dict[SessionId, Identity] = field(default_factory=dict)
    _speakers: dict[SessionId, Member] = field(default_factory=dict)

    def claim(self, who: Identity) -> Claim:
        """Judge whether an identity can be had; changes nothing.

        `AUTO_RANK` gets, in this order: the rank that had this name, a free rank that was last on this host, the
        lowest rank never used, the lowest free one.
        """
        if who.role is Role.EVALUATOR:
            same = next((s for s, other in self.evaluators.items() if other.incarnation == who.incarnation), None)
            return Granted(AUTO_RANK, who.name or f"{who.host}:evaluator"[-MAX_NAME_CHARACTERS:], same)
        if who.role is Role.VALIDATOR:
            return self._claim_validator(who)
        if who.rank >= self.workers:
            return Denied(
                RefusalCode.RANK_RANGE,
                f"rank {who.rank} is not one of this run's ranks 0 to {self.workers - 1}; "
                "start the server with more --workers or the worker with a lower --rank",
            )
        rank = self._choose(who) if who.rank == AUTO_RANK else who.rank
        if rank is None:
            return Denied(RefusalCode.FULL, f"all {self.workers} ranks of this run are held by live workers")
        name = who.name or f"{who.host}:{rank}"[-MAX_NAME_CHARACTERS:]
        namesake = next((m for m in self.members.values() if m.name == name and m.rank != rank), None)
        if namesake is not None and namesake.session is not None:
            return Denied(
                RefusalCode.RANK_TAKEN, f"the name {name!r} belongs to {namesake.label}; give another --name"
            )
        return self._judge(who, rank, name, self.members.get(rank))

    def _claim_validator(self, who: Identity) -> Claim:
        numbers = range(self.workers, self.workers + self.validator_slots)
        if not numbers:
            return Denied(
                RefusalCode.FULL, "this run has no use for a validator: its aggregation rule asks for none"
            )
        name = who.name or f"{who.host}:validator"[-MAX_NAME_CHARACTERS:]
        known = [m.rank for m in self.validators.values() if m.incarnation == who.incarnation or m.name == name]
        free = [n for n in numbers if n not in self.validators or self.validators[n].session is None]
        number = next(iter([*known, *free, *numbers]))
        return self._judge(who, number, name, self.validators.get(number))

    @staticmethod
    def _judge(who: Identity, rank: int, name: str, holder: Member | None) -> Claim:
        if holder is None or holder.session is None:
            return Granted(rank, name)
        if holder.incarnation == who.incarnation:
            return Granted(rank, name, replaces=holder.session)
        return Contested(holder.session, f"{holder.label} on {holder.host}")

    def _choose(self, who: Identity) -> int | None:
        for member in self.members.values():
            if member.incarnation == who.incarnation or (who.name and member.name == who.name):
                return member.rank
        free = [rank for rank in range(self.workers) if not self._held(rank)]
        on_host = [rank for rank in free if rank in self.members and self.members[rank].host == who.host]
        unused = [rank for rank in free if rank not in self.members]
        return next(iter([*on_host, *unused, *free]), None)

    def _held(self, rank: int) -> bool:
        member = self.members.get(rank)
        return member is not None and member.session is not None

    def bind(self, session: SessionId, who: Identity, granted: Granted, threads: int, now: float) -> Member | None:
        """Let a connection speak for a granted identity; evaluators have no `Member`."""
        if who.role is Role.EVALUATOR:
            self.evaluators[session] = who
            return None
        known = self.validators if who.role is Role.VALIDATOR else self.members
        member = known.get(granted.rank)
        if member is None:
            member = Member(granted.rank, granted.name, who.host, who.incarnation, threads, role=who.role)
            known[granted.rank] = member
        elif member.incarnation != who.incarnation:
            member.name, member.host, member.incarnation = granted.name, who.host, who.incarnation
            member.last_seq, member.last_applied, member.last_reason = 0, False, ""
        member.session, member.joined_at, member.finished = session, now, False
        member.software, member.left_early = who.software, False
        member.lost_at, member.lost_reason, member.excused = None, "", False
        self._speakers[session] = member
        return member

    def release(self, session: SessionId, reason: str, now: float, finished: bool = False) -> Member | None:
        """Note that a connection has ended; return the member that it spoke for, if it still did."""
        self.evaluators.pop(session, None)
        member = self._speakers.pop(session, None)
        if member is not None:
            member.session, member.lost_at, member.lost_reason, member.finished = None, now, reason, finished
        return member

    def of(self, session: SessionId) -> Member | None:
        """Return the member for which a connection speaks."""
        return self._speakers.get(session)

    def member(self, role: Role, rank: int) -> Member | None:
        """Return what is known of a worker's rank, or of a validator's number."""
        return (self.validators if role is Role.VALIDATOR else self.members).get(rank)

    def live_validators(self) -> list[Member]:
        """Return the validators that a connection speaks for, in the order of their numbers."""
        return [m for _, m in sorted(self.validators.items()) if m.session is not None]

    def missing(self) -> list[int]:
        """Return the ranks that no connection speaks for and that have not left on purpose, ascending."""
        return [
            rank
            for rank in range(self.workers)
            if not self._held(rank) and not (rank in self.members and self.members[rank].finished)
        ]

    def active(self) -> list[int]:
        """Return the ranks that have not left on purpose, ascending, connected or not."""
        return [rank for rank in range(self.workers) if rank not in self.members or not self.members[rank].finished]


def name_ranks(ranks: list[int]) -> str:
    """Return `rank 2`, `ranks 0, 1 and 2`, or, when they are many, `ranks 0, 1, ... and 30 more`."""
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > MAX_RANKS_NAMED:
        words[MAX_RANKS_NAMED - 1 :] = [f"{len(words) - MAX_RANKS_NAMED + 1} more"]
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
