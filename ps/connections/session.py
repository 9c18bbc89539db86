"""One connection of the server, in a thread of its own: handshake, then events in and replies out."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.arena import aligned_empty
from protocol.deadlines import Deadline
from protocol.errors import (
    NetworkError,
    PeerSilent,
    Refused,
    RemoteProtocolError,
    VersionMismatch,
    WeighmasterError,
)
from protocol.injection import Point
from protocol.link import HANDSHAKE_S, Link, expect
from protocol.messages import (
    AUTO_RANK,
    MAX_REASON_CHARACTERS,
    AskInitial,
    Bye,
    Ended,
    Heartbeat,
    Hello,
    Initial,
    Kind,
    Logits,
    Message,
    Offer,
    Pull,
    Push,
    Refusal,
    RefusalCode,
    Report,
    Role,
    Side,
    TestLogits,
    Values,
)
from protocol.tls import Unsecured
from protocol.transport import PlainChannel, Wake
from ps.connections.handshake import authenticate
from ps.connections.stranger_log import StrangerLog
from ps.coordination import instructions as decided
from ps.coordination.members import Contested, Denied, Granted, Identity

if TYPE_CHECKING:
    from ps.gathering import Gathering
    from ps.server import ParameterServer

logger = logging.getLogger("weighmaster.ps")

TICK_S = 1.0
"""Longest sleep of a session; with short heartbeat intervals it sleeps for half of one."""

HOLD_SLACK = 1.5
"""A newcomer is held for this many heartbeat intervals: a live holder beats within 1.1 of them, give or take."""

CUT_S = 30.0
"""Longest wait for the end of a connection that was cut: its thread may be within an update."""

REFUSAL_BYTES = 64
"""At least what the header of a refusal has beside the reason."""

LAST_WORDS_S = 1.0
"""How long a connection stays half open so that the peer can read why it ended."""


@dataclass(frozen=True, eq=False)
class Answered:
    """A message whose payload was made when it was decided: it may change before it is sent."""

    message: Message
    payload: NDArray[np.uint8]


Outgoing = decided.Reply | decided.AskInitial | decided.Finish | Answered


class Session(threading.Thread):
    """Serves one client from its hello to its end.

    Attributes:
        number: of the session, never used twice.
        link: the connection; any thread may abort it.
        joined: whether the coordinator knows of it.
        ended: set when nothing of this session touches the store any more.
        after_payload: what to do when the payload that is being dropped has been read.
        cut_because: why the server itself has cut this connection; empty if it has not.
        leaves_door: called once, when this is no stranger's connection any more, or has ended as one.
        proof_failed: called when its proof is wrong, before it hears of it.
        strangers: takes what is logged of it before it has joined.
    """

    def __init__(self, number: int, channel: PlainChannel, host: "ParameterServer | Gathering") -> None:
        super().__init__(name=f"session-{number}", daemon=True)
        self.number = number
        self._channel, tls = channel, host.config.tls
        self.link = Link(channel if tls is None else tls.wrap(channel), Side.SERVER)
        self.joined = False
        self.ended = threading.Event()
        self.after_payload: Callable[[], None] | None = None
        self.cut_because = ""
        self.leaves_door: Callable[[], None] = lambda: None
        self.proof_failed: Callable[[], None] = lambda: None
        self.strangers = StrangerLog()
        self._host = host
        self._faults = host.faults
        self._role, self._rank = Role.WORKER, AUTO_RANK
        self._tick_s = min(TICK_S, host.config.heartbeat_interval / 2)
        self._outbox: deque[Outgoing] = deque()
        self._wake = Wake()
        self._owes_values = False
        self._is_at_door = True

    @property
    def _server(self) -> "ParameterServer":
        """Whom a client reaches once it is held no longer."""
        return self._host.server

    def post(self, item: Outgoing) -> None:
        """Hand over something to send; safe from any thread."""
        self._outbox.append(item)
        if threading.current_thread() is not self:
            self._wake.set()

    def nudge(self) -> None:
        """Have it look again at what it waits for; safe from any thread."""
        self._wake.set()

    def cut(self, reason: str) -> None:
        """End the connection, and say why when that is told; safe from any thread."""
        self.cut_because = self.cut_because or reason
        self.link.abort()

    def run(self) -> None:
        """Serve; every way in which this can end is here."""
        reason, on_purpose, linger_s = "", False, 0.0
        try:
            self._handshake()
            reason, on_purpose = self._serve()
            linger_s = LAST_WORDS_S
        except Refused as refused:
            self._say(logging.WARNING, f"{self.link.peer} refused ({refused.code}): {refused}")
            linger_s = self._refuse(RefusalCode(refused.code), str(refused))
        except VersionMismatch as error:
            self._say(logging.WARNING, f"{self.link.peer} refused: {error}")
            linger_s = self._refuse(RefusalCode.VERSION, str(error))
            reason = str(error)
        except RemoteProtocolError as error:
            self._say(logging.WARNING, f"{self.link.peer} cut off: {error}")
            reason = str(error)
            if isinstance(error, Unsecured):
                linger_s = self._answer_in_plain(error.answer)
        except NetworkError as error:
            reason = self.cut_because or str(error)
            if not self.joined:
                self._say(logging.INFO, f"{self.link.peer} gave up before it had joined: {error}")
        except Exception as error:  # noqa: BLE001 - a fault of ours must end the run, not one thread of it
            self._host.broke(error)
        finally:
            self.ended.set()
            try:  # leaving may close a round
                self._host.left(self, reason, on_purpose)
            except Exception as error:  # noqa: BLE001 - as above
                self._host.broke(error)
            self.link.close(linger_s)
            self._wake.close()
            self._leave_door()  # last: strangers who are heard out still count

    def _say(self, level: int, text: str) -> None:
        """Log a sentence; those on strangers are counted."""
        if self.joined:
            logger.log(level, "%s", text)
        else:
            self.strangers.say(level, text)

    def _failed(self, text: str) -> None:
        self.proof_failed()
        self._say(logging.WARNING, text)

    def _leave_door(self) -> None:
        if self._is_at_door:
            self._is_at_door = False
            self.leaves_door()

    def _refuse(self, code: RefusalCode, reason: str) -> float:
        limit = self.link.connection.header_limit(Kind.REFUSED)
        try:
            self.link.send(Refusal(code, _as_reason(reason, limit - REFUSAL_BYTES)))
        except NetworkError:
            return 0.0
        return LAST_WORDS_S

    def _answer_in_plain(self, answer: str) -> float:
        """Tell a client without TLS why it is cut off; one that speaks TLS has been sent an alert."""
        if not answer:
            return LAST_WORDS_S
        self.link = Link(self._channel, Side.SERVER)
        return self._refuse(RefusalCode.VERSION, answer)

    # ---- handshake -------------------------------------------------------------------------------------

    def _handshake(self) -> None:
        deadline = Deadline(HANDSHAKE_S)
        self.link.secure(deadline)
        hello = expect(self.link.receive(deadline), Hello)
        who = authenticate(self.link, hello, self._host.grants, self._failed)
        self._role = who.role
        offer = expect(self.link.receive(Deadline(HANDSHAKE_S)), Offer)
        self._leave_door()  # not before the offer: without tokens anybody may begin one of 16 MB
        if not self._wait_while(lambda: self._host.holds(self, who)):
            return  # the run has ended: serving begins with saying so
        if who.role is Role.EVALUATOR and not self._wait_while(self._missing_variables):
            return
        claim = self._server.admissions.claim(who)
        if isinstance(claim, Denied):  # before its offer is looked at: who is turned away defines no variables
            raise Refused(claim.code, claim.reason)
        self._server.compiling.begin(self._server.admissions.new_dtypes(offer))
        if not self._wait_while(self._server.compiling.what_waits):
            return
        self._server.admissions.check_offer(who, offer)
        self._take_identity(who, offer)
        self.link.silence_s = self._server.config.heartbeat_timeout

    def _missing_variables(self) -> str:
        """Say for what an evaluator waits until a worker has defined the variables; empty when one has."""
        return "" if self._server.admissions.has_variables else self._server.waiting_for() or "the first worker"

    def _wait_while(self, waits_for: Callable[[], str]) -> bool:
        """Hold a client as long as `waits_for` names something; False if the run ended before that."""
        while what := waits_for():
            if self._outbox:
                return False
            self.link.send_if_quiet(Heartbeat(_as_reason(what)), self._tick_s)
            if self.link.wait(self._tick_s, self._wake):
                self.link.receive()  # a heartbeat, or the end of the connection
            self._wake.clear()
        return True

    def _take_identity(self, who: Identity, offer: Offer) -> None:
        held = False
        while True:
            claim = self._server.admissions.claim(who)
            if self._outbox:  # asked after the claim, which waits for whoever is just posting the end of the run
                return  # serving begins with saying so
            if isinstance(claim, Denied):
                raise Refused(claim.code, claim.reason)
            if isinstance(claim, Contested):
                if held:
                    # Whoever asked for no rank was led here by the name.
                    cure = (
                        "name; give another --name"
                        if who.rank == AUTO_RANK
                        else "rank; give another --rank, or --rank auto"
                    )
                    raise Refused(RefusalCode.RANK_TAKEN, f"{claim.label} is alive and holds this {cure}")
                held = self._wait_for_holder(claim)
            elif claim.replaces is not None:
                self._cut(claim.replaces)
            elif self._join(who, claim, offer):
                return

    def _join(self, who: Identity, granted: Granted, offer: Offer) -> bool:
        # The welcome must be the first frame: replies that joining sets off wait in the outbox.
        self.joined = True
        self.link.heard_at = time.monotonic()  # a client beats from its welcome on, however long it was held
        try:
            admission = self._server.admissions.join(self.number, who, granted, offer)
        except WeighmasterError:
            self.joined = False
            raise
        if admission is None:
            self.joined = False
            return False
        self._rank = admission.welcome.rank
        self.link.send(admission.welcome)
        self.link.connection.agree(admission.terms.layout, admission.terms.payloads)
        return True

    def _wait_for_holder(self, claim: Contested) -> bool:
        """Wait one heartbeat interval for a sign of life of the rank's holder; say whether there was one."""
        holder = self._server.session(claim.holder)
        if holder is None:
            return False
        began = time.monotonic()
        interval = self._server.config.heartbeat_interval
        while not holder.ended.wait(self._tick_s) and not self._outbox:
            if time.monotonic() - began >= HOLD_SLACK * interval:
                if holder.link.heard_at > began:
                    return True
                self._cut(claim.holder)
                return False
            waiting = f"{claim.label} holds this rank; asking whether it is alive"
            self.link.send_if_quiet(Heartbeat(_as_reason(waiting)), self._tick_s)
        return False

    def _cut(self, number: int) -> None:
        """End another session of the same rank, and wait until it touches no buffer any more."""
        other = self._server.session(number)
        if other is not None and other is not self:
            other.cut("another connection took its place")
            other.join(CUT_S)
            if other.is_alive():
                raise NetworkError(f"the earlier connection from {other.link.peer} does not end; try again")

    # ---- the run ---------------------------------------------------------------------------------------

    def _serve(self) -> tuple[str, bool]:
        """Serve until the client or the run ends; return why, and whether the client said bye."""
        while True:
            if not self._deliver_all():
                return "the run has ended", False
            self._server.settle()
            if not self.link.wait(self._tick_s, self._wake):
                self._wake.clear()
                self._keep_alive()
                continue
            message = self.link.receive()
            match message:
                case Push():
                    self._receive_push(message)
                case Logits():
                    self._receive_logits(message)
                case TestLogits():
                    self._server.tested(self, message, self._receive_whole())
                case Pull(min_step):
                    self._owes_values = True
                    self._server.pulled(self, min_step)
                case Initial():
                    self._receive_initial()
                case Report():
                    self._server.reported(message)
                case Bye():
                    return "it said goodbye", True
                case _:  # a heartbeat has done its work by arriving
                    pass

    def _receive_whole(self) -> NDArray[np.uint8]:
        buffer = aligned_empty(self.link.connection.payload_bytes)
        self.link.receive_payload(buffer.data)
        return buffer

    def _receive_initial(self) -> None:
        self._server.initial_arrived(self, self._receive_whole())

    def _receive_logits(self, logits: Logits) -> None:
        self._owes_values = True
        if self._server.logits_begin(self, logits):
            self._server.logits_arrived(self, logits, self._receive_whole())
            return
        self._discard()

    def _receive_push(self, push: Push) -> None:
        self._owes_values = True
        receiver = self._server.push_begins(self, push)
        if receiver is None:
            self._discard()
            return
        midway = self._faults.midway(self.link, Point.MID_PUSH, self._rank, push.step)
        self.link.receive_payload(receiver.buffer, receiver, midway)
        self._server.push_arrived(self, push, receiver.finish())

    def _discard(self) -> None:
        self.link.discard_payload()
        then, self.after_payload = self.after_payload, None
        if then is not None:
            then()

    def _keep_alive(self) -> None:
        silent_s = time.monotonic() - self.link.heard_at
        # It may be this process that was stopped: then what the client said meanwhile lies unread.
        if silent_s >= self._server.config.heartbeat_timeout and not self.link.wait(0):
            raise PeerSilent(f"nothing was heard of {self.link.peer} for {silent_s:.0f} s")
        if self._owes_values:
            interval = min(self._server.config.heartbeat_interval, TICK_S)
            self.link.send_if_quiet(Heartbeat(_as_reason(self._server.waiting_for())), interval)

    def _deliver_all(self) -> bool:
        """Send what is to be sent, but values that are held back; say whether the run goes on."""
        while self._outbox:
            item = self._outbox.popleft()
            if isinstance(item, decided.Reply):
                if self._send_values(item):
                    self._owes_values = False
                elif not self._server.admissions.is_over:  # else it hears of the end, and these may never be kept
                    self._outbox.appendleft(item)
                    return True
            elif not self._deliver(item):
                return False
        return True

    def _deliver(self, item: decided.AskInitial | decided.Finish | Answered) -> bool:
        match item:
            case Answered(message, payload):
                self._owes_values = False
                self.link.send(message, [payload.data])
            case decided.AskInitial():
                self.link.send(AskInitial())
            case decided.Finish(status, reason):
                self.link.send(Ended(status, _as_reason(reason)))
                return False
        return True

    def _send_values(self, reply: decided.Reply) -> bool:
        """Send the current values; False, and nothing is sent, while they are held back."""
        if self._role is Role.EVALUATOR and self._server.config.ema_decay is not None:
            # A copy, and nothing held: an update that waits for holds would wait for this thread, and it for that.
            smooth = aligned_empty(self.link.connection.payload_of(Kind.VALUES))
            averaged = self._server.replies.smooth_values(reply, smooth)
            if averaged is not None:
                self._send_reply(averaged, [smooth.data])
            return averaged is not None
        pinned = self._server.replies.values_for(self, reply)
        if pinned is None:
            return False
        values, hold, pieces = pinned
        with hold:
            self._send_reply(values, pieces)
        return True

    def _send_reply(self, values: Values, payload: list[memoryview]) -> None:
        midway = self._faults.midway(self.link, Point.MID_REPLY, self._rank, values.step)
        self.link.send(values, payload, midway)


def _as_reason(text: str, max_bytes: int = 4 * MAX_REASON_CHARACTERS) -> str:
    """Return a text as it may travel: printable, and cut when it has too many characters or bytes of UTF-8."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    cut = printable[:MAX_REASON_CHARACTERS].encode()[:max_bytes].decode(errors="ignore")
    return cut if cut == printable else cut[:-3] + "..."
