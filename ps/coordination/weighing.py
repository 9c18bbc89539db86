"""Rounds in which each example is weighed before its gradient: the events of logits. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from protocol.messages import Logits, Push
from ps.coordination import attendance
from ps.coordination.course import OF_NOBODY, Course
from ps.coordination.instructions import Contribution, Drop, Instruction, SendWeights, Take, Useless, WeighAnswers
from ps.coordination.members import Member, SessionId
from ps.coordination.policy import Phase
from ps.coordination.rounds import Answer, other_labels


@dataclass
class Weighing(Course):
    """Decides whose logits are taken, and when those of a round are weighed; in other modes nothing is."""

    # ---- events --------------------------------------------------------------------------------------

    def logits_begin(self, session: SessionId, logits: Logits) -> Take | Drop:
        """The header of a member's logits is here; decide where they go."""
        member = self.registry.of(session)
        if member is None:
            return OF_NOBODY
        untimely = self._untimely(member, logits)
        if untimely is not None:
            return untimely
        if self._has_weights(member, logits):  # as they were computed before: who started again computes the same
            return Drop(None)
        if self._in_round(member) or self.open_round.weighed is not None:
            return self._not_in_round(member)
        return Take(member.rank)

    def _has_weights(self, member: Member, message: Push | Logits) -> bool:
        """Say whether the examples of a member have been weighed in the round that a message is of."""
        weighed = self.open_round.weighed
        is_open = self.phase is Phase.RUNNING and message.step == self.step
        return is_open and weighed is not None and member.rank in weighed and not self._in_round(member)

    def _not_in_round(self, member: Member) -> Drop:
        reason = f"{member.label} takes no part in round {self.step}, which is under way"
        return Drop(Useless.STALE, reason, min_step=self.step + 1)

    def logits_arrived(self, session: SessionId, logits: Logits, problem: str, now: float) -> list[Instruction]:
        """A member's logits are complete; `problem` says why they cannot be used, or is empty."""
        member = self.registry.of(session)
        if member is None:
            return []  # its connection was replaced while the payload came in: the newcomer speaks for the rank
        too_late = self._too_late(member, logits)
        if too_late is not None or self._in_round(member):
            if too_late is not None and self.policy.leaves_out:
                return list(self._forget(member, logits, too_late, now))  # its round has closed without it
            return []
        if self._has_weights(member, logits):
            return [SendWeights(session, member.rank, logits.seq)]
        if self.open_round.weighed is not None:  # it goes on without it
            return list(self._forget(member, logits, self._not_in_round(member), now))
        self.last_push_at = now
        if self.open_round.began is None:
            self.open_round.began = now
        answer = Answer(session, logits.seq, logits.labels)
        told = list(self._refuse_answer(member, answer, problem, now)) if problem else []
        if not problem:
            self.open_round.answers[member.rank] = answer
        return [*told, *self._weigh_if_complete(now)]

    # ---- when the examples of a round are weighed ----------------------------------------------------

    def _weigh_if_complete(self, now: float) -> Iterator[Instruction]:
        """Weigh the answers once those of all ranks are here that have not left on purpose."""
        known = self.open_round
        if not self._weighs_examples or known.weighed is not None or self.phase is not Phase.RUNNING:
            return
        there = frozenset(known.answers) | frozenset(known.pushes)
        if not there or not frozenset(attendance.awaited(self)) <= there:
            return
        digests = {rank: answer.labels for rank, answer in known.answers.items()}
        for rank, reason in other_labels(digests).items():
            yield from self._refuse_answer(self.registry.members[rank], known.answers[rank], reason, now)
        if not known.answers:
            yield from self._close_if_complete(now)
            return
        known.weighed, known.began = frozenset(known.answers), now
        yield WeighAnswers(self.step, tuple(sorted(known.answers)))
        for rank, answer in sorted(known.answers.items()):
            yield SendWeights(answer.session, rank, answer.seq)

    def _refuse_answer(self, member: Member, answer: Answer, reason: str, now: float) -> Iterator[Instruction]:
        """Count a member that cannot be weighed as present in this round, with weight 0."""
        self.open_round.answers.pop(member.rank, None)
        refused = Contribution(
            member.rank, answer.session, answer.seq, None, None, 0, math.inf, reason, answer.labels
        )
        self.open_round.take(refused, False, now)
        yield self._refuse(member, refused)
