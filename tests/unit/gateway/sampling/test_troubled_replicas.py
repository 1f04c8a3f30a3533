"""What becomes of a sample when replicas fail or have no room, against scripted samplers and a real Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.contract import ids
from services.common.contract.errors import Internal, Overloaded, Unavailable
from services.common.state.registry import ServiceRecord
from services.gateway.sampling import dispatcher as module
from services.gateway.sampling import tries
from tests.unit.gateway.sampling.dispatching import (
    SESSION,
    GatewayFactory,
    until,
)
from tests.unit.gateway.scripted_services import ScriptedSampler, serving
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2, types_pb2


async def test_a_replica_that_fails_by_itself_is_left_alone_for_a_while(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "_FIRST_REST_S", 300.0)
    monkeypatch.setattr(tries, "_MOST_REST_S", 300.0)
    broken, sound = ScriptedSampler("broken"), ScriptedSampler("sound")
    broken.answer = _break
    async with serving(redis_client, broken, "sampler-0"):
        gateway = await gateway_on()
        assert (await gateway.result(await gateway.sample(0))).HasField("error")
        asked = len(broken.served)
        async with serving(redis_client, sound, "sampler-1"):
            await until(lambda: len(gateway.discovery.samplers.all()) == 2)
            # At once, so that the work alone would spread them over both.
            requests = [await gateway.sample(seq_id) for seq_id in range(1, 41)]
            assert [await gateway.tokens(request_id) for request_id in requests] == [b"sound"] * 40
    assert (len(broken.served), len(sound.served)) == (asked, 40)


def test_samples_that_a_replica_loses_are_told_of_together_and_those_of_its_next_start_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = [ServiceRecord(kind="sampler", id="sampler-7", address="127.0.0.1:1") for _ in range(2)]
    for start in starts:
        for _ in range(50):
            tries.Tries().note(Unavailable("Stream removed"), start)
    said = [message for message in caplog.messages if "lost samples" in message]
    assert said == [
        "a sampler lost samples, which run again: "
        f"sampler-7, started as {one.incarnation[:8]}: Stream removed"
        for one in starts
    ]


async def test_a_replica_that_has_no_room_is_passed_over_while_there_is_another(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "_FULL_S", 300.0)
    full, other = ScriptedSampler("full"), ScriptedSampler("other")
    full.answer = _full
    async with serving(redis_client, full, "sampler-0"):
        gateway = await gateway_on()
        first = await gateway.sample(0)
        await until(lambda: len(full.served) == 2)
        async with serving(redis_client, other, "sampler-1"):
            assert await gateway.tokens(first) == b"other"
            asked = len(full.served)
            requests = [await gateway.sample(seq_id) for seq_id in range(1, 41)]
            assert [await gateway.tokens(request_id) for request_id in requests] == [b"other"] * 40
    assert len(full.served) == asked


async def test_a_replica_that_had_no_room_is_asked_again_when_there_is_no_other(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "_FULL_S", 300.0)
    sampler = ScriptedSampler("a")
    sampler.answer = _full
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        request_id = await gateway.sample(0)
        await until(lambda: len(sampler.served) == 1)
        sampler.answer = None
        assert await gateway.tokens(request_id) == b"a"


async def test_what_waits_to_be_written_while_redis_is_away_keeps_its_slot(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff", lambda attempt, **_: 0.01)
    sampler, tries, is_away = ScriptedSampler("a"), 0, True
    async with serving(redis_client, sampler, "sampler-0", max_sequences=1):
        gateway = await gateway_on()
        publish = gateway.journal.publish_bytes

        async def away(*args: Any) -> Any:
            nonlocal tries
            tries += 1
            if is_away:
                raise RedisConnectionError("Connection refused")
            return await publish(*args)

        monkeypatch.setattr(gateway.journal, "publish_bytes", away)
        requests = [await gateway.sample(seq_id) for seq_id in range(3)]
        await until(lambda: tries > 20)
        assert len(sampler.served) == 1, "results that nobody can write have no bound"
        is_away = False
        assert [await gateway.tokens(name) for name in requests] == [b"a"] * 3


async def test_a_replica_that_fails_is_still_asked_when_there_is_no_other(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.answer = _break
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        error = (await gateway.result(await gateway.sample(0))).error
        assert (error.category, len(sampler.served)) == (types_pb2.ERROR_CATEGORY_SERVER, 2)
        sampler.answer = None
        assert await gateway.tokens(await gateway.sample(1)) == b"a"


async def test_a_sample_that_is_refused_for_load_lets_others_run_meanwhile(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, again = ids.request_id(SESSION, 0), asyncio.Event()
    waited = asyncio.Event()

    def backoff(attempt: int, **_: float) -> float:
        waited.set()
        return 0.01 if again.is_set() else 0.3

    def full(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        if request.request_id == large and not again.is_set():
            raise Overloaded("no room for a large one")
        return sampler_pb2.SampleResponse(result=sampling_pb2.SampleResult())

    monkeypatch.setattr(module, "backoff", backoff)
    sampler = ScriptedSampler("a")
    sampler.answer = full
    # One slot: who waits while it has it keeps all others out.
    async with serving(redis_client, sampler, "sampler-0", max_sequences=1):
        gateway = await gateway_on()
        await gateway.sample(0)
        await waited.wait()
        for seq_id in range(1, 6):
            await gateway.result(await gateway.sample(seq_id))
        assert (await gateway.futures.wait(large, 0)).state == "pending"
        again.set()
        await gateway.result(large)


def _break(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    raise Internal("CUDA error: an illegal memory access was encountered")


def _full(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    raise Overloaded("no room")
