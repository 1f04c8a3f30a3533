"""How long connections to a server live."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.process import rpc
from services.common.process.serving.server_limits import ServerLimits


async def test_an_old_connection_ends_without_a_failed_call() -> None:
    limits = ServerLimits(age_s=1)
    server = await rpc.serve([], "127.0.0.1:0", limits=limits)
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            under_way = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            first = await under_way.read()
            assert first.status == health_pb2.HealthCheckResponse.SERVING
            async with asyncio.timeout(60):
                state = grpc.ChannelConnectivity.READY
                while state is grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state()
            # A connection of its own, while the one before still has its call.
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            assert not under_way.done()
            under_way.cancel()
    finally:
        await server.drain(0)


def test_connections_of_the_public_port_do_not_last_for_ever() -> None:
    options = dict(ServerLimits.public(1, 1, 1).options())
    assert 60_000 <= options["grpc.max_connection_age_ms"] <= 3_600_000
    assert "grpc.max_connection_age_ms" not in dict(ServerLimits().options())


async def test_calls_that_come_at_once_on_several_connections_are_all_answered() -> None:
    limits = ServerLimits.public(2**20, 16, 8192)
    server = await rpc.serve([], "127.0.0.1:0", limits=limits)
    own = [("grpc.use_local_subchannel_pool", 1)]
    try:
        async with contextlib.AsyncExitStack() as open_ones:
            channels = [
                await open_ones.enter_async_context(
                    grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=own)
                )
                for _ in range(4)
            ]
            asked = [
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
                for channel in channels
                for _ in range(limits.streams)
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await server.drain(0)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
