"""Dispatch of samples, against scripted samplers and a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import Draining, SnapshotNotFound, Unavailable
from services.common.state import keys, known_models, registry
from services.gateway.cluster.discovery import Discovery
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.records.model import ModelRecord
from services.gateway.records.sample_journal import Resolution, SampleJournal
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from services.gateway.results.futures import Futures
from services.gateway.sampling import claims
from services.gateway.sampling import dispatcher as module
from services.gateway.sampling.admission import Admission
from services.gateway.sampling.dispatcher import SampleDispatcher, SampleSettings
from services.gateway.sampling.replicas import Replicas
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tinsmith.internal.v1 import operation_pb2, sampler_pb2
from tinsmith.v1 import checkpoints_pb2, results_pb2, types_pb2

SESSION = ids.sampling_session_id("s", 0)
MODEL = ids.model_id("s", 0)


class Gateway:
    """The sampling half of a gateway."""

    def __init__(self, client: redis.asyncio.Redis, name: str, stall: float, room: int = 1000) -> None:
        self.name = name
        stores = Stores.over(client)
        self.journal = stores.samples
        self.futures = Futures(client)
        self.admission = Admission(room, 1 << 20)
        self.discovery = Discovery(client, stores.poison)
        self.dispatcher = SampleDispatcher(
            client,
            stores,
            Replicas(self.discovery.samplers, stall),
            self.discovery.gateways,
            name,
            self.admission,
            SampleSettings(dead_after=0.2),
        )
        self.parts = (self.futures, self.discovery, self.dispatcher)

    async def sample(self, seq_id: int, prompt: bytes = b"") -> str:
        request = sampler_pb2.SampleRequest(request_id=ids.request_id(SESSION, seq_id), num_samples=1)
        request.prompt.data = prompt
        payload = request.SerializeToString()
        accepted = await self.journal.accept(SESSION, seq_id, payload, self.name)
        self.dispatcher.submit(accepted, request)
        return accepted.request_id

    async def result(self, request_id: str, within: float = 10) -> results_pb2.OperationResult:
        view = await self.futures.wait(request_id, within)
        assert view.state == "done", f"{request_id} is {view.state}: {view.queue_state_reason}"
        return results_pb2.OperationResult.FromString(view.result or b"")

    async def tokens(self, request_id: str) -> bytes:
        result = await self.result(request_id)
        assert result.HasField("sample"), result
        return result.sample.sequences[0].tokens.data


GatewayFactory = Callable[..., Awaitable[Gateway]]


@asynccontextmanager
async def started(
    client: redis.asyncio.Redis, name: str, stall: float = 60, room: int = 1000
) -> AsyncIterator[Gateway]:
    """A live, announced gateway."""
    record = registry.ServiceRecord(kind="gateway", id=name, address="127.0.0.1:1")
    announcer = registry.Announcer(client, record)
    await announcer.start()
    gateway = Gateway(client, name, stall, room)
    for part in gateway.parts:
        await part.start()
    try:
        yield gateway
    finally:
        for part in reversed(gateway.parts):
            await part.stop()
        await announcer.stop()


@pytest.fixture
async def gateway_on(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GatewayFactory]:
    """Starts gateways, and stops them after the test."""
    monkeypatch.setattr(module, "_AUDIT_S", 0.1)
    await Stores.over(redis_client).sampling_sessions.create_if_absent(
        SamplingSessionRecord(sampling_session_id=SESSION, session_id="s", owner="ann", base_model=BASE)
    )
    async with AsyncExitStack() as running:

        async def start(name: str = "gateway-0", **settings: Any) -> Gateway:
            return await running.enter_async_context(started(redis_client, name, **settings))

        yield start


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


async def test_a_replica_is_sent_no_more_than_it_says_it_generates_at_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0", max_sequences=2):
        gateway = await gateway_on()
        requests = [await gateway.sample(seq_id) for seq_id in range(4)]
        await sampler.arrived.wait()
        await asyncio.sleep(0.2)
        assert sampler.waiting == 2
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
    claim = SampleJournal.claim

    async def counted(self: SampleJournal, *args: str) -> object:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        try:
            return await claim(self, *args)
        finally:
            at_once -= 1

    monkeypatch.setattr(SampleJournal, "claim", counted)
    async with serving(redis_client, sampler, "sampler-0"):
        gateways = [await gateway_on(name, room=30) for name in ("gateway-0", "gateway-1")]
        for gateway in gateways:
            await until(lambda gateway=gateway: gateway.admission.is_full)
        taken = [await gateway.journal.samples_of(gateway.name) for gateway in gateways]
        assert all(30 <= len(some) < 30 + 4 for some in taken), "the rest is left for later, or for others"
        assert not taken[0] & taken[1]
        assert len(await dead.journal.samples_of(dead.name)) == 100 - sum(map(len, taken))
        assert most_at_once <= 2 * 4
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
    claim = gateway.journal.claim

    async def counted(request_id: str, *gateways: str) -> Any:
        claimed.append(request_id)
        return await claim(request_id, *gateways)

    monkeypatch.setattr(gateway.journal, "claim", counted)
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
    monkeypatch.setattr(claims, "ACCEPTANCE_S", 0.3)
    gateway = await gateway_on()
    for name in ("gateway-0", "gateway-9"):
        await redis_client.sadd(keys.gateway_samples(name), ids.request_id(SESSION, 0))
        await gateway.journal.join(name)
    await asyncio.sleep(0.2)
    assert await gateway.journal.samples_of("gateway-0")
    for _ in range(100):
        if not await gateway.journal.samples_of("gateway-0") and await gateway.journal.gateways() == {
            "gateway-0"
        }:
            return
        await asyncio.sleep(0.05)
    pytest.fail("what was never accepted is still listed")


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


def _end(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    raise Unavailable("this sampler is going")


def _refuse(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    error = types_pb2.Error(category=types_pb2.ERROR_CATEGORY_USER, code="too_long", message="too long")
    return sampler_pb2.SampleResponse(error=error)


def _not_found(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    raise SnapshotNotFound("snapshot 3 of s:train:0 is not stored")


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
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
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
        assert (has_it.cancelled.is_set(), has_it.ended) == (True, [])
        # What a sampler that goes on with it says.
        has_it.known.add(request_id)
        async with serving(redis_client, idle, "sampler-1"):
            other = await gateway_on("gateway-1")
            has_it.gate.set()
            assert await other.tokens(request_id) == b"has it"
    assert idle.served == []


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
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
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


async def test_a_draining_replica_finishes_what_it_runs_and_gets_nothing_new(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    old, new = ScriptedSampler("old"), ScriptedSampler("new")
    old.gate.clear()
    async with serving(redis_client, old, "sampler-0") as draining, serving(redis_client, new, "sampler-1"):
        gateway = await gateway_on()
        requests = [await gateway.sample(seq_id, prompt=bytes([seq_id])) for seq_id in range(20)]
        await old.arrived.wait()
        await until(lambda: len(gateway.dispatcher._claimed) + len(new.served) == 20)
        announcer = draining._announcer
        await announcer.update(msgspec.structs.replace(announcer.record, state="draining"))
        await until(lambda: len(gateway.dispatcher._replicas.ready(BASE)) == 1)
        later = [await gateway.sample(seq_id, prompt=bytes([seq_id])) for seq_id in range(20, 40)]
        assert {await gateway.tokens(name) for name in later} == {b"new"}
        old.gate.set()
        assert {await gateway.tokens(name) for name in requests} == {b"old", b"new"}
    assert set(old.served) <= set(requests)
    assert sorted(old.served + new.served) == sorted(requests + later), "each ran once"


@asynccontextmanager
async def running_sample(
    client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> AsyncIterator[tuple[Gateway, ScriptedSampler, str]]:
    """A gateway, and a sampler that has begun with its sample and is held there."""
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(client, sampler, "sampler-0"):
        gateway = await gateway_on()
        request_id = await gateway.sample(0)
        await sampler.arrived.wait()
        yield gateway, sampler, request_id


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def inflight_session(client: redis.asyncio.Redis, session: str, version: int) -> None:
    """What a finished inflight save leaves behind."""
    model = ModelRecord(
        model_id=MODEL, session_id="s", owner="ann", base_model=BASE, lora_rank=4, created_at=0.0
    )
    stores = Stores.over(client)
    await stores.models.create_if_absent(model)
    recorder = ResultRecorder(stores)
    save = operation_pb2.SaveForSampler(sampling_session_id=session, inflight=True)
    operation = operation_pb2.Operation(model_id=MODEL, seq_id=version, save_for_sampler=save)
    result = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=session, version=version)
    await recorder.record(operation, results_pb2.OperationResult(save_for_sampler=result))


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
