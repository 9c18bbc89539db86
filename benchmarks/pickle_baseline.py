"""Train as people write it today: pickled dicts over a socket, Adam in plain NumPy expressions.

A careful version of that script, not a caricature: the length is a fixed-width integer, a closed socket is
noticed, chunks are joined once, Nagle's delay is off, one thread serves each worker.

    python -m benchmarks.pickle_baseline server --port-file F --parameters P --workers W --steps S
    python -m benchmarks.pickle_baseline worker --port N --rank R --parameters P --steps S
"""

import json
import math
import pickle
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import (
    BETA1,
    BETA2,
    EPSILON,
    LEARNING_RATE,
    checksum,
    gradients_of,
    initial_values,
)

Arrays = dict[str, NDArray[np.float32]]

CHUNK_BYTES = 1 << 16


def send_message(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(struct.pack("<Q", len(data)))
    connection.sendall(data)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    chunks = []
    while size > 0:
        chunk = connection.recv(min(size, CHUNK_BYTES))
        if not chunk:
            raise ConnectionError("the peer closed the connection")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def receive_message(connection: socket.socket) -> Any:
    (size,) = struct.unpack("<Q", receive_exactly(connection, 8))
    return pickle.loads(receive_exactly(connection, size))


class Adam:
    """Adam in TensorFlow's formulation, one expression per line and variable."""

    def __init__(self, values: Arrays) -> None:
        self.step = 0
        self.m: dict[str, NDArray[Any]] = {name: np.zeros_like(value) for name, value in values.items()}
        self.v: dict[str, NDArray[Any]] = {name: np.zeros_like(value) for name, value in values.items()}

    def apply(self, values: Arrays, gradients: Arrays) -> None:
        """Replace `values` by those of the next step."""
        self.step += 1
        rate = LEARNING_RATE * math.sqrt(1 - BETA2**self.step) / (1 - BETA1**self.step)
        for name, gradient in gradients.items():
            self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * gradient
            self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * gradient**2
            values[name] = values[name] - rate * self.m[name] / (np.sqrt(self.v[name]) + EPSILON)


class Server:
    """A parameter server: collect all gradients, average, apply, answer all."""

    def __init__(self, parameters: int, workers: int, steps: int) -> None:
        self.values: Arrays = initial_values(parameters)
        self.optimizer = Adam(self.values)
        self.gradients: list[Arrays] = [{}] * workers
        self.steps = steps
        self.barrier = threading.Barrier(workers, action=self.update)

    def update(self) -> None:
        """Average the gradients of all workers and apply the mean."""
        mean = {name: np.mean([gradients[name] for gradients in self.gradients], axis=0) for name in self.values}
        self.optimizer.apply(self.values, mean)

    def serve(self, connection: socket.socket) -> None:
        """Serve one worker to the end."""
        with connection:
            rank = receive_message(connection)
            for _ in range(self.steps):
                self.gradients[rank] = receive_message(connection)
                self.barrier.wait()
                send_message(connection, self.values)


@click.group()
def main() -> None:
    """Run one process of the baseline."""


@main.command()
@click.option("--port-file", type=click.Path(path_type=Path), required=True)
@click.option("--parameters", type=int, required=True)
@click.option("--workers", type=int, required=True)
@click.option("--steps", type=int, required=True)
def server(port_file: Path, parameters: int, workers: int, steps: int) -> None:
    """Serve until all workers have done their steps."""
    state = Server(parameters, workers, steps)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        part = port_file.with_suffix(".part")
        part.write_text(f"{listener.getsockname()[1]}\n")
        part.rename(port_file)
        threads = []
        for _ in range(workers):
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=state.serve, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()


@main.command()
@click.option("--port", type=int, required=True)
@click.option("--rank", type=int, required=True)
@click.option("--parameters", type=int, required=True)
@click.option("--steps", type=int, required=True)
def worker(port: int, rank: int, parameters: int, steps: int) -> None:
    """Push the same gradient in every step; rank 0 prints when each step returned."""
    gradients = gradients_of(parameters, rank)
    returned_ns = []
    values: Arrays = {}
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_message(connection, rank)
        for _ in range(steps):
            send_message(connection, gradients)
            values = receive_message(connection)
            returned_ns.append(time.monotonic_ns())
    if rank == 0:
        print(json.dumps({"returned_ns": returned_ns, "checksum": checksum(values)}))


if __name__ == "__main__":
    main()
