"""Errors, each carrying the blame in its type and the exit code of a process that ends by it."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of both programs."""

    DONE = 0
    CONFIGURATION = 2
    REFUSED = 3
    PEER_LOST = 4
    DIVERGED = 5
    CHECKPOINT = 6
    NO_PROGRESS = 7
    SIGINT = 130
    SIGTERM = 143


class WeighmasterError(Exception):
    """Base of every error that this project raises; its text is one sentence for a person."""

    exit_code: ExitCode = ExitCode.CONFIGURATION


# ---- our own misuse ------------------------------------------------------------------------------------


class ConfigurationError(WeighmasterError):
    """What the user asked for cannot be done; nothing was started."""

    exit_code = ExitCode.CONFIGURATION


class LocalProtocolError(WeighmasterError):
    """Our own code tried to send what the protocol does not allow here: a bug, never the peer's fault."""


# ---- the peer's fault ----------------------------------------------------------------------------------


class RemoteProtocolError(WeighmasterError):
    """The peer sent bytes that the protocol does not allow; the connection is dead."""

    exit_code = ExitCode.PEER_LOST


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the protocol."""

    exit_code = ExitCode.REFUSED


class Refused(WeighmasterError):
    """The peer understood us and said no. Never retried.

    Attributes:
        code: one of `protocol.messages.RefusalCode`.
    """

    exit_code = ExitCode.REFUSED

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ManifestMismatch(WeighmasterError):
    """Two sides hold different variables; the text names the first that differs, with both views."""

    exit_code = ExitCode.REFUSED


# ---- the network: worth another attempt ----------------------------------------------------------------


class NetworkError(WeighmasterError):
    """A connection could not be made or broke; retried until a deadline."""

    exit_code = ExitCode.PEER_LOST


class ConnectionLost(NetworkError):
    """The peer closed the connection, or it broke."""


class PeerSilent(NetworkError):
    """The peer sent nothing, or too little, for too long."""


# ---- the end of a run ----------------------------------------------------------------------------------


class PeerLost(WeighmasterError):
    """The peer did not come back before the deadline."""

    exit_code = ExitCode.PEER_LOST


class Diverged(WeighmasterError):
    """Too many rounds in a row had nothing finite to apply."""

    exit_code = ExitCode.DIVERGED


class CheckpointError(WeighmasterError):
    """A checkpoint or export cannot be read or written."""

    exit_code = ExitCode.CHECKPOINT


class NoProgress(WeighmasterError):
    """The run cannot go on: too few workers came, or came back."""

    exit_code = ExitCode.NO_PROGRESS


class Interrupted(WeighmasterError):
    """A signal asked this process to end."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = ExitCode.SIGINT if signal_name == "SIGINT" else ExitCode.SIGTERM
