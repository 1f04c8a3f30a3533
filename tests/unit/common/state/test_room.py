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
from services.gateway.dispatch.leases import Lease, Leases
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.results.fetched import FetchedResults
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2, training_pb2, types_pb2

ENTRY = 512
KIB = 1024
OWNERS = ("ann", "ben", "cleo")


def model(owner: str) -> str:
    return ids.model_id(f"of-{owner}", 0)


def creation(owner: str) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        model_id=model(owner), seq_id=0, create_model=operation_pb2.CreateModel(base_model="org/base")
    )


def batch(owner: str, seq_id: int, nbytes: int = 100, forward_only: bool = False) -> operation_pb2.Operation:
    forward = training_pb2.ForwardBackward(loss_fn="x" * nbytes, forward_only=forward_only)
    return operation_pb2.Operation(model_id=model(owner), seq_id=seq_id, forward_backward=forward)


def step(owner: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.OptimStep(adam=training_pb2.AdamParams(learning_rate=0.1))
    return operation_pb2.Operation(model_id=model(owner), seq_id=seq_id, optim_step=made)


def sampled(nbytes: int) -> results_pb2.OperationResult:
    result = results_pb2.OperationResult()
    result.sample.sequences.add().tokens.data = b"x" * nbytes
    return result


async def lead(client: redis.asyncio.Redis, owner: str) -> Lease:
    lease = await Leases(client, "gateway-0").acquire(model(owner))
    assert isinstance(lease, Lease)
    return lease


async def held(client: redis.asyncio.Redis, owner: str = "*") -> int:
    return int(await client.hget(keys.HELD_BYTES, owner) or 0)


async def results_there(client: redis.asyncio.Redis) -> int:
    """What results take, found by looking at all futures."""
    names = [name async for name in client.scan_iter(f"{keys.PREFIX}:future:*")]
    futures = [await client.hgetall(name) for name in names]
    return sum(len(future[b"result"]) + ENTRY for future in futures if future[b"state"] == b"done")


async def journals_there(client: redis.asyncio.Redis) -> int:
    """What operations in journals take, found by looking at all of them."""
    journals = [await client.hvals(keys.journal(model(owner))) for owner in OWNERS]
    return sum(len(payload) for journal in journals for payload in journal)


async def there(client: redis.asyncio.Redis) -> dict[str, int]:
    """What each owner holds, found by looking at everything."""
    found = dict.fromkeys(OWNERS, 0)
    for owner in OWNERS:
        payloads = await client.hvals(keys.journal(model(owner)))
        found[owner] += sum(len(payload) for payload in payloads)
    async for name in client.scan_iter(f"{keys.PREFIX}:future:*"):
        future = await client.hgetall(name)
        if future[b"state"] == b"pending":
            size = int(future.get(b"held", ENTRY))
        else:
            size = len(future[b"result"]) + ENTRY
        found[future[b"owner"].decode()] += size
    return found


async def expire(client: redis.asyncio.Redis, seconds: int) -> None:
    """Has results go that have at most so many seconds left, as if these had passed."""
    async for name in client.scan_iter(f"{keys.PREFIX}:future:*"):
        if 0 <= await client.ttl(name) <= seconds:
            await client.delete(name)
    now = (await client.time())[0]
    for slot, at in await client.zrange(keys.EXPIRING_BYTES, 0, -1, withscores=True):
        if at <= now + seconds + 600:
            await client.zadd(keys.EXPIRING_BYTES, {slot: 1})


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
