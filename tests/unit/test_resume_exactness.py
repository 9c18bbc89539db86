"""A server that starts again from a checkpoint goes on with the same bits as one that was never stopped.

Workers are functions of (values, rank, step), as real ones are. A checkpoint is what the store and the closer give
out, taken to files and back; it is read only when the run that wrote it has long gone on.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from protocol.arena import Arena
from protocol.errors import CheckpointError, WeighmasterError
from protocol.tensors import Kind, Layout, Manifest, VariableSpec
from ps.closing import RoundCloser
from ps.coordination.instructions import CloseRound, Contribution
from ps.rules.aggregation import ClippedMean, CosineTrust, Krum, Mean, MeanOver, Median, MultiKrum, TrimmedMean
from ps.rules.evidence import Evidence
from ps.rules.master import Master
from ps.rules.user_master import UserMaster
from ps.rules.user_network import load_user_master
from ps.storage.optimizers import SGD, Adam, AdamW
from ps.storage.receiver import PushCheck
from ps.storage.schedules import Cosine
from ps.storage.store import Store
from ps.storage.store_config import StoreConfig
from tests.unit.resumed import at, copied, leaves, plain, without, written_and_read

LAYOUT = Layout.of(
    Manifest(
        (
            VariableSpec("dense/kernel", (9, 5), "float32"),
            VariableSpec("dense/bias", (5,), "float32"),
            VariableSpec("precise", (7,), "float64"),
            VariableSpec("norm/mean", (3,), "float32", Kind.STATE),
            VariableSpec("norm/count", (), "int64", Kind.STATE),
        )
    )
)


# ---- a run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What a run is.

    Attributes:
        rule: makes a fresh one.
        rounds: how long it is.
        stops: steps at which it goes on from a checkpoint.
        workers: how many.
        every: rounds between validations; 0 for none.
        first_validated: the first round in which a validator takes part.
        deserted: the round from which on it is gone, in the midst of a gradient.
        judge: what the validator's slope is multiplied by.
        bad: who pushes the opposite, from a third of the run on.
        options: of the store.
        clip_worker_norm: of the closer.
        rename: whether the last worker gives way to one of another name in the middle.
    """

    rule: Any
    rounds: int = 16
    stops: tuple[int, ...] = (0, 1, 7, 12, 15)
    workers: int = 5
    every: int = 0
    first_validated: int = 0
    deserted: int = 1000
    judge: float = 1.0
    bad: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    clip_worker_norm: float | None = None
    rename: bool = False


RULES = {
    "mean": Case(Mean),
    "mean over examples": Case(
        lambda: Mean(MeanOver.EXAMPLES),
        options={"ema_decay": 0.9, "clip_norm": 2.0, "optimizer": AdamW()},
        clip_worker_norm=5.0,
    ),
    "mean, plain descent": Case(Mean, options={"optimizer": SGD()}),
    "mean, momentum": Case(Mean, options={"optimizer": SGD(0.9), "ema_decay": 0.5}),
    "clipped mean": Case(ClippedMean, options={"optimizer": SGD(0.9, True)}),
    "median": Case(Median),
    "trimmed mean": Case(lambda: TrimmedMean(1), options={"ema_decay": 0.9}),
    "krum": Case(lambda: Krum(1)),
    "multi-krum": Case(lambda: MultiKrum(1)),
    "cosine trust": Case(CosineTrust, every=1, bad=(1,)),
    "cosine trust, seldom": Case(CosineTrust, every=4, bad=(1,)),
    "cosine trust, many": Case(CosineTrust, every=3, workers=12),
    "cosine trust, deserted": Case(CosineTrust, every=3, deserted=8),
    "cosine trust, all bad": Case(CosineTrust, every=2, bad=(0, 1, 2, 3, 4)),
    "evidence": Case(lambda: Evidence(True), every=1, bad=(0,), rounds=30, stops=(1, 9, 11, 29)),
    "evidence, seldom": Case(lambda: Evidence(True), every=5, bad=(0,), rounds=40, stops=(4, 16, 33), rename=True),
    "evidence, many": Case(lambda: Evidence(True), every=3, workers=12, bad=(0, 4), rounds=30, stops=(7, 20)),
    "evidence, surprised": Case(lambda: Evidence(False), every=3, first_validated=6, bad=(0,), stops=(3, 8, 14)),
    "evidence, deserted": Case(
        lambda: Evidence(True), every=3, deserted=8, judge=0.2, bad=(0,), stops=(6, 7, 9, 12)
    ),
    "evidence by claims": Case(lambda: Evidence(False), rounds=60, stops=(20, 39, 50)),
    "master": Case(lambda: Master(True, 3), every=1, bad=(2,), rounds=80, stops=(0, 5, 30, 66), rename=True),
    "master, seldom": Case(lambda: Master(True, 3), every=4, bad=(2,), rounds=60, stops=(19, 26, 50), rename=True),
    "master, many": Case(lambda: Master(True, 3), every=3, workers=12, bad=(2, 5), rounds=30, stops=(10, 17)),
    "master, deserted": Case(
        lambda: Master(True, 3), every=3, deserted=8, judge=0.2, bad=(0,), stops=(6, 7, 9, 12)
    ),
    "master by claims": Case(lambda: Master(False, 3), rounds=60, stops=(20, 41, 50), bad=(1,)),
    "master, momentum": Case(
        lambda: Master(True, 3), every=2, bad=(2,), rounds=24, stops=(9, 18), options={"optimizer": SGD(0.9)}
    ),
}


class Server:
    """The parts of a server that a checkpoint is of, and what they are fed with."""

    def __init__(self, case: Case) -> None:
        self.case = case
        config = {"optimizer": Adam(), "threads": 1, "reductions": True, "checkpoints": True, **case.options}
        self.store = Store(LAYOUT, StoreConfig(slots=case.workers, references=1, **config))
        self.closer = RoundCloser(case.rule(), Cosine(0.05, 100), case.clip_worker_norm)
        self.judge = case.workers
        for row in range(case.workers + 1):
            self.store.receiver(row).buffer[:] = b"\xff" * LAYOUT.payload_bytes  # NaN, should anybody look

    def begin(self) -> "Server":
        arena = Arena.zeros(LAYOUT)
        for name, view in arena.views(writeable=True).items():
            view[...] = np.random.default_rng(len(name)).normal(size=view.shape)
        self.store.initialise(arena.buffer[: LAYOUT.values_bytes])
        return self

    def _push(self, row: int, step: int, factor: float) -> PushCheck:
        values = Arena(LAYOUT, np.frombuffer(self.store.current.buffer, np.uint8)).views()
        draw = np.random.default_rng([7, row, step])
        receiver = self.store.receiver(row)
        arena = Arena.zeros(LAYOUT)
        for slot in LAYOUT.slots:
            value, view = values[slot.spec.name], arena.slot_view(slot)
            noise = draw.normal(size=value.shape)
            truth = factor * (value - 1.0) if slot.spec.kind is Kind.TRAINABLE else 0.1 * value
            view[...] = truth + 0.5 * noise if slot.spec.dtype.startswith("float") else 10 * row + step
        receiver.buffer[:] = arena.buffer.data
        for end in receiver.block_ends:
            receiver.received(end)
        return receiver.finish()

    def _contribution(self, rank: int, step: int) -> Contribution:
        draw = np.random.default_rng([8, rank, step])
        is_bad = rank in self.case.bad and step >= self.case.rounds // 3
        check = self._push(rank, step, -3.0 if is_bad else 1.0)
        loss, accuracy = draw.random(2) + (2.0 if is_bad else 0.0)
        refused = "made up" if (rank + step) % 13 == 0 or step % 11 == 10 else ""
        numbers = (loss, accuracy / 3, 8 + rank, check.gradient_norm)
        return Contribution(rank, rank, step + 1, *numbers, refused, state_norm=check.state_norm)

    def round(self, step: int) -> tuple[Any, ...]:
        """Go through a round; return all bits that it has found and left behind."""
        case, found = self.case, self._holds()
        present = [rank for rank in range(case.workers) if (2 * rank + step) % 9]
        contributions = tuple(self._contribution(rank, step) for rank in present)
        references: tuple[int, ...] = ()
        if case.every and case.first_validated <= step <= case.deserted:
            if step < case.deserted and (step % case.every == 0 or self.closer.wants_validation):
                self.closer.reference_arrives(self.judge)
                self._push(self.judge, step, case.judge)
                references = (self.judge,)
            elif step % 7 == 6 or step == case.deserted:  # it breaks off in the midst of one that comes too late
                self.closer.reference_arrives(self.judge)
                self.store.receiver(self.judge).buffer[:] = b"\xff" * LAYOUT.payload_bytes
        decided: tuple[Any, ...] = ()
        if all(c.refused for c in contributions):
            self.store.skip()
        else:
            names = [f"w{rank}" for rank in present]
            if case.rename and step >= case.rounds // 2 and present[-1] == case.workers - 1:
                names[-1] = "newcomer"
            closed = self.closer.close(self.store, CloseRound(step, contributions, references), names)
            assert closed.decision is not None
            decided = (closed.decision.weights.tobytes(), closed.decision.factors.tobytes(), closed.decision.trim)
            decided += (closed.decision.fallback, closed.fresh)
        kept = (self.store.current.step, self.store.updates, self.closer.unapplied, self.closer.references)
        return (*found, *self._holds(), *kept, *decided, self.closer.wants_validation)

    def _holds(self) -> list[bytes]:
        parts = self.store.optimizer_arrays().values()
        return [bytes(self.store.current.buffer), *(array.tobytes() for part in parts for array in part.values())]

    def knows(self) -> tuple[str, ...]:
        """Return, to the bit, what rounds to come would depend on beside the store."""
        return tuple(f"{place}: {plain(at(self.closer.state(), place))}" for place in leaves(self.closer.state()))

    def restore(self, step: int, updates: int, tensors: Any, state: Any) -> "Server":
        self.store.restore(step, updates, tensors)
        self.closer.restore(state)
        return self


def undisturbed(case: Case) -> list[tuple[Any, ...]]:
    server = Server(case).begin()
    rounds = []
    for step in range(case.rounds):
        rounds.append(server.round(step))
        server.closer.learn()
    return [*rounds, server.knows()]


@dataclass(frozen=True)
class Kept:
    """What a checkpoint holds."""

    step: int
    updates: int
    tensors: dict[str, dict[str, Any]]
    state: dict[str, Any]


def checkpoint(case: Case, stop: int, learns: bool) -> Kept:
    """Run to a step, take a checkpoint, and read it when the run has gone on to its end.

    Args:
        case: of the run.
        stop: the step.
        learns: whether what was judged is learned at once, or not before it must be.
    """
    server = Server(case).begin()
    for step in range(stop):
        server.round(step)
        if learns:
            server.closer.learn()
    snapshot = server.store.snapshot(server.closer.references)
    state = server.closer.state()
    for step in range(stop, case.rounds):
        server.round(step)
    kept = Kept(snapshot.step, snapshot.updates, copied(snapshot.tensors), written_and_read(state))
    snapshot.release()
    return kept


def goes_on(case: Case, kept: Kept) -> Iterator[tuple[Any, ...]]:
    server = Server(case).restore(kept.step, kept.updates, kept.tensors, kept.state)
    for step in range(kept.step, case.rounds):
        yield server.round(step)
        if step % 3:
            server.closer.learn()
    yield server.knows()


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(name):
    case = RULES[name]
    whole = undisturbed(case)
    for stop in case.stops:
        for learns in (True, False):
            kept = checkpoint(case, stop, learns)
            assert kept.step == stop
            same = [one == other for one, other in zip(goes_on(case, kept), whole[stop:], strict=True)]
            assert all(same), f"resumed at {stop}, learning {learns}, {same.index(False)} rounds later"


def test_a_run_that_is_stopped_again_and_again_is_the_same():
    case = RULES["master, seldom"]
    whole = undisturbed(case)
    server = Server(case).begin()
    for step in range(case.rounds):
        assert server.round(step) == whole[step]
        if step % 4 == 2:
            snapshot = server.store.snapshot(server.closer.references)
            kept = copied(snapshot.tensors), written_and_read(server.closer.state())
            server = Server(case).restore(snapshot.step, snapshot.updates, *kept)


LEARNER = """
import tensorflow as tf
def master(features, num_workers):
    kernel = tf.Variable(tf.random.normal([9, 6], stddev=0.3))
    top = tf.Variable(tf.zeros([6, 1]))
    bias = tf.Variable(tf.zeros([num_workers]))
    return tf.nn.softmax(tf.matmul(tf.tanh(tf.matmul(features, kernel)), top)[:, 0] + bias)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_master_of_the_users_own_goes_on_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(LEARNER))
    function = load_user_master(f"{path}:master")
    made = []

    def rule():
        made.append(UserMaster(function, 5, validated=True, seed=3))
        return made[-1]

    case = Case(rule, every=3, bad=(2,), rounds=30, rename=True)
    whole = undisturbed(case)
    for stop, learns in ((8, True), (19, False)):
        kept = checkpoint(case, stop, learns)
        assert not differs(case, kept, whole), stop
        fresh = Server(case).closer.state()
        assert fresh["rule"].keys() == {"evidence", "variables", "learned", "memory"}
        for part in fresh["rule"]:
            left_out = without(kept.state, ("rule", part), fresh)
            assert differs(case, Kept(kept.step, kept.updates, kept.tensors, left_out), whole), part
    for master in made:
        master.close()


# ---- no part of it can be left out ---------------------------------------------------------------------


def differs(case, kept, whole):
    try:
        return any(one != other for one, other in zip(goes_on(case, kept), whole[kept.step :], strict=True))
    except (WeighmasterError, ValueError, IndexError, AssertionError):
        return True


WATCHED = {
    "master, seldom": (26, 50),
    "master, many": (10,),
    "master, deserted": (6, 9, 12),
    "master by claims": (41,),
    "evidence, seldom": (17, 33),
    "evidence, many": (9,),
    "evidence, deserted": (6, 9, 12),
    "evidence by claims": (50,),
    "cosine trust, seldom": (10,),
    "cosine trust, deserted": (10,),
    "cosine trust, all bad": (9,),
}
"""Cases and steps which together need everything that a state holds."""

NOT_MISSED = {
    "CosineTrust": {("rule",)},  # it remembers nothing
    "Evidence": {("rule", "validated"), ("unapplied",)},
    "Master": {("rule", "evidence", "validated"), ("unapplied",)},
}
"""What may be left out, by rule: the norm of a reference says again that there was one; what no case of a rule
counts, others do. A rule's name is only compared."""


def test_every_part_of_a_closers_state_is_needed():
    """What is left out changes later bits, or what is known at the end, in one case at least."""
    needed, seen = set(), set()
    for name, stops in WATCHED.items():
        case = RULES[name]
        whole, fresh = undisturbed(case), Server(case).closer.state()
        kind = fresh["rule_name"]
        for stop in stops:
            kept = checkpoint(case, stop, True)
            for place in leaves(kept.state):
                seen.add((kind, place))
                if (kind, place) not in needed:
                    part = Kept(kept.step, kept.updates, kept.tensors, without(kept.state, place, fresh))
                    if differs(case, part, whole):
                        needed.add((kind, place))
    unneeded = {kind: {place for of, place in seen - needed if of == kind} for kind in NOT_MISSED}
    assert unneeded == {kind: places | {("rule_name",)} for kind, places in NOT_MISSED.items()}


@pytest.mark.parametrize("name", ["mean over examples", "cosine trust, seldom"])
def test_every_tensor_of_a_store_is_needed(name):
    case = RULES[name]
    whole, kept = undisturbed(case), checkpoint(case, 5, True)
    assert not differs(case, kept, whole)
    miscounted = Kept(kept.step, kept.updates - 1, kept.tensors, kept.state)
    assert differs(case, miscounted, whole)
    count = 0
    for group, tensors in kept.tensors.items():
        for tensor in tensors:
            changed = copied(kept.tensors)
            changed[group][tensor][...] = 0
            is_needed = differs(case, Kept(kept.step, kept.updates, changed, kept.state), whole)
            assert is_needed, (group, tensor)
            count += 1
    assert count == 5 + 3 * 3  # values; for each trainable variable, two moments and an average or a reference


def test_the_memory_of_another_rule_is_refused_by_name():
    state = Server(RULES["master"]).closer.state()
    with pytest.raises(CheckpointError, match="rule Master, and this run's is Evidence"):
        Server(RULES["evidence"]).closer.restore(state)
    Server(RULES["mean"]).closer.restore(state)
