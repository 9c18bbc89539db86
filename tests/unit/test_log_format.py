"""Logs as JSON: one event a line, with the names and fields that programs rely on."""

import ast
import io
import json
import logging
from pathlib import Path
from types import ModuleType

import pytest

from protocol.log_lines import (
    ENDED,
    MAX_MESSAGE_CHARACTERS,
    UNNAMED,
    asks_for_json,
    json_line,
    recognise,
    rfc3339,
)
from protocol.messages import AUTO_RANK, Role
from ps.coordination.coordinator import Coordinator
from ps.coordination.instructions import Announce
from ps.coordination.members import Granted, Identity
from ps.monitoring import log_format
from ps.monitoring.console import PLAIN_LINE_S
from ps.monitoring.log_events import EVENTS
from ps.monitoring.log_format import JsonConsole, JsonFormatter, formatter_of
from ps.settings import command_line as server_side
from ps.settings.command_line import parse
from worker import command_line as worker_side
from worker import log_format as worker_log
from worker.log_format import Speaker

ROOT = Path(__file__).resolve().parents[2]

GENERAL = {
    "7",
    "77",
    "step 7: 7",
    "7; summary in 7",
    "7 refused (7): 7",
    "7: the last bits may differ",
    "rank 7 (w) on 7 has 7",
    "rank 7 (w) 7 before the start; waiting for it",
    "checkpoint 7 is written",
}
"""Templates whose words are made elsewhere: the samples above stand for them. The last is for debugging only."""


def test_a_line_has_time_level_event_and_message_first() -> None:
    line = json_line(1_700_000_000.25, "info", "joined", "he is in", {"rank": 3, "step": None})
    assert line == (
        '{"time": "2023-11-14T22:13:20.250Z", "level": "info", "event": "joined", "message": "he is in", "rank": 3}'
    )


def test_what_peers_say_cannot_break_a_line() -> None:
    line = json_line(0.0, "info", "joined", 'a\nb\u2028c"d\x1b[31m\ud800', {"name": "\r\n", "loss": float("nan")})
    assert line.isascii()
    assert line.isprintable()
    parsed = json.loads(line)
    assert parsed["message"] == 'a\nb\u2028c"d\x1b[31m\ud800'
    assert parsed["loss"] is None


def test_no_field_replaces_what_every_line_has() -> None:
    assert json.loads(json_line(0.0, "info", "lost", "text", {"event": "other", "time": 5}))["event"] == "lost"


@pytest.mark.parametrize("length", [MAX_MESSAGE_CHARACTERS, MAX_MESSAGE_CHARACTERS + 1])
def test_a_long_message_is_cut(length: int) -> None:
    message = json.loads(json_line(0.0, "info", "x", "m" * length, {}))["message"]
    assert len(message) == MAX_MESSAGE_CHARACTERS
    assert message.endswith(" ...") == (length > MAX_MESSAGE_CHARACTERS)


def test_midnight_has_milliseconds_too() -> None:
    assert rfc3339(86400.0) == "1970-01-02T00:00:00.000Z"


@pytest.mark.parametrize(
    ("text", "event", "fields"),
    [
        (
            "listening on 127.0.0.1:5014, workers to come: 3",
            "listening",
            {"address": "127.0.0.1:5014", "workers": 3},
        ),
        ("rank 1 (host:1) on host has joined", "joined", {"rank": 1, "name": "host:1", "host": "host"}),
        ("evaluator e has joined", "joined", {"role": "evaluator", "name": "e"}),
        ("validator-0 on h has joined", "joined", {"name": "validator-0", "host": "h"}),
        ("rank 0 (a) on h has returned", "returned", {"rank": 0, "name": "a", "host": "h"}),
        (
            "rank 2 (c) is lost for the second time in round 17: it closed; it may return within 5 s",
            "lost",
            {"rank": 2, "name": "c", "step": 17, "reason": "it closed; it may return within 5 s"},
        ),
        ("an evaluator is lost: silent", "lost", {"role": "evaluator", "reason": "silent"}),
        ("round 17 waits for rank 2 since 12 s (rank 2 lost, may return within 108 s)", "waiting", {"step": 17}),
        ("the start waits for ranks 0 and 1", "waiting", {}),
        (
            "10.0.0.7:4321 refused (rank_taken): rank 0 is held",
            "refused",
            {"peer": "10.0.0.7:4321", "cause": "rank_taken", "reason": "rank 0 is held"},
        ),
        ("[::1]:99 cut off: no magic", "cut_off", {"peer": "[::1]:99", "reason": "no magic"}),
        (
            "step 40: worker 'w2' is muted: it points away",
            "muted",
            {"step": 40, "name": "w2", "reason": "it points away"},
        ),
        ("done: 300 steps in 8.1 s, loss 0.02; summary in s.json", "done", {"step": 300}),
        ("step 20: weighted vote 0.96, plain vote 0.95, alone 0.93", "vote", {"step": 20}),
        (
            "rank 0 (a) is lost (it closed) before the start; waiting for it",
            "left_before_start",
            {"rank": 0, "name": "a", "reason": "it closed"},
        ),
        (
            "rank 0 (a) computes on B, and before on A: the last bits may differ",
            "software_changed",
            {"rank": 0, "name": "a"},
        ),
        ("something new", UNNAMED, {}),
    ],
)
def test_sentences_of_the_server_have_names_and_fields(text: str, event: str, fields: dict[str, object]) -> None:
    assert recognise(text, EVENTS) == (event, fields)


def test_a_run_says_nothing_that_has_no_name() -> None:
    """The sentences are the coordinator's own, so one that is worded anew fails here."""
    from ps.build import policy_of

    config = parse(["--steps", "5", "--workers", "2", "--rejoin-timeout", "1"])
    run = Coordinator(policy_of(config, b"secret"), 1, 0.0, has_values=True)
    instructions = []
    for rank in (0, 1):
        who = Identity(f"w{rank}", "h", AUTO_RANK, Role.WORKER, rank)
        instructions += run.joined(rank, who, Granted(rank, who.name), 1, 0.0)
    instructions += run.left(0, "it closed the connection", 1.0)
    instructions += run.left(1, "", 1.0, on_purpose=True)
    told = [recognise(i.text, EVENTS)[0] for i in instructions if isinstance(i, Announce)]
    assert told == ["joined", "joined", "started", "lost", "left"]
    assert recognise(run.waiting_for(20.0), EVENTS)[0] == "waiting"


def _templates(path: Path) -> list[str]:
    """Return what a module logs or announces, with samples in the place of what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func)
        if name == "Announce" or name.startswith("logger."):
            found.append(_sample(node.args[0]))
    return [text for text in found if text is not None]


def _sample(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value).replace("%s", "7").replace("%d", "7").replace("%r", "'7'")
    if isinstance(node, ast.JoinedStr):
        return "".join(_filled(part) for part in node.values)
    return None


def _filled(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    return "rank 7 (w)" if "label" in ast.unparse(part.value) else "7"


def test_every_sentence_in_the_code_has_a_name() -> None:
    unnamed, seen = [], 0
    for path in sorted((ROOT / "ps").rglob("*.py")):
        for text in _templates(path):
            if text in GENERAL:
                continue
            seen += 1
            for peer in ("7", "1.2.3.4:7"):
                event, _ = recognise(text.replace("7", peer, 1) if text.startswith("7") else text, EVENTS)
                if event != UNNAMED:
                    break
            else:
                unnamed.append(f"{path.name}: {text}")
    assert seen > 30
    assert unnamed == []


def _record(message: str, *arguments: object, extra: dict[str, object] | None = None) -> logging.LogRecord:
    return logging.getLogger("weighmaster.ps").makeRecord(
        "weighmaster.ps", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )


def test_the_formatter_takes_names_from_the_call_before_the_table() -> None:
    line = json.loads(JsonFormatter().format(_record("rank %d (%s) has left; so", 1, "x")))
    assert (line["event"], line["rank"], line["name"], line["level"]) == ("left", 1, "x", "warning")
    extra = {"event": "tls_failed", log_format.FIELDS: {"peer": "h:1"}}
    line = json.loads(JsonFormatter().format(_record("no TLS", extra=extra)))
    assert (line["event"], line["peer"]) == ("tls_failed", "h:1")


def test_a_traceback_is_part_of_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = _record("the server itself has failed")
        record.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: two\nlines" in json.loads(line)["message"]
    assert json.loads(line)["event"] == "failed"


def test_text_stays_as_it_was() -> None:
    assert formatter_of("text").format(_record("rank 1 has left"))[8:] == " rank 1 has left"


def test_progress_is_told_every_few_seconds_and_at_the_end() -> None:
    stream = io.StringIO()
    console = JsonConsole(300, stream, clock=lambda: 0.0)
    for tick in range(9):
        console.progress(tick, 0.5, None, 12.34, now_s=tick * PLAIN_LINE_S / 4)
    console.progress(9, float("nan"), 0.9, 0.0, now_s=2.1 * PLAIN_LINE_S)
    console.close()
    console.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["step"] for line in lines] == [0, 4, 8, 9]
    assert lines[1] == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "event": "progress",
        "message": "step 4/300",
        "step": 4,
        "steps": 300,
        "loss": 0.5,
        "examples_per_s": 12.3,
    }
    assert lines[3]["loss"] is None
    assert lines[3]["test_accuracy"] == 0.9


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("loading TensorFlow, which takes some seconds", "loading"),
        ("connected to the server at ps:5014", "connected"),
        ("waiting for the server at ps:5014, 50 s left: refused", "waiting_for_server"),
        ("the connection to the server is lost: closed", "connection_lost"),
        ("the server has started anew: going on from step 40", "server_restarted"),
        ("waiting: round 3 waits for rank 1", "waiting"),
        ("the push of step 3 did not count: NaN", "push_not_counted"),
        ("step 20: test loss 0.1, test accuracy 0.9", "test"),
        ("done at step 300", "done"),
    ],
)
def test_sentences_of_a_worker_have_names(text: str, event: str) -> None:
    assert recognise(text, worker_log.EVENTS)[0] == event


def test_a_worker_speaks_json_with_its_rank() -> None:
    lines: list[str] = []
    speaker = Speaker(lines.append, "json", clock=lambda: 0.0)
    speaker("loading TensorFlow, which takes some seconds")
    speaker.name, speaker.rank = "w", 2
    speaker("the push of step 3 did not count: it came late")
    first, second = map(json.loads, lines)
    assert "rank" not in first
    assert (second["event"], second["step"], second["rank"], second["name"]) == ("push_not_counted", 3, 2, "w")
    assert (first["level"], second["level"]) == ("info", "warning")


def test_a_bad_end_of_a_worker_is_an_event_like_any_other() -> None:
    lines: list[str] = []
    speaker = Speaker(lines.append, "json", "w", 2, clock=lambda: 0.0)
    speaker.ended("the server is gone", 4)
    (line,) = map(json.loads, lines)
    assert line == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "error",
        "event": ENDED,
        "message": "the server is gone",
        "rank": 2,
        "name": "w",
        "exit_code": 4,
    }


def test_a_worker_warns_of_what_somebody_should_look_at() -> None:
    levels = {row.event: row.level for row in worker_log.EVENTS}
    assert set(levels.values()) == {"info", "warning"}
    warnings = {event for event, level in levels.items() if level == "warning"}
    assert warnings >= {"waiting_for_server", "connection_lost", "push_not_counted", "fault_injected"}
    assert not warnings & {"connected", "done", "test", "loading"}


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([], None, False),
        ([], "json", True),
        (["--log-format", "json"], None, True),
        (["--steps", "3", "--log-format=json"], "text", True),
        (["--log-format", "json", "--log-format", "text"], "json", False),
        (["--log-format"], "json", False),
        (["--log-format=text", "--name", "json"], "json", False),
    ],
)
def test_what_is_asked_for_is_known_before_the_options_are_understood(
    arguments: list[str], variable: str | None, expected: bool
) -> None:
    assert asks_for_json(arguments, variable) is expected


@pytest.mark.parametrize("side", [server_side, worker_side], ids=["server", "worker"])
@pytest.mark.parametrize("words", [["--nonsense"], ["--name", "\n"], ["--steps", "0", "--workers", "1"]])
def test_a_wrong_option_is_an_event_too(
    side: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = side.build_command(*[lambda _: 0] * (4 if side is server_side else 1))
    code = side.execute(command, [*words, "--log-format", "json"])
    shown = capsys.readouterr()
    line = json.loads(shown.out)
    assert (line["event"], line["level"], line["exit_code"]) == (ENDED, "error", code)
    assert shown.err == ""
    monkeypatch.setenv("WEIGHMASTER_LOG_FORMAT", "json")
    assert side.execute(command, words) == code
    assert json.loads(capsys.readouterr().out)["message"] == line["message"]
    monkeypatch.setenv("WEIGHMASTER_LOG_FORMAT", "text")
    assert side.execute(command, words) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"{side.PROGRAM}: {line['message']}\n")


def test_commands_beside_serving_have_no_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they print is the answer itself, so an error is none of it."""
    monkeypatch.setenv("WEIGHMASTER_LOG_FORMAT", "json")
    assert server_side.execute(server_side.build_command(*[lambda _: 0] * 4), ["token", "--nonsense"]) == 2
    assert capsys.readouterr().out == ""


def test_the_names_are_short_and_not_used_for_two_things() -> None:
    for table in (EVENTS, worker_log.EVENTS):
        names = [row.event for row in table]
        assert len(set(names)) == len(names)
        assert all(name.replace("_", "").isalpha() and name.islower() for name in names)
        assert {UNNAMED, log_format.PROGRESS, ENDED}.isdisjoint(names)
