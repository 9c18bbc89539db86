"""What the status server answers to a request. Pure: a request in, an answer out; no socket, no lock, no clock."""

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import parse_qs

from protocol.addresses import is_loopback
from protocol.extras import installing
from ps.coordination.policy import Phase
from ps.monitoring.status import Status
from ps.monitoring.status_feed import Published

PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

TEXT = "text/plain; charset=utf-8"
METHODS = ("GET", "HEAD")

EVERY_ANSWER = (
    ("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)

MAX_SINCE_DIGITS = 15
"""A step has no more; Python would turn very long numbers only slowly into integers."""


@dataclass(frozen=True)
class Request:
    """A request as far as it matters: `target` as sent; headers that were not sent are empty.

    `hosts` has the value of every Host header: more than one is an attempt to be read in two ways.
    """

    method: str
    target: str
    hosts: tuple[str, ...] = ()
    authorization: str = ""
    if_none_match: str = ""


@dataclass(frozen=True)
class Answer:
    """An answer; `headers` beside length, type and those of every answer."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = (("Cache-Control", "no-store"),)


@dataclass(frozen=True)
class PageFile:
    """A file of the page, and the tag by which a browser asks whether it has changed."""

    body: bytes
    content_type: str
    tag: str


def load_page() -> dict[str, PageFile]:
    """Read the files of the page, by path."""
    folder = files("ps.monitoring") / "status_page"
    page = {}
    for path, (name, content_type) in PAGE_FILES.items():
        body = (folder / name).read_bytes()
        page[path] = PageFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return page


class Access:
    """Who may look.

    A page on loopback is for this machine: no token, but the Host header must name this machine, or a web page from
    elsewhere could read it in the browser of somebody here (DNS rebinding). Elsewhere the token is asked for; a
    browser gives it to this very name only, so any name will do.

    Args:
        host: address that the server listens on.
        tokens: any of them opens; empty: nothing is asked, whatever the address.
    """

    def __init__(self, host: str, tokens: Sequence[bytes] = ()) -> None:
        self._host = host.strip("[]").lower()
        self._tokens = () if is_loopback(host) else tuple(tokens)
        self._any_address = not is_loopback(host)

    def admits_host(self, host: str) -> bool:
        """Say whether a Host header names this server as somebody would who means it."""
        name = _host_name(host)
        if not name:
            return False
        if self._tokens or name in ("localhost", self._host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except (
            ValueError
        ):  # a name: without a dot it is of this network, as a service's in compose; nobody can buy it
            return self._any_address and "." not in name
        return self._any_address or address.is_loopback

    def admits(self, authorization: str) -> bool:
        """Say whether an Authorization header holds a token: as bearer, or as the password of anyone."""
        if not self._tokens:
            return True
        given = _token_of(authorization)
        found = False
        for token in self._tokens:  # all of them, in the same time whichever it is
            found |= hmac.compare_digest(token, given)
        return found


class Answers:
    """Answers requests from the newest state of the run.

    Args:
        latest: returns that state, or None before the first; must not wait for anybody.
        access: who may look.
        exposition: writes a state for Prometheus; None: `/metrics` says what is missing.
        exposition_type: the content type of that.
    """

    def __init__(
        self,
        latest: Callable[[], Published | None],
        access: Access,
        exposition: Callable[[Status], bytes] | None = None,
        exposition_type: str = TEXT,
    ) -> None:
        self._latest = latest
        self._access = access
        self._exposition = exposition
        self._exposition_type = exposition_type
        self._exposed: tuple[int, bytes] = (0, b"")
        self._page = load_page()

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request; that to HEAD has the body that GET would have, which is not sent."""
        if len(request.hosts) != 1 or not self._access.admits_host(request.hosts[0]):
            return _said(
                HTTPStatus.MISDIRECTED_REQUEST, "this server does not answer to that name; use its address"
            )
        if request.method not in METHODS:
            return _said(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "only GET and HEAD: nothing can be changed here",
                ("Allow", "GET, HEAD"),
            )
        path, _, query = request.target.partition("?")
        knows = self._access.admits(request.authorization)
        if path == "/healthz":
            return _said(HTTPStatus.OK, "ok")
        if path == "/readyz":
            return self._readiness(knows)
        if not knows:
            return _said(
                HTTPStatus.UNAUTHORIZED,
                "the token is asked for: as password, with any user name, or as bearer",
                ("WWW-Authenticate", 'Basic realm="weighmaster", charset="UTF-8"'),
            )
        if path == "/status.json":
            return self._status(query, request.if_none_match)
        if path == "/metrics":
            return self._metrics()
        return self._file(path, request.if_none_match)

    def _readiness(self, knows: bool) -> Answer:
        published = self._latest()
        if published is None:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the server is starting")
        run, sentence = published.status.run, published.status.waiting.sentence
        if run.phase == Phase.RUNNING.value:
            return _said(HTTPStatus.OK, "training is running")
        why = f"the run is {run.phase}"
        return _said(HTTPStatus.SERVICE_UNAVAILABLE, f"{why}: {sentence}" if sentence and knows else why)

    def _status(self, query: str, if_none_match: str) -> Answer:
        published = self._latest()
        if published is None:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the server is starting")
        given = _since_of(query)
        if not (given.isascii() and given.isdigit() and len(given) <= MAX_SINCE_DIGITS):
            return _said(HTTPStatus.BAD_REQUEST, "since must be a step: a whole number from 0")
        since = int(given)
        tag = f'"{published.status.epoch}-{published.sequence}-{since}"'
        headers = (("Cache-Control", "no-store"), ("ETag", tag))
        if if_none_match == tag:
            return Answer(HTTPStatus.NOT_MODIFIED, headers=headers)
        return Answer(HTTPStatus.OK, published.document(since), "application/json", headers)

    def _metrics(self) -> Answer:
        published = self._latest()
        if self._exposition is None:
            return _said(
                HTTPStatus.NOT_IMPLEMENTED,
                f"prometheus_client is not installed on the server: {installing('metrics')}",
            )
        if published is None:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the server is starting")
        sequence, text = self._exposed
        if sequence != published.sequence:
            text = self._exposition(published.status)
            self._exposed = (published.sequence, text)
        return Answer(HTTPStatus.OK, text, self._exposition_type)

    def _file(self, path: str, if_none_match: str) -> Answer:
        file = self._page.get(path)
        if file is None:
            return _said(HTTPStatus.NOT_FOUND, "there is no such page")
        headers = (("Cache-Control", "no-cache"), ("ETag", file.tag))
        if if_none_match == file.tag:
            return Answer(HTTPStatus.NOT_MODIFIED, headers=headers)
        return Answer(HTTPStatus.OK, file.body, file.content_type, headers)


def _said(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, f"{text}\n".encode(), headers=(("Cache-Control", "no-store"), *headers))


def _since_of(query: str) -> str:
    try:
        return parse_qs(query, keep_blank_values=True, max_num_fields=8).get("since", ["0"])[-1]
    except ValueError:  # more fields than anybody means
        return ""


def _host_name(host: str) -> str:
    """Return the name in a Host header, lower case, without port and brackets; empty if it is none."""
    name, colon, port = host.strip().rpartition(":")
    if not colon or port.endswith("]"):
        name, port = host.strip(), "0"
    if not (port.isascii() and port.isdigit()):
        return ""
    bracketed = name.startswith("[") and name.endswith("]")
    name = name[1:-1] if bracketed else name
    is_text = name.isascii() and name.isprintable() and not any(character in " /\\@,;" for character in name)
    return name.lower().removesuffix(".") if is_text and (bracketed or ":" not in name) else ""


def _token_of(authorization: str) -> bytes:
    scheme, _, rest = authorization.strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest.encode("utf-8", "replace")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(rest, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
