"""One log format for every process.

Invariant: a message is one line. It may quote what a client sent, which must neither begin a line of its
own nor speak to a terminal.
"""

from __future__ import annotations

import logging
import os
import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class LineFormatter(logging.Formatter):
    """ "time level [process] module: message", control characters escaped. A traceback keeps its lines."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s [{name}] %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(_escaped, super().formatMessage(record))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def configure(name: str) -> None:
    """Logs to stderr; TINSMITH_LOG_LEVEL sets the level."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(name))
    logging.basicConfig(
        level=os.environ.get("TINSMITH_LOG_LEVEL", "INFO").upper(), handlers=[handler], force=True
    )
