"""What one HTTP connection may send and take, seen from a raw socket."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from services.gateway.edge.http.server import _bind, _Server
from services.gateway.edge.http.wire.connection import Connection, ConnectionLimits, Connections, bounded

LIMITS = ConnectionLimits(
    connections=4,
    head_bytes=2000,
    head_fields=20,
    head_seconds=0.4,
    pipelined=3,
    idle_seconds=1,
    linger_seconds=0.4,
    stuck_seconds=0.3,
)
PATIENT = replace(LIMITS, idle_seconds=600)
"""With these, what waits is closed for another reason than that it waits."""
REQUEST = b"GET /small HTTP/1.1\r\nhost: gateway\r\n\r\n"
LARGE = 32 << 20

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def app(
    scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Answers /small at once, /slow after a while, /large with much; reads bodies only of /read."""
    body = {"/large": bytes(LARGE)}.get(scope["path"], b"ok")
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    while scope["path"] == "/read" and (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def limits() -> ConnectionLimits:
    return LIMITS


@pytest.fixture
async def connections(limits: ConnectionLimits) -> AsyncIterator[Connections]:
    yield Connections(limits)


@pytest.fixture
async def port(connections: Connections) -> AsyncIterator[int]:
    listener = _bind("127.0.0.1", 0)
    protocol: Any = bounded(connections)
    server = _Server(
        uvicorn.Config(
            app, loop="none", http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[Reader, Writer]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader: Reader) -> tuple[int, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    return int(head.split()[1]), await reader.readexactly(int(fields[b"content-length"]))


async def closed(reader: Reader, seconds: float = 60) -> bool:
    """Whether the server ends the connection; what it sends until then is dropped."""
    with contextlib.suppress(ConnectionError):
        try:
            async with asyncio.timeout(seconds):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("limits", [PATIENT])
async def test_requests_one_after_the_other_keep_their_connection(port: int) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(3):
            writer.write(REQUEST)
            assert await answer(reader) == (200, b"ok")
            await asyncio.sleep(0.5)


@pytest.mark.parametrize("path", ["/small", "/read"])
async def test_a_body_is_taken_also_when_nobody_reads_it(port: int, path: str) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(3):
            head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-length: 300000\r\n\r\n"
            writer.write(head.encode() + bytes(300_000))
            assert await answer(reader) == (200, b"ok")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 2000,
        b"GET / HTTP/1.1\r\n" + b"long: " + b"x" * 2000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30,
    ],
    ids=["path", "header", "headers"],
)
async def test_a_head_that_is_too_large_is_431_as_soon_as_it_is(port: int, head: bytes) -> None:
    async with connected(port) as (reader, writer):
        writer.write(head)
        status, body = await answer(reader)
        assert status == 431
        assert b"head_too_large" in body
        assert await closed(reader)


@pytest.mark.parametrize(
    "head",
    [b"GET /" + b"x" * 4000, b"GET / HTTP/1.1\r\nx: " + b"y" * 4000 + b"\r\n\r\n"],
    ids=["path", "header"],
)
async def test_nothing_is_left_of_a_refused_connection_for_the_collector(port: int, head: bytes) -> None:
    gc.collect()
    gc.disable()
    try:
        async with connected(port) as (reader, writer):
            writer.write(head)
            assert (await reader.read()).startswith(b"HTTP/1.1 431")
        async with asyncio.timeout(20):
            while any(isinstance(one, Connection) for one in gc.get_objects()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


@pytest.mark.parametrize("limits", [replace(PATIENT, linger_seconds=600)])
@pytest.mark.parametrize("path", ["/small", "/read"])
async def test_a_field_behind_a_body_is_bounded_like_a_head(port: int, path: str) -> None:
    async with connected(port) as (reader, writer):
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ".encode()
        )
        for _ in range(5):
            writer.write(b"a" * 1000)
            await asyncio.sleep(0.05)
        assert await closed(reader)


@pytest.mark.parametrize("limits", [PATIENT])
async def test_a_head_that_begins_beside_the_end_of_a_large_body_is_no_larger_for_it(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(bytes(5000) + REQUEST[:20])
        assert await answer(reader) == (200, b"ok")
        writer.write(REQUEST[20:])
        assert await answer(reader) == (200, b"ok")


async def test_a_head_that_is_too_large_is_so_too_where_it_began_beside_a_body(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"a" + b"GET / HTTP/1.1\r\nx: " + b"b" * 2500)
        assert await answer(reader) == (200, b"ok")
        writer.write(b"\r\n\r\n")
        assert (await answer(reader))[0] == 431
        assert await closed(reader)


@pytest.mark.parametrize("piece", [b"", b"\r\n", b"GET / HTTP/1.1\r\nx: y\r\n", b"a: b\r\n"])
async def test_a_head_that_does_not_come_to_an_end_ends_the_connection(port: int, piece: bytes) -> None:
    async with connected(port) as (reader, writer):
        if piece == b"a: b\r\n":
            writer.write(b"GET / HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                writer.write(piece)
                await asyncio.sleep(0.1)

        trickling = asyncio.create_task(trickle())
        assert await closed(reader)
        trickling.cancel()


async def test_a_connection_without_requests_is_closed_also_when_it_sends_line_ends(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(REQUEST)
        await answer(reader)

        async def trickle() -> None:
            while True:
                writer.write(b"\r\n")
                await asyncio.sleep(0.1)

        trickling = asyncio.create_task(trickle())
        assert await closed(reader)
        trickling.cancel()


async def test_what_is_no_http_is_400_with_a_sentence(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"\x00\x01\x02\x03\r\n\r\n")
        status, body = await answer(reader)
        assert (status, b"detail" in body) == (400, True)


async def test_a_body_that_nobody_reads_does_not_hold_the_connection(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST /small HTTP/1.1\r\nhost: gateway\r\ncontent-length: 10000\r\n\r\n")
        assert await answer(reader) == (200, b"ok")
        assert await closed(reader)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.5])
async def test_a_body_may_come_after_its_head(port: int, seconds: float) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST /read HTTP/1.1\r\nhost: gateway\r\ncontent-length: 4\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(seconds)
        writer.write(b"body")
        assert await answer(reader) == (200, b"ok")
        writer.write(REQUEST)
        assert await answer(reader) == (200, b"ok")


async def test_a_request_whose_body_does_not_come_is_answered_all_the_same(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST /small HTTP/1.1\r\nhost: gateway\r\ncontent-length: 4\r\n\r\n")
        assert await answer(reader) == (200, b"ok")


async def test_who_asks_whether_to_send_a_body_is_told_at_once(port: int) -> None:
    async with connected(port) as (reader, writer):
        head = b"POST /read HTTP/1.1\r\nhost: gateway\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
        writer.write(head)
        async with asyncio.timeout(8):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"body")
        assert await answer(reader) == (200, b"ok")


async def test_a_client_that_goes_before_its_body_leaves_nothing(port: int, connections: Connections) -> None:
    async with connected(port) as (_, writer):
        writer.write(b"POST /read HTTP/1.1\r\nhost: gateway\r\ncontent-length: 4\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
    async with asyncio.timeout(8):
        while len(connections):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_few_requests_are_received_ahead_of_their_answers(port: int) -> None:
    slow = REQUEST.replace(b"small", b"slow")
    async with connected(port) as (reader, writer):
        writer.write(slow + REQUEST * 2)
        assert [await answer(reader) for _ in range(3)] == [(200, b"ok")] * 3
    async with connected(port) as (reader, writer):
        writer.write(slow + REQUEST * 1000)
        assert await closed(reader)


async def test_a_client_that_does_not_take_its_answer_is_cut_off(port: int, connections: Connections) -> None:
    async with connected(port) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(REQUEST.replace(b"small", b"large"))
        await asyncio.sleep(0.1)
        assert len(connections) == 1
        async with asyncio.timeout(60):
            while len(connections):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_client_that_takes_its_answer_slowly_gets_it(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(REQUEST.replace(b"small", b"large"))
        await reader.readuntil(b"\r\n\r\n")
        taken = 0
        while taken < LARGE:
            taken += len(await reader.readexactly(min(1 << 20, LARGE - taken)))
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("limits", [PATIENT])
async def test_connections_that_only_wait_give_way_to_new_ones(port: int, connections: Connections) -> None:
    async with contextlib.AsyncExitStack() as opened:
        idle = [await opened.enter_async_context(connected(port)) for _ in range(4)]
        # The second one is the only one in use.
        idle[1][1].write(REQUEST.replace(b"small", b"slow"))
        await asyncio.sleep(0.1)
        async with connected(port) as (reader, writer):
            writer.write(REQUEST)
            assert await answer(reader) == (200, b"ok")
        assert await closed(idle[0][0])
        assert await answer(idle[1][0]) == (200, b"ok")
        assert len(connections) <= 4


async def test_when_all_connections_are_busy_a_new_one_is_429(port: int) -> None:
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(4):
            _, writer = await opened.enter_async_context(connected(port))
            writer.write(REQUEST.replace(b"small", b"slow"))
        await asyncio.sleep(0.2)
        async with connected(port) as (reader, _):
            status, body = await answer(reader)
            assert (status, b"overloaded" in body) == (429, True)
        await asyncio.sleep(1.2)
        async with connected(port) as (reader, writer):
            writer.write(REQUEST)
            assert await answer(reader) == (200, b"ok")
