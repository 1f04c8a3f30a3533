"""Which gateway runs a sample, and when, against scripted samplers and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions

from services.common.contract import ids
from services.common.state import keys, known_models
from services.common.state.journal_records import Published
from services.gateway.records.sample_journal import Resolution, SampleJournal
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from services.gateway.sampling import claims
from services.gateway.sampling import dispatcher as module
from services.gateway.sampling.tries import WAITS
from tests.unit.gateway.sampling.dispatching import (
    SESSION,
    Gateway,
    GatewayFactory,
    running_sample,
    started,
    until,
)
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tinsmith.internal.v1 import sampler_pb2


async def test_a_sample_is_answered_and_a_repeated_one_runs_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        sampler.gate.clear()
        request_id = await gateway.sample(0)
        await sampler.arrived.wait()
        assert await gateway.sample(0) == request_id
        other = await gateway_on("gateway-1")
        await other.sample(0)
        await asyncio.sleep(0.1)
        sampler.gate.set()
        assert await gateway.tokens(request_id) == b"a"
        await gateway.sample(0)
        await asyncio.sleep(0.3)
        assert sampler.served == [request_id]
        assert await gateway.journal.samples_of("gateway-0") == set()
        assert await gateway.journal.samples_of("gateway-1") == set()


async def test_a_stopped_gateway_leaves_its_samples_to_its_next_start(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with started(redis_client, "gateway-0") as stopping:
        request_id = await stopping.sample(0)
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        again = await gateway_on("gateway-0")
        assert await again.tokens(request_id) == b"a"


async def test_a_dead_gateways_samples_are_taken_over(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0") as sampler:
        other = await gateway_on("gateway-1")
        await sampler.kill()
        async with started(redis_client, "gateway-0") as dying:
            requests = [await dying.sample(seq_id) for seq_id in range(3)]
    async with serving(redis_client, ScriptedSampler("b"), "sampler-0"):
        assert [await other.tokens(name) for name in requests] == [b"b"] * 3
    assert await other.journal.samples_of("gateway-0") == set()


async def test_what_a_dead_gateway_left_goes_by_its_priority(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0", max_sequences=1):
        other = await gateway_on("gateway-1")
        running = await other.sample(0)
        await sampler.arrived.wait()
        async with started(redis_client, "gateway-0") as dying:
            left = {rank: await dying.sample(1 + rank, priority=rank) for rank in (3, 0, 6, 4, 1, 5, 2)}
        (slots,) = other.dispatcher._slots_of.values()
        await until(lambda: sum(map(len, slots._waiting.values())) == len(left))
        sampler.gate.set()
        for name in (running, *left.values()):
            assert await other.tokens(name) == b"a"
    assert sampler.served == [running, *(left[rank] for rank in range(6, -1, -1))]


async def test_gateways_share_what_a_dead_one_left_and_none_takes_more_than_it_has_room_for(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_AT_ONCE", 4)
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    left = set()
    dead = Gateway(redis_client, "gateway-dead", 60)
    await dead.journal.join("gateway-dead")
    for seq_id in range(100):
        request = sampler_pb2.SampleRequest(request_id=ids.request_id(SESSION, seq_id), num_samples=1)
        accepted = await dead.journal.accept(SESSION, seq_id, request.SerializeToString(), dead.name)
        left.add(accepted.request_id)

    at_once = most_at_once = 0
    claim = SampleJournal.claim_some

    async def counted(self: SampleJournal, *args: Any) -> Any:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        try:
            return await claim(self, *args)
        finally:
            at_once -= 1

    monkeypatch.setattr(SampleJournal, "claim_some", counted)
    async with serving(redis_client, sampler, "sampler-0"):
        gateways = [await gateway_on(name, room=30) for name in ("gateway-0", "gateway-1")]
        for gateway in gateways:
            await until(lambda gateway=gateway: gateway.admission.is_full)
        taken = [await gateway.journal.samples_of(gateway.name) for gateway in gateways]
        assert all(30 <= len(some) < 30 + 4 for some in taken), "the rest is left for later, or for others"
        assert not taken[0] & taken[1]
        assert len(await dead.journal.samples_of(dead.name)) == 100 - sum(map(len, taken))
        assert most_at_once <= 2
        sampler.gate.set()
        for request_id in left:
            assert await gateways[0].tokens(request_id) == b"a"
    assert sorted(sampler.served) == sorted(left)


async def test_a_sample_that_was_accepted_just_now_is_run_without_asking_for_it(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AUDIT_S", 60)
    gateway = await gateway_on()
    # The audit at the start is over: one that sees the sample before it is submitted would ask for it.
    await asyncio.sleep(0.5)
    claimed: list[str] = []
    claim = gateway.journal.claim_some

    async def counted(request_ids: Sequence[str], *gateways: str) -> Any:
        claimed.extend(request_ids)
        return await claim(request_ids, *gateways)

    monkeypatch.setattr(gateway.journal, "claim_some", counted)
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        assert await gateway.tokens(await gateway.sample(0)) == b"a"
    assert claimed == []


async def test_a_sample_is_run_although_the_list_was_looked_through_before_it_was_accepted(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await gateway_on()
    accept = gateway.journal._accept

    async def late(*args: Any) -> Any:
        await asyncio.sleep(0.4)
        return await accept(*args)

    monkeypatch.setattr(gateway.journal, "_accept", late)
    request_id = ids.request_id(SESSION, 0)
    payload = sampler_pb2.SampleRequest(request_id=request_id, num_samples=1).SerializeToString()
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        await gateway.journal.accept(SESSION, 0, payload, gateway.name)
        assert await gateway.tokens(request_id) == b"a"


async def test_an_acceptance_that_broke_off_is_taken_off_the_list(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "ACCEPTANCE_S", 2.0)
    gateway = await gateway_on()
    for name in ("gateway-0", "gateway-9"):
        await redis_client.sadd(keys.gateway_samples(name), ids.request_id(SESSION, 0))
        await gateway.journal.join(name)
    await asyncio.sleep(0.2)
    assert await gateway.journal.samples_of("gateway-0")
    for _ in range(1200):
        if not await gateway.journal.samples_of("gateway-0") and await gateway.journal.gateways() == {
            "gateway-0"
        }:
            return
        await asyncio.sleep(0.05)
    pytest.fail("what was never accepted is still listed")


async def test_a_cancelled_sample_frees_its_place_on_whichever_gateway_it_runs(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AUDIT_S", 60)
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0"):
        running, other = await gateway_on("gateway-0"), await gateway_on("gateway-1")
        request_id = await running.sample(0)
        await sampler.arrived.wait()
        assert await other.journal.cancel(request_id, "given up") is Resolution.NOW
        async with asyncio.timeout(60):
            await sampler.cancelled.wait()
        await until(lambda: sampler.ended == [request_id])
        assert (await running.result(request_id)).error.message == "given up"
        await until(lambda: not running.dispatcher._running)
        sampler.gate.set()
        assert await running.tokens(await running.sample(1)) == b"a"
    assert sampler.served == [ids.request_id(SESSION, 1)]


async def test_a_cancellation_whose_word_was_lost_is_seen_by_the_audit(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with running_sample(redis_client, gateway_on) as (gateway, sampler, request_id):
        await gateway.dispatcher._cancellations.stop()
        await gateway.journal.cancel(request_id, "given up")
        async with asyncio.timeout(60):
            await sampler.cancelled.wait()
        await until(lambda: sampler.ended == [request_id])


async def test_a_gateway_that_stops_leaves_its_samples_running_for_who_takes_them_over(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    has_it, idle = ScriptedSampler("has it"), ScriptedSampler("idle")
    has_it.gate.clear()
    async with serving(redis_client, has_it, "sampler-0"):
        async with started(redis_client, "gateway-0") as stopping:
            request_id = await stopping.sample(0)
            await has_it.arrived.wait()
        async with asyncio.timeout(60):
            await has_it.cancelled.wait()
        assert has_it.ended == []
        # What a sampler that goes on with it says.
        has_it.known.add(request_id)
        async with serving(redis_client, idle, "sampler-1"):
            other = await gateway_on("gateway-1")
            has_it.gate.set()
            assert await other.tokens(request_id) == b"has it"
    assert idle.served == []


async def test_a_running_sample_that_redis_forgot_goes_on(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with running_sample(redis_client, gateway_on) as (gateway, sampler, request_id):
        await redis_client.delete(keys.future(SESSION, 0), keys.gateway_samples("gateway-0"))
        await asyncio.sleep(0.4)
        assert not sampler.cancelled.is_set()
        sampler.gate.set()
        await until(lambda: not gateway.dispatcher._running)
        assert await gateway.tokens(request_id) == b"a"


async def test_a_key_with_one_sample_is_not_held_up_by_the_thousand_of_another(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    other = ids.sampling_session_id("t", 0)
    await Stores.over(redis_client).sampling_sessions.create_if_absent(
        SamplingSessionRecord(sampling_session_id=other, session_id="t", owner="bob", base_model=BASE)
    )
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        gateway.dispatcher._slots(BASE).resize(4)
        many = [await gateway.sample(seq_id) for seq_id in range(40)]
        await until(lambda: len(gateway.dispatcher._claimed) == 40)
        request_id = ids.request_id(other, 0)
        request = sampler_pb2.SampleRequest(request_id=request_id, num_samples=1)
        accepted = await gateway.journal.accept(other, 0, request.SerializeToString(), gateway.name)
        gateway.dispatcher.submit(accepted, request)
        await until(lambda: len(gateway.dispatcher._claimed) == 41)
        sampler.gate.set()
        for name in [*many, request_id]:
            await gateway.tokens(name)
        await until(lambda: not gateway.dispatcher._running)
        assert sampler.served.index(request_id) <= 8
        assert gateway.admission._held == {}


async def test_a_sample_whose_session_redis_forgot_waits_until_it_is_restored(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        name = keys.sampling_session(SESSION)
        record = await redis_client.get(name)
        await redis_client.delete(name)
        request_id = await gateway.sample(0)
        await asyncio.sleep(0.3)
        assert sampler.served == []
        await redis_client.set(name, record)
        assert await gateway.tokens(request_id) == b"a"


async def test_a_sample_that_waits_for_a_base_model_that_is_retired_fails_and_says_so(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    gateway = await gateway_on()
    request_id = await gateway.sample(0)
    await asyncio.sleep(0.1)
    await known_models.retire(redis_client, BASE)
    await gateway.discovery.refresh()
    assert (await gateway.result(request_id)).error.code == "base_model_retired"
    assert await gateway.journal.samples_of(gateway.name) == set()


async def test_a_sample_that_cannot_be_read_fails_and_others_run(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    broken, whole = ids.request_id(SESSION, 0), ids.request_id(SESSION, 1)
    samples = Stores.over(redis_client).samples
    await samples.accept(SESSION, 0, b"\xff", "gateway-0", "ann")
    request = sampler_pb2.SampleRequest(request_id=whole, num_samples=1)
    await samples.accept(SESSION, 1, request.SerializeToString(), "gateway-0", "ann")
    # Of another version, perhaps: it stays on the list, for one that can read it.
    await redis_client.sadd(keys.gateway_samples("gateway-0"), "no request")
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        gateway = await gateway_on()
        assert (await gateway.result(broken)).error.code == "record_unreadable"
        assert await gateway.tokens(whole) == b"a"
    assert await samples.samples_of("gateway-0") == {"no request"}


async def test_while_redis_is_away_the_log_has_no_line_for_each_sample(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with serving(redis_client, ScriptedSampler("a"), "sampler-0"):
        gateway = await gateway_on()
        publish, tries = gateway.journal.publish_bytes, list[str]()
        counted = WAITS.labels("unwritten")._value.get
        before = counted()

        async def refused(request_id: str, *rest: Any) -> Published:
            tries.append(request_id)
            if tries.count(request_id) < 3:
                raise redis.exceptions.ConnectionError("Connection refused")
            return await publish(request_id, *rest)

        monkeypatch.setattr(gateway.journal, "publish_bytes", refused)
        samples = [await gateway.sample(number) for number in range(20)]
        for sample in samples:
            await gateway.tokens(sample)
    said = [message for message in caplog.messages if message.startswith("samples wait for Redis: ")]
    assert "samples wait for Redis: results that are written again until they are: Connection refused" in said
    # An audit says that it is over, and may come before the last of them.
    assert len(said) < len(samples) and len(tries) == 3 * len(samples)
    assert counted() == before + 2 * len(samples)


async def test_samples_that_pause_while_redis_is_away_are_told_of_together(
    redis_client: redis.asyncio.Redis,
    gateway_on: GatewayFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = await gateway_on()

    asked: list[str] = []
    counted = WAITS.labels("paused")._value.get
    before = counted()

    async def refused(request_id: str) -> SamplingSessionRecord:
        asked.append(request_id)
        raise redis.exceptions.ConnectionError("Connection refused")

    monkeypatch.setattr(gateway.dispatcher._sessions, "of", refused)
    for number in range(20):
        await gateway.sample(number)
    await until(lambda: len(asked) >= 20 and not gateway.dispatcher._running)
    said = [message for message in caplog.messages if "paused" in message]
    assert said[0] == "samples wait for Redis: what is paused until the next audit: Connection refused"
    assert (len(said) < 20, counted()) == (True, before + len(asked))
