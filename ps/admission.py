"""Who is let in, and on what terms: an identity is claimed, an offer checked, a client welcomed."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from protocol.messages import AUTO_RANK, Offer, Role, Welcome
from ps.agreement import Agreement, check_seed
from ps.coordination.coordinator import Coordinator
from ps.coordination.course_clock import CourseClock
from ps.coordination.instructions import Instruction
from ps.coordination.members import Claim, Granted, Identity
from ps.ensemble_mode import Terms
from ps.settings.config import ServerConfig

CarryOut = Callable[[Iterable[Instruction]], None]


@dataclass(frozen=True)
class Admission:
    """What a client is told when it has joined, and what holds for its connection from then on."""

    welcome: Welcome
    terms: Terms


class Admissions:
    """Lets clients into a run.

    Args:
        config: what the operator asked for.
        epoch: of this start of the server.
        lock: of the server's state.
        course: of the run.
        clock: of the course.
        agreement: on the variables.
        carry_out: does what the coordinator decides; called with the lock held.
    """

    def __init__(
        self,
        config: ServerConfig,
        epoch: int,
        lock: threading.RLock,
        course: Coordinator,
        clock: CourseClock,
        agreement: Agreement,
        carry_out: CarryOut,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._lock = lock
        self._course = course
        self._clock = clock
        self._agreement = agreement
        self._carry_out = carry_out
        self.is_over = False

    def claim(self, who: Identity) -> Claim:
        """Judge an identity; changes nothing."""
        with self._lock:
            return self._course.registry.claim(who)

    @property
    def has_variables(self) -> bool:
        """Whether it is known what is trained."""
        return self._agreement.is_settled

    def new_dtypes(self, offer: Offer) -> frozenset[str]:
        """Return the dtypes whose kernels must be ready before this offer is checked."""
        return frozenset() if self.is_over else self._agreement.new_dtypes(offer)

    def check_offer(self, who: Identity, offer: Offer) -> None:
        """Check what an offer says before the identity is settled; in mode shared, agree on the variables.

        Raises:
            Refused: other variables, another seed, a dtype that cannot be served, or too many bytes.
        """
        check_seed(self._config.seed, offer)
        if not self.is_over:  # else it hears of the end next; nothing is to be made for it
            self._agreement.check(who, offer)

    def join(self, session: int, who: Identity, granted: Granted, offer: Offer) -> Admission | None:
        """Welcome a session under an identity; None if the identity was taken meanwhile.

        Raises:
            Refused: it cannot be a member of the ensemble.
        """
        with self._lock:
            again = self._course.registry.claim(who)
            if not isinstance(again, Granted) or again.replaces is not None:
                return None
            known = self._course.registry.member(who.role, granted.rank)
            threads = known.threads if known is not None and who.role is not Role.EVALUATOR else offer.threads
            terms = self._agreement.terms(offer, again.rank)
            who = replace(who, software=offer.software)
            told = self._course.joined(session, who, again, threads, self._clock.now())
            welcome = self._welcome(who, again, threads, terms)
            self._carry_out(told)
            return Admission(welcome, terms)

    def _welcome(self, who: Identity, granted: Granted, threads: int, terms: Terms) -> Welcome:
        config = self._config
        return Welcome(
            epoch=self._epoch,
            step=self._course.step,
            steps=config.steps,
            rank=granted.rank if who.role is Role.WORKER else AUTO_RANK,
            name=granted.name,
            seed=config.seed,
            threads=threads,
            workers=config.ranks,
            shards=config.shard_count,
            mode=config.mode,
            codec="raw",
            heartbeat_interval=float(config.heartbeat_interval),
            heartbeat_timeout=float(config.heartbeat_timeout),
            manifest=terms.layout.manifest.to_wire(),
            weighting=config.weighting if self._course.policy.weighting is not None else "",
        )
