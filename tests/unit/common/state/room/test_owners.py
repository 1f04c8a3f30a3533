"""An owner who fetches nothing, fails or waits is stopped alone, and not by the memory."""

from __future__ import annotations

import pytest
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import InvalidRequest, LimitReached, Overloaded
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.room import Room, RoomLimits
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.results.fetched import FetchedResults
from tests.unit.common.state.room.given import (
    KIB,
    batch,
    creation,
    expire,
    held,
    lead,
    model,
    sampled,
    step,
)
from tinsmith.internal.v1 import operation_pb2


async def test_results_that_nobody_fetches_stop_their_owner_and_not_the_memory(
    any_redis: redis.asyncio.Redis,
) -> None:
    room = Room(RoomLimits(total_bytes=8 * 1024 * KIB))
    samples = SampleJournal(any_redis, room=room)
    session = ids.sampling_session_id("of-ann", 0)
    before = (await any_redis.info("memory"))["used_memory"]
    accepted = []
    with pytest.raises(Overloaded, match="Results go 600 s after they are fetched"):
        for seq_id in range(5000):
            one = await samples.accept(session, seq_id, b"r", "gateway-0", "ann", 512 * KIB)
            accepted.append(one.request_id)
            await samples.publish(one.request_id, sampled(500 * KIB))
    assert 4 <= len(accepted) <= 8
    assert (await any_redis.info("memory"))["used_memory"] - before < 10 * 1024 * KIB
    # The refused one is on no list, and others have room.
    assert await samples.samples_of("gateway-0") == set()
    other = ids.sampling_session_id("of-ben", 0)
    await samples.accept(other, 0, b"r", "gateway-0", "ben", 512 * KIB)
    # What was fetched goes, and makes room.
    fetched = FetchedResults(any_redis, room)
    await fetched.let_go(accepted, room.limits.fetched_life)
    await expire(any_redis, 600)
    await samples.accept(session, 5000, b"r", "gateway-0", "ann", 512 * KIB)


async def test_an_owner_has_a_bound_of_its_own(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis, room=Room(RoomLimits(owner_bytes=10 * KIB)))
    await journal.accept(creation("ann"), "ann")
    await journal.accept(batch("ann", 1, 8 * KIB), "ann")
    with pytest.raises(Overloaded, match="at most 10240"):
        await journal.accept(batch("ann", 2, 8 * KIB), "ann")
    # What is accepted already is so again, also after Redis has lost it.
    await journal.accept(batch("ann", 1, 8 * KIB), "ann")
    await journal.accept(batch("ann", 2, 8 * KIB), "ann", accepted_before=True)


async def test_an_owner_may_have_so_many_operations_waiting_over_all_its_models(
    any_redis: redis.asyncio.Redis,
) -> None:
    def of(number: int, seq_id: int) -> operation_pb2.Operation:
        operation = batch("ann", seq_id)
        operation.model_id = ids.model_id("of-ann", number)
        return operation

    async def waiting(owner: str) -> int:
        return int(await any_redis.hget(keys.WAITING_OPERATIONS, owner) or 0)

    journal = Journal(any_redis, room=Room(RoomLimits(owner_operations=2)))
    await journal.accept(creation("ann"), "ann")
    lease = await lead(any_redis, "ann")
    for _ in range(2):
        await journal.publish(model("ann"), lease.epoch, 0, b"")
    assert await waiting("ann") == 0
    for accepted in (of(0, 2), of(1, 1)):
        await journal.accept(accepted, "ann")
    for refused in (of(0, 3), of(1, 2), of(2, 1), step("ann", 3)):
        with pytest.raises(LimitReached, match=r"2 operations that wait.*--owner-operations") as caught:
            await journal.accept(refused, "ann")
        assert caught.value.about == {"limit": "--owner-operations"}
    # What was accepted is so again; what one that waits waits for gets in, and so do others' operations.
    await journal.accept(of(0, 2), "ann")
    await journal.accept(of(0, 1), "ann")
    assert await waiting("ann") == 3
    await journal.accept(creation("ben"), "ben")
    assert await waiting("ben") == 1

    for seq_id in (1, 2):
        await journal.publish(model("ann"), lease.epoch, seq_id, b"")
    assert await waiting("ann") == 1
    await journal.accept(of(2, 1), "ann")
    lease = await lead(any_redis, "ben")
    await journal.publish(model("ben"), lease.epoch, 0, b"")
    assert {name.decode() for name in await any_redis.hkeys(keys.WAITING_OPERATIONS)} == {"ann"}

    # A Redis that lost its last second may count fewer than there are.
    await journal.accept(step("ben", 1), "ben")
    await any_redis.hdel(keys.WAITING_OPERATIONS, "ben")
    await journal.publish(model("ben"), lease.epoch, 1, b"")
    assert not await any_redis.hexists(keys.WAITING_OPERATIONS, "ben")


def refused(owner: str, seq_id: int, why: str = "no" * 500) -> operation_pb2.Operation:
    error = errors.to_pb(InvalidRequest(why))
    return operation_pb2.Operation(model_id=model(owner), seq_id=seq_id, refused=error)


async def test_failures_that_nobody_fetches_stop_their_owner_and_no_model_waits_for_one(
    any_redis: redis.asyncio.Redis,
) -> None:
    room = Room(RoomLimits(total_bytes=64 * KIB))
    journal = Journal(any_redis, room=room)
    await journal.accept(creation("ann"), "ann")
    seq_id, heard = 0, []
    with pytest.raises(LimitReached, match="send this again later"):
        while seq_id < 200:
            seq_id += 1
            heard.append((await journal.accept(refused("ann", seq_id), "ann")).request_id)
    assert await held(any_redis) <= 32 * KIB
    # Others have room, and the operations behind the one whose failure had none wait for nothing.
    await journal.accept(creation("ben"), "ben")
    await journal.accept(step("ann", seq_id + 1), "ann")
    index = await journal.index(model("ann"), -1)
    assert (index.floor, index.entries[-1].seq_id) == (seq_id + 1, seq_id + 1)
    # Nothing is kept of it: it is heard when there is room.
    with pytest.raises(LimitReached):
        await journal.accept(refused("ann", seq_id), "ann")
    assert not await any_redis.exists(keys.future(model("ann"), seq_id))
    await FetchedResults(any_redis, room).let_go(heard, 60)
    await expire(any_redis, 60)
    await journal.accept(refused("ann", seq_id), "ann")
    kept = await any_redis.hget(keys.future(model("ann"), seq_id), "result")
    assert b"nonono" in kept


async def test_a_creation_that_was_refused_where_there_was_no_room_to_say_why_says_so_later(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis, room=Room(RoomLimits(total_bytes=64 * KIB)))
    await any_redis.hset(keys.HELD_BYTES, mapping={"ann": 64 * KIB, "*": 64 * KIB})
    with pytest.raises(LimitReached):
        await journal.accept(refused("ann", 0), "ann")
    await any_redis.delete(keys.HELD_BYTES)
    # By now it would be accepted, but its number is used up.
    await journal.accept(creation("ann"), "ann")
    assert b"nonono" in await any_redis.hget(keys.future(model("ann"), 0), "result")


async def test_requests_to_a_model_that_is_closed_stop_their_owner_and_not_the_memory(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis, room=Room(RoomLimits(total_bytes=64 * KIB)))
    await journal.accept(creation("ann"), "ann")
    lease = await lead(any_redis, "ann")
    await journal.publish(model("ann"), lease.epoch, 0, b"", closing=b"over")
    with pytest.raises(LimitReached):
        for seq_id in range(1, 200):
            await journal.accept(step("ann", seq_id), "ann")
    assert await held(any_redis) <= 32 * KIB
