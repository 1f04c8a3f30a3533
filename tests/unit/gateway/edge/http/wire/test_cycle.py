"""An answer as it goes over a connection, seen from a raw socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from services.gateway.edge.http.server import _bind, _Server
from services.gateway.edge.http.wire.connection import ConnectionLimits, Connections, bounded

Send = Callable[[Any], Awaitable[None]]
TEXT = (b"content-type", b"text/plain")


async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
    """Answers with a length or without, in one piece or several."""
    headers, pieces = {
        "/whole": ([TEXT, (b"content-length", b"4")], [b"body"]),
        "/empty": ([TEXT, (b"content-length", b"0")], [b""]),
        "/pieces": ([TEXT, (b"content-length", b"4")], [b"bo", b"dy"]),
        "/large": ([TEXT, (b"content-length", b"1000000")], [bytes(1_000_000)]),
        "/chunked": ([TEXT], [b"bo", b"dy"]),
        "/closes": ([TEXT, (b"content-length", b"4"), (b"connection", b"close")], [b"body"]),
        "/long": ([TEXT, (b"content-length", b"3")], [b"body"]),
        "/short": ([TEXT, (b"content-length", b"5")], [b"body"]),
        "/two-fields": ([TEXT, (b"x-a", b"b\r\nx-c: d"), (b"content-length", b"4")], [b"body"]),
    }[scope["path"]]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, piece in enumerate(pieces, start=1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listener = _bind("127.0.0.1", 0)
    protocol: Any = bounded(Connections(ConnectionLimits()))
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
    config = uvicorn.Config(app, loop="none", http=protocol, timeout_graceful_shutdown=1, **options)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def answer(port: int, head: str) -> tuple[list[str], bytes]:
    """Lines of the answer's head, in lower case and without the time, and what follows until its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n".encode())
    async with asyncio.timeout(30):
        got = await reader.read(-1)
    writer.close()
    lines, _, body = got.partition(b"\r\n\r\n")
    told = [line.decode().lower() for line in lines.split(b"\r\n")]
    return [line for line in told if not line.startswith(("date:", "server:"))], body


@pytest.mark.parametrize(
    ("path", "length", "body"),
    [
        ("/whole", 4, b"body"),
        ("/empty", 0, b""),
        ("/pieces", 4, b"body"),
        ("/large", 1_000_000, bytes(1_000_000)),
        ("/closes", 4, b"body"),
    ],
)
async def test_an_answer_with_a_length_is_its_head_once_and_its_body(
    port: int, path: str, length: int, body: bytes
) -> None:
    head, got = await answer(port, f"GET {path}")
    assert head[0] == "http/1.1 200 ok"
    expected = ["connection: close", f"content-length: {length}", "content-type: text/plain"]
    assert sorted(head[1:]) == expected
    assert got == body


async def test_an_answer_without_a_length_comes_in_chunks(port: int) -> None:
    head, got = await answer(port, "GET /chunked")
    assert "transfer-encoding: chunked" in head
    assert got == b"2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n"


async def test_an_answer_to_head_has_no_body(port: int) -> None:
    head, got = await answer(port, "HEAD /whole")
    assert "content-length: 4" in head
    assert got == b""


async def test_a_head_that_a_value_would_add_a_field_to_is_not_sent(port: int) -> None:
    head, got = await answer(port, "GET /two-fields")
    assert head[0] == "http/1.1 500 internal server error"
    assert b"x-c" not in got and not any("x-c" in line for line in head)


@pytest.mark.parametrize("path", ["/long", "/short"])
async def test_a_body_of_another_length_than_was_said_is_not_taken_for_a_whole_one(
    port: int, path: str
) -> None:
    head, got = await answer(port, f"GET {path}")
    length = next(int(line.partition(": ")[2]) for line in head if line.startswith("content-length"))
    assert len(got) < length


async def test_trailers_are_passed_over(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"POST /whole HTTP/1.1\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\na\r\n0\r\nx-later: " + b"b" * 1000 + b"\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n\r\nbody")).startswith(b"HTTP/1.1 200 OK")
    writer.close()
