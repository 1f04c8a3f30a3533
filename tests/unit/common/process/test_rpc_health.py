"""What a server tells of its health, also beside a client that takes nothing of it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.process import rpc
from tests.component.gateway.hostile import headers_of_call

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 0x1, 0x4
_NO_WINDOW = struct.pack("!HI", 4, 0)
STATUS = health_pb2.HealthCheckResponse
REQUEST = health_pb2.HealthCheckRequest()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def watch_and_take_nothing(port: int) -> asyncio.StreamWriter:
    """A watch of a client with no window for an answer, when the server has begun to answer it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    called = headers_of_call("/grpc.health.v1.Health/Watch")
    writer.write(_PREFACE + frame(_SETTINGS, 0, 0, _NO_WINDOW) + frame(_SETTINGS, 1, 0, b""))
    writer.write(frame(_HEADERS, _END_HEADERS, 1, called) + frame(_DATA, _END_STREAM, 1, bytes(5)))
    kind = None
    while kind != _HEADERS:
        head = await asyncio.wait_for(reader.readexactly(9), 30)
        kind = head[3]
        await reader.readexactly(int.from_bytes(head[:3], "big"))
    return writer


@pytest.fixture
async def server() -> AsyncIterator[rpc.RpcServer]:
    server = await rpc.serve([], "127.0.0.1:0")
    yield server
    await server.drain(0)


@pytest.fixture
async def stub(server: rpc.RpcServer) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def test_who_watches_hears_what_changes(
    server: rpc.RpcServer, stub: health_pb2_grpc.HealthStub
) -> None:
    watches = [stub.Watch(REQUEST, timeout=60) for _ in range(2)]
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
    assert (await unknown.read()).status == STATUS.SERVICE_UNKNOWN
    assert [(await watch.read()).status for watch in watches] == [STATUS.SERVING] * 2
    assert (await stub.Check(REQUEST, timeout=30)).status == STATUS.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=30)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    draining = asyncio.create_task(server.drain(30))
    assert [(await watch.read()).status for watch in watches] == [STATUS.NOT_SERVING] * 2
    for watch in [*watches, unknown]:
        watch.cancel()
    await draining


async def test_a_client_that_takes_nothing_keeps_no_other_and_no_drain_waiting(
    server: rpc.RpcServer, stub: health_pb2_grpc.HealthStub
) -> None:
    stuck = await watch_and_take_nothing(server.port)
    try:
        assert (await stub.Watch(REQUEST, timeout=30).read()).status == STATUS.SERVING
        await asyncio.wait_for(server.drain(0), 30)
    finally:
        stuck.transport.abort()
