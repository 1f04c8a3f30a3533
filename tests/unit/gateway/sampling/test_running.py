"""What samples that run are told: newer weights to go on with, and to end with what they have come to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.common.state.journal_records import Accepted
from services.common.state.known_models import Configured, configure
from services.gateway.records.snapshot import SnapshotStore
from services.gateway.records.usage import UsageStore, day_of
from services.gateway.sampling.dispatcher import UNSAID_SEQUENCES
from services.gateway.sampling.running import Followed
from tests.unit.gateway.sampling.dispatching import (
    MODEL,
    SESSION,
    Gateway,
    GatewayFactory,
    inflight_session,
    running_sample,
    started,
    until,
)
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2

FIRST, SECOND, THIRD = (ids.sampling_session_id("s", number) for number in (7, 8, 9))
CANCELLED = sampling_pb2.STOP_REASON_CANCELLED


async def sample(gateway: Gateway, seq_id: int, moves: bool) -> str:
    """A sample of the first inflight session."""
    request_id = ids.request_id(FIRST, seq_id)
    request = sampler_pb2.SampleRequest(request_id=request_id, num_samples=1, moves=moves)
    request.snapshot.model_id, request.snapshot.version = MODEL, 3
    accepted = await gateway.journal.accept(FIRST, seq_id, request.SerializeToString(), gateway.name)
    gateway.dispatcher.submit(accepted, request)
    return request_id


async def test_samples_that_move_are_told_of_newer_weights_wherever_they_were_saved_and_others_are_not(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0"):
        gateways = [await gateway_on(), await gateway_on("gateway-1")]
        await inflight_session(redis_client, FIRST, 3)
        moving = [await sample(gateway, number, True) for number, gateway in enumerate(gateways)]
        await sample(gateways[0], 9, False)
        await until(lambda: sampler.waiting == 3)
        await inflight_session(redis_client, SECOND, 5)
        await until(lambda: len(sampler.moved) == 2)
        # An older save that is recorded again moves nothing.
        await inflight_session(redis_client, FIRST, 3)
        await inflight_session(redis_client, THIRD, 6)
        await until(lambda: len(sampler.moved) == 4)
        sampler.gate.set()
    assert sorted(sampler.moved) == [(name, MODEL, version) for name in moving for version in (5, 6)]


async def test_a_sample_hears_of_newer_weights_that_were_saved_while_its_gateway_could_not_listen(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        await inflight_session(redis_client, FIRST, 3)
        moving = await sample(gateway, 0, True)
        await sampler.arrived.wait()
        await gateway.dispatcher._followed.stop()
        await inflight_session(redis_client, SECOND, 5)
        assert sampler.moved == []
        gateway.dispatcher._followed.start()
        await until(lambda: sampler.moved == [(moving, MODEL, 5)])
        sampler.gate.set()


async def test_a_sample_hears_of_newer_weights_however_long_redis_does_not_tell_them(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        await inflight_session(redis_client, FIRST, 3)
        moving = await sample(gateway, 0, True)
        await sampler.arrived.wait()
        await gateway.dispatcher._followed.stop()
        await inflight_session(redis_client, SECOND, 5)
        # As one that loads its data does, it takes subscriptions and answers nothing.
        await redis_client.execute_command("ACL", "SETUSER", "default", "-get")
        try:
            gateway.dispatcher._followed.start()
            await asyncio.sleep(0.3)
            assert sampler.moved == []
        finally:
            await redis_client.execute_command("ACL", "SETUSER", "default", "+@all")
        await until(lambda: sampler.moved == [(moving, MODEL, 5)])
        sampler.gate.set()


async def test_words_that_were_lost_or_came_before_their_sample_are_said_again(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(redis_client, sampler, "sampler-0"):
        gateway = await gateway_on()
        await inflight_session(redis_client, FIRST, 3)
        moving = await sample(gateway, 0, True)
        await sampler.arrived.wait()
        sampler.deaf, sampler.early = 2, 3
        await inflight_session(redis_client, SECOND, 5)
        await until(lambda: sampler.moved == [(moving, MODEL, 5)])
        sampler.deaf, sampler.early = 2, 3
        await gateway.journal.keep(moving)
        await until(lambda: sampler.kept == [moving])
        await gateway.result(moving)
        await until(lambda: not gateway.dispatcher._replicas._words._said)


async def test_a_word_about_a_sample_that_has_ended_is_not_said_again(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with running_sample(redis_client, gateway_on) as (gateway, sampler, request_id):
        sampler.deaf = 10**6
        async with asyncio.timeout(60):
            while sampler.deaf == 10**6:
                await gateway.journal.keep(request_id)
                await asyncio.sleep(0.01)
        sampler.gate.set()
        await gateway.result(request_id)
        await until(lambda: not gateway.dispatcher._replicas._words._said)
        assert sampler.kept == []


def once_unavailable(request_id: str) -> Callable[[sampler_pb2.SampleRequest], sampler_pb2.SampleResponse]:
    """Answers that are tokens, but at first for one request a passing fault."""
    asked = []

    def answer(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
        asked.append(request.request_id)
        if asked.count(request_id) == 1 and request.request_id == request_id:
            raise Unavailable("in a moment")
        reply = sampler_pb2.SampleResponse()
        reply.result.sequences.add().tokens.data = b"kept"
        return reply

    return answer


async def test_what_a_sample_has_come_to_that_another_gateway_left_is_kept_although_it_waits_for_its_turn(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    has_it = ScriptedSampler("has it")
    has_it.gate.clear()
    async with serving(redis_client, has_it, "sampler-0"):
        async with started(redis_client, "gateway-0") as stopping:
            request_id = await stopping.sample(0)
            await has_it.arrived.wait()
        await until(has_it.cancelled.is_set)
        # What a sampler that goes on with it says, once it can be asked, at the second call.
        has_it.known.add(request_id)
        has_it.mute = 3
        has_it.answer = once_unavailable(request_id)
        other = await gateway_on("gateway-1")
        other.dispatcher._slots(BASE).resize(1)
        filling = await other.sample(1)
        await until(lambda: has_it.waiting == 1)
        async with asyncio.timeout(60):
            while await other.journal.state(request_id) == "pending":
                await other.journal.keep(request_id)
                await asyncio.sleep(0.01)
        assert await other.tokens(request_id) == b"kept"
        assert set(has_it.kept) == {request_id}
        await other.result(filling)
    now = time.time()
    used = await UsageStore(redis_client).used("ann", sorted({day_of(now - 60), day_of(now)}))
    # One token of four bytes each.
    assert sum(one.amount for one in used if one.kind == "sampled") == 2


async def test_a_sample_is_kept_at_its_replica_through_whichever_gateway(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with running_sample(redis_client, gateway_on) as (gateway, sampler, request_id):
        other = await gateway_on("gateway-1")
        async with asyncio.timeout(60):
            while not sampler.kept:
                await other.journal.keep(request_id)
                await asyncio.sleep(0.01)
        assert await gateway.tokens(request_id) == b"a"
        assert (set(sampler.kept), sampler.ended) == ({request_id}, [])
        assert await other.journal.state(request_id) == "done"


async def accepted_without_replicas(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> tuple[Gateway, Accepted, sampler_pb2.SampleRequest]:
    """A sample of a base model without replicas that a gateway has accepted and not yet submitted."""
    await configure(redis_client, [Configured(name=BASE)])
    gateway = await gateway_on()
    request = sampler_pb2.SampleRequest(
        request_id=ids.request_id(SESSION, 0), num_samples=2, topk_sample_logprobs=3
    )
    accepted = await gateway.journal.accept(SESSION, 0, request.SerializeToString(), gateway.name)
    return gateway, accepted, request


async def test_a_sample_that_no_replica_has_is_kept_with_nothing_at_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    gateway, accepted, request = await accepted_without_replicas(redis_client, gateway_on)
    request_id = request.request_id
    gateway.dispatcher.submit(accepted, request)
    # As a client's call does: a word is heard by who listens at that moment.
    async with asyncio.timeout(60):
        while await gateway.journal.state(request_id) == "pending":
            await gateway.journal.keep(request_id)
            await asyncio.sleep(0.01)
    sequences = (await gateway.result(request_id)).sample.sequences
    assert [sequence.stop_reason for sequence in sequences] == [CANCELLED] * 2
    assert [list(sequence.topk_logprobs.token_ids.shape) for sequence in sequences] == [[0, 3]] * 2
    assert await gateway.journal.samples_of(gateway.name) == set()
    assert gateway.dispatcher._followed._followed == {}


async def test_a_sample_that_an_audit_finds_before_it_is_submitted_is_kept_at_once_all_the_same(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    gateway, accepted, request = await accepted_without_replicas(redis_client, gateway_on)
    request_id = request.request_id
    await gateway.dispatcher._audit()
    await until(lambda: request_id in gateway.dispatcher._followed._followed)
    gateway.dispatcher.submit(accepted, request)
    await gateway.journal.keep(request_id)
    sequences = (await gateway.result(request_id, within=20)).sample.sequences
    assert [sequence.stop_reason for sequence in sequences] == [CANCELLED] * 2
    await until(lambda: not gateway.dispatcher._new)


async def test_a_sample_that_waits_for_its_turn_keeps_its_snapshot_in_use(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    snapshots = SnapshotStore(redis_client)
    await snapshots.add(MODEL, 3, "alice", 100)
    await redis_client.zadd(keys.SNAPSHOTS_USED, {f"{MODEL}@3": 1.0})
    (before,) = await snapshots.oldest(9)
    assert before.last_used == 1.0
    gateway = await gateway_on()
    request = sampler_pb2.SampleRequest(request_id=ids.request_id(SESSION, 0), num_samples=1)
    request.snapshot.model_id, request.snapshot.version = MODEL, 3
    with gateway.dispatcher._followed.follow(request, "alice"):
        await gateway.dispatcher._followed._note_uses()
    (after,) = await snapshots.oldest(9)
    assert after.last_used > time.time() - 600


async def test_a_sample_has_noted_the_use_of_its_snapshot_when_it_begins_to_wait_for_its_turn(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    snapshots = SnapshotStore(redis_client)
    await snapshots.add(MODEL, 3, "ann", 100)
    await redis_client.zadd(keys.SNAPSHOTS_USED, {f"{MODEL}@3": 1.0})
    gateway = await gateway_on()
    # Not by another sample of the snapshot: its use would be noted, and a gateway notes one once a minute.
    slots = gateway.dispatcher._slots(BASE)
    async with slots.held("bob", UNSAID_SEQUENCES):
        request = sampler_pb2.SampleRequest(request_id=ids.request_id(SESSION, 0), num_samples=1)
        request.snapshot.model_id, request.snapshot.version = MODEL, 3
        accepted = await gateway.journal.accept(SESSION, 0, request.SerializeToString(), gateway.name)
        gateway.dispatcher.submit(accepted, request)
        await until(lambda: "ann" in slots._waiting)
        (used,) = await snapshots.oldest(9)
        assert used.last_used > time.time() - 600


async def test_a_sample_that_is_done_is_not_cut_off_while_its_result_is_written() -> None:
    followed = Followed(sampler_pb2.SampleRequest(), "alice")
    async with followed.waiting:
        followed.settle()
        followed.keep()
        await asyncio.sleep(0.01)
    other = Followed(sampler_pb2.SampleRequest(), "alice")
    with pytest.raises(TimeoutError):
        async with other.waiting:
            other.keep()
            await asyncio.sleep(1)
