"""Who is let in: whatever a client may legally say of itself, it is welcomed or refused, and the run goes on."""

import contextlib
import io

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.codec import encode_header
from protocol.errors import Refused, RemoteProtocolError
from protocol.messages import AUTO_RANK, MAX_NAME_CHARACTERS, MAX_RANK, Hello, Offer, Role, Welcome
from protocol.tensors import ITEM_BYTES, Kind, Manifest, VariableSpec
from ps.coordination.members import Granted, Identity
from ps.monitoring.console import Console
from ps.server import ParameterServer
from ps.settings.config import ServerConfig

MAX_MODEL_BYTES = 1 << 16

MANIFEST = Manifest((VariableSpec("kernel", (3,), "float32"),)).to_wire()
LONGEST = "h" * MAX_NAME_CHARACTERS

names = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=MAX_NAME_CHARACTERS).filter(str.isprintable),
    st.integers(MAX_NAME_CHARACTERS - 12, MAX_NAME_CHARACTERS).map("h".__mul__),
)
ranks = st.one_of(st.integers(AUTO_RANK, 4), st.integers(AUTO_RANK, MAX_RANK))
hellos = st.builds(
    Hello,
    name=names,
    host=names,
    rank=ranks,
    role=st.sampled_from(Role),
    incarnation=st.integers(0, 3),
    nonce=st.just(bytes(32)),
)


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 2**20), max_size=3)))
    return VariableSpec(draw(names), shape, draw(st.sampled_from(sorted(ITEM_BYTES))), draw(st.sampled_from(Kind)))


@st.composite
def manifests(draw):
    """What `Manifest` allows, or bytes that are none."""
    try:
        return Manifest(tuple(draw(st.lists(specs(), max_size=3)))).to_wire()
    except ValueError:
        return draw(st.binary(max_size=30))


counts = st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1))
MEMBER = Offer(MANIFEST, 1, examples=4, classes=3, logits_dtype="float32", test_examples=2)
any_offers = st.builds(
    Offer,
    manifest=st.one_of(st.just(MANIFEST), manifests()),
    threads=st.integers(1, 4096),
    seed=st.one_of(st.none(), st.just(0), st.integers(0, 2**63 - 1)),
    examples=counts,
    classes=counts,
    logits_dtype=st.one_of(st.sampled_from(["", "float32", "float64"]), names),
    test_examples=counts,
    software=names,
)
offers = st.one_of(st.just(MEMBER), any_offers)


def come(server, clients):
    """Let clients in, as a session does after the proof; return what they are told."""
    admissions, told = server.admissions, []
    for session, (hello, offer) in enumerate(clients, 1):
        who = Identity(hello.name, hello.host, hello.rank, hello.role, hello.incarnation)
        with contextlib.suppress(Refused, RemoteProtocolError):  # it ends this connection alone
            granted = admissions.claim(who)
            if not isinstance(granted, Granted) or not (admissions.has_variables or hello.role is Role.WORKER):
                continue
            admissions.check_offer(who, offer)
            admission = admissions.join(session, who, granted, offer)
            if admission is not None:
                told.append(admission.welcome)
    return told


def server_of(**options):
    config = ServerConfig(
        steps=9, port=0, threads=1, seed=0, max_model_bytes=MAX_MODEL_BYTES, max_memory=1 << 26, **options
    )
    return ParameterServer(config, Console(1, io.StringIO(), interactive=False), epoch=5)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(hellos, offers), max_size=5), st.sampled_from(["shared", "with a validator", "ensemble"]))
@example(
    [
        (Hello("", LONGEST, rank, role, number, bytes(32)), Offer(MANIFEST, 1))
        for number, (role, rank) in enumerate([(Role.WORKER, 0), *((role, AUTO_RANK) for role in Role)])
    ],
    "with a validator",
)
def test_no_legal_hello_and_offer_can_end_the_run_of_the_others(clients, kind):
    """A fault of the server's own would end it; all that may happen is a welcome, or a refusal of this client."""
    options = {
        "shared": {"workers": 2},
        "with a validator": {"workers": 2, "validators": 1, "aggregation": "evidence"},
        "ensemble": {"workers": 2, "mode": "ensemble", "aggregation": "master"},
    }[kind]
    for welcome in come(server_of(**options), clients):
        assert isinstance(welcome, Welcome) and encode_header(welcome)


def test_every_role_is_welcomed_from_a_host_with_the_longest_name():
    clients = [
        (Hello("", LONGEST, rank, role, number, bytes(32)), Offer(MANIFEST, 1))
        for number, (role, rank) in enumerate([(Role.WORKER, 0), *((role, AUTO_RANK) for role in Role)])
    ]
    told = come(server_of(workers=2, validators=1, aggregation="evidence"), clients)
    assert [welcome.name[-5:] for welcome in told] == ["hhh:0", "hhh:1", "dator", "uator"]
    assert {len(welcome.name) for welcome in told} == {MAX_NAME_CHARACTERS}
