"""A worker in plain Python: what docs/PROTOCOL.md says, and nothing of this project's own code.

It imports the standard library and msgpack only, so it proves that the document is enough to write a client in
another language. Run by `test_plain_client.py`; by hand:

    python plain_client.py PORT [TOKEN]
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import sys

import msgpack

PREFIX = struct.Struct("<4sHHIQ")
HELLO, CHALLENGE, PROOF, SERVER_PROOF, OFFER, WELCOME, REFUSED, PULL = range(1, 9)
VALUES, PUSH, ASK_INITIAL, INITIAL, HEARTBEAT, REPORT, BYE, ENDED = range(9, 17)

# Two float32 variables, "w" of 3 elements and "b" a scalar, each in 64 bytes of its own: 128 bytes of payload.
ROWS = [["w", [3], "float32", "trainable", -1], ["b", [], "float32", "trainable", -1]]
NO_ENSEMBLE = {"examples": 0, "classes": 0, "logits_dtype": "", "test_examples": 0, "software": ""}
"""The end of an offer of a client that trains in mode `shared` only."""

INITIAL_VALUES = [1.0, 2.0, 3.0, -4.0]
GRADIENTS = [[0.5, -1.0, 2.0, 8.0], [1.0, 0.0, 0.25, -16.0], [-2.0, 4.0, -8.0, 0.125]]


def padding_after(header_bytes: int) -> int:
    """Number of zero bytes that make prefix, header and themselves a multiple of 64 bytes."""
    return -(PREFIX.size + header_bytes) % 64


def pack_payload(numbers: list[float]) -> bytes:
    """Lay three numbers at offset 0 and one at offset 64; the gaps are zero."""
    w, b = struct.pack("<3f", *numbers[:3]), struct.pack("<f", numbers[3])
    return w.ljust(64, b"\0") + b.ljust(64, b"\0")


def unpack_payload(payload: bytes) -> list[float]:
    return [*struct.unpack_from("<3f", payload, 0), *struct.unpack_from("<f", payload, 64)]


class PlainClient:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)

    def send(self, kind: int, fields: dict, payload: bytes = b"") -> bytes:
        header = msgpack.packb(fields)
        frame = PREFIX.pack(b"WMPS", 1, kind, len(header), len(payload)) + header
        frame += bytes(padding_after(len(header)))
        self.socket.sendall(frame + payload)
        return frame

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise SystemExit("the server closed the connection")
            data += piece
        return data

    def receive(self, *wanted: int) -> tuple[int, dict, bytes, bytes]:
        """Return kind, fields, payload and the frame's bytes; heartbeats are skipped."""
        while True:
            prefix = self.read(PREFIX.size)
            magic, version, kind, header_bytes, payload_bytes = PREFIX.unpack(prefix)
            assert (magic, version) == (b"WMPS", 1)
            header = self.read(header_bytes)
            padding = self.read(padding_after(header_bytes))
            payload = self.read(payload_bytes)
            fields = msgpack.unpackb(header)
            if kind == HEARTBEAT:
                self.send(HEARTBEAT, {"waiting": ""})
                continue
            if kind in (REFUSED, ENDED) or kind not in wanted:
                raise SystemExit(f"the server sent kind {kind}: {fields}")
            return kind, fields, payload, prefix + header + padding

    def shake_hands(self, token: bytes) -> dict:
        nonce = os.urandom(32)
        hello = self.send(
            HELLO,
            {
                "name": "plain",
                "host": "elsewhere",
                "rank": 0,
                "role": "worker",
                "incarnation": int.from_bytes(os.urandom(8), "little") >> 1,
                "nonce": nonce,
                "codecs": ["raw"],
            },
        )
        _, challenge, _, frame = self.receive(CHALLENGE)
        hellos = hashlib.sha256(hello + frame).digest()

        def proof(side: bytes) -> bytes:
            if not challenge["token_required"]:
                return bytes(32)
            message = b"weighmaster proof 1\0" + side + b"\0" + nonce + challenge["nonce"] + hellos
            return hmac.new(token, message, hashlib.sha256).digest()

        self.send(PROOF, {"mac": proof(b"worker")})
        _, answer, _, _ = self.receive(SERVER_PROOF)
        assert hmac.compare_digest(answer["mac"], proof(b"server")), "the server does not hold the token"
        self.send(OFFER, {"manifest": b"".join(map(msgpack.packb, ROWS)), "threads": 1, "seed": None} | NO_ENSEMBLE)
        return self.receive(WELCOME)[1]

    def train(self, welcome: dict) -> list[dict]:
        """Pull, push the gradients one after another, and return what each answer said."""
        answers = []
        self.send(PULL, {"min_step": 0})
        kind, fields, payload, _ = self.receive(ASK_INITIAL, VALUES)
        if kind == ASK_INITIAL:
            self.send(INITIAL, {}, pack_payload(INITIAL_VALUES))
            kind, fields, payload, _ = self.receive(VALUES)
        answers.append({**fields, "values": unpack_payload(payload)})
        for seq, gradient in enumerate(GRADIENTS, 1):
            push = {"epoch": fields["epoch"], "step": fields["step"], "seq": seq}
            measured = {"loss": 1.0 / seq, "accuracy": None, "examples": 8, "labels": None}
            self.send(PUSH, push | measured, pack_payload(gradient))
            _, fields, payload, _ = self.receive(VALUES)
            assert fields["epoch"] == welcome["epoch"]
            answers.append({**fields, "values": unpack_payload(payload)})
        return answers

    def leave(self) -> None:
        self.send(BYE, {})
        self.socket.shutdown(socket.SHUT_WR)
        while self.socket.recv(4096):
            pass
        self.socket.close()


def main() -> None:
    client = PlainClient(int(sys.argv[1]))
    with client.socket:
        welcome = client.shake_hands(sys.argv[2].encode() if len(sys.argv) > 2 else b"")
        answers = client.train(welcome)
        client.leave()
    welcome["manifest"] = welcome["manifest"].hex()
    print(json.dumps({"welcome": welcome, "answers": answers}))


if __name__ == "__main__":
    main()
