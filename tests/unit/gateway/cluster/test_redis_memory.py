"""A gateway looks at what Redis has left, and takes none that throws things away."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import redis.asyncio

from services.common.contract.errors import Overloaded, Unavailable
from services.common.process import rpc
from services.common.state import keys
from services.common.state.room import Room
from services.gateway.cluster import redis_memory as module
from services.gateway.cluster.redis_memory import RedisMemory
from tests.unit.gateway.edges import ALICE, Edges
from tinsmith.v1 import service_pb2_grpc, sessions_pb2


async def test_a_redis_that_evicts_is_refused_with_what_to_set(any_redis: redis.asyncio.Redis) -> None:
    await any_redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(Unavailable, match=r"allkeys-lru.*set maxmemory-policy noeviction"):
            await RedisMemory(any_redis, Room()).start()
    finally:
        await any_redis.config_set("maxmemory-policy", "noeviction")


async def test_the_room_follows_the_memory_of_redis(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    room = Room()
    memory = RedisMemory(any_redis, room)
    used = (await any_redis.info("memory"))["used_memory"]
    await any_redis.config_set("maxmemory", 100 * used)
    try:
        await memory.start()
        assert room.total == 50 * used
        room.check()
        await any_redis.config_set("maxmemory", int(1.02 * used))
        async with asyncio.timeout(60):
            while room.bounds != (0, 0):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            room.check()
    finally:
        await memory.stop()
        await any_redis.config_set("maxmemory", 0)


async def test_without_memory_both_edges_say_so_and_ask_for_another_try(edges: Edges) -> None:
    await edges.redis.config_set("maxmemory", 1)
    try:
        async with edges.http() as client:
            answer = await client.post("create_session", json={"tags": [], "sdk_version": "1"})
        assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
        assert "raise maxmemory" in answer.json()["detail"]
        async with rpc.channel(edges.grpc_address) as channel:
            stub = service_pb2_grpc.TinsmithServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.CreateSession(
                    sessions_pb2.CreateSessionRequest(), metadata=(("x-api-key", ALICE),), timeout=10
                )
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "raise maxmemory" in str(raised.value.details())
    finally:
        await edges.redis.config_set("maxmemory", 0)


async def test_the_room_knows_what_requests_and_results_take(any_redis: redis.asyncio.Redis) -> None:
    room = Room()
    memory = RedisMemory(any_redis, room)
    await memory.start()
    await memory.stop()
    assert (room.held, room.results, room.journals) == (0, 0, 0)
    await any_redis.hset(keys.HELD_BYTES, mapping={"*": "4097", "*results": "97", "*journals": "7"})
    await memory.start()
    await memory.stop()
    assert (room.held, room.results, room.journals) == (4097, 97, 7)
