"""One request and its answer, as they go over a connection.

Invariant: an answer is on its way as uvicorn would send it. One that says how long it is begins with its
body, in one piece: what goes out in two costs twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

_TOGETHER_BYTES = 64 * 1024
"""A larger body is not copied once more to go out with its head."""
_HEADS = 1024
"""Heads that are remembered. Most answers differ from others in their length alone."""

Headers = tuple[tuple[bytes, bytes], ...]


class _Head(NamedTuple):
    """What an answer begins with, without what is said of the time and of the connection.

    Attributes:
        length: bytes of the body; None: it is not said, or more is said of how the body is sent.
    """

    data: bytes
    length: int | None


class Cycle(RequestResponseCycle):
    """uvicorn's, with fewer steps for an answer that says how long it is."""

    _head = b""

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started and self.scope["method"] != "HEAD":
            head = _head_of(message["status"], tuple(map(tuple, message.get("headers", ()))))
            if head.length is not None:
                self.response_started, self.waiting_for_100_continue = True, False
                self.chunked_encoding, self.expected_content_length = False, head.length
                closes = b"" if self.keep_alive else b"connection: close\r\n"
                self._head = b"%s%s%s\r\n" % (head.data, _lines(self.default_headers), closes)
                return
        elif kind == "http.response.body" and self._head:
            begun, self._head = self._head, b""
            body = message.get("body", b"")
            whole = len(body) == self.expected_content_length and not message.get("more_body", False)
            if whole and len(body) <= _TOGETHER_BYTES:
                self.expected_content_length = 0
                self.transport.write(begun + body)
                self._end()
                return
            self.transport.write(begun)
        await super().send(message)

    def _end(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


@lru_cache(_HEADS)
def _head_of(status: int, headers: Headers) -> _Head:
    """The head of an answer. What it says of the body is for uvicorn, unless that is the length alone.

    Raises:
        RuntimeError: a name or value has characters that none may have.
    """
    length: int | None = None
    for name, value in headers:
        if HEADER_RE.search(name):
            raise RuntimeError("Invalid HTTP header name.")
        if HEADER_VALUE_RE.search(value):
            raise RuntimeError("Invalid HTTP header value.")
        if name.lower() in (b"transfer-encoding", b"connection"):
            return _Head(b"", None)
        if name.lower() == b"content-length":
            length = int(value)
    return _Head(STATUS_LINE[status] + _lines(headers), length)


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])
