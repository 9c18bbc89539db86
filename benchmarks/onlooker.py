"""Looks at a run as an open page and a Prometheus server do, once a second, until the run has ended."""

import contextlib
import http.client
import json
import time
from pathlib import Path

import click

EVERY_S = 1.0
PATIENCE_S = 60.0


def ask(port: int, path: str) -> bytes:
    """Return what the status page answers.

    Raises:
        OSError, http.client.HTTPException: it does not answer.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise http.client.HTTPException(f"{path} answered {answer.status}")
    return body


def look(port: int, since: int) -> int:
    """Fetch what a page and a scraper would; return the step from which the page asks next."""
    points = json.loads(ask(port, f"/status.json?since={since}"))["history"]["points"]
    ask(port, "/metrics")
    return int(points[-1][0]) if points else since


@click.command()
@click.option("--status-port-file", type=click.Path(path_type=Path), required=True)
def main(status_port_file: Path) -> None:
    """Look once a second until nobody answers any more."""
    deadline, since, looks = time.monotonic() + PATIENCE_S, 0, 0
    while looks or time.monotonic() < deadline:
        try:  # the file may still tell of the run before: then nobody answers there
            since = look(int(status_port_file.read_text()), since)
            looks += 1
            time.sleep(EVERY_S)
        except (OSError, ValueError, http.client.HTTPException):
            if looks:
                break
            time.sleep(0.05)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"looks": looks}), flush=True)
    raise SystemExit(0 if looks else 1)


if __name__ == "__main__":
    main()
