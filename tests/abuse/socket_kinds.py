"""What speaks HTTP and HTTP/2 badly on purpose, on bare sockets.

An attempt has ended well when the server answered or closed the connection by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from tests.abuse.attack import Attempt, End, Outcome
from tests.abuse.target import Target

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SECONDS = 360.0
"""A connection without calls is kept for two minutes, and then asked in order to end."""

Parts = Callable[[], AsyncIterator[bytes]]


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def drip(head: bytes, piece: bytes, seconds: float) -> AsyncIterator[bytes]:
    """A head, and then the same piece again and again."""
    yield head
    while True:
        await asyncio.sleep(seconds)
        yield piece


async def flood(head: bytes, piece: bytes, times: int) -> AsyncIterator[bytes]:
    """A head, and then a piece as fast as it is taken."""
    yield head
    for _ in range(times):
        yield piece


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def attempts(target: Target, each: int) -> Iterator[Attempt]:
    """`each` connections of every kind."""
    for _ in range(each):
        for kind, parts in _http(target).items():
            yield Attempt(f"socket {kind}", partial(_send, target.host, target.port, parts), _SECONDS)
        for kind, parts in _http2().items():
            yield Attempt(f"socket {kind}", partial(_send, target.host, target.grpc_port, parts), _SECONDS)


def _http(target: Target) -> dict[str, Parts]:
    post = (
        b"POST /api/v1/session_heartbeat HTTP/1.1\r\nHost: a\r\nX-Api-Key: " + target.key.encode() + b"\r\n"
    )
    big = post + b"Content-Length: 1000000\r\n\r\n"
    return {
        "HTTP: silence": lambda: once(b""),
        "HTTP: half a request line": lambda: once(b"POST /api"),
        "HTTP: a header a second, for ever": lambda: drip(post, b"X-A: b\r\n", 1.0),
        "HTTP: endless headers": lambda: flood(post, b"X-A: " + b"b" * 8_000 + b"\r\n", 20_000),
        "HTTP: an endless header": lambda: flood(post + b"X-A: ", b"b" * 65_536, 2_000),
        "HTTP: an endless request line": lambda: flood(b"GET /", b"b" * 65_536, 2_000),
        "HTTP: a byte of a body a second": lambda: drip(big, b"a", 1.0),
        "HTTP: a body that never comes": lambda: once(big),
        "HTTP: an endless chunked body": lambda: flood(
            post + b"Transfer-Encoding: chunked\r\n\r\n", b"ffff\r\n" + b" " * 65_535 + b"\r\n", 1_000
        ),
        "HTTP: a chunk of 2**70 bytes": lambda: once(
            post + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 18 + b"\r\na"
        ),
        "HTTP: a negative length": lambda: once(post + b"Content-Length: -1\r\n\r\n{}"),
        "HTTP: two lengths": lambda: once(post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
        "HTTP: a length and chunks": lambda: once(
            post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        "HTTP: no HTTP": lambda: once(bytes(range(256)) * 100),
        "HTTP: TLS": lambda: once(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500),
        "HTTP: zero bytes": lambda: once(b"GET /api/v1/healthz\x00 HTTP/1.1\r\nHost: a\r\n\r\n"),
        "HTTP: an upgrade": lambda: once(
            b"GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ),
        "HTTP: 2,000 requests at once": lambda: once(
            b"GET /api/v1/sessions HTTP/1.1\r\nHost: a\r\n\r\n" * 2_000
        ),
    }


def _http2() -> dict[str, Parts]:
    settings = frame(4, 0, 0)
    opened = b"\x83\x86\x84"
    resets = b"".join(
        frame(1, 4, number, opened) + frame(3, 0, number, b"\0\0\0\x08") for number in range(1, 2_001, 2)
    )
    # HPACK: an indexed :method, :scheme and :path.
    headers = frame(1, 4, 1, b"\x83\x86\x84")
    return {
        "HTTP/2: silence": lambda: once(b""),
        "HTTP/2: a preface and silence": lambda: once(PREFACE + settings),
        "HTTP/2: no HTTP": lambda: once(bytes(range(256)) * 100),
        "HTTP/2: HTTP/1": lambda: once(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        "HTTP/2: a flood of settings": lambda: flood(PREFACE, settings * 1_000, 200),
        "HTTP/2: a flood of pings": lambda: flood(PREFACE + settings, frame(6, 0, 0, b"\0" * 8) * 1_000, 200),
        "HTTP/2: a frame of 16 MB": lambda: flood(
            PREFACE + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", b"\0" * 65_536, 256
        ),
        "HTTP/2: endless continuations": lambda: flood(
            PREFACE + settings + frame(1, 0, 1, b"\x83"), frame(9, 0, 1, b"\x40\x01a\x01b" * 1_000), 5_000
        ),
        "HTTP/2: streams reset as they open": lambda: flood(
            PREFACE + settings,
            resets,
            1,
        ),
        "HTTP/2: a window that overflows": lambda: once(
            PREFACE + settings + headers + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 3
        ),
    }


async def _send(host: str, port: int, parts: Parts) -> Outcome:
    reader, writer = await asyncio.open_connection(host, port)
    sending = asyncio.create_task(_write(writer, parts()))
    try:
        while await reader.read(65_536):
            pass
        return Outcome(End.CLOSED)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def _write(writer: asyncio.StreamWriter, parts: AsyncIterator[bytes]) -> None:
    async for part in parts:
        writer.write(part)
        await writer.drain()
