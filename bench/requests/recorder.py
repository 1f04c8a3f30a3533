"""What the SDK sends a gateway, as bytes: requests to be sent again without what the SDK costs its process.

Invariant: everything that goes through is passed on unchanged, both ways.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PIECE_BYTES = 2**16


@dataclass(frozen=True)
class Recorded:
    """One request: the path below /api/v1/, its head without the length of the body, and the body."""

    path: str
    head: bytes
    body: bytes

    def with_body(self, body: bytes) -> tuple[bytes, bytes]:
        """Head and body of the same request with another body."""
        return self.head + b"\r\ncontent-length: %d\r\n\r\n" % len(body), body


def requests_in(stream: bytes) -> list[Recorded]:
    """The whole requests in what a client sent over one connection."""
    found = []
    while (end := stream.find(b"\r\n\r\n")) >= 0:
        head, rest = stream[:end], stream[end + 4 :]
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if len(rest) < size:
            break
        path = head.split(b" ", 2)[1].decode().removeprefix("/api/v1/")
        found.append(Recorded(path, _LENGTH.sub(b"", head), rest[:size]))
        stream = rest[size:]
    return found


class Recorder:
    """A relay to a gateway, in a thread of its own, that keeps what clients send until it is told not to."""

    def __init__(self, base_url: str) -> None:
        self._gateway = urlsplit(base_url)
        self._streams: list[bytearray] = []
        self._keeps = True
        self._loop = asyncio.new_event_loop()
        self.port = 0

    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self.port}"

    def taken(self) -> list[Recorded]:
        """The requests so far; from now on nothing is kept."""
        self._keeps = False
        return [request for stream in self._streams for request in requests_in(bytes(stream))]

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        """Relays until the context ends."""
        thread = threading.Thread(target=self._loop.run_forever, name="recorder", daemon=True)
        thread.start()
        listening = asyncio.start_server(self._relay, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(30)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(server.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(30)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = bytearray()
        self._streams.append(stream)
        there = await asyncio.open_connection(self._gateway.hostname, self._gateway.port)
        await asyncio.gather(self._pass(reader, there[1], stream), self._pass(there[0], writer, None))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: bytearray | None
    ) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if stream is not None and self._keeps:
                stream += piece
            writer.write(piece)
            await writer.drain()
        writer.close()
