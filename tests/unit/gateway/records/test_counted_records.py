"""Records that stay count in what their owner may hold of Redis, until they are forgotten."""

from __future__ import annotations

import time

import msgspec
import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import LimitReached
from services.common.state import keys
from services.common.state.room import Room, RoomLimits
from services.gateway.access.limits import Limits
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.model import ModelRecord
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from services.gateway.retention.forget import Forgetting
from services.gateway.sessions.sessions import NewSession, Sessions

KIB = 1024
LARGE = NewSession(user_metadata={"x": "y" * 60 * KIB})


def sessions(client: redis.asyncio.Redis) -> Sessions:
    room = Room(RoomLimits(total_bytes=KIB * KIB))
    return Sessions(Stores.over(client).sessions, Limits(), RedoLog(client), room)


async def held(client: redis.asyncio.Redis, owner: str = "*") -> int:
    return int(await client.hget(keys.HELD_BYTES, owner) or 0)


async def test_records_of_one_owner_leave_room_for_others(any_redis: redis.asyncio.Redis) -> None:
    made = sessions(any_redis)
    first = await made.create("ann", LARGE, "key")
    with pytest.raises(LimitReached, match=r"records.*--state-bytes"):
        for _ in range(100):
            await made.create("ann", LARGE, None)
    assert 400 * KIB < await held(any_redis, "ann") <= 512 * KIB
    # Who holds nothing has room, and a repeated request is none.
    await made.create("ben", LARGE, None)
    before = await held(any_redis, "ann")
    assert await made.create("ann", LARGE, "key") == first
    assert await held(any_redis, "ann") == before


async def test_what_is_counted_of_a_session_and_all_in_it_goes_with_it(
    any_redis: redis.asyncio.Redis,
) -> None:
    stores, made = Stores.over(any_redis), sessions(any_redis)
    session_id = await made.create("ann", NewSession(project_id="p"), None)
    await stores.sessions.set_project(await made.open("ann", session_id), "q")
    of_session = await held(any_redis, "ann")
    for _ in range(2):
        for number in range(3):
            record = SamplingSessionRecord(
                sampling_session_id=ids.sampling_session_id(session_id, number),
                session_id=session_id,
                owner="ann",
                base_model="org/base",
            )
            assert await stores.sampling_sessions.create_if_absent(record) == record
        model = ModelRecord(
            model_id=ids.model_id(session_id, 0),
            session_id=session_id,
            owner="ann",
            base_model="org/base",
            lora_rank=8,
            created_at=1.0,
        )
        await stores.models.create_if_absent(model)
    assert await held(any_redis, "ann") > of_session + 4 * 512
    assert await held(any_redis, "ann") < of_session + 4 * KIB
    # A number that is used again is counted once.
    before = await held(any_redis, "ann")
    await stores.models.drop(model)
    assert await held(any_redis, "ann") < before
    assert await stores.models.count("ann") == 0
    await stores.models.create_if_absent(model)
    assert await held(any_redis, "ann") == before

    await made.finish("ann", session_id, "success", "")
    await Forgetting(any_redis, stores, "gateway-0", forget_after=10).sweep(time.time() + 100)
    assert await stores.sessions.get(session_id) is None
    assert (await held(any_redis, "ann"), await held(any_redis)) == (0, 0)


async def test_a_checkpoint_counts_as_it_is_and_no_more_once_it_is_deleted(
    any_redis: redis.asyncio.Redis,
) -> None:
    store = Stores.over(any_redis).checkpoints

    def saved(version: int, note: str) -> CheckpointRecord:
        return CheckpointRecord(
            model_id="session:train:0",
            checkpoint_id="weights/a",
            owner="ann",
            kind="training",
            version=version,
            size_bytes=1,
            created_at=1.0,
            user_metadata={"note": note},
            base_model="org/base",
            lora_rank=8,
        )

    first, again = saved(1, "x" * 30 * KIB), saved(2, "x" * 10 * KIB)
    for _ in range(2):
        await store.put(first)
        assert 30 * KIB < await held(any_redis, "ann") < 32 * KIB
    await store.put(again)
    await store.put(first)
    assert 10 * KIB < await held(any_redis, "ann") < 12 * KIB
    shorter = msgspec.structs.replace(again, user_metadata={})
    assert await store.change(again, shorter)
    assert not await store.change(again, first)
    assert 512 < await held(any_redis, "ann") < KIB
    assert not await store.remove(again)
    assert await store.remove(shorter)
    assert not await store.remove(shorter)
    assert (await held(any_redis, "ann"), await held(any_redis)) == (0, 0)


async def test_what_has_expired_keeps_nobody_out_also_where_nobody_else_does_anything(
    any_redis: redis.asyncio.Redis,
) -> None:
    full, over = KIB * KIB, f"{int(time.time()) - 60}/ann"
    await any_redis.hset(keys.HELD_BYTES, mapping={"ann": full, "*": full, over: full})
    await any_redis.zadd(keys.EXPIRING_BYTES, {over: time.time() - 60})
    assert await sessions(any_redis).create("ann", NewSession(), None)
    assert await held(any_redis, "ann") == await held(any_redis) < KIB


async def test_sampling_sessions_that_are_forgotten_count_no_more_while_their_session_is_kept(
    any_redis: redis.asyncio.Redis,
) -> None:
    stores, made = Stores.over(any_redis), sessions(any_redis)
    session_id = await made.create("ann", NewSession(), None)
    of_session = await held(any_redis, "ann")
    model_id = ids.model_id(session_id, 0)
    model = ModelRecord(
        model_id=model_id,
        session_id=session_id,
        owner="ann",
        base_model="org/base",
        lora_rank=8,
        created_at=1.0,
    )
    await stores.models.create_if_absent(model)
    with_model = await held(any_redis, "ann")
    # A checkpoint that is kept.
    await any_redis.hset(keys.checkpoints(model_id), "weights/kept", "{}")
    sampler = SamplingSessionRecord(
        sampling_session_id=ids.sampling_session_id(session_id, 0),
        session_id=session_id,
        owner="ann",
        base_model="org/base",
    )
    await stores.sampling_sessions.create_if_absent(sampler)
    await made.finish("ann", session_id, "success", "")
    for _ in range(2):
        await Forgetting(any_redis, stores, "gateway-0", forget_after=10).sweep(time.time() + 1000)
        assert await stores.sampling_sessions.get(sampler.sampling_session_id) is None
        assert await stores.sessions.get(session_id) is not None
        assert await held(any_redis, "ann") == with_model > of_session
