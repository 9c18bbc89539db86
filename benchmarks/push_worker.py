"""Push pre-made gradients through `worker.connect`, as a user's own loop would; rank 0 prints the step times."""

import json
import time

import click

import worker
from benchmarks.workload import checksum, gradients_of, initial_values


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--rank", type=int, required=True)
@click.option("--parameters", type=int, required=True)
def main(port: int, rank: int, parameters: int) -> None:
    """Push the same gradient in every step until the server says done."""
    gradients = gradients_of(parameters, rank)
    returned_ns = []
    with worker.connect(f"127.0.0.1:{port}", variables=initial_values(parameters), rank=rank) as server:
        update = server.pull()
        while not update.done:
            update = server.push(gradients, loss=1.0, examples=32)
            returned_ns.append(time.monotonic_ns())
        total = checksum(update.values) if rank == 0 else 0.0
    if rank == 0:
        print(json.dumps({"returned_ns": returned_ns, "checksum": total}))


if __name__ == "__main__":
    main()
