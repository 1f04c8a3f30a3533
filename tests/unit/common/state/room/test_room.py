"""What owners hold in Redis is counted to the byte, and bounded before it is accepted."""

from __future__ import annotations

import random

import pytest
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Conflict, InvalidRequest, LimitReached, Overloaded, TooLarge
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.journal_records import JournalLimits
from services.common.state.room import Room, RoomLimits
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.results.fetched import FetchedResults
from tests.unit.common.state.room.given import (
    ENTRY,
    KIB,
    OWNERS,
    batch,
    creation,
    expire,
    held,
    journals_there,
    lead,
    model,
    results_there,
    sampled,
    step,
    there,
)
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import types_pb2


async def test_the_account_is_what_is_there_whatever_happens(any_redis: redis.asyncio.Redis) -> None:
    rng = random.Random(7)
    journal, samples = Journal(any_redis), SampleJournal(any_redis)
    fetched = FetchedResults(any_redis, Room())
    leases, numbers, waiting, known = {}, dict.fromkeys(OWNERS, 0), [], []
    for owner in OWNERS:
        await journal.accept(creation(owner), owner)
        leases[owner] = await lead(any_redis, owner)
        await journal.publish(model(owner), leases[owner].epoch, 0, b"")
        await journal.mark_durable(model(owner), leases[owner].epoch, 0, "0")
    for number in range(400):
        owner = rng.choice(OWNERS)
        what = rng.choice(
            ["batch", "forward", "step", "refused", "again", "sample", "answer", "answer", "fetch"]
        )
        if what in ("batch", "forward", "step", "refused"):
            numbers[owner] += 1
            seq_id = numbers[owner]
            operation = step(owner, seq_id)
            if what in ("batch", "forward"):
                operation = batch(owner, seq_id, rng.randrange(3000), what == "forward")
            elif what == "refused":
                refused = errors.to_pb(InvalidRequest("no" * rng.randrange(100)))
                operation = operation_pb2.Operation(model_id=model(owner), seq_id=seq_id, refused=refused)
            accepted = await journal.accept(operation, owner)
            if accepted.to_run:
                waiting.append((owner, operation))
            else:
                known.append(accepted.request_id)
        elif what == "again":
            with pytest.raises(Conflict):
                await journal.accept(batch(owner, 0), owner)
        elif what == "sample":
            size = rng.randrange(3000)
            session = ids.sampling_session_id(f"of-{owner}", 0)
            accepted = await samples.accept(session, number, b"r" * size, "gateway-0", owner, 5000)
            waiting.append((owner, accepted.request_id))
        elif what == "answer" and waiting:
            owner, asked = waiting.pop(rng.randrange(len(waiting)))
            if isinstance(asked, str):
                await samples.publish(asked, sampled(rng.randrange(3000)))
                known.append(asked)
            else:
                passed = asked.HasField("forward_backward") and asked.forward_backward.forward_only
                lease = leases[owner]
                answer = b"a" * rng.randrange(2000)
                await journal.publish(
                    asked.model_id, lease.epoch, asked.seq_id, answer, replay_passes_over=passed
                )
                if asked.HasField("optim_step"):
                    await journal.mark_durable(asked.model_id, lease.epoch, asked.seq_id, "there")
                known.append(ids.request_id(asked.model_id, asked.seq_id))
        elif what == "fetch" and known:
            await fetched.let_go(rng.sample(known, min(5, len(known))), 60)
        if number % 40 == 0:
            found = await there(any_redis)
            assert {name: await held(any_redis, name) for name in OWNERS} == found
            assert await held(any_redis) == sum(found.values())
            assert await held(any_redis, "*results") == await results_there(any_redis)
            assert await held(any_redis, "*journals") == await journals_there(any_redis)
    await expire(any_redis, 60)
    for _ in range(5):
        numbers["ann"] += 1
        await journal.accept(step("ann", numbers["ann"]), "ann")
    found = await there(any_redis)
    assert {name: await held(any_redis, name) for name in OWNERS} == found
    assert await held(any_redis) == sum(found.values())


async def test_nothing_is_left_of_the_account_of_owners_whose_results_are_gone(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal, samples = Journal(any_redis), SampleJournal(any_redis)
    for number, owner in enumerate(OWNERS):
        accepted = await samples.accept(
            ids.sampling_session_id(f"of-{owner}", 0), number, b"request", "gateway-0", owner
        )
        await samples.publish(accepted.request_id, sampled(10))
    await expire(any_redis, 24 * 3600)
    closed = operation_pb2.Operation(model_id=model("dan"), seq_id=0, refused=types_pb2.Error())
    await journal.accept(closed, "dan")
    fields = {name.decode() for name in await any_redis.hkeys(keys.HELD_BYTES)}
    assert {name.partition("/")[2] or name for name in fields} == {"dan", "*", "*results"}
    assert await held(any_redis, "*results") == await results_there(any_redis)
    assert await any_redis.zcard(keys.EXPIRING_BYTES) == 1


async def test_steps_that_make_no_room_stop_where_there_is_none(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis, room=Room(RoomLimits(total_bytes=64 * KIB)))
    await journal.accept(creation("ann"), "ann")
    lease = await lead(any_redis, "ann")
    await journal.publish(model("ann"), lease.epoch, 0, b"")
    done = 0
    with pytest.raises(LimitReached):
        for seq_id in range(1, 400):
            await journal.accept(step("ann", seq_id), "ann")
            await journal.publish(model("ann"), lease.epoch, seq_id, b"")
            await journal.mark_durable(model("ann"), lease.epoch, seq_id, str(seq_id))
            done = seq_id
    assert 64 <= done < 64 + 64


async def test_a_step_gets_in_where_there_is_no_room_and_makes_some(any_redis: redis.asyncio.Redis) -> None:
    room = Room(RoomLimits(total_bytes=64 * KIB))
    journal = Journal(any_redis, room=room)
    await journal.accept(creation("ann"), "ann")
    lease = await lead(any_redis, "ann")
    await journal.publish(model("ann"), lease.epoch, 0, b"")
    await journal.mark_durable(model("ann"), lease.epoch, 0, "0")
    seq_id = 0
    with pytest.raises(Overloaded):
        while True:
            await journal.accept(batch("ann", seq_id + 1, 8 * KIB), "ann")
            seq_id += 1
            await journal.publish(model("ann"), lease.epoch, seq_id, b"")
    await journal.accept(step("ann", seq_id + 1), "ann")
    await journal.publish(model("ann"), lease.epoch, seq_id + 1, b"")
    await journal.mark_durable(model("ann"), lease.epoch, seq_id + 1, "1")
    await journal.accept(batch("ann", seq_id + 2, 8 * KIB), "ann")
    # But not any number of steps, and no new models.
    room.note_memory(95, 100)
    with pytest.raises(Overloaded, match=r"nearly used up \(95 of 100 bytes\)"):
        for further in range(seq_id + 3, seq_id + 103):
            await journal.accept(step("ann", further), "ann")
    assert (await journal.index(model("ann"), -1)).pending == 1 + 64
    with pytest.raises(Overloaded):
        await journal.accept(creation("ben"), "ben")
    with pytest.raises(Overloaded):
        room.check()
    room.note_memory(50, 100)
    room.check()


async def test_an_erased_journal_is_taken_off_the_account(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis, JournalLimits())
    await journal.accept(creation("ann"), "ann")
    lease = await lead(any_redis, "ann")
    await journal.publish(model("ann"), lease.epoch, 0, b"")
    await journal.accept(batch("ann", 1, 5000), "ann")
    await journal.publish(model("ann"), lease.epoch, 1, b"")
    await journal.close(model("ann"), lease.epoch, b"over")
    assert await held(any_redis, "*journals") == await journals_there(any_redis) > 0
    assert await journal.erase(model("ann"))
    assert await held(any_redis, "*journals") == 0
    assert await held(any_redis, "ann") == 2 * ENTRY


def test_the_room_is_half_of_what_redis_may_use_unless_told() -> None:
    room = Room()
    assert room.total == 4 << 30
    room.note_memory(10, 1000)
    assert room.bounds == (500, 500)
    assert Room(RoomLimits(total_bytes=100, owner_bytes=10)).bounds == (100, 10)


async def test_with_no_memory_left_redis_refuses_what_is_new_and_not_results(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal, samples = Journal(any_redis), SampleJournal(any_redis)
    await journal.accept(creation("ann"), "ann")
    lease = await lead(any_redis, "ann")
    session = ids.sampling_session_id("of-ann", 0)
    sample = await samples.accept(session, 0, b"r", "gateway-0", "ann")
    await any_redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            await journal.accept(step("ann", 1), "ann")
        await journal.publish(model("ann"), lease.epoch, 0, b"done")
        await journal.mark_durable(model("ann"), lease.epoch, 0, "0")
        assert await samples.publish(sample.request_id, sampled(10))
        assert (await lead(any_redis, "ann")).epoch > lease.epoch
    finally:
        await any_redis.config_set("maxmemory", 0)


async def test_what_can_never_fit_is_refused_for_good(any_redis: redis.asyncio.Redis) -> None:
    room = Room(RoomLimits(total_bytes=100 * KIB))
    room.check_fits(50 * KIB)
    samples = SampleJournal(any_redis, room=room)
    with pytest.raises(TooLarge, match="may hold 51200"):
        await samples.accept(ids.sampling_session_id("s", 0), 0, b"r", "gateway-0", "ann", 51 * KIB)
    assert await samples.samples_of("gateway-0") == set()
    with pytest.raises(TooLarge):
        Room(RoomLimits(owner_bytes=KIB)).check_fits(2 * KIB)
