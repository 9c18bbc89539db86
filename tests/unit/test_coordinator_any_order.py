"""The coordinator under random events: whatever comes, in whatever order, its promises hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.messages import Role
from ps.coordination import attendance
from ps.coordination.instructions import AskInitial, CloseRound, Drop, Finish, Reply, SkipRound, Take
from ps.coordination.policy import Consistency, Phase
from tests.unit.course import EPOCH, NAN, Client, Run

RANKS = st.integers(0, 2)
MOSTLY_NOT = st.sampled_from([False] * 5 + [True])
POLICIES = st.sampled_from(
    [
        {},
        {"shrink": True},
        {"shrink": True, "elastic": True},
        {"quorum": 1},
        {"quorum": 2},
        {"quorum": 2, "shrink": True},
        {"consistency": Consistency.ASYNC},
        {"consistency": Consistency.ASYNC, "max_staleness": 1},
        {"consistency": Consistency.SSP, "ssp_bound": 1},
        {"consistency": Consistency.SSP, "ssp_bound": 2},
    ]
)


class AnyRun(RuleBasedStateMachine):
    """Joins, losses, goodbyes, pulls, pushes, copies and time in any order keep what a run promises."""

    @initialize(
        workers=st.integers(1, 3),
        steps=st.integers(1, 12),
        has_values=st.booleans(),
        started=st.booleans(),
        policy=POLICIES,
    )
    def begin_run(self, workers, steps, has_values, started, policy):
        if "quorum" in policy:
            policy = policy | {"quorum": min(workers, policy["quorum"])}
        times = {"rejoin_timeout_s": 25, "drain_timeout_s": 15, "round_timeout_s": 18}
        self.run = Run(workers=workers, steps=steps, has_values=has_values, **times | policy)
        self.workers = [Client(rank) for rank in range(workers)]
        self.evaluator = Client(-1, Role.EVALUATOR)
        self.counted = set()
        self.waiting = {}  # session: seq that its next reply must carry
        self.repeated = {}  # session: seq that was pushed again while waited for: may be answered twice
        self.on_its_way = {}  # session: push whose payload is not complete, and what was decided of it
        self.seen = 0
        self.last_step = 0
        self.finished = False
        if started:
            self.run.start(*self.workers)
            self.seen = len(self.run.told)

    def worker(self, rank):
        return self.workers[rank % len(self.workers)]

    def everyone(self):
        return [*self.workers, self.evaluator]

    def is_idle(self, client):
        return client.session is not None and client.session not in self.waiting

    def cut(self, client):
        self.waiting.pop(client.session, None)
        self.repeated.pop(client.session, None)
        return self.on_its_way.pop(client.session, None)

    @rule(rank=st.integers(-1, 2), new=st.booleans())
    def somebody_joins(self, rank, new):
        """A process starts anew, or one that was cut off connects again."""
        client = self.evaluator if rank < 0 else self.worker(rank)
        if client.session is None:
            if new:
                client = Client(client.rank, client.identity.role)
                if rank < 0:
                    self.evaluator = client
                else:
                    self.workers[client.rank] = client
            self.run.join(client)

    @rule(rank=RANKS, on_purpose=MOSTLY_NOT)
    def a_worker_goes(self, rank, on_purpose):
        client = self.worker(rank)
        if client.session is not None:
            self.cut(client)
            self.run.bye(client) if on_purpose else self.run.lose(client)

    @rule(on_purpose=st.booleans())
    def the_evaluator_goes(self, on_purpose):
        if self.evaluator.session is not None:
            self.cut(self.evaluator)
            self.run.bye(self.evaluator) if on_purpose else self.run.lose(self.evaluator)

    @rule(rank=st.integers(-1, 2), ahead=st.integers(0, 3))
    def somebody_pulls(self, rank, ahead):
        client = self.evaluator if rank < 0 else self.worker(rank)
        if self.is_idle(client):
            self.waiting[client.session] = 0
            self.run.pull(client, self.run.coordinator.step + ahead if rank < 0 else 0)

    @rule(fails=MOSTLY_NOT)
    def initial_values_come(self, fails):
        for client in self.workers:
            if client.session is not None and self.run.coordinator.may_initialise(client.session):
                self.run.give_initial(client, "variable 'w' is not finite" if fails else "")

    def push_begins(self, client, loss=1.0, ahead=0, old_epoch=False, repeat=False):
        repeat = repeat and client.seq > 0 and self.waiting.get(client.session) in (None, client.seq)
        may = self.is_idle(client) or (client.session is not None and repeat)
        if not may or client.session in self.on_its_way:
            return
        if repeat and client.session in self.waiting:
            self.repeated[client.session] = client.seq
        self.waiting[client.session] = client.seq if repeat else client.seq + 1
        step = max(0, self.run.coordinator.step + ahead)
        push, decided = self.run.begin(client, step, EPOCH - old_epoch, client.seq if repeat else None, loss)
        if isinstance(decided, Take):
            assert decided.rank == client.rank
            assert self.run.coordinator.phase is Phase.RUNNING
            assert push.epoch == EPOCH
            age = self.run.coordinator.step - push.step
            assert age == 0 or (not self.run.policy.is_sync and 0 < age <= (self.run.policy.max_staleness or 99))
        self.on_its_way[client.session] = push, decided

    @rule(rank=RANKS, ahead=st.sampled_from([-1, 1]), old_epoch=st.booleans(), repeat=st.booleans())
    def an_odd_push_begins(self, rank, ahead, old_epoch, repeat):
        self.push_begins(self.worker(rank), ahead=ahead, old_epoch=old_epoch, repeat=repeat)

    @rule(rank=RANKS, repeat=st.booleans(), loss=st.sampled_from([1.0, 1.0, 1.0, None, NAN]))
    def a_push_begins(self, rank, repeat, loss):
        self.push_begins(self.worker(rank), loss, repeat=repeat)

    @rule(rank=RANKS, bad=MOSTLY_NOT)
    def a_payload_is_complete(self, rank, bad):
        client = self.worker(rank)
        push, decided = self.on_its_way.pop(client.session, (None, None))
        if isinstance(decided, Take):
            self.run.complete(client, push, "w" if bad else None)
        elif push is not None:
            self.run.drop(client, push, decided)

    @rule(order=st.permutations(range(3)))
    def all_push(self, order):
        for rank in order:
            if rank < len(self.workers):
                self.push_begins(self.workers[rank])
                self.a_payload_is_complete(rank, False)

    @rule(rank=RANKS)
    def a_payload_of_a_lost_connection_is_complete(self, rank):
        """The server cuts a connection that is replaced; what it had received must not count."""
        client = self.worker(rank)
        session = client.session
        if session in self.on_its_way:
            push, decided = self.cut(client)
            self.run.lose(client)
            coordinator, now = self.run.coordinator, self.run.now
            assert coordinator.push_arrived(session, push, 1.0, None, now) == []
            if isinstance(decided, Drop):
                assert coordinator.dropped(session, push, decided, now) == []

    @rule(seconds=st.floats(0.1, 12))
    def time_passes(self, seconds):
        self.run.wait(seconds)

    @invariant()
    def promises_are_kept(self):
        coordinator = self.run.coordinator
        for instruction in self.run.told[self.seen :]:
            answers_late = isinstance(instruction, Reply) and coordinator.is_done
            assert not self.finished or answers_late, "after the end who still asks gets the final values"
            self.judge(instruction)
        self.seen = len(self.run.told)
        assert coordinator.step == self.last_step <= self.run.policy.steps
        for session, seq in self.waiting.items():
            if session in self.on_its_way:
                continue
            assert coordinator.phase is not Phase.DRAINING, "in the drain everyone is answered at once"
            if coordinator.phase is Phase.RUNNING and seq:
                rank = self.run.by_session[session].rank
                waits = attendance.must_wait(coordinator, coordinator.registry.members[rank])
                assert waits or rank in coordinator.open_round.pushes, (
                    "who has pushed waits for the open round only"
                )
        if coordinator.phase is Phase.RUNNING:
            self.no_answer_is_lost(coordinator)
            self.nobody_waits_in_vain(coordinator)
        coordinator.waiting_for(self.run.now)

    def no_answer_is_lost(self, coordinator):
        """Whoever waits for values after a push that is neither in the round nor held by a slower rank has them."""
        for session in self.waiting:
            client = self.run.by_session[session]
            member = coordinator.registry.of(session)
            if member is None or session in self.on_its_way or client.rank in coordinator.open_round.pushes:
                continue
            assert attendance.must_wait(coordinator, member) or member.since_step > coordinator.step

    def nobody_waits_in_vain(self, coordinator):
        assert not coordinator.open_round.pushes or coordinator.absent(), "a round that is complete has closed"
        clocks = [coordinator.registry.members[rank].clock for rank in attendance.attending(coordinator)]
        if coordinator.policy.consistency is Consistency.SSP and clocks:
            assert max(clocks) - min(clocks) <= coordinator.policy.ssp_bound, "nobody is too far ahead"

    def judge(self, instruction):
        match instruction:
            case CloseRound(step, contributions) | SkipRound(step, contributions):
                assert step == self.last_step
                self.last_step += 1
                ranks = [c.rank for c in contributions]
                assert ranks and ranks == sorted(set(ranks))
                assert isinstance(instruction, CloseRound) == any(not c.refused for c in contributions)
                assert not self.counted & {(step, rank) for rank in ranks}
                self.counted |= {(step, rank) for rank in ranks}
            case Reply(session, seq):
                asked = self.waiting.pop(session, None)
                if asked is None:
                    asked = self.repeated.pop(session)
                assert asked == seq, "one answer, to what was asked"
                assert self.run.coordinator.has_values
                client = self.run.by_session[session]
                present = self.run.coordinator.open_round.pushes
                assert client.rank not in present, "a rank in the open round waits for its end"
            case AskInitial():
                assert not self.run.coordinator.has_values
            case Finish():
                self.finished = True


AnyRun.TestCase.settings = settings(stateful_step_count=40, max_examples=max(400, settings().max_examples))
TestAnyRun = AnyRun.TestCase
