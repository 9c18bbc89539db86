"""A server that runs in a thread of the test, and clients that speak to it message by message."""

from protocol.link import Link
from protocol.messages import AUTO_RANK, Challenge, Heartbeat, Hello, Offer, Proof, Role, ServerProof, Side
from protocol.proof import NO_PROOF
from protocol.tensors import Manifest, VariableSpec
from protocol.transport import connect

PATIENCE_S = 30.0

KERNEL, BIAS = VariableSpec("kernel", (3,), "float32"), VariableSpec("bias", (), "float32")


class Run:
    """A server of one worker that runs in a thread, and links to it."""

    def __init__(self, server, links):
        self.server = server
        self.listener = server.listen()
        self._links = links

    def call(self):
        link = Link(connect(self.listener.address, PATIENCE_S), Side.WORKER)
        self._links.callback(link.close)
        return link

    def offer(self, role, *variables, incarnation=None, rank=0):
        """Shake hands as far as the offer."""
        link = self.call()
        rank = rank if role is Role.WORKER else AUTO_RANK
        incarnation = incarnation or 7 + (role is Role.WORKER) + max(rank, 0)
        link.send(Hello("", "host-a", rank, role, incarnation=incarnation, nonce=bytes(32)))
        assert isinstance(link.receive(), Challenge)
        link.send(Proof(NO_PROOF))
        assert isinstance(link.receive(), ServerProof)
        link.send(Offer(Manifest(variables).to_wire(), 1))
        return link


def answer(link):
    """The first message that is no heartbeat."""
    message = link.receive()
    while isinstance(message, Heartbeat):
        message = link.receive()
    return message
