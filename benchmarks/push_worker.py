"""Push pre-made gradients through `worker.connect`, as a user's own loop would; rank 0 prints the step times."""

import json
import time

import click

import worker
from benchmarks.workload import checksum, gradients_of, initial_values


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--rank", type=int, help="Of a worker; without it this is the validator.")
@click.option("--parameters", type=int, required=True)
@click.option(
    "--alike", is_flag=True, help="Let all gradients have half in common, so that a rule finds something."
)
@click.option("--tls-ca", help="File of the authority of the server's certificate; without it there is no TLS.")
def main(port: int, rank: int | None, parameters: int, alike: bool, tls_ca: str | None) -> None:
    """Push the same gradient in every step until the server says done."""
    gradients = gradients_of(parameters, -1 if rank is None else rank)
    if alike:
        for name, common in gradients_of(parameters, -2).items():
            gradients[name] += common
    returned_ns = []
    role = "validator" if rank is None else "worker"
    address = f"127.0.0.1:{port}"
    initial = initial_values(parameters)
    with worker.connect(address, variables=initial, rank=rank, role=role, tls_ca=tls_ca) as server:
        update = server.pull()
        while not update.done:
            update = server.push(gradients, loss=1.0, accuracy=0.5, examples=32)
            returned_ns.append(time.monotonic_ns())
        total = checksum(update.values) if rank == 0 and not alike else None
    if rank == 0:
        print(json.dumps({"returned_ns": returned_ns, "checksum": total}))


if __name__ == "__main__":
    main()
