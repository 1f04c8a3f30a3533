"""Typed errors cross gRPC and come out as the same type."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
import redis.exceptions
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.contract import errors
from services.common.process import rpc
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc

NAME = sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].full_name


class Raising(sampler_pb2_grpc.SamplerServiceServicer):
    """Fails every status call with the error it was given."""

    error: BaseException = errors.Internal("unset")

    async def GetSamplerStatus(
        self, request: object, context: object
    ) -> sampler_pb2.GetSamplerStatusResponse:
        await asyncio.sleep(0)
        raise self.error


class Deserted(sampler_pb2_grpc.SamplerServiceServicer):
    """Refuses a status call whose client has gone by then."""

    def __init__(self) -> None:
        self.call: grpc.aio.Call | None = None

    async def GetSamplerStatus(
        self, request: object, context: object
    ) -> sampler_pb2.GetSamplerStatusResponse:
        assert self.call is not None
        self.call.cancel()
        # Nobody here is told of it before it is refused.
        time.sleep(0.3)  # noqa: ASYNC251
        raise errors.InvalidRequest("no")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[Raising, rpc.RpcServer]]:
    servicer = Raising()
    running = await rpc.serve(
        [(sampler_pb2_grpc.add_SamplerServiceServicer_to_server, servicer, NAME)], "127.0.0.1:0"
    )
    yield servicer, running
    await running.drain(0.1)


async def fail_with(server: tuple[Raising, rpc.RpcServer], error: BaseException) -> errors.TinsmithError:
    servicer, running = server
    servicer.error = error
    async with rpc.channel(f"127.0.0.1:{running.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sampler_pb2_grpc.SamplerServiceStub(channel).GetSamplerStatus(
                sampler_pb2.GetSamplerStatusRequest(), timeout=60
            )
    return rpc.from_rpc_error(caught.value)


async def test_a_store_that_cannot_be_reached_is_unavailable(server: tuple[Raising, rpc.RpcServer]) -> None:
    received = await fail_with(server, redis.exceptions.ConnectionError("refused"))
    assert isinstance(received, errors.Unavailable)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("token 9 is out of range"),
        errors.Overloaded("the queue is full"),
        errors.ModelNotResident("restore it first"),
        errors.StaleEpoch("epoch 3 was taken over"),
        errors.SnapshotNotFound("no such snapshot"),
        errors.DataLoss("checksum differs"),
        errors.Unavailable("draining"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_typed_error_arrives_as_the_same_type(
    server: tuple[Raising, rpc.RpcServer], error: errors.TinsmithError
) -> None:
    received = await fail_with(server, error)
    assert type(received) is type(error)
    assert received.message == error.message
    assert received.code == error.code


async def test_any_other_exception_arrives_as_an_internal_error(
    server: tuple[Raising, rpc.RpcServer],
) -> None:
    received = await fail_with(server, KeyError("oops"))
    assert type(received) is errors.Internal
    assert "KeyError" in received.message


async def test_a_server_that_is_gone_is_unavailable() -> None:
    async with rpc.channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sampler_pb2_grpc.SamplerServiceStub(channel).GetSamplerStatus(
                sampler_pb2.GetSamplerStatusRequest(), timeout=60
            )
    assert type(rpc.from_rpc_error(caught.value)) is errors.Unavailable


async def test_health_says_serving_and_reflection_lists_the_service(
    server: tuple[Raising, rpc.RpcServer],
) -> None:
    _, running = server
    async with rpc.channel(f"127.0.0.1:{running.port}") as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=NAME), timeout=60
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=60
        )
        async for reply in call:
            assert NAME in [service.name for service in reply.list_services_response.service]
            break


def test_an_error_survives_protobuf() -> None:
    original = errors.InvalidRequest("shorten the prompt", "prompt_too_long")
    restored = errors.from_pb(errors.to_pb(original))
    assert (restored.category, restored.code, restored.message) == (
        "user",
        "prompt_too_long",
        "shorten the prompt",
    )
    assert errors.from_pb(errors.to_pb(RuntimeError("x"))).category == "server"


async def test_the_log_does_not_tell_of_a_client_that_has_gone_when_it_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer = Deserted()
    add = sampler_pb2_grpc.add_SamplerServiceServicer_to_server
    running = await rpc.serve([(add, servicer, NAME)], "127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{running.port}") as channel:
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        servicer.call = stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=60)
        with pytest.raises(asyncio.CancelledError):
            await servicer.call
    await running.drain(1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
