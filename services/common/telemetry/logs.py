"""One log format for every process: lines to read, or objects to search.

Invariants: a message is one line. It may quote what a client sent, which must neither begin a line of its
own nor speak to a terminal. What looks like an API key, or like the password of a URL, is not written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType

from services.common.telemetry import subject

FORMATS = ("text", "json")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_INDENT = "    "
_SECRET = re.compile(
    r"tml-[0-9A-Za-z_-]{4,}"  # What every API key of the SDK begins with.
    # A token in a key's place. It begins where a word does: from every "eyJ" of a long word it would be
    # looked for to the end.
    r"|(?<![0-9A-Za-z_-])eyJ[0-9A-Za-z_-]+\.[0-9A-Za-z_-]+\.[0-9A-Za-z_-]*"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"  # User and password of a URL.
    r"|(?i:(?<=bearer )[^\s'\",;]+)"
)
_HIDDEN = "[hidden]"


class LineFormatter(logging.Formatter):
    """ "time level [process] module: message", control characters escaped. The lines of a traceback are
    indented, so that nothing in them can pass for a message."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s [{name}] %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _one_line(super().formatMessage(record))

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return "\n".join(_INDENT + _one_line(line) for line in super().formatException(ei).split("\n"))

    def formatStack(self, stack_info: str) -> str:
        return "\n".join(_INDENT + _one_line(line) for line in stack_info.split("\n"))


class JsonFormatter(logging.Formatter):
    """An object a line: time (RFC 3339, UTC), level, process, logger, message; of the call that it is about
    trace_id, owner, model_id and request_id, as far as they are known; what `fields` adds; exception."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        told: dict[str, object] = {
            "time": time.removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "process": self._name,
            "logger": record.name,
            "message": hidden(record.getMessage()),
        }
        about = subject.current()
        if about is not None:
            told["trace_id"] = about.trace_id
            ids = {"owner": about.owner, "model_id": about.model_id, "request_id": about.request_id}
            told |= {key: hidden(value) for key, value in ids.items() if value}
        for key, value in getattr(record, _FIELDS, {}).items():
            told[key] = hidden(value) if isinstance(value, str) else value
        if record.exc_info:
            told["exception"] = hidden(self.formatException(record.exc_info))
        if record.stack_info:
            told["stack"] = hidden(record.stack_info)
        # Everything beyond ASCII is escaped, and with it what a terminal or a reader of lines would obey.
        return json.dumps(told)


_FIELDS = "tinsmith_fields"


def fields(values: Mapping[str, str | int | float]) -> dict[str, object]:
    """As `extra` of a log call: members of the JSON object, beside its message."""
    return {_FIELDS: values}


def hidden(text: str) -> str:
    """A text without what looks like a secret."""
    return _SECRET.sub(_HIDDEN, text)


def _one_line(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), hidden(text))


def configure(name: str, form: str = "text") -> None:
    """Logs to stderr; TINSMITH_LOG_LEVEL sets the level.

    Args:
        name: of this process.
        form: one of FORMATS.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(name) if form == "json" else LineFormatter(name))
    logging.basicConfig(
        level=os.environ.get("TINSMITH_LOG_LEVEL", "INFO").upper(), handlers=[handler], force=True
    )
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _uncaught


def take_over() -> None:
    """Has libraries that write to handlers of their own, in formats of their own, log as `configure` said,
    where that is JSON. To be called when they are loaded."""
    if not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers):
        return
    for name in list(logging.root.manager.loggerDict):
        library = logging.getLogger(name)
        if any(type(handler) is logging.StreamHandler for handler in library.handlers):
            library.handlers = [one for one in library.handlers if type(one) is not logging.StreamHandler]
            library.propagate = True


def _uncaught(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger(__name__).critical("the process ends: %s", kind.__name__, exc_info=(kind, error, place))
