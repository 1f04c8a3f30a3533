"""A log line is one line, whatever is in it, says whom it is about, and holds no key."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from datetime import datetime
from typing import Any

from services.common.process.tasks import detached
from services.common.telemetry import access_log, logs, subject
from services.common.telemetry.subject import Subject

KEY = "tml-0123456789abcdefghijklmnop_-QRSTUV"


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("room", logging.WARNING, __file__, 1, message, arguments, info)


def formatted(message: str, *arguments: object, error: BaseException | None = None) -> str:
    return logs.LineFormatter("gateway-0").format(record(message, *arguments, error=error))


def told(message: str, *arguments: object, error: BaseException | None = None) -> dict[str, Any]:
    line = logs.JsonFormatter("gateway-0").format(record(message, *arguments, error=error))
    assert line.isprintable() and line.isascii()
    return json.loads(line)


def raised(text: str) -> BaseException:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_control_characters_of_a_client_are_escaped() -> None:
    line = formatted("POST %s: no", "/api\r\n12:00:00 INFO  [gateway-0] forged\x1b[2J\u2028\x85é")
    assert "\n" not in line
    assert "\x1b" not in line
    assert "/api\\r\\n12:00:00 INFO  [gateway-0] forged\\x1b[2J\\u2028\\x85é" in line


def test_a_traceback_keeps_its_lines_and_none_of_them_can_pass_for_a_message() -> None:
    error = raised("first\n12:00:00 INFO    [gateway-0] room: forged\r12:00:00 again\x1b[2J")
    first, *rest = formatted("failed", error=error).splitlines()
    assert first.endswith("room: failed")
    assert len(rest) > 3
    assert all(line.startswith("    ") and "\x1b" not in line for line in rest)


def test_an_object_is_one_line_with_a_date_whatever_is_in_it() -> None:
    error = raised('a\n{"level": "INFO"}\u2028\x9b')
    object_ = told("no %s", '/api"\r\n{"forged": 1}\x1b[2J\u2028\x85é', error=error)
    assert object_["message"] == 'no /api"\r\n{"forged": 1}\x1b[2J\u2028\x85é'
    assert "ValueError" in object_["exception"]
    assert object_["level"] == "WARNING" and object_["logger"] == "room"
    assert object_["process"] == "gateway-0"
    assert object_["time"].endswith("Z")
    assert datetime.fromisoformat(object_["time"]).tzinfo is not None


def test_neither_format_writes_what_looks_like_a_key_or_a_password() -> None:
    secrets = f"{KEY} redis://:pass-word@redis:6379/0 Authorization: Bearer sk-abcdef"
    with subject.about(Subject(request_id=f"{KEY}:1")):
        for line in (
            formatted("no %s", secrets, error=raised(secrets)),
            json.dumps(told("no %s", secrets, error=raised(secrets))),
        ):
            assert "no [hidden] redis://[hidden]@redis:6379/0 Authorization: Bearer [hidden]" in line
            for secret in (KEY[4:], "pass-word", "sk-abcdef"):
                assert secret not in line


def test_a_token_in_a_keys_place_is_not_written() -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJvd25lciI6ImEifQ.c2lnbmF0dXJl"
    for line in (formatted("x-api-key: %s", token), json.dumps(told("x-api-key: %s", token))):
        assert "x-api-key: [hidden]" in line
        assert "eyJ" not in line


def test_a_long_word_takes_time_by_its_length_to_be_looked_through() -> None:
    # By its square this would take an hour.
    assert logs.hidden("eyJ" * 300_000) == "eyJ" * 300_000
    assert logs.hidden("://a" * 300_000) == "://a" * 300_000


def test_an_object_names_the_call_that_its_task_serves() -> None:
    about = Subject.of(f"00-{'ab' * 16}-{'cd' * 8}-01", "alice", "s:train:0", "s:train:0:7")
    with subject.about(about):
        object_ = told("done")
    assert object_["trace_id"] == "ab" * 16
    assert (object_["owner"], object_["model_id"], object_["request_id"]) == (
        "alice",
        "s:train:0",
        "s:train:0:7",
    )
    assert "trace_id" not in told("done")


def test_what_is_learned_of_a_call_is_told_from_then_on() -> None:
    with subject.about(Subject()):
        assert "owner" not in told("received")
        subject.note(owner="alice")
        subject.note(request_id="s:sample:0:1")
        assert told("accepted")["owner"] == "alice"
        assert told("accepted")["request_id"] == "s:sample:0:1"


async def test_a_task_serves_the_call_of_who_started_it_and_a_detached_one_nobody() -> None:
    async def seen() -> Subject | None:
        return subject.current()

    about = subject.begin(Subject())
    assert await asyncio.create_task(seen()) is about
    assert await detached(seen(), "seen") is None


def test_a_trace_of_a_caller_is_taken_over_only_when_it_is_well_formed() -> None:
    good = f"00-{'12' * 16}-{'34' * 8}-01"
    assert Subject.of(good).traceparent == good
    for bad in ("", good + "\n", good.replace("00-", "01-", 1), f"00-{'0' * 32}-{'34' * 8}-01", "x" * 55):
        made = Subject.of(bad)
        assert made.trace_id not in bad
        assert Subject.of(made.traceparent).trace_id == made.trace_id
    assert Subject.of("").trace_id != Subject.of("").trace_id


def test_a_line_of_the_access_log_has_what_a_search_asks_for(caplog: Any) -> None:
    about = Subject(owner="alice", received=120, sent=30)
    with caplog.at_level(logging.INFO), subject.about(about):
        access_log.write("POST", "/api/v1/asample", "200", 0.25)
        line = logs.JsonFormatter("gateway-0").format(caplog.records[-1])
    object_ = json.loads(line)
    assert object_["route"] == "/api/v1/asample" and object_["outcome"] == "200"
    assert object_["seconds"] == 0.25
    assert (object_["received_bytes"], object_["sent_bytes"]) == (120, 30)
    assert object_["owner"] == "alice" and object_["trace_id"] == about.trace_id


PROGRAM = """
import logging, sys, warnings
from services.common.telemetry import logs
logging.basicConfig()
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler(sys.stdout))
library.propagate = False
logs.configure("gateway-7", {form!r})
logs.take_over()
logging.getLogger("room").warning("told")
library.warning("told too")
warnings.warn("old")
raise ValueError("the end")
"""


def run(form: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the root logger of this one is the tests'.
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(form=form)], capture_output=True, text=True, check=False
    )


def test_configured_logs_are_formatted_so() -> None:
    done = run("text")
    assert done.stderr.splitlines()[0].endswith("WARNING [gateway-7] room: told")
    assert done.stdout == "told too\n"


def test_where_logs_are_objects_everything_that_the_process_tells_is_one() -> None:
    done = run("json")
    told, library, warned, ended = [json.loads(line) for line in done.stderr.splitlines()]
    assert (told["message"], library["message"]) == ("told", "told too")
    assert "old" in warned["message"]
    assert ended["level"] == "CRITICAL" and "ValueError: the end" in ended["exception"]
    assert done.stdout == ""
