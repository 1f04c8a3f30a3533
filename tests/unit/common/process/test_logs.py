"""A log line is one line, whatever is in it."""

from __future__ import annotations

import logging
import subprocess
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


def test_configured_logs_are_formatted_so() -> None:
    program = """
import logging, sys
from services.common.process import logs
logging.basicConfig()
logs.configure("gateway-7")
logging.getLogger("room").warning("told")
(handler,) = logging.getLogger().handlers
assert isinstance(handler.formatter, logs.LineFormatter)
"""
    # In a process of its own: the root logger of this one is the tests'.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("WARNING [gateway-7] room: told\n")
