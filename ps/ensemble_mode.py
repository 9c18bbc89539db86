"""Ensemble mode on the server: who owns what, what their answers weigh, and how they vote.

`EnsembleMode.close` is called by `ParameterServer._update`, by way of `ps.modes.MembersMode`.
All methods are called under the server's lock.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.arena import Arena
from protocol.ensemble import Answers, Weighting, as_member, labels_digest, side_views
from protocol.errors import CheckpointError, ConfigurationError, LocalProtocolError, ManifestMismatch, Refused
from protocol.messages import Kind, Offer, RefusalCode
from protocol.tensors import SHARED, Layout, Manifest
from protocol.user_function import UserFunction
from ps.coordination.instructions import CloseRound
from ps.rules.ensemble import ActsOn, EnsembleMaster, Floats, Head, MasterConfig, Vote, member_factors, vote
from ps.storage.member_store import MemberStore, MemberWeights
from ps.storage.schedules import Schedule
from ps.storage.snapshots import Tensors
from ps.storage.store_config import NotFinite, StoreConfig

logger = logging.getLogger("weighmaster.ps")

MEGABYTE = 1e6


class Master(Protocol):
    """What weighs answers: see `ps.rules.ensemble.EnsembleMaster`."""

    def weights(self, logits: Floats, present: NDArray[np.bool_]) -> Floats:
        """Return the weight of each member for each example [B, N]."""

    def learn(self, logits: Floats, labels: NDArray[np.int32], present: NDArray[np.bool_], rate: float) -> float:
        """Learn from who was right; return the loss before."""

    def state(self) -> dict[str, Any]:
        """Return everything that later weights depend on, as arrays and plain numbers."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""


@dataclass(frozen=True)
class EnsembleConfig:
    """What an ensemble is.

    Attributes:
        members: N.
        weighting: of batches or examples.
        acts_on: what a batch's weight multiplies.
        head: how scores become weights.
        seed: of the master's initial values.
        master: `file.py:function` of a master of the user's own, or None.
        store: slots for N.
        max_memory, max_model_bytes: limits of the server.
    """

    members: int
    weighting: Weighting
    acts_on: ActsOn
    head: Head
    seed: int
    master: str | None
    store: StoreConfig
    max_memory: int
    max_model_bytes: int


@dataclass(frozen=True)
class Terms:
    """What is agreed with one client: its layout, and the payloads of messages that only some modes have."""

    layout: Layout
    payloads: dict[Kind, int]


@dataclass(frozen=True, eq=False)
class _Batch:
    """What was asked of all members at one step, and what the master made of it."""

    logits: Floats
    labels: NDArray[np.int32]
    present: NDArray[np.bool_]
    weights: Floats


class EnsembleMode:
    """The members of a run, their store, their master and their votes.

    Attributes:
        store: None until all members have said what they hold.
        votes: the last vote and its step, or None.

    Raises:
        ConfigurationError: the file or function of the user's own master is missing, or cannot be loaded.
    """

    def __init__(
        self, config: EnsembleConfig, schedule: Schedule, initial_values: dict[str, NDArray[Any]] | None
    ) -> None:
        self.config = config
        self._function = None if config.master is None else _load(config.master)
        self.store: MemberStore | None = None
        self.votes: tuple[int, Vote] | None = None
        self._schedule = schedule
        self._initial_values = initial_values
        self._parts: dict[int, Manifest] = {}
        self._answers: Answers | None = None
        self._master: Master | None = None
        self._shown: dict[int, NDArray[np.uint8]] = {}
        self._batch: _Batch | None = None
        self._learning: tuple[_Batch, float] | None = None
        self._tests: dict[int, NDArray[np.uint8]] = {}
        self._test_step = -1
        self._complaint = ""

    # ---- who owns what ---------------------------------------------------------------------------------

    def agree(self, offer: Offer, rank: int) -> Terms:
        """Agree with a member; when it is the last, everything is allocated.

        Raises:
            Refused: it cannot be a member, or differs from what this rank or the others said before.
            ConfigurationError: the memory does not suffice, or the user's master cannot be used.
            ManifestMismatch: the values of `--init` are not those of the members.
        """
        answers, part = self._judged(offer, rank)
        if rank not in self._parts:
            self._answers = answers
            self._parts[rank] = part
            if len(self._parts) == self.config.members:
                self._allocate(answers, self._initial_values)
        layout = Layout.of(self._parts[rank], answers.push_sides(self.config.weighting))
        return Terms(layout, dict(answers.payloads(self.config.weighting)))

    def _judged(self, offer: Offer, rank: int) -> tuple[Answers, Manifest]:
        try:
            answers = Answers.in_offer(offer)
            part = as_member(Manifest.from_wire(offer.manifest), rank)
        except ValueError as error:
            raise Refused(RefusalCode.MANIFEST, f"the worker cannot be a member of an ensemble: {error}") from error
        if answers is None:
            raise Refused(
                RefusalCode.MANIFEST,
                "this server trains an ensemble, for which a worker must have logits of two classes or more: "
                "return them from the build function, or give `answers` to worker.connect",
            )
        if self._answers is not None and answers != self._answers:
            raise Refused(
                RefusalCode.MANIFEST,
                f"all members must answer alike: this one has {answers.describe()}, the others "
                f"{self._answers.describe()}; give them the same data, --batch-size and classes",
            )
        if not any(spec.owner == rank for spec in part.variables):
            raise Refused(RefusalCode.MANIFEST, "the worker has no variables of its own, so it is no member")
        self._check_bytes(part, answers)
        part = self._in_our_order(part)
        if rank in self._parts:
            try:
                self._parts[rank].check_same_variables(part, "the server", "the worker")
            except ManifestMismatch as error:
                raise Refused(RefusalCode.MANIFEST, str(error)) from error
        return answers, part

    def _check_bytes(self, part: Manifest, answers: Answers) -> None:
        size = Layout.of(part).values_bytes + answers.batch.payload_bytes + answers.test.payload_bytes
        if size > self.config.max_model_bytes:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"the variables and logits of a member take {size} bytes, above --max-model-bytes "
                f"{self.config.max_model_bytes} of the server",
            )
        try:
            MemberStore.check_supported(part)
        except ConfigurationError as error:
            raise Refused(RefusalCode.MANIFEST, str(error)) from error

    def _in_our_order(self, part: Manifest) -> Manifest:
        """Return a part with the shared variables in the order of the first member, which all layouts need."""
        known = next(iter(self._parts.values()), part)
        ours = Manifest(tuple(spec for spec in known.variables if spec.owner == SHARED))
        theirs = Manifest(tuple(spec for spec in part.variables if spec.owner == SHARED))
        try:
            ours.check_same_variables(theirs, "the other members", "this worker")
        except ManifestMismatch as error:
            raise Refused(RefusalCode.MANIFEST, str(error)) from error
        return Manifest((*ours.variables, *(spec for spec in part.variables if spec.owner != SHARED)))

    def _allocate(self, answers: Answers, initial_values: dict[str, NDArray[Any]] | None) -> None:
        config = self.config
        sides = answers.push_sides(config.weighting)
        parts = [Layout.of(self._parts[rank], sides) for rank in range(config.members)]
        # Beside the store: the answers of all members, on a batch and on the test set, and three times in float64.
        answered = 4 * config.members * (answers.batch.payload_bytes + answers.test.payload_bytes)
        needed = MemberStore.bytes_for(parts, config.store) + answered
        logger.info(
            "%d members with %.1f MB of variables; the server will hold %.1f MB",
            config.members,
            sum(part.values_bytes for part in parts) / MEGABYTE,
            needed / MEGABYTE,
        )
        if needed > config.max_memory:
            raise ConfigurationError(
                f"the ensemble needs {needed / MEGABYTE:.0f} MB on the server, above --max-memory "
                f"{config.max_memory / MEGABYTE:.0f} MB: allow more, or use fewer workers"
            )
        self._master = make_master(config, answers.classes, self._function)
        store = MemberStore(parts, config.store)
        if initial_values is not None:
            try:
                arena = Arena.zeros(store.layout)
                arena.fill(initial_values)
                store.initialise(arena.buffer)
            except (ManifestMismatch, NotFinite) as error:
                store.close()
                raise ManifestMismatch(f"--init does not fit the members' models: {error}") from error
        self.store = store

    # ---- what answers weigh ----------------------------------------------------------------------------

    def problem_of(self, rank: int, labels: bytes | None) -> str:
        """Return why what a rank has pushed cannot be used, beside its gradient; or nothing.

        Args:
            rank: whose row is complete.
            labels: digest in the header.
        """
        if labels is None:
            return "it carries no digest of its labels"
        if self.config.weighting is Weighting.SAMPLE:
            return ""
        assert self.store is not None
        return _problem(side_views(self.store.parts[rank], self.store.row(rank)), labels)

    def show(self, rank: int, payload: NDArray[np.uint8], labels: bytes) -> str:
        """Take a member's logits on the open batch; return why they cannot be used, or nothing."""
        assert self._answers is not None
        problem = _problem(side_views(self._answers.batch, payload), labels)
        if not problem:
            self._shown[rank] = payload
        return problem

    def weigh(self, ranks: Sequence[int]) -> None:
        """Weigh the logits that these ranks have shown."""
        assert self._answers is not None
        layout = self._answers.batch
        self._batch = self._weighed({rank: side_views(layout, self._shown[rank]) for rank in ranks})
        self._shown.clear()

    def weights_for(self, rank: int) -> NDArray[np.uint8]:
        """Return the payload that tells a rank what its examples weigh."""
        assert self._answers is not None and self._batch is not None
        layout = self._answers.weights
        arena = Arena.zeros(layout)
        side_views(layout, arena.buffer)["weights"][...] = self._batch.weights[:, rank]
        return arena.buffer

    def _weighed(self, sides: dict[int, dict[str, NDArray[Any]]]) -> _Batch:
        assert self._master is not None and sides
        self.learn()
        first = sides[min(sides)]
        members = self.config.members
        logits = np.zeros((len(first["labels"]), members, first["logits"].shape[1]))
        present = np.zeros(members, np.bool_)
        for rank, views in sides.items():
            logits[:, rank] = views["logits"]
            present[rank] = True
        weights = self._master.weights(logits, present)
        return _Batch(logits, first["labels"].copy(), present, weights)

    def close(self, closing: CloseRound) -> dict[int, float]:
        """Make values(step + 1) of values(step), the round's gradients and the weights of their owners.

        Returns:
            The mean weight of each member that counted.
        """
        assert self.store is not None
        ranks = [c.rank for c in closing.contributions if not c.refused]
        self._vote_before_the_update(closing.step)
        sample = self.config.weighting is Weighting.SAMPLE
        if not sample:
            parts = self.store.parts
            self._batch = self._weighed({r: side_views(parts[r], self.store.row(r)) for r in ranks})
        assert self._batch is not None
        batch, rate = self._batch, self._schedule(closing.step)
        means = batch.weights.mean(axis=0)
        if sample:  # the weights are in the gradients already
            ones = [1.0] * len(ranks)
            factors = MemberWeights(ranks, ones, ones, ones)
        else:
            own, steps = member_factors(means, self.config.acts_on)
            factors = MemberWeights(ranks, means[ranks].tolist(), own[ranks].tolist(), steps[ranks].tolist())
        self.store.apply_members(factors, rate)
        self._learning = (batch, rate)
        self._batch = None
        return {rank: float(means[rank]) for rank in ranks}

    def skip(self) -> None:
        """Close a void round: nothing is applied, and nothing learned."""
        assert self.store is not None
        self._batch = None
        self._shown.clear()
        self.store.skip()

    def learn(self) -> None:
        """Let the master learn from the last round, if it has not yet; what is weighed next does so by itself."""
        if self._learning is not None and self._master is not None:
            batch, rate = self._learning
            self._learning = None
            self._master.learn(batch.logits, batch.labels, batch.present, rate)
            complaint = getattr(self._master, "complaint", "")
            if complaint and complaint != self._complaint:
                logger.warning("%s", complaint)
            self._complaint = complaint

    # ---- votes -----------------------------------------------------------------------------------------

    def tested(self, rank: int, step: int, payload: NDArray[np.uint8], voters: Iterable[int]) -> None:
        """Take a member's logits on the test set; vote when those of all `voters` are there.

        Args:
            rank: whose they are.
            step: of the values, the present one.
            payload: uint8, logits and labels.
            voters: ranks that are waited for.
        """
        assert self._answers is not None
        if step != self._test_step:
            self._tests.clear()
            self._test_step = step
        views = side_views(self._answers.test, payload)
        first = next(iter(self._tests.values()), payload)
        same = np.array_equal(views["labels"], side_views(self._answers.test, first)["labels"])
        if not (same and np.isfinite(views["logits"]).all()):
            why = "are not finite" if same else "are of other labels than those of the others"
            logger.warning("rank %d does not vote at step %d: its logits on the test set %s", rank, step, why)
            return
        self._tests[rank] = payload
        if set(voters) <= self._tests.keys():
            self.vote_now()

    def _vote_before_the_update(self, step: int) -> None:
        if self._test_step == step:
            self.vote_now()

    def vote_now(self) -> None:
        """Vote with the logits that are there, if there are any that were not counted yet."""
        if not self._tests or self._master is None or self._answers is None:
            return
        layout = self._answers.test
        batch = self._weighed({rank: side_views(layout, payload) for rank, payload in self._tests.items()})
        result = vote(batch.logits, batch.labels, batch.present, batch.weights)
        self.votes = (self._test_step, result)
        self._tests.clear()
        logger.info("step %d: %s", self._test_step, describe_vote(result))

    # ---- checkpoints -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that later rounds depend on beside the store, as arrays and plain values.

        Answers of an open round are no part of it: after a restart the members show them again.

        Raises:
            LocalProtocolError: the members have not all come yet.
        """
        if self._master is None or self._answers is None:
            raise LocalProtocolError("an ensemble has no state before all its members have come")
        self.learn()
        answers = self._answers
        step, votes = self.votes if self.votes is not None else (None, None)
        return {
            "manifests": [self._parts[rank].to_wire() for rank in range(self.config.members)],
            "answers": [answers.examples, answers.classes, answers.dtype, answers.test_examples],
            "master": self._master.state(),
            "master_name": type(self._master).__name__,
            "votes": None if votes is None else [step, votes.weighted, votes.plain, votes.alone.copy()],
            "complaint": self._complaint,
        }

    def restore(self, state: Mapping[str, Any], step: int, updates: int, tensors: Tensors) -> None:
        """Make the store and the master of a checkpoint; whoever joins later is compared with what they hold.

        Args:
            state: what `state` returned, or read from JSON.
            step: of the store's snapshot.
            updates: likewise.
            tensors: likewise.

        Raises:
            ConfigurationError: another number of members, or the memory does not suffice.
            CheckpointError: the master is of another kind, or a user's own has other variables now.
            ManifestMismatch: the tensors are not those of the members.
            NotFinite: a variable has NaN or infinite values.
        """
        if len(state["manifests"]) != self.config.members:
            raise ConfigurationError(
                f"the checkpoint is of an ensemble of {len(state['manifests'])} members, and --workers is "
                f"{self.config.members}: give as many as before"
            )
        answers = Answers(*state["answers"])
        self._parts = {rank: Manifest.from_wire(wire) for rank, wire in enumerate(state["manifests"])}
        self._answers = answers
        self._allocate(answers, None)
        assert self.store is not None and self._master is not None
        self.store.restore(step, updates, tensors)
        name = type(self._master).__name__
        if name != state["master_name"]:
            raise CheckpointError(
                f"the checkpoint has a master of the kind {state['master_name']}, and this run's is {name}: "
                "give the same --master as before"
            )
        self._master.restore(state["master"])
        votes = state["votes"]
        if votes is not None:
            alone = np.array(votes[3], np.float64)
            self.votes = (int(votes[0]), Vote(float(votes[1]), float(votes[2]), alone))
        self._complaint = state["complaint"]

    def summary(self) -> dict[str, Any]:
        """Return the last vote, ready for JSON; None where there was none."""
        step, result = self.votes if self.votes is not None else (None, None)
        alone = [None] * self.config.members if result is None else result.alone.tolist()
        return {
            "step": step,
            "weighted_vote": None if result is None else result.weighted,
            "plain_vote": None if result is None else result.plain,
            "alone": [None if share is None or share != share else share for share in alone],
        }


def _load(spec: str) -> UserFunction:
    from ps.rules.user_network import load_user_master

    return load_user_master(spec)


def make_master(config: EnsembleConfig, classes: int, function: UserFunction | None) -> Master:
    """Return the built-in master, or one that does as a user's function says.

    Raises:
        ConfigurationError: the user's own cannot be used.
    """
    optimizer = config.store.optimizer
    numbers = {name: getattr(optimizer, name) for name in ("beta1", "beta2", "epsilon") if hasattr(optimizer, name)}
    wanted = MasterConfig(config.members, classes, config.head, config.seed, **numbers)
    if function is None:
        return EnsembleMaster(wanted)
    from ps.rules.user_vote import UserVote

    return UserVote(function, wanted)


def describe_vote(result: Vote) -> str:
    """Return `weighted vote 0.9611, plain vote 0.9556, alone 0.9306 0.9417 missing`."""
    alone = " ".join("missing" if share != share else f"{share:.4f}" for share in result.alone.tolist())
    return f"weighted vote {result.weighted:.4f}, plain vote {result.plain:.4f}, alone {alone}"


def _problem(views: dict[str, NDArray[Any]], labels: bytes) -> str:
    if not np.isfinite(views["logits"]).all():
        return "its logits are not finite"
    if labels_digest(views["labels"]) != labels:
        return "its labels are not those of its digest"
    return ""
