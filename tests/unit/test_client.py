"""The worker's client against a server that plays a script: one function per connection, over loopback."""

import functools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from protocol.addresses import Address, parse_address
from protocol.arena import Arena
from protocol.deadlines import Deadline, Patience
from protocol.ensemble import Answers, Weighting, as_member, labels_digest, side_views
from protocol.errors import (
    ConfigurationError,
    ConnectionLost,
    Diverged,
    LocalProtocolError,
    ManifestMismatch,
    NoProgress,
    PeerLost,
    Refused,
    RemoteProtocolError,
)
from protocol.link import Link, expect
from protocol.messages import (
    AskInitial,
    Bye,
    Challenge,
    Ended,
    Heartbeat,
    Hello,
    Initial,
    Logits,
    Offer,
    Proof,
    Pull,
    Push,
    Refusal,
    RefusalCode,
    Report,
    ServerProof,
    Side,
    Status,
    TestLogits,
    Values,
    Weights,
    Welcome,
)
from protocol.proof import NO_PROOF, prove
from protocol.tensors import Layout, Manifest
from protocol.transport import Listener
from worker.joining import connect

EPOCH = 1000
VARIABLES = {
    "w": np.arange(5, dtype=np.float32),
    "count": np.array(3, np.int64),
    "b": np.array([7.0, 8.0], np.float32),
}
MANIFEST = Manifest.of(VARIABLES, state=["count"])
LAYOUT = Layout.of(MANIFEST)
TOKEN = "a-token-of-more-than-22-characters"
WAIT_S = 20.0

Script = Callable[["Peer"], None]


class Peer:
    """The server's end of one connection, with the words of a script."""

    def __init__(self, channel) -> None:
        self.link = Link(channel, Side.SERVER, WAIT_S)
        self.hello: Hello | None = None

    def hears(self, kind):
        """The next message, which must be of this kind; heartbeats are passed over unless asked for."""
        message = self.link.receive(Deadline(WAIT_S))
        while isinstance(message, Heartbeat) and kind is not Heartbeat:
            message = self.link.receive(Deadline(WAIT_S))
        return expect(message, kind)

    def payload(self):
        """The payload of the last message, as an arena."""
        arena = Arena.zeros(LAYOUT)
        self.link.receive_payload(memoryview(arena.buffer[: self.link.connection.payload_bytes]))
        return arena

    def challenges(self, token_required=False):
        self.hello = self.hears(Hello)
        self.link.send(Challenge(bytes(32), token_required))
        return self

    def welcomes(self, epoch=EPOCH, step=0, rank=0, interval=5.0, manifest=MANIFEST):
        """Go through the handshake without tokens."""
        self.challenges()
        self.hears(Proof)
        self.link.send(ServerProof(NO_PROOF))
        self.offer = self.hears(Offer)
        self.greet(epoch, step, rank, interval, manifest)
        return self

    def greet(
        self,
        epoch=EPOCH,
        step=0,
        rank=0,
        interval=5.0,
        manifest=MANIFEST,
        mode="shared",
        weighting="",
        seed=42,
        shards=4,
    ):
        self.link.send(
            Welcome(
                epoch=epoch,
                step=step,
                steps=10,
                rank=rank,
                name=f"site-{rank}",
                seed=seed,
                threads=3,
                workers=2,
                shards=shards,
                mode=mode,
                codec="raw",
                heartbeat_interval=interval,
                heartbeat_timeout=WAIT_S,
                manifest=manifest.to_wire(),
                weighting=weighting,
            )
        )
        self.link.connection.agree(LAYOUT)

    def answers(self, step, seq=0, fill=0.0, epoch=EPOCH, applied=True, reason="", done=False):
        arena = Arena.zeros(LAYOUT)
        arena.fill({name: np.full_like(value, fill) for name, value in VARIABLES.items()})
        size = LAYOUT.values_bytes
        self.link.send(Values(epoch, step, seq, applied, reason, done), [arena.buffer[:size].data])


class ScriptedServer:
    """Plays one script per connection, in turn; a script that fails fails the test."""

    def __init__(self, *scripts: Script) -> None:
        self._listener = Listener(Address("127.0.0.1", 0))
        self.address = str(self._listener.address)
        self.played = 0
        self.problem: BaseException | None = None
        self._scripts = scripts
        self._thread = threading.Thread(target=self._play, name="scripted server")

    def _play(self) -> None:
        try:
            for script in self._scripts:
                channel = self._listener.accept(WAIT_S)
                assert channel is not None, f"connection {self.played} did not come"
                peer = Peer(channel)
                try:
                    script(peer)
                finally:
                    peer.link.close(linger_s=WAIT_S if not peer.link.connection.payload_bytes else 0)
                self.played += 1
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.problem = error
        finally:
            self._listener.close()

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._thread.join()
        if self.problem is not None:
            raise self.problem
        if kind is None:
            assert self.played == len(self._scripts)


def join(server, **options):
    given = {"state": ["count"], "rank": 0, "connect_timeout": WAIT_S, "reconnect_timeout": WAIT_S}
    return connect(server.address, VARIABLES, **given | options)


def gradients(value=1.0):
    return {name: np.full_like(array, value) for name, array in VARIABLES.items()}


# ---- a run without faults ------------------------------------------------------------------------------


def test_a_run_from_the_first_values_to_the_last():
    def script(peer):
        peer.welcomes(step=4)
        assert peer.hears(Pull).min_step == 0
        peer.answers(4, fill=1.5)
        push = peer.hears(Push)
        assert (push.epoch, push.step, push.seq) == (EPOCH, 4, 1)
        assert (push.loss, push.accuracy, push.examples) == (0.5, None, 32)
        views = peer.payload().views()
        assert {name: array.tolist() for name, array in views.items()} == {
            "w": [2.0] * 5,
            "count": 2,
            "b": [2.0] * 2,
        }
        peer.answers(5, seq=1, fill=2.5)
        push = peer.hears(Push)
        assert (push.step, push.seq) == (5, 2)
        peer.payload()
        peer.answers(6, seq=2, fill=3.5, done=True)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted) as server:
        assert (server.rank, server.welcome.seed, server.welcome.threads, server.welcome.shards) == (0, 42, 3, 4)
        update = server.pull()
        assert (update.step, update.done, update.restarted) == (4, False, False)
        assert update.values["w"].tolist() == [1.5] * 5 and not update.values["w"].flags.writeable
        update = server.push(gradients(2.0), loss=np.float32(0.5), examples=32)
        assert (update.step, update.applied, update.reason) == (5, True, "")
        update = server.push(gradients())
        assert update.done and update.values["b"].tolist() == [3.5, 3.5]


def test_the_gaps_of_a_push_are_zero_on_the_wire():
    seen = []

    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0)
        peer.hears(Push)
        seen.append(peer.payload().buffer)
        peer.answers(1, seq=1)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted) as server:
        server.pull()
        server.push(gradients(-1))
    assert not seen[0][LAYOUT.gap_bytes].any() and len(LAYOUT.gap_bytes) > 100


def test_initial_values_are_sent_when_they_are_asked_for_as_they_were_at_the_start():
    mine = {name: array.copy() for name, array in VARIABLES.items()}

    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.link.send(AskInitial())
        peer.hears(Initial)
        views = peer.payload().views()
        assert all((views[name] == array).all() for name, array in VARIABLES.items())
        peer.answers(0, fill=9.0)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted:
        server = connect(scripted.address, mine, state=["count"], connect_timeout=WAIT_S)
        mine["w"][:] = -1
        with server:
            assert server.pull().values["count"] == 9


def test_an_update_stays_good_until_the_second_next_answer():
    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0, fill=10.0)
        for seq in (1, 2):
            peer.hears(Push)
            peer.payload()
            peer.answers(seq - 1, seq=seq - 1, fill=-1.0)  # a second copy of the last answer must be passed over
            peer.answers(seq, seq=seq, fill=10.0 + seq)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted) as server:
        zero = server.pull()
        one = server.push(gradients())
        assert (zero.values["w"] == 10).all() and (one.values["w"] == 11).all()
        two = server.push(gradients())
        assert (two.step, one.step) == (2, 1)
        assert (one.values["w"] == 11).all() and (two.values["w"] == 12).all()


def test_heartbeats_are_sent_by_themselves_and_the_servers_are_told():
    told, heard = [], threading.Event()

    def script(peer):
        peer.welcomes(interval=0.01)
        peer.hears(Heartbeat)  # while the client does nothing at all
        peer.hears(Heartbeat)
        heard.set()
        peer.hears(Pull)
        peer.link.send(Heartbeat(""))
        peer.link.send(Heartbeat("round 3 waits for rank 1"))
        peer.answers(3)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted, on_event=told.append) as server:
        assert heard.wait(WAIT_S)
        assert server.pull().step == 3
    assert told == ["round 3 waits for rank 1"]


def test_an_evaluator_waits_for_a_step_and_reports():
    def script(peer):
        peer.welcomes(rank=-1)
        assert peer.hello.role == "evaluator"
        assert peer.hears(Pull).min_step == 7
        peer.answers(8)
        assert peer.hears(Report) == Report(EPOCH, 8, 0.25, None, 100)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted, rank=None, role="evaluator") as server:
        update = server.pull(7)
        server.report(update.step, np.float64(0.25), None, 100)


def test_an_exception_in_the_block_leaves_without_a_goodbye():
    def script(peer):
        peer.welcomes()
        with pytest.raises(ConnectionLost):
            peer.hears(Bye)

    with pytest.raises(KeyError), ScriptedServer(script) as scripted, join(scripted):
        raise KeyError("user code")


# ---- broken connections --------------------------------------------------------------------------------


def pulls_and_breaks_after(part):
    """A script that answers the pull, reads a push up to `part` of its payload, and cuts the connection."""

    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0)
        peer.hears(Push)
        piece = memoryview(bytearray(int(part * LAYOUT.payload_bytes)))
        peer.link.channel.receive_into(piece, Patience(0, WAIT_S))
        peer.link.abort()

    return script


@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_after_a_broken_connection_the_same_push_is_sent_again_by_the_same_incarnation(part):
    hellos, told = [], []

    def before(peer):
        script = pulls_and_breaks_after(part)
        try:
            script(peer)
        finally:
            hellos.append(peer.hello)

    def after(peer):
        peer.welcomes(step=0, rank=0)
        hellos.append(peer.hello)
        push = peer.hears(Push)
        assert (push.epoch, push.step, push.seq, push.loss) == (EPOCH, 0, 1, 0.5)
        assert (peer.payload().views()["w"] == 5.0).all()
        peer.answers(1, seq=1)
        peer.hears(Bye)

    with ScriptedServer(before, after) as scripted, join(scripted, rank=None, on_event=told.append) as server:
        server.pull()
        update = server.push(gradients(5.0), loss=0.5)
        assert update.step == 1 and update.applied and not update.restarted
    assert hellos[0].incarnation == hellos[1].incarnation
    assert hellos[0].nonce != hellos[1].nonce
    assert (hellos[0].rank, hellos[1].rank, hellos[1].name) == (-1, 0, "site-0"), "it asks for what it was given"
    assert told[0].startswith("the connection to the server is lost: ") and scripted.address in told[0]
    assert told[1] == f"connected to the server at {scripted.address}"


def test_a_reply_that_breaks_off_is_asked_for_again():
    def before(peer):
        peer.welcomes()
        peer.hears(Pull)
        frame = peer.link.connection.send(Values(EPOCH, 3, 0, False, "", False))
        peer.link.channel.send([frame, bytes(LAYOUT.values_bytes // 2)], Patience(0, WAIT_S))
        peer.link.abort()

    def after(peer):
        peer.welcomes(step=3)
        peer.hears(Pull)
        peer.answers(3, fill=6.0)
        peer.hears(Bye)

    with ScriptedServer(before, after) as scripted, join(scripted) as server:
        assert (server.pull().values["w"] == 6).all()


def test_a_server_that_has_started_anew_gets_no_old_gradient_and_the_run_goes_on_from_its_step():
    def after(peer):
        peer.welcomes(epoch=EPOCH + 1, step=0)
        peer.hears(Pull)
        peer.answers(0, epoch=EPOCH + 1, applied=False, fill=2.0)
        push = peer.hears(Push)
        assert (push.epoch, push.step, push.seq) == (EPOCH + 1, 0, 2)
        peer.payload()
        peer.answers(1, seq=2, epoch=EPOCH + 1)
        peer.hears(Bye)

    with ScriptedServer(pulls_and_breaks_after(0.5), after) as scripted, join(scripted) as server:
        server.pull()
        update = server.push(gradients())
        assert (update.step, update.applied, update.restarted) == (0, False, True)
        update = server.push(gradients())
        assert (update.step, update.applied, update.restarted) == (1, True, False)


def test_a_second_break_after_a_restart_does_not_revive_the_old_gradient():
    def again_broken(peer):
        peer.welcomes(epoch=EPOCH + 1)
        peer.hears(Pull)
        peer.link.abort()

    def after(peer):
        peer.welcomes(epoch=EPOCH + 1)
        peer.hears(Pull)
        peer.answers(0, epoch=EPOCH + 1, applied=False)
        peer.hears(Bye)

    scripts = (pulls_and_breaks_after(0.5), again_broken, after)
    with ScriptedServer(*scripts) as scripted, join(scripted) as server:
        server.pull()
        assert server.push(gradients()).restarted


# ---- a server that has started anew ----------------------------------------------------------------------


def pulls(step, fill=0.0, epoch=EPOCH, min_step=0, **options):
    """A script that answers a pull and goes away."""

    def script(peer):
        peer.welcomes(step=step, epoch=epoch, **options)
        assert peer.hears(Pull).min_step == min_step
        peer.answers(step, fill=fill, epoch=epoch)
        peer.link.abort()

    return script


def test_an_evaluator_that_waits_for_a_later_step_gets_the_step_that_a_new_server_has():
    def after(peer):
        peer.welcomes(rank=-1, epoch=EPOCH + 1, step=40)
        assert peer.hears(Pull).min_step == 0
        peer.answers(40, epoch=EPOCH + 1)
        assert peer.hears(Report).step == 40
        assert peer.hears(Pull).min_step == 60
        peer.answers(60, epoch=EPOCH + 1)
        peer.hears(Bye)

    scripts = (pulls(60, rank=-1), after)
    with ScriptedServer(*scripts) as scripted, join(scripted, rank=None, role="evaluator") as server:
        assert server.pull().step == 60
        update = server.pull(80)
        assert (update.step, update.restarted) == (40, True)
        server.report(40, 0.5, None, 1)
        update = server.pull(60)
        assert (update.step, update.restarted) == (60, False)


def test_a_server_that_dies_before_the_first_values_is_asked_again_and_nothing_was_lost():
    def welcomes_and_dies(peer):
        peer.welcomes()
        peer.link.abort()

    def gathers_and_dies(peer):
        peer.welcomes(epoch=EPOCH + 1)
        assert peer.hears(Pull).min_step == 7
        peer.link.send(Heartbeat("the start waits for rank 1"))
        peer.link.abort()

    def after(peer):
        peer.welcomes(epoch=EPOCH + 2)
        assert peer.hears(Pull).min_step == 7
        peer.answers(7, epoch=EPOCH + 2)
        peer.hears(Bye)

    with ScriptedServer(welcomes_and_dies, gathers_and_dies, after) as scripted, join(scripted) as server:
        update = server.pull(7)
        assert (update.step, update.restarted) == (7, False)


def test_initial_values_whose_way_broke_are_sent_to_the_new_server():
    def asks_and_dies(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.link.send(AskInitial())
        peer.hears(Initial)
        peer.link.abort()

    def after(peer):
        peer.welcomes(epoch=EPOCH + 1)
        peer.hears(Pull)
        peer.link.send(AskInitial())
        peer.hears(Initial)
        assert (peer.payload().views()["w"] == VARIABLES["w"]).all()
        peer.answers(0, epoch=EPOCH + 1)
        peer.hears(Bye)

    with ScriptedServer(asks_and_dies, after) as scripted, join(scripted) as server:
        assert not server.pull().restarted


def test_a_run_that_is_restored_at_its_last_step_is_done():
    def after(peer):
        peer.welcomes(epoch=EPOCH + 1, step=10)
        peer.hears(Pull)
        peer.answers(10, epoch=EPOCH + 1, applied=False, done=True)
        peer.hears(Bye)

    with ScriptedServer(pulls_and_breaks_after(1), after) as scripted, join(scripted) as server:
        server.pull()
        update = server.push(gradients())
        assert (update.step, update.done, update.restarted) == (10, True, True)


def test_an_update_stays_good_over_a_reply_that_broke_off_and_a_new_server():
    def breaks_off(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0, fill=10.0)
        peer.hears(Push)
        peer.payload()
        peer.answers(1, seq=1, fill=11.0)
        peer.hears(Push)
        peer.payload()
        frame = peer.link.connection.send(Values(EPOCH, 2, 2, True, "", False))
        peer.link.channel.send([frame, bytes(LAYOUT.values_bytes // 2)], Patience(0, WAIT_S))
        peer.link.abort()

    def after(peer):
        peer.welcomes(epoch=EPOCH + 1)
        peer.hears(Pull)
        peer.answers(1, fill=12.0, epoch=EPOCH + 1)
        peer.hears(Bye)

    with ScriptedServer(breaks_off, after) as scripted, join(scripted) as server:
        server.pull()
        one = server.push(gradients())
        two = server.push(gradients())
        assert two.restarted
        assert (one.values["w"] == 11).all() and (two.values["w"] == 12).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [({"seed": 43}, "its seed is 43, and was 42"), ({"shards": 5}, "its shards is 5, and was 4")],
)
def test_a_server_of_another_run_is_not_gone_on_with(change, text):
    """Batches are a function of seed and shards: this worker has chosen its own by the old ones."""

    def another(peer):
        peer.challenges()
        peer.hears(Proof)
        peer.link.send(ServerProof(NO_PROOF))
        peer.hears(Offer)
        peer.greet(epoch=EPOCH + 1, **change)

    with (
        ScriptedServer(pulls_and_breaks_after(0.5), another) as scripted,
        pytest.raises(PeerLost, match=rf"the server that came back at {scripted.address} is another: {text}"),
        join(scripted) as server,
    ):
        server.pull()
        server.push(gradients())


def test_the_order_agreed_is_offered_again_and_another_order_is_not_gone_on_with():
    """A graph that was built by the first layout would read and write the wrong variables, without a word."""
    reverse = Manifest(tuple(reversed(MANIFEST.variables)))
    offers = []

    def first(peer):
        try:
            pulls_and_breaks_after(0.5)(peer)
        finally:
            offers.append(peer.offer)

    def another(peer):
        try:
            peer.welcomes(epoch=EPOCH + 1, manifest=reverse)
        finally:
            offers.append(peer.offer)

    with (
        ScriptedServer(first, another) as scripted,
        pytest.raises(ManifestMismatch, match="in another order; start this worker again"),
        connect(scripted.address, dict(reversed(VARIABLES.items())), state=["count"], rank=0) as server,
    ):
        server.pull()
        server.push(gradients())
    assert [offer.manifest for offer in offers] == [reverse.to_wire(), MANIFEST.to_wire()]
    assert [offer.threads for offer in offers] == [1, 3], "the threads that were recorded for it, too"


# ---- faults on purpose -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("drop@before-push,rank=0,step=0", None),
        ("half-close@before-push,step=0", None),
        ("cut@mid-push", 0.5),
        ("half-close@mid-push", 0.5),
        ("drop@after-push", 1),
        ("half-close@after-push", 1),
    ],
)
def test_a_push_that_a_fault_breaks_is_sent_again_once(text, part, capsys):
    """The fault comes where it was asked for, and once: the second attempt arrives."""

    def before(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0)
        if part is None:
            with pytest.raises(ConnectionLost):
                peer.hears(Push)
            return
        peer.hears(Push)
        piece = memoryview(bytearray(int(part * LAYOUT.payload_bytes)))
        peer.link.channel.receive_into(piece, Patience(0, WAIT_S))
        with pytest.raises(ConnectionLost):  # not a byte more
            peer.link.channel.receive_into(memoryview(bytearray(1)), Patience(0, WAIT_S))

    def after(peer):
        peer.welcomes()
        assert peer.hears(Push).seq == 1
        assert (peer.payload().views()["w"] == 5.0).all()
        peer.answers(1, seq=1)
        peer.hears(Bye)

    told = []
    with ScriptedServer(before, after) as scripted, join(scripted, inject=text, on_event=told.append) as server:
        server.pull()
        assert server.push(gradients(5.0)).applied
    assert told[0].startswith("faults will be injected: ")
    assert capsys.readouterr().err == f"injected: {text.split(',')[0].replace('@', ' at ')}, rank 0, step 0\n"


@pytest.mark.parametrize("action", ["cut", "half-close"])
def test_a_reply_that_a_fault_breaks_is_asked_for_again_or_read_to_its_end(action, capsys):
    def before(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0, fill=2.0)
        with pytest.raises(ConnectionLost):
            peer.hears(Bye)

    def after(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0, fill=2.0)
        peer.hears(Bye)

    with ScriptedServer(before, after) as scripted, join(scripted, inject=f"{action}@mid-reply,step=0") as server:
        assert (server.pull().values["w"] == 2).all()
        if action == "half-close":  # found out with the next request
            assert server.pull().step == 0
    assert capsys.readouterr().err == f"injected: {action} at mid-reply, rank 0, step 0\n"


def test_a_duplicate_is_the_same_push_sent_twice(capsys):
    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0)
        first, payload = peer.hears(Push), peer.payload().buffer
        assert (peer.hears(Push), bytes(peer.payload().buffer)) == (first, bytes(payload))
        peer.answers(1, seq=1)
        peer.answers(1, seq=1)
        assert peer.hears(Push).seq == 2
        peer.payload()
        peer.answers(2, seq=2)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted, inject="duplicate@after-push,step=0") as server:
        server.pull()
        assert server.push(gradients()).step == 1
        assert server.push(gradients()).step == 2
    assert capsys.readouterr().err == "injected: duplicate at after-push, rank 0, step 0\n"


def test_a_fault_that_cannot_be_meant_is_refused_before_anybody_is_called():
    with pytest.raises(ConfigurationError, match="names no point of a worker"):
        connect("nowhere.invalid:1", VARIABLES, inject="kill@after-apply")


def test_a_lost_report_is_not_repeated_and_not_an_error():
    def before(peer):
        peer.welcomes(rank=-1)
        peer.hears(Pull)
        peer.answers(1)
        peer.link.abort()

    def after(peer):
        peer.welcomes(rank=-1)
        peer.hears(Pull)
        peer.answers(2)
        peer.hears(Bye)

    with ScriptedServer(before, after) as scripted, join(scripted, rank=None, role="evaluator") as server:
        server.pull()
        while server._link is not None:  # until the broken connection is noticed
            server.report(1, 0.5, None, 1)
        server.report(1, 0.5, None, 1)
        assert server.pull(2).step == 2


def test_nobody_there_ends_with_the_address_and_the_time():
    listener = Listener(Address("127.0.0.1", 0))
    address = str(listener.address)
    listener.close()
    told = []
    with pytest.raises(PeerLost, match=rf"the server at {address} could not be reached for 0\.3 s: nobody answers"):
        connect(address, {"w": np.zeros(1)}, connect_timeout=0.3, on_event=told.append)
    assert told and told[0].startswith(f"waiting for the server at {address}")


def test_a_server_that_does_not_come_back_ends_with_peer_lost():
    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0)

    with ScriptedServer(script) as scripted, join(scripted, reconnect_timeout=0.2) as server:
        server.pull()
        server._link.abort()
        scripted._thread.join()
        with pytest.raises(PeerLost, match=r"could not be reached for 0\.2 s"):
            server.push(gradients())


# ---- the server says no, or that it is over ----------------------------------------------------------------


def refuses(peer):
    peer.challenges()
    peer.hears(Proof)
    peer.link.send(Refusal(RefusalCode.RANK_TAKEN, "rank 0 (site-a) on box is alive and holds this rank"))


def test_a_refusal_is_raised_at_once_and_never_tried_again():
    with ScriptedServer(refuses) as scripted:
        with pytest.raises(Refused, match=rf"{scripted.address} refused: rank 0 \(site-a\) on box") as caught:
            join(scripted)
        assert caught.value.code is RefusalCode.RANK_TAKEN and caught.value.exit_code == 3


def test_a_refusal_after_a_broken_connection_is_raised_too():
    scripts = (pulls_and_breaks_after(1), refuses)
    with ScriptedServer(*scripts) as scripted, pytest.raises(Refused), join(scripted) as server:
        server.pull()
        server.push(gradients())


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (Status.LOST, NoProgress, 7),
        (Status.NO_PROGRESS, NoProgress, 7),
        (Status.DIVERGED, Diverged, 5),
        (Status.INTERRUPTED, PeerLost, 4),
        (Status.FAILED, PeerLost, 4),
    ],
)
def test_the_end_of_a_run_is_an_error_of_its_own_and_leaving_afterwards_is_none(status, error, code):
    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.link.send(Ended(status, "rank 1 has not returned"))

    with ScriptedServer(script) as scripted, join(scripted) as server:
        with pytest.raises(error, match=rf"the server at {scripted.address} ended the run: rank 1 has") as caught:
            server.pull()
        assert caught.value.exit_code == code


def test_why_the_run_ended_is_heard_although_the_push_cannot_be_sent():
    """The server has said it, closed, and gone; a large push breaks long before its answer could be read."""
    large = {"w": np.zeros(8_000_000, np.float32)}
    layout = Layout.of(Manifest.of(large))
    gone = threading.Event()

    def script(peer):
        peer.welcomes(manifest=layout.manifest)
        peer.link.connection.agree(layout)
        peer.hears(Pull)
        size = layout.values_bytes
        peer.link.send(Values(EPOCH, 0, 0, False, "", False), [bytes(size)])
        peer.link.send(Ended(Status.LOST, "rank 1 has not returned"))
        peer.link.close()
        gone.set()

    with ScriptedServer(script) as scripted, connect(scripted.address, large, reconnect_timeout=0.2) as server:
        server.pull()
        assert gone.wait(WAIT_S)
        with pytest.raises(NoProgress, match="rank 1 has not returned"):
            server.push(large)


def test_a_message_that_no_client_expects_is_an_error_and_not_a_hang():
    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.link.channel.send([b"WMPS" + bytes(60)], Patience(0, WAIT_S))

    with pytest.raises(RemoteProtocolError), ScriptedServer(script) as scripted, join(scripted) as server:
        server.pull()


# ---- proof and agreement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [TOKEN, f" {TOKEN}\n", f"* worker * {TOKEN}\n", f"# mine\n\nsite-0 worker 0 {TOKEN}\r\n"]
)
def test_both_sides_prove_that_they_hold_the_token(given):
    def script(peer):
        hello = peer.challenges(token_required=True).hello
        proof = peer.hears(Proof)
        digest = peer.link.connection.hellos_digest
        assert proof.mac == prove(TOKEN.encode(), Side.WORKER, hello.nonce, bytes(32), digest)
        peer.link.send(ServerProof(prove(TOKEN.encode(), Side.SERVER, hello.nonce, bytes(32), digest)))
        peer.hears(Offer)
        peer.greet()
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted, token=given):
        pass


@pytest.mark.parametrize("given", ["", f"{TOKEN} {TOKEN}", f"{TOKEN}\n{TOKEN}\n", f"* worker * {TOKEN}ä"])
def test_a_token_that_is_something_else_is_refused_before_anybody_is_called(given):
    with pytest.raises(ConfigurationError, match="give the last field of its line in the token file") as caught:
        connect("127.0.0.1:1", VARIABLES, state=["count"], token=given)
    assert TOKEN not in str(caught.value)


def test_a_server_that_reflects_the_proof_is_refused():
    def script(peer):
        peer.challenges(token_required=True)
        peer.link.send(ServerProof(peer.hears(Proof).mac))

    with ScriptedServer(script) as scripted, pytest.raises(Refused, match="does not hold this worker's token"):
        join(scripted, token=TOKEN)


@pytest.mark.parametrize(
    ("required", "token", "code", "text"),
    [
        (True, None, RefusalCode.TOKEN_REQUIRED, "asks for a token: give --token-file"),
        (False, TOKEN, RefusalCode.PROOF, "asks for no token, so it cannot prove that it is the right one"),
    ],
)
def test_a_token_on_one_side_only_is_refused_by_the_worker_and_nothing_is_proved(required, token, code, text):
    def script(peer):
        peer.challenges(token_required=required)
        with pytest.raises(ConnectionLost):
            peer.hears(Proof)

    with ScriptedServer(script) as scripted, pytest.raises(Refused, match=text) as caught:
        join(scripted, token=token)
    assert caught.value.code is code


def test_a_server_with_other_variables_is_refused_naming_the_first_that_differs():
    other = Manifest.of(VARIABLES | {"w": np.zeros(6, np.float32)}, state=["count"])

    def script(peer):
        peer.challenges()
        peer.hears(Proof)
        peer.link.send(ServerProof(NO_PROOF))
        peer.hears(Offer)
        peer.greet(manifest=other)

    with ScriptedServer(script) as scripted, pytest.raises(ManifestMismatch, match=r"'w' differs: this worker has"):
        join(scripted)


def test_the_servers_order_of_variables_is_laid_out():
    manifest = Manifest(tuple(reversed(MANIFEST.variables)))
    layout = Layout.of(manifest)

    def script(peer):
        peer.welcomes(manifest=manifest)
        peer.link.connection.agree(layout)
        peer.hears(Pull)
        arena = Arena.zeros(layout)
        arena.fill(VARIABLES)
        size = layout.values_bytes
        peer.link.send(Values(EPOCH, 0, 0, False, "", False), [arena.buffer[:size].data])
        peer.hears(Push)
        received = Arena.zeros(layout)
        peer.link.receive_payload(received.buffer.data)
        assert all((received.views()[name] == array).all() for name, array in VARIABLES.items())
        peer.link.send(Values(EPOCH, 1, 1, True, "", False), [arena.buffer[:size].data])
        peer.hears(Bye)

    assert [slot.spec.name for slot in layout.slots] != [slot.spec.name for slot in LAYOUT.slots]
    with ScriptedServer(script) as scripted, join(scripted) as server:
        values = server.pull().values
        assert all((values[name] == array).all() for name, array in VARIABLES.items())
        server.push(VARIABLES)


# ---- misuse --------------------------------------------------------------------------------------------


def test_a_push_before_the_first_pull_is_our_own_mistake():
    def script(peer):
        peer.welcomes()
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted) as server:
        with pytest.raises(LocalProtocolError, match="pull values before the first push"):
            server.push(gradients())
        assert server.rank == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w": None}, "the gradient of variable 'w' is missing"),
        ({"x": np.zeros(1, np.float32)}, "variable 'x' is not in the manifest"),
        ({"w": np.zeros((5, 1), np.float32)}, r"'w' must be float32 \[5\], not float32 \[5, 1\]"),
        (
            {"w": np.zeros(5, np.float64)},
            r"'w' must be float32 \[5\], not float64 \[5\]; `\.astype\(numpy\.float32\)` converts it",
        ),
        ({"w": np.zeros(5, np.int64)}, r"'w' must be float32 \[5\], not int64 \[5\]$"),
        ({"count": np.array(1.0, np.float32)}, r"'count' must be int64 \[\], not float32"),
    ],
)
def test_gradients_that_do_not_fit_are_named_and_nothing_is_sent(change, text):
    def script(peer):
        peer.welcomes()
        peer.hears(Pull)
        peer.answers(0)
        push = peer.hears(Push)
        assert push.seq == 1
        assert (peer.payload().views()["w"] == 4).all(), "the first that is sent is the good one"
        peer.answers(1, seq=1)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted) as server:
        server.pull()
        given = {name: array for name, array in (gradients() | change).items() if array is not None}
        with pytest.raises(ManifestMismatch, match=text):
            server.push(given)
        assert server.push(gradients(4)).step == 1


def test_a_gradient_in_another_memory_order_arrives_by_value():
    variables = {"w": np.zeros((3, 4), np.float32)}
    layout = Layout.of(Manifest.of(variables))
    gradient = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    seen = []

    def script(peer):
        peer.welcomes(manifest=layout.manifest)
        peer.link.connection.agree(layout)
        peer.hears(Pull)
        size = layout.values_bytes
        peer.link.send(Values(EPOCH, 0, 0, False, "", False), [bytes(size)])
        peer.hears(Push)
        arena = Arena.zeros(layout)
        peer.link.receive_payload(arena.buffer.data)
        seen.append(arena.views()["w"])
        peer.link.send(Values(EPOCH, 1, 1, True, "", False), [bytes(size)])
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, connect(scripted.address, variables) as server:
        server.pull()
        server.push({"w": gradient})
    np.testing.assert_array_equal(seen[0], gradient)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5014", Address("127.0.0.1", 5014)),
        ("ps.example.org:1", Address("ps.example.org", 1)),
        ("[::1]:65535", Address("::1", 65535)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "host", ":5014", "host:", "host:0", "host:65536", "host:-1", "host:x", "::1:5014", "host: 5"]
)
def test_what_is_no_address_is_refused_with_an_example(text):
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:5014|\[::1\]:5014"):
        parse_address(text)


# ---- ensembles -----------------------------------------------------------------------------------------

ANSWERS = Answers(4, 3, "float32", 2)
LOGITS, LABELS = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([2, 0, 1, 2], np.int32)


def welcomes_member(peer, weighting, epoch=EPOCH):
    """Go through the handshake in ensemble mode: the member's own variables are called after its rank."""
    member = as_member(MANIFEST, 0)
    greet = functools.partial(peer.greet, epoch=epoch, manifest=member, mode="ensemble", weighting=weighting)
    peer.challenges()
    peer.hears(Proof)
    peer.link.send(ServerProof(NO_PROOF))
    peer.offer = peer.hears(Offer)
    greet()
    layout = Layout.of(member, ANSWERS.push_sides(Weighting(weighting)))
    peer.link.connection.agree(layout, ANSWERS.payloads(Weighting(weighting)))


def side_arrays(peer, layout):
    payload = np.zeros(peer.link.connection.payload_bytes, np.uint8)
    peer.link.receive_payload(payload.data)
    return {name: view.tolist() for name, view in side_views(layout, payload).items()}


def send_weights(peer, seq, value=0.5):
    arena = Arena.zeros(ANSWERS.weights)
    side_views(ANSWERS.weights, arena.buffer)["weights"][...] = value
    peer.link.send(Weights(EPOCH, 0, seq), [arena.buffer.data])


def test_what_only_a_member_says_is_refused_by_itself_in_mode_shared():
    """Nothing of it reaches the server, which would cut the connection."""

    def script(peer):
        peer.welcomes().hears(Pull)
        peer.answers(0)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted) as server:
        server.pull()
        with pytest.raises(LocalProtocolError, match="in ensemble mode, and with none in other modes"):
            server.push(gradients(), labels=LABELS)
        with pytest.raises(LocalProtocolError, match="does not weigh single examples"):
            server.weigh(LOGITS, LABELS)
        with pytest.raises(LocalProtocolError, match="only a member"):
            server.vote(LOGITS, LABELS)


def test_a_member_offers_its_answers_and_pushes_them_with_their_digest():
    """It goes on calling its variables as it does."""

    def script(peer):
        welcomes_member(peer, "batch")
        offered = peer.offer
        assert (offered.examples, offered.classes, offered.logits_dtype) == (4, 3, "float32")
        assert offered.test_examples == 2
        peer.hears(Pull)
        peer.answers(0)
        push = peer.hears(Push)
        assert push.labels == labels_digest(LABELS)
        layout = peer.link.connection.layout
        assert side_arrays(peer, layout) == {"logits": LOGITS.tolist(), "labels": LABELS.tolist()}
        peer.answers(1, seq=1, done=True)
        peer.hears(TestLogits)
        assert side_arrays(peer, ANSWERS.test) == {"logits": LOGITS[:2].tolist(), "labels": LABELS[:2].tolist()}
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted, answers=ANSWERS) as server:
        assert server.pull().values.keys() == VARIABLES.keys()
        with pytest.raises(LocalProtocolError, match="labels go with every push"):
            server.push(gradients())
        with pytest.raises(LocalProtocolError, match="needs logits and labels"):
            server.push(gradients(), labels=LABELS)
        with pytest.raises(ManifestMismatch, match="'logits'"):
            server.push(gradients(), logits=LOGITS[:3], labels=LABELS)
        assert server.push(gradients(), logits=LOGITS, labels=LABELS).done
        server.vote(LOGITS[:2], LABELS[:2])


def test_logits_are_shown_again_over_a_new_connection_with_the_number_of_their_push():
    def first(peer):
        welcomes_member(peer, "sample")
        peer.hears(Pull)
        peer.answers(0)
        assert peer.hears(Logits).seq == 1
        peer.link.abort()

    def second(peer):
        welcomes_member(peer, "sample")
        logits = peer.hears(Logits)
        assert (logits.step, logits.seq, logits.labels) == (0, 1, labels_digest(LABELS))
        assert side_arrays(peer, ANSWERS.batch)["logits"] == LOGITS.tolist()
        send_weights(peer, 9, value=0.9)  # of another request: read and passed over
        send_weights(peer, 1)
        assert peer.hears(Push).seq == 1
        peer.link.discard_payload()
        peer.answers(1, seq=1, done=True)
        peer.hears(Bye)

    with ScriptedServer(first, second) as scripted, join(scripted, answers=ANSWERS) as server:
        server.pull()
        assert server.weigh(LOGITS, LABELS).tolist() == [0.5] * 4
        assert server.push(gradients(), labels=LABELS).done


def test_logits_may_be_answered_with_values_and_their_number_is_spent():
    def script(peer):
        welcomes_member(peer, "sample")
        peer.hears(Pull)
        peer.answers(0)
        assert peer.hears(Logits).seq == 1
        peer.link.discard_payload()
        peer.answers(3, seq=1, applied=False, reason="too late")
        assert (message := peer.hears(Logits)).seq == 2 and message.step == 3
        peer.link.discard_payload()
        send_weights(peer, 2)
        peer.hears(Bye)

    with ScriptedServer(script) as scripted, join(scripted, answers=ANSWERS) as server:
        server.pull()
        update = server.weigh(LOGITS, LABELS)
        assert (update.step, update.applied, update.reason) == (3, False, "too late")
        assert server.weigh(LOGITS, LABELS).shape == (4,)


def test_a_member_whose_logits_meet_a_new_server_goes_on_from_its_values_and_spends_no_number():
    def first(peer):
        welcomes_member(peer, "sample")
        peer.hears(Pull)
        peer.answers(5)
        peer.hears(Logits)
        peer.link.abort()

    def second(peer):
        welcomes_member(peer, "sample", epoch=EPOCH + 1)
        peer.hears(Pull)
        peer.answers(3, epoch=EPOCH + 1, applied=False)
        vote = peer.hears(TestLogits)
        assert (vote.epoch, vote.step) == (EPOCH + 1, 3)
        peer.link.discard_payload()
        logits = peer.hears(Logits)
        assert (logits.epoch, logits.step, logits.seq) == (EPOCH + 1, 3, 1)
        peer.link.discard_payload()
        send_weights(peer, 1)
        peer.hears(Bye)

    with ScriptedServer(first, second) as scripted, join(scripted, answers=ANSWERS) as server:
        server.pull()
        update = server.weigh(LOGITS, LABELS)
        assert (update.step, update.restarted) == (3, True)
        server.vote(LOGITS[:2], LABELS[:2])
        assert server.weigh(LOGITS, LABELS).tolist() == [0.5] * 4
