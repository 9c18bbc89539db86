"""What is answered to whom: paths, methods, names of the server, tokens, tags; without a socket."""

import base64
import json
from http import HTTPStatus

import pytest

from ps.monitoring.prometheus import CONTENT_TYPE, Exposition
from ps.monitoring.status_answers import EVERY_ANSWER, PAGE_FILES, Access, Answers, Request, load_page
from tests.unit.status_run import Watched

TOKEN = b"a-token-of-somebody-that-is-long-enough"
OTHER = b"another-token-that-is-long-enough-too-x"


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path).start().round([0.5, 0.5])


def answers(watched, host="127.0.0.1", tokens=()):
    return Answers(lambda: watched.feed.latest, Access(host, tokens), Exposition().text, CONTENT_TYPE)


def get(target, host="localhost:80", **more):
    return Request("GET", target, (host,), **more)


def basic(password, user="me"):
    return "Basic " + base64.b64encode(user.encode() + b":" + password).decode()


@pytest.mark.parametrize("path", PAGE_FILES)
def test_each_file_of_the_page_is_served_and_needs_nothing_from_elsewhere(watched, path):
    answer = answers(watched).answer(get(path))
    assert answer.status is HTTPStatus.OK and answer.body == load_page()[path].body
    text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text and "https://" not in text
    assert "<script>" not in text and " style=" not in text and "innerHTML" not in text, "the policy forbids it"


def test_the_page_is_small():
    assert sum(len(file.body) for file in load_page().values()) < 200_000


def test_a_browser_asks_whether_a_file_has_changed(watched):
    all_answers = answers(watched)
    tag = dict(all_answers.answer(get("/page.js")).headers)["ETag"]
    assert all_answers.answer(get("/page.js", if_none_match=tag)).status is HTTPStatus.NOT_MODIFIED
    assert all_answers.answer(get("/page.css", if_none_match=tag)).status is HTTPStatus.OK


def test_status_is_sent_once_and_never_stored(watched):
    watched.publish()
    all_answers = answers(watched)
    answer = all_answers.answer(get("/status.json"))
    assert answer.content_type == "application/json" and answer.body == watched.feed.latest.document()
    headers = dict(answer.headers)
    assert headers["Cache-Control"] == "no-store"
    again = get("/status.json", if_none_match=headers["ETag"])
    assert all_answers.answer(again) == all_answers.answer(again)
    assert all_answers.answer(again).status is HTTPStatus.NOT_MODIFIED
    assert all_answers.answer(get("/status.json?since=1", if_none_match=headers["ETag"])).status is HTTPStatus.OK
    watched.publish()
    assert all_answers.answer(again).status is HTTPStatus.OK


def test_status_since_a_step(watched):
    watched.round([0.5, 0.5])
    watched.publish()
    answer = answers(watched).answer(get("/status.json?since=1"))
    assert [point[0] for point in json.loads(answer.body)["history"]["points"]] == [1]


@pytest.mark.parametrize("since", ["-1", "x", "", "1.5", "٣", "9" * 16, "9" * 5000, "1&" * 20])
def test_a_step_that_is_none_is_refused(watched, since):
    watched.publish()
    assert answers(watched).answer(get(f"/status.json?since={since}")).status is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_nothing_can_be_changed(watched, method):
    answer = answers(watched).answer(Request(method, "/status.json", ("localhost",)))
    assert answer.status is HTTPStatus.METHOD_NOT_ALLOWED and dict(answer.headers)["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path", ["/x", "/page.js/", "/../ps/server.py", "//etc/passwd", "/%2e%2e/", "", "http://a/"]
)
def test_other_paths_are_not_found(watched, path):
    assert answers(watched).answer(get(path)).status is HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("path", ["/status.json", "/readyz", "/metrics"])
def test_before_the_first_state_it_says_that_it_starts(watched, path):
    answer = answers(watched).answer(get(path))
    assert (answer.status, answer.body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"the server is starting\n")
    assert answers(watched).answer(get("/healthz")).status is HTTPStatus.OK


def test_ready_means_that_training_is_running(tmp_path):
    watched = Watched(tmp_path)
    watched.publish()
    answer = answers(watched).answer(get("/readyz"))
    assert answer.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.body.startswith(b"the run is gathering: the start waits for ranks 0 and 1")
    watched.start()
    watched.publish()
    assert answers(watched).answer(get("/readyz")).status is HTTPStatus.OK


def test_metrics_are_made_once_for_each_state(watched):
    made = []

    def exposition(status):
        made.append(status)
        return b"figures"

    all_answers = Answers(lambda: watched.feed.latest, Access("127.0.0.1"), exposition, "text/x")
    published = watched.publish()
    answer = all_answers.answer(get("/metrics"))
    assert (answer.body, answer.content_type) == (b"figures", "text/x")
    all_answers.answer(get("/metrics"))
    assert made == [published.status]
    watched.publish()
    all_answers.answer(get("/metrics"))
    assert len(made) == 2


def test_without_prometheus_it_says_what_is_missing(watched):
    watched.publish()
    answer = Answers(lambda: watched.feed.latest, Access("127.0.0.1")).answer(get("/metrics"))
    assert answer.status is HTTPStatus.NOT_IMPLEMENTED and b"weighmaster[metrics]" in answer.body


# ---- names of the server -------------------------------------------------------------------------------

LOCAL = (
    "localhost",
    "localhost:8080",
    "LOCALHOST:1",
    "127.0.0.1",
    "127.8.8.8:9",
    "[::1]:80",
    "[::1]",
    "localhost.:80",
)
STRANGE = (
    "",
    " ",
    ":80",
    "evil.example",
    "localhost.evil.example",
    "localhost:80@evil",
    "a b",
    "localhost:x",
    "::1",
)
STRANGE += ("10.0.0.1", "[10.0.0.1", "localhost/x", "localhost,evil", "ps")


@pytest.mark.parametrize("host", LOCAL)
def test_on_loopback_names_of_this_machine_are_answered(watched, host):
    assert answers(watched).answer(get("/", host)).status is HTTPStatus.OK


@pytest.mark.parametrize("host", STRANGE)
@pytest.mark.parametrize("path", ["/", "/healthz", "/status.json", "/metrics"])
def test_on_loopback_other_names_are_not(watched, host, path):
    watched.publish()
    answer = answers(watched, tokens=(TOKEN,)).answer(get(path, host))
    assert answer.status is HTTPStatus.MISDIRECTED_REQUEST
    assert b"evil" not in answer.body


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
def test_the_name_is_given_exactly_once(watched, hosts):
    answer = answers(watched).answer(Request("GET", "/", hosts))
    assert answer.status is HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize(
    ("host", "admitted"),
    [("10.1.2.3:80", True), ("ps:80", True), ("localhost", True), ("[fd00::1]", True), ("rebound.example", False)],
)
def test_elsewhere_without_tokens_a_name_that_can_be_bought_is_not_answered(watched, host, admitted):
    answer = answers(watched, "0.0.0.0").answer(get("/", host))
    assert (answer.status is HTTPStatus.OK) is admitted


# ---- tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [basic(TOKEN), basic(TOKEN, ""), basic(OTHER), f"Bearer {TOKEN.decode()}", f"bearer  {OTHER.decode()} "],
)
def test_elsewhere_any_of_the_tokens_opens(watched, authorization):
    watched.publish()
    all_answers = answers(watched, "0.0.0.0", (TOKEN, OTHER))
    for path in ("/", "/status.json", "/metrics"):
        request = get(path, "training.example", authorization=authorization)
        assert all_answers.answer(request).status is HTTPStatus.OK


@pytest.mark.parametrize(
    "authorization",
    [
        *("", "Basic", "Basic !!!", "Bearer", "Bearer x", f"Digest {TOKEN.decode()}", TOKEN.decode(), "Bearer é"),
        *(basic(TOKEN + b"x"), basic(TOKEN[:-1]), basic(b""), "Basic " + base64.b64encode(TOKEN).decode()),
    ],
)
@pytest.mark.parametrize("path", ["/", "/page.js", "/status.json", "/metrics", "/nothing"])
def test_elsewhere_nothing_is_shown_without_one(watched, path, authorization):
    watched.publish()
    request = get(path, "training.example", authorization=authorization)
    answer = answers(watched, "0.0.0.0", (TOKEN, OTHER)).answer(request)
    assert answer.status is HTTPStatus.UNAUTHORIZED and dict(answer.headers)["WWW-Authenticate"].startswith("Basic")


def test_probes_need_no_token_and_learn_no_names(tmp_path):
    watched = Watched(tmp_path)
    watched.publish()
    all_answers = answers(watched, "0.0.0.0", (TOKEN,))
    assert all_answers.answer(get("/healthz")).status is HTTPStatus.OK
    assert all_answers.answer(get("/readyz")).body == b"the run is gathering\n"
    assert b"ranks 0 and 1" in all_answers.answer(get("/readyz", authorization=basic(TOKEN))).body


def test_on_loopback_no_token_is_asked_for(watched):
    watched.publish()
    assert answers(watched, "127.0.0.1", (TOKEN,)).answer(get("/status.json")).status is HTTPStatus.OK


def test_every_answer_forbids_what_comes_from_elsewhere():
    headers = dict(EVERY_ANSWER)
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert headers["X-Content-Type-Options"] == "nosniff"
