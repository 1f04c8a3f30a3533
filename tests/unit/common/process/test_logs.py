"""A log line is one line, whatever is in it."""

from __future__ import annotations

import logging
import sys

from services.common.process import logs


def formatted(message: str, *arguments: object, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("room", logging.WARNING, __file__, 1, message, arguments, info)
    return logs.LineFormatter("gateway-0").format(record)


def test_control_characters_of_a_client_are_escaped() -> None:
    line = formatted("POST %s: no", "/api\r\n12:00:00 INFO  [gateway-0] forged\x1b[2J\u2028\x85é")
    assert "\n" not in line
    assert "\x1b" not in line
    assert "/api\\r\\n12:00:00 INFO  [gateway-0] forged\\x1b[2J\\u2028\\x85é" in line


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        line = formatted("failed", error=error)
    assert len(line.splitlines()) > 3


def test_configured_logs_are_formatted_so(capsys: object) -> None:
    logs.configure("gateway-7")
    try:
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler.formatter, logs.LineFormatter)
        assert handler.stream is sys.stderr  # type: ignore[attr-defined]
    finally:
        logging.basicConfig(force=True)
