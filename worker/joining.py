"""Join a run with any framework or none: `worker.connect`."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.addresses import parse_address
from protocol.certificates import ClientTls, parse_fingerprint
from protocol.ensemble import Answers
from protocol.errors import ConfigurationError
from protocol.injection import Plan
from protocol.injector import Faults
from protocol.messages import AUTO_RANK, Role, Side
from protocol.proof import check_token
from protocol.tensors import Manifest
from worker.client import Server
from worker.reconnect import ClientConfig


def connect(
    address: str,
    variables: Mapping[str, NDArray[Any]],
    *,
    rank: int | None = None,
    name: str = "",
    role: str = "worker",
    token: str | None = None,
    tls_ca: str | Path | None = None,
    tls_fingerprint: str | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    state: Iterable[str] = (),
    threads: int = 1,
    seed: int | None = None,
    answers: Answers | None = None,
    connect_timeout: float = 60.0,
    reconnect_timeout: float = 120.0,
    inject: str | None = None,
    on_event: Callable[[str], None] = lambda text: None,
) -> Server:
    """Join a run as a worker, with any framework or none.

    Args:
        address: `host:port` of the server.
        variables: initial values by name; their shapes and dtypes are the manifest. The server takes the values
            themselves from one worker only.
        rank: 0..N-1, or None for the lowest free one.
        name: who this is; default host and rank.
        role: `worker`; `validator`, whose gradients on trusted data are references by which the server judges those
            of the workers and are never applied; or `evaluator`, which pulls and reports and is never waited for.
        token: shared secret, if the server asks for one; the text of a token file with one line will do.
        tls_ca: file of the authority that the server's certificate must be of; turns TLS on.
        tls_fingerprint: SHA-256 of the server's certificate instead, in hexadecimal; turns TLS on.
        tls_cert: certificate file of this client, if the server asks for one.
        tls_key: its key.
        state: names of variables that are state, not trainable: their changes are pushed, not gradients.
        threads: recorded by the server for this rank.
        seed: refused if it is not the server's; None takes that.
        answers: sizes of the logits that go with each push in ensemble mode; None: the mode is refused.
        connect_timeout: seconds to wait for the server at first.
        reconnect_timeout: seconds to wait for its return later.
        inject: faults on purpose, as `protocol.injection.Plan` reads them; None: none.
        on_event: told, in words, of waits, losses and returns.

    Returns:
        The server, a context manager.

    Raises:
        PeerLost: nobody answered in time.
        Refused: the server said no; never retried.
        ConfigurationError: the address, the token or a fault cannot be understood, a file of TLS cannot be used, or
            another argument is beyond what the protocol allows.
    """
    plan = Plan.parse([] if inject is None else [inject], Side.WORKER)
    if plan.announcement:
        on_event(plan.announcement)
    initial = {key: np.array(value, copy=True) for key, value in variables.items()}
    try:
        manifest, known_role = Manifest.of(initial, state), Role(role)
    except ValueError as error:
        raise ConfigurationError(f"a worker cannot join like this: {error}") from error
    return Server(
        ClientConfig(
            address=parse_address(address),
            manifest=manifest,
            initial_values=lambda: initial,
            rank=AUTO_RANK if rank is None else rank,
            name=name,
            role=known_role,
            token=None if token is None else _secret(token),
            tls=_client_tls(tls_fingerprint, tls_ca, tls_cert, tls_key),
            threads=threads,
            seed=seed,
            answers=answers,
            connect_timeout_s=connect_timeout,
            reconnect_timeout_s=reconnect_timeout,
            faults=Faults(plan),
            on_event=on_event,
            on_waiting=on_event,
        )
    )


def _client_tls(fingerprint: str | None, *files: str | Path | None) -> ClientTls | None:
    authority, certificate, key = (None if file is None else Path(file) for file in files)
    if (fingerprint, authority, certificate, key) == (None,) * 4:
        return None
    return ClientTls(authority, None if fingerprint is None else parse_fingerprint(fingerprint), certificate, key)


def _secret(text: str) -> str:
    """Return the token of a text: the token alone, or a token file's one line, of which it is the last field."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(lines) != 1 or len(lines[0]) not in (1, 4) or not lines[0][-1].isascii():
        raise ConfigurationError(
            "the token must be printable ASCII without blanks; give the last field of its line in the token file"
        )
    return check_token(lines[0][-1], "this worker's arguments").decode("ascii")
