"""Clients that a gateway has to bear: raw sockets that speak HTTP/1 and HTTP/2 badly, slowly or too much."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS = 0x1, 0x4
_FRAME = 16_384


class Http2:
    """One connection that keeps to HTTP/2's flow control, and to nothing else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._window = {0: 65_535}
        self._initial = 65_535
        self._changed = asyncio.Event()
        self._over: set[int] = set()
        self.closed = False

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, port: int) -> AsyncIterator[Http2]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = cls(reader, writer)
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        reading = asyncio.create_task(connection._read())
        try:
            yield connection
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            writer.transport.abort()

    def open(self, stream: int, path: str, **extra: str) -> None:
        """Begins a gRPC call; streams have odd numbers."""
        self.send_headers(stream, headers_of_call(path, **extra), last=True)

    def send_headers(self, stream: int, block: bytes, last: bool, first: bool = True) -> None:
        """One frame of a header block."""
        self._window.setdefault(stream, self._initial)
        kind = _HEADERS if first else _CONTINUATION
        self._writer.write(_frame(kind, _END_HEADERS if last else 0, stream, block))

    async def send(self, stream: int, size: int) -> int:
        """Sends so many bytes of one message, as fast as the server takes them; how many it took before it
        ended the call or the connection."""
        sent = 0
        left = struct.pack("!BI", 0, size) + bytes(_FRAME)
        while sent < size + 5 and stream not in self._over and not self.closed:
            room = min(self._window[0], self._window[stream], _FRAME, size + 5 - sent)
            if room <= 0:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await self._changed.wait()
                continue
            self._writer.write(_frame(_DATA, 0, stream, left[:room]))
            left = bytes(_FRAME)
            self._window[0] -= room
            self._window[stream] -= room
            sent += room
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        return sent

    async def ended(self, stream: int) -> None:
        """Returns when the server has ended the call or the connection."""
        while stream not in self._over and not self.closed:
            self._changed.clear()
            await self._changed.wait()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
                self._take(kind, flags, stream, await self._reader.readexactly(size))
                self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed = True
            self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & 1:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from("!HI", payload, at)
                if name == 4:
                    for open_stream in set(self._window) - {0}:
                        self._window[open_stream] += value - self._initial
                    self._initial = value
            self._writer.write(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _WINDOW:
            self._window[stream] = self._window.get(stream, self._initial) + int.from_bytes(payload, "big")
        elif kind == _PING and not flags & 1:
            self._writer.write(_frame(_PING, 1, 0, payload))
        elif kind == _GOAWAY:
            self.closed = True
        elif kind == _RST or (kind == _HEADERS and flags & _END_STREAM):
            self._over.add(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def headers_of_call(path: str, **extra: str) -> bytes:
    """The header block of a gRPC call, in HPACK without tables."""
    named = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "gateway",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in extra.items()},
    }
    return b"".join(header(name, value) for name, value in named.items())


def header(name: str, value: str) -> bytes:
    """One field in HPACK: literal, not indexed."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text.encode()
    left, coded = size - 127, bytearray([127])
    while left >= 128:
        coded.append(left % 128 + 128)
        left //= 128
    return bytes(coded) + bytes([left]) + text.encode()


@contextlib.asynccontextmanager
async def http1(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that sends nothing by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def send_for(seconds: float, port: int, first: bytes, again: bytes, every: float) -> None:
    """Sends `first` and then `again` and again, on a new connection whenever the server ends one."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        with contextlib.suppress(ConnectionError):
            async with http1(port) as (reader, writer):
                writer.write(first)
                while asyncio.get_running_loop().time() < until and not reader.at_eof():
                    writer.write(again)
                    await writer.drain()
                    await asyncio.sleep(every)
