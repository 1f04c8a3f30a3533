"""What becomes of a sample by what its replicas do, against scripted samplers and a real Redis."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.contract import ids
from services.common.contract.errors import Draining, SnapshotNotFound, Unavailable
from services.gateway.records.stores import Stores
from services.gateway.sampling import dispatcher as module
from tests.unit.gateway.sampling.dispatching import (
    MODEL,
    SESSION,
    GatewayFactory,
    inflight_session,
    until,
)
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import types_pb2


async def test_a_replica_is_sent_no_more_than_it_says_it_generates_at_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0", max_sequences=2):
        gateway = await gateway_on()
        requests = [await gateway.sample(seq_id) for seq_id in range(4)]
        await until(lambda: sampler.waiting == 2)
        await asyncio.sleep(0.2)
        assert sampler.waiting == 2
        sampler.gate.set()
        assert [await gateway.tokens(name) for name in requests] == [b"a"] * 4


async def test_a_replica_is_sent_as_much_as_it_says_however_much_that_is(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0", max_sequences=4096):
        gateway = await gateway_on()
        requests = [await gateway.sample(seq_id, sequences=1024) for seq_id in range(4)]
        await until(lambda: sampler.waiting == 4)
        sampler.gate.set()
        assert [await gateway.tokens(name) for name in requests] == [b"a"] * 4


async def test_the_samples_of_a_dead_replica_are_run_by_another(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    dying, living = ScriptedSampler("dying"), ScriptedSampler("living")
    dying.gate.clear()
    async with serving(redis_client, dying, "sampler-0") as first:
        gateway = await gateway_on()
        requests = [await gateway.sample(seq_id) for seq_id in range(5)]
        await dying.arrived.wait()
        async with serving(redis_client, living, "sampler-1"):
            await first.kill()
            assert [await gateway.tokens(name) for name in requests] == [b"living"] * 5
    assert sorted(living.served) == requests


async def test_without_a_sampler_samples_wait_and_say_why(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    gateway = await gateway_on()
    request_id = await gateway.sample(0)
    view = await gateway.futures.wait(request_id, 0.3)
    assert (view.state, view.queue_state) == ("pending", "paused_capacity")
    assert view.queue_state_reason is not None
    assert BASE in view.queue_state_reason
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        assert await gateway.tokens(request_id) == b"a"


async def test_a_failure_caused_by_the_request_is_the_result(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.answer = _refuse
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        error = (await gateway.result(await gateway.sample(0))).error
        assert (error.category, error.message) == (types_pb2.ERROR_CATEGORY_USER, "too long")
        sampler.answer = _not_found
        error = (await gateway.result(await gateway.sample(1))).error
        assert error.code == "snapshot_not_found"


async def test_a_sample_that_five_replicas_in_turn_did_not_survive_is_given_up(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    samplers = [ScriptedSampler(str(number)) for number in range(6)]
    async with AsyncExitStack() as running:
        for number, sampler in enumerate(samplers):
            sampler.answer = _end
            await running.enter_async_context(serving(redis_client, sampler, f"sampler-{number}"))
        gateway = await gateway_on()
        error = (await gateway.result(await gateway.sample(0))).error
    assert error.category == types_pb2.ERROR_CATEGORY_SERVER
    assert "5 samplers stopped" in error.message


async def test_a_result_outlasts_an_outage_of_redis_and_is_generated_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff", lambda attempt, **_: 0.01)
    sampler = ScriptedSampler("a")
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        publish, tries = gateway.journal.publish_bytes, 0

        async def away(*args: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries <= 30:
                raise RedisConnectionError("Connection refused")
            return await publish(*args)

        monkeypatch.setattr(gateway.journal, "publish_bytes", away)
        request_id = await gateway.sample(0)
        assert await gateway.tokens(request_id) == b"a"
        assert (sampler.served, tries) == ([request_id], 31)


def _end(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    raise Unavailable("this sampler is going")


def _refuse(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    error = types_pb2.Error(category=types_pb2.ERROR_CATEGORY_USER, code="too_long", message="too long")
    return sampler_pb2.SampleResponse(error=error)


def _not_found(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    raise SnapshotNotFound("snapshot 3 of s:train:0 is not stored")


async def test_a_sample_takes_as_long_as_it_takes_while_tokens_come(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ScriptedSampler("a")
    asked = 0

    def answer(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        nonlocal asked
        asked += 1
        reply = sampler_pb2.SampleResponse()
        if asked < 20:
            time.sleep(0.02)
            reply.progress.tokens = asked
        else:
            reply.result.sequences.add().tokens.data = b"a"
        return reply

    sampler.answer = answer
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on(stall=0.1)
        assert await gateway.tokens(await gateway.sample(0)) == b"a"
    assert (asked, sampler.ended) == (20, [])


async def test_a_sample_without_progress_is_ended_and_not_tried_again(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")

    def answer(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        assert request.wait_seconds > 0
        time.sleep(0.02)
        return sampler_pb2.SampleResponse(progress=sampler_pb2.SampleProgress(tokens=7))

    sampler.answer = answer
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on(stall=0.2)
        request_id = await gateway.sample(0)
        error = (await gateway.result(request_id)).error
        assert (error.code, error.category) == ("deadline_exceeded", types_pb2.ERROR_CATEGORY_SERVER)
        assert "no progress in 0 s, after 7 tokens" in error.message
        asked = len(sampler.served)
        await until(lambda: sampler.ended == [request_id])
        await asyncio.sleep(0.3)
    assert len(sampler.served) == asked


async def test_replicas_that_end_in_order_are_not_held_against_a_sample(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff", lambda attempt, **_: 0.01)

    def refuse(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        raise Draining("stopping")

    samplers = [ScriptedSampler(str(number)) for number in range(6)]
    async with AsyncExitStack() as running:
        for number, sampler in enumerate(samplers):
            sampler.answer = refuse
            await running.enter_async_context(serving(redis_client, sampler, f"sampler-{number}"))
        gateway = await gateway_on()
        request_id = await gateway.sample(0)
        await until(lambda: all(sampler.served for sampler in samplers))
        for sampler in samplers:
            sampler.answer = None
        assert await gateway.tokens(request_id) in {sampler.name.encode() for sampler in samplers}


async def test_a_draining_replica_finishes_what_it_runs_and_gets_nothing_new(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    old, new = ScriptedSampler("old"), ScriptedSampler("new")
    # Held, so that both run some when one of them drains.
    old.gate.clear()
    new.gate.clear()
    async with serving(redis_client, old, "sampler-0") as draining, serving(redis_client, new, "sampler-1"):
        gateway = await gateway_on()
        await until(lambda: len(gateway.dispatcher._replicas.ready(BASE)) == 2)
        requests = [await gateway.sample(seq_id, prompt=bytes([seq_id])) for seq_id in range(20)]
        await until(lambda: old.waiting + new.waiting == 20)
        assert 0 < old.waiting < 20
        new.gate.set()
        announcer = draining._announcer
        await announcer.update(msgspec.structs.replace(announcer.record, state="draining"))
        await until(lambda: len(gateway.dispatcher._replicas.ready(BASE)) == 1)
        later = [await gateway.sample(seq_id, prompt=bytes([seq_id])) for seq_id in range(20, 40)]
        assert {await gateway.tokens(name) for name in later} == {b"new"}
        old.gate.set()
        assert {await gateway.tokens(name) for name in requests} == {b"old", b"new"}
    assert set(old.served) <= set(requests)
    assert sorted(old.served + new.served) == sorted(requests + later), "each ran once"


async def test_inflight_sessions_follow_their_model_and_running_samples_keep_their_version(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    first, second = ids.sampling_session_id("s", 7), ids.sampling_session_id("s", 8)
    sampler = ScriptedSampler("a")
    used: dict[str, int] = {}

    def answer(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        used[request.request_id] = request.snapshot.version
        reply = sampler_pb2.SampleResponse()
        reply.result.sequences.add()
        return reply

    sampler.answer = answer
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()

        async def sample(session: str, seq_id: int, wait: bool = True) -> str:
            request_id = ids.request_id(session, seq_id)
            request = sampler_pb2.SampleRequest(request_id=request_id, num_samples=1)
            request.snapshot.model_id, request.snapshot.version = MODEL, 3
            accepted = await gateway.journal.accept(
                session, seq_id, request.SerializeToString(), gateway.name
            )
            gateway.dispatcher.submit(accepted, request)
            if wait:
                await gateway.result(request_id)
            return request_id

        await inflight_session(redis_client, first, 3)
        before = await sample(first, 0)
        sampler.gate.clear()
        sampler.arrived.clear()
        running = await sample(first, 1, wait=False)
        await sampler.arrived.wait()
        await inflight_session(redis_client, second, 5)
        sampler.gate.set()
        await gateway.result(running)
        after, fresh = await sample(first, 2), await sample(second, 0)
        # Recording an older save again, as a replay does, moves nothing back.
        await inflight_session(redis_client, first, 3)
        still = await sample(first, 3)
    assert [used[name] for name in (before, running, after, fresh, still)] == [3, 3, 5, 5, 5]


async def test_the_client_of_a_snapshot_that_was_let_go_is_told_so(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.answer = _not_found
    await Stores.over(redis_client).snapshots.mark_let_go(MODEL, 3)
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        request = sampler_pb2.SampleRequest(request_id=ids.request_id(SESSION, 0), num_samples=1)
        request.snapshot.model_id, request.snapshot.version = MODEL, 3
        accepted = await gateway.journal.accept(SESSION, 0, request.SerializeToString(), gateway.name)
        gateway.dispatcher.submit(accepted, request)
        error = (await gateway.result(accepted.request_id)).error
    assert (error.category, error.code) == (types_pb2.ERROR_CATEGORY_USER, "snapshot_let_go")
    assert "save the weights again" in error.message


async def test_an_inflight_sample_whose_version_is_gone_is_answered_from_the_next(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    session, sampler = ids.sampling_session_id("s", 7), ScriptedSampler("a")
    asked: list[int] = []

    def answer(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        asked.append(request.snapshot.version)
        if request.snapshot.version < 5:
            _not_found(request)
        reply = sampler_pb2.SampleResponse()
        reply.result.sequences.add().tokens.data = b"a"
        return reply

    sampler.answer = answer
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        await inflight_session(redis_client, session, 3)
        sampler.gate.clear()
        request = sampler_pb2.SampleRequest(request_id=ids.request_id(session, 0), num_samples=1)
        request.snapshot.model_id = MODEL
        accepted = await gateway.journal.accept(session, 0, request.SerializeToString(), gateway.name)
        gateway.dispatcher.submit(accepted, request)
        await sampler.arrived.wait()
        await inflight_session(redis_client, ids.sampling_session_id("s", 8), 5)
        sampler.gate.set()
        assert await gateway.tokens(accepted.request_id) == b"a"
    assert asked == [3, 5]
