"""What a worker says, as plain lines or as JSON, and the names of its events."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.log_lines import ended, said, sentence

EVENTS = (
    sentence(
        "fault_injected",
        r"(?:faults will be injected: .*|MISBEHAVING ON PURPOSE .*)",
        "`--inject` or `--fault` was given",
        "leave it out in earnest",
        "warning",
    ),
    sentence("data_set", r"data set \S+: .*", "where the data comes from"),
    sentence("loading", r"loading TensorFlow, .*", "TensorFlow is imported, which takes some seconds"),
    sentence("remark", r"remark: .*", "something about the model that is worth knowing", "read it", "warning"),
    sentence("connected", r"connected to the server at (?P<address>.*)", "the handshake is done"),
    sentence(
        "waiting_for_server",
        r"waiting for the server at (?P<address>.*), \d+ s left: (?P<reason>.*)",
        "the server cannot be reached; it is tried until the time is over, then exit code 4",
        "look at `--ps`, at the firewall, and at the server",
        "warning",
    ),
    sentence(
        "connection_lost",
        r"the connection to the server is lost: (?P<reason>.*)",
        "it is called again for `--reconnect-timeout`",
        "look at the server's log if it does not come back",
        "warning",
    ),
    sentence(
        "server_restarted",
        r"the server has started anew: going on from step (?P<step>\d+)",
        "the server came back from a checkpoint; what was computed beyond it is computed again",
        level="warning",
    ),
    sentence("waiting", r"waiting: (?P<reason>.*)", "for whom the run waits, as the server says it"),
    sentence(
        "push_not_counted",
        r"the push of step (?P<step>\d+) did not count: (?P<reason>.*)",
        "a gradient was refused, or came late",
        "the reason says which; look at this worker's data or speed",
        "warning",
    ),
    sentence("test", r"step (?P<step>\d+): test loss .*", "an evaluator's measurement"),
    sentence(
        "threads",
        r"using \d+ threads, as recorded for this rank, .*",
        "threads are those of the rank's first start",
    ),
    sentence("shard", r"(?:.* examples.*|member (?P<rank>\d+) of .*)", "which examples this worker trains on"),
    sentence("done", r"done at step (?P<step>\d+).*", "the run is done; exit code 0"),
)
"""The sentences of a worker, in the order in which they are tried."""


@dataclass
class Speaker:
    """Writes what a worker says to one stream, a line each.

    Attributes:
        write: takes a line without its newline.
        log_format: `text` or `json`.
        name: of this worker, once it is known; in JSON only.
        rank: likewise.
        clock: seconds since 1970.
    """

    write: Callable[[str], None]
    log_format: str = "text"
    name: str | None = None
    rank: int | None = None
    clock: Callable[[], float] = time.time

    def __call__(self, text: str) -> None:
        """Say a sentence."""
        self.write(self.line(text))

    def ended(self, reason: str, exit_code: int) -> None:
        """Say why this worker does not end as it should; in JSON only, a sentence is said where it is caught."""
        self.write(ended(self.clock(), reason, exit_code, self._known()))

    def _known(self) -> dict[str, object]:
        return {"rank": self.rank, "name": self.name}

    def line(self, text: str) -> str:
        """Return a sentence as it is written."""
        now = self.clock()
        if self.log_format == "json":
            return said(now, text, EVENTS, self._known())
        return f"{time.strftime('%H:%M:%S', time.localtime(now))} {text}"
