"""What owners used is counted once, with the result that it came to."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.journal_records import (
    PREFILLED,
    SAMPLED,
    SAVED,
    SAVED_BYTES,
    STORED,
    TRAINED,
    USE_LIFE_S,
    Published,
    Use,
)
from services.common.state.poison import Poison
from services.gateway.dispatch.used import used_by
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.session import SessionRecord, SessionStore
from services.gateway.records.usage import UsageStore, Used, day_of
from services.gateway.sampling.used import used_by as used_by_sample
from tinsmith.internal.v1 import operation_pb2, sampler_pb2
from tinsmith.v1 import checkpoints_pb2, results_pb2, sampling_pb2, training_pb2, types_pb2

MODEL = ids.model_id("s", 0)
SESSION = ids.sampling_session_id("s", 0)


def tokens(count: int) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[count], data=bytes(4 * count))


def operation(**kind: object) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        model_id=MODEL, seq_id=1, origin=operation_pb2.Origin(owner="alice"), **kind
    )


def batch(*counts: int) -> operation_pb2.Operation:
    data = [training_pb2.Datum(tokens=tokens(count)) for count in counts]
    return operation(forward_backward=training_pb2.ForwardBackward(data=data))


async def used(client: redis.asyncio.Redis, owner: str = "alice") -> dict[tuple[str, ...], int]:
    # The day may have changed since it was counted.
    days = [day_of(time.time() - 60), day_of(time.time())]
    found = await UsageStore(client).used(owner, sorted(set(days)))
    return {(one.kind, one.base_model, one.session, one.run): one.amount for one in found}


async def test_an_operation_is_counted_when_its_result_is_written_and_never_again(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    creation = operation_pb2.Operation(
        model_id=MODEL, seq_id=0, create_model=operation_pb2.CreateModel(base_model="org/base")
    )
    await journal.accept(creation, "alice")
    made = batch(5, 7)
    await journal.accept(made, "alice")
    use = used_by(made, results_pb2.OperationResult(forward_backward=training_pb2.ForwardBackwardResult()))
    await any_redis.set(keys.epoch(MODEL), 2)
    # A gateway that lost the model writes nothing and counts nothing.
    assert await journal.publish(MODEL, 1, 1, b"r", use=use) is Published.STALE_EPOCH
    assert await used(any_redis) == {}
    assert await journal.publish(MODEL, 2, 1, b"r", use=use) is Published.PUBLISHED
    # Its answer was lost, so it is written again; or the operation was replayed.
    assert await journal.publish(MODEL, 2, 1, b"r", use=use) is not Published.PUBLISHED
    assert await used(any_redis) == {(TRAINED, "org/base", "s", MODEL): 12}
    (day,) = await any_redis.keys(keys.used("alice", "*"))
    assert 0 < await any_redis.ttl(day) <= USE_LIFE_S


async def test_a_sample_is_counted_once_and_a_cancelled_one_never(any_redis: redis.asyncio.Redis) -> None:
    journal = SampleJournal(any_redis)
    request = sampler_pb2.SampleRequest(prompt=tokens(10))
    session = SamplingSessionRecord(
        sampling_session_id=SESSION,
        session_id="s",
        owner="alice",
        base_model="org/base",
        model_id="",
        version=0,
    )
    sequences = [sampling_pb2.SampledSequence(tokens=tokens(count)) for count in (3, 4)]
    sample = sampling_pb2.SampleResult(sequences=sequences, prompt_cache_hit_tokens=4)
    result = results_pb2.OperationResult(sample=sample)
    use = used_by_sample(request, session, result)
    first = (await journal.accept(SESSION, 1, b"request", "gateway-0")).request_id
    assert await journal.publish(first, result, use)
    assert not await journal.publish(first, result, use)
    second = (await journal.accept(SESSION, 2, b"request", "gateway-0")).request_id
    await journal.cancel(second, "enough")
    assert not await journal.publish(second, result, use)
    names = {"prefilled": 6, "cached": 4, "sampled": 7}
    assert await used(any_redis) == {(kind, "org/base", "s", ""): count for kind, count in names.items()}


async def test_of_too_many_runs_the_rest_is_counted_together(any_redis: redis.asyncio.Redis) -> None:
    journal = SampleJournal(any_redis)
    for number in range(205):
        name = (await journal.accept(SESSION, number, b"request", "gateway-0")).request_id
        use = Use("alice", f"s{number}", "", "org/base", {SAMPLED: 2})
        assert await journal.publish(name, results_pb2.OperationResult(), use)
    found = await used(any_redis)
    assert len(found) == 201
    assert found[SAMPLED, "org/base", "", ""] == 10
    assert sum(found.values()) == 410


async def test_hours_of_storage_are_noted_once_each(any_redis: redis.asyncio.Redis) -> None:
    await any_redis.sadd(keys.OWNERS, "alice", "bob")
    member = f"tinker://{MODEL}/weights/a@1"
    await any_redis.hset(keys.owner_checkpoint_bytes("alice"), mapping={member: 500, "total": 500})
    store = UsageStore(any_redis)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    for at in (noon, noon + 1200, noon + 3600):
        await store.note_stored(at)
    found = await store.used("alice", [day_of(noon)])
    assert found == [Used("alice", day_of(noon), STORED, "", "", "", 2 * 500)]
    assert await store.used("bob", [day_of(noon)]) == []
    assert await store.stored("alice") == {"s": (1, 500)}


async def test_an_owner_is_forgotten_with_its_last_session_and_the_last_day_that_is_kept(
    any_redis: redis.asyncio.Redis,
) -> None:
    store, now = UsageStore(any_redis), time.time()
    await any_redis.sadd(keys.OWNERS, "alice", "bob", "carol")
    await any_redis.zadd(keys.owner_sessions("alice"), {"s": now})
    first_day = day_of(now - USE_LIFE_S).isoformat()
    await any_redis.hset(keys.used("bob", first_day), "sampled\norg/base\n\n", 1)
    await store.note_stored(now)
    assert await store.owners() == ["alice", "bob"]
    await any_redis.delete(keys.used("bob", first_day))
    await store.note_stored(now)
    assert await store.owners() == ["alice"]


async def test_an_owner_who_comes_back_is_not_forgotten_at_whatever_moment(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = UsageStore(any_redis), any_redis.execute_command

    async def after_each_step(*args: Any, **options: Any) -> Any:
        found = await asked(*args, **options)
        with monkeypatch.context() as plain:
            plain.setattr(any_redis, "execute_command", asked)
            await store.forget("alice", time.time())
        return found

    sessions = SessionStore(any_redis, Poison(any_redis))
    monkeypatch.setattr(any_redis, "execute_command", after_each_step)
    await sessions.create(SessionRecord(session_id="s", owner="alice", created_at=1.0, last_heartbeat=1.0))
    assert await store.owners() == ["alice"]


def test_only_what_was_done_counts() -> None:
    failed = results_pb2.OperationResult(error=types_pb2.Error(code="internal"))
    assert used_by(batch(5), failed).amounts == {}
    named = operation(save_for_sampler=operation_pb2.SaveForSampler(checkpoint_id="sampler_weights/a"))
    unnamed = operation(save_for_sampler=operation_pb2.SaveForSampler(sampling_session_id=SESSION))
    saved = results_pb2.OperationResult(save_for_sampler=checkpoints_pb2.SaveForSamplerResult(size_bytes=9))
    assert used_by(named, saved).amounts == {SAVED: 1, SAVED_BYTES: 9}
    assert used_by(unnamed, saved).amounts == {}
    assert Use("", "s", "r", "b", {PREFILLED: 1}).args[3:] == []
