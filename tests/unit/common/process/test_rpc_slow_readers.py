"""A client that stops reading a stream holds what it takes of a server for a while, and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from services.common.process import rpc
from services.common.process.serving.server_limits import ServerLimits
from tinsmith.v1 import results_pb2, service_pb2_grpc

PIECES = 64
PIECE = bytes(1 << 20)


class Results(service_pb2_grpc.TinsmithServiceServicer):
    """Has results that are larger than what gRPC takes ahead of a reader."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def ReadResults(
        self, request: results_pb2.ReadResultsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[results_pb2.ReadResultsResponse]:
        try:
            for number in range(PIECES):
                piece = results_pb2.ResultPiece(data=PIECE, total_bytes=len(PIECE))
                yield results_pb2.ReadResultsResponse(request_id=str(number), piece=piece)
        finally:
            self.ended.set()


@pytest.fixture
async def results() -> Results:
    return Results()


@pytest.fixture
async def stub(results: Results) -> AsyncIterator[service_pb2_grpc.TinsmithServiceStub]:
    add = service_pb2_grpc.add_TinsmithServiceServicer_to_server
    limits = ServerLimits(write_s=0.5)
    server = await rpc.serve([(add, results, "tinsmith.v1.TinsmithService")], "127.0.0.1:0", limits=limits)
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        yield service_pb2_grpc.TinsmithServiceStub(channel)
    await server.drain(0)


async def test_a_stream_whose_client_stops_reading_ends_and_says_why_when_it_reads_again(
    results: Results, stub: service_pb2_grpc.TinsmithServiceStub
) -> None:
    stream = stub.ReadResults(results_pb2.ReadResultsRequest(), timeout=120)
    assert (await stream.read()).request_id == "0"
    async with asyncio.timeout(60):
        await results.ended.wait()
    told = 1
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        while await stream.read() is not grpc.aio.EOF:
            told += 1
    assert told < PIECES
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "nothing of the stream was read for 0.5 s" in (failed.value.details() or "")


async def test_the_log_does_not_tell_of_a_client_that_reads_its_error_late(
    results: Results,
    stub: service_pb2_grpc.TinsmithServiceStub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rpc, "_TOLD_S", 0.1)
    stream = stub.ReadResults(results_pb2.ReadResultsRequest(), timeout=120)
    await stream.read()
    async with asyncio.timeout(60):
        await results.ended.wait()
    await asyncio.sleep(0.5)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        while await stream.read() is not grpc.aio.EOF:
            pass
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_stream_that_is_read_slowly_is_told_to_its_end(
    results: Results, stub: service_pb2_grpc.TinsmithServiceStub
) -> None:
    stream = stub.ReadResults(results_pb2.ReadResultsRequest(), timeout=120)
    told = []
    async for reply in stream:
        told.append(reply.request_id)
        await asyncio.sleep(0.02)
    assert told == [str(number) for number in range(PIECES)]


async def test_a_stream_that_its_client_gives_up_is_closed(
    results: Results, stub: service_pb2_grpc.TinsmithServiceStub
) -> None:
    stream = stub.ReadResults(results_pb2.ReadResultsRequest(), timeout=120)
    await stream.read()
    stream.cancel()
    async with asyncio.timeout(60):
        await results.ended.wait()


class LateResults(service_pb2_grpc.TinsmithServiceServicer):
    """Tells something when its client has gone already, as it may in the moment in which that goes."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def ReadResults(
        self, request: results_pb2.ReadResultsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[results_pb2.ReadResultsResponse]:
        yield results_pb2.ReadResultsResponse(request_id="0")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            yield results_pb2.ReadResultsResponse(request_id="1")
        finally:
            self.told.set()


async def test_the_log_does_not_tell_of_a_client_that_goes_while_it_is_written_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = LateResults()
    add = service_pb2_grpc.add_TinsmithServiceServicer_to_server
    server = await rpc.serve([(add, late, "tinsmith.v1.TinsmithService")], "127.0.0.1:0")
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            asked = results_pb2.ReadResultsRequest()
            stream = service_pb2_grpc.TinsmithServiceStub(channel).ReadResults(asked, timeout=60)
            await stream.read()
            stream.cancel()
            await asyncio.wait_for(late.told.wait(), 60)
    finally:
        await server.drain(1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_public_port_waits_for_minutes_and_services_for_one_another_without_end() -> None:
    assert 60 <= ServerLimits.public(1, 1, 1).write_s <= 3600
    assert ServerLimits().write_s == 0
