"""The server's half of the handshake: who a client is, and the proof of it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from protocol.deadlines import Deadline
from protocol.errors import Refused
from protocol.link import HANDSHAKE_S, Link, expect
from protocol.messages import AUTO_RANK, Challenge, Hello, Proof, RefusalCode, Role, ServerProof, Side
from protocol.proof import NO_PROOF, prove, proves
from protocol.tokens import Grant, candidates
from ps.coordination.members import Identity


def authenticate(
    link: Link, hello: Hello, grants: Sequence[Grant], proof_failed: Callable[[str], None]
) -> Identity:
    """Challenge a client, check its proof and answer with the server's own; return who it is.

    Args:
        link: the connection, of which the hello has been received.
        hello: who the client says it is.
        grants: who may join with which token; empty admits everyone.
        proof_failed: called with a sentence for the log when the proof is wrong, before the client hears of it.

    Raises:
        Refused: no token proves this name, role and rank, or the client cannot speak our codec.
        NetworkError: the connection broke, or the client fell silent.
        RemoteProtocolError: what came is no proof.
    """
    challenge = Challenge(os.urandom(32), bool(grants))
    link.send(challenge)
    proof = expect(link.receive(Deadline(HANDSHAKE_S)), Proof)
    who = Identity(hello.name, hello.host, hello.rank, hello.role, hello.incarnation)
    if "raw" not in hello.codecs:
        raise Refused(RefusalCode.CODEC, "this server speaks the codec 'raw' only")
    if not grants:
        link.send(ServerProof(NO_PROOF))
        return who
    hellos, certificate = link.connection.hellos_digest, link.certificate
    for grant in candidates(grants, hello.name, hello.role, hello.rank):
        covered = (hello.nonce, challenge.nonce, hellos, certificate)
        if proves(proof.mac, prove(grant.token, Side.WORKER, *covered)):
            mac = prove(grant.token, Side.SERVER, *covered)
            link.send(ServerProof(mac))
            return _as_granted(who, grant)
    proof_failed(f"{link.peer} failed the proof as {hello.role} {hello.name!r}, rank {_rank_text(hello.rank)}")
    raise Refused(RefusalCode.PROOF, "the token was not accepted for this name, role and rank")


def _as_granted(who: Identity, grant: Grant) -> Identity:
    """Fill in what the client left open and its token says."""
    rank = grant.rank if grant.rank is not None and who.rank == AUTO_RANK and who.role is Role.WORKER else who.rank
    return replace(who, name=who.name or grant.name or "", rank=rank)


def _rank_text(rank: int) -> str:
    return "auto" if rank == AUTO_RANK else str(rank)
