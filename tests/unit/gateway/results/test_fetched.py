"""Results that were fetched stay for an answer that was lost, and then go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract import ids
from services.common.state import keys
from services.common.state.redis_client import connect
from services.common.state.room import Room, RoomLimits
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.results.fetched import FetchedResults
from tests.conftest import redis_server, redis_server_kinds
from tests.unit.gateway.redis_calls import counted
from tinsmith.v1 import results_pb2, sampling_pb2

SESSION = ids.sampling_session_id("s", 0)


async def accept(journal: SampleJournal, *numbers: int) -> list[str]:
    return [(await journal.accept(SESSION, n, b"request", "gateway-0", "ann")).request_id for n in numbers]


def result() -> results_pb2.OperationResult:
    return results_pb2.OperationResult(sample=sampling_pb2.SampleResult())


async def test_fetched_results_go_soon_and_pending_samples_never(any_redis: redis.asyncio.Redis) -> None:
    journal, fetched = SampleJournal(any_redis), FetchedResults(any_redis, Room())
    done, pending = await accept(journal, 0, 1)
    await journal.publish(done, result())
    await fetched.let_go([done, pending, ids.request_id(SESSION, 5)], 60)
    assert 0 < await any_redis.ttl(keys.future(SESSION, 0)) <= 60
    assert await any_redis.ttl(keys.future(SESSION, 1)) == -1
    assert await any_redis.exists(keys.future(SESSION, 5)) == 0
    # Asked for once more, it does not stay longer for that.
    await fetched.let_go([done], 600)
    assert await any_redis.ttl(keys.future(SESSION, 0)) <= 60


async def test_a_result_that_its_client_had_before_it_was_written_goes_once_it_is(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal, unwritten = SampleJournal(any_redis), set[str]()
    fetched = FetchedResults(any_redis, Room(RoomLimits(fetched_life=300)), unwritten.__contains__)
    requests = await accept(journal, 0, 1)
    unwritten.update(requests)
    fetched.note(requests[0])
    await fetched.let_go([requests[1]], 60)
    await fetched.start()
    await asyncio.sleep(1.5)
    for request_id in requests:
        await journal.publish(request_id, result())
    unwritten.clear()
    async with asyncio.timeout(60):
        while any(not 0 < life <= 300 for life in (await lives(any_redis))[:2]):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await fetched.stop()


async def test_a_result_that_its_client_has_acknowledged_is_not_let_go_again(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal, fetched = SampleJournal(any_redis), FetchedResults(any_redis, Room())
    (request_id,) = await accept(journal, 0)
    await journal.publish(request_id, result())
    fetched.note(request_id)
    await fetched.let_go([request_id], 60)
    with counted(SESSION) as seen:
        await fetched.start()
        await asyncio.sleep(1.5)
        await fetched.stop()
    assert not seen


async def test_what_was_fetched_is_not_told_as_a_completion_any_more(any_redis: redis.asyncio.Redis) -> None:
    journal, fetched = SampleJournal(any_redis), FetchedResults(any_redis, Room())
    clone = ids.CLONE_SEQ_IDS + 2
    requests = await accept(journal, 0, 1, clone)
    for request_id in requests:
        await journal.publish(request_id, result())
    await fetched.let_go([requests[0], requests[2]], 60)
    assert [one.request_id for one in (await journal.completions(SESSION, 0, 0))[0]] == [requests[1]]
    assert (await journal.completions(SESSION, 1, 0))[0] == []
    # A client that never reads completions leaves none behind.
    await fetched.let_go([requests[1]], 60)
    assert await any_redis.zrange(keys.completions(SESSION, 0), 0, -1) == [b"newest"]


async def test_hundreds_of_results_go_in_a_few_steps(redis_client: redis.asyncio.Redis) -> None:
    journal = SampleJournal(redis_client)
    fetched = FetchedResults(redis_client, Room(RoomLimits(fetched_life=300)))
    requests = await accept(journal, *range(600))
    for request_id in requests:
        await journal.publish(request_id, result())
    before = (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    for request_id in requests:
        fetched.note(request_id)
    await fetched.start()
    async with asyncio.timeout(60):
        while len([life for life in await lives(redis_client) if 0 < life <= 300]) < 600:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await fetched.stop()
    # One by its text, which Redis did not know.
    assert (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"] - before <= 4


async def lives(client: redis.asyncio.Redis) -> list[int]:
    pipeline = client.pipeline(transaction=False)
    for number in range(600):
        pipeline.ttl(keys.future(SESSION, number))
    return await pipeline.execute()


async def test_what_was_fetched_while_redis_was_away_goes_when_it_is_back(tmp_path: Path) -> None:
    server = redis_server_kinds()["valkey"]
    with redis_server(server, tmp_path) as url:
        client = connect(url)
        journal = SampleJournal(client)
        fetched = FetchedResults(client, Room(RoomLimits(fetched_life=300)))
        for request_id in await accept(journal, 0, 1):
            await journal.publish(request_id, result())
    fetched.note(ids.request_id(SESSION, 0))
    with pytest.raises(RedisError):
        await fetched._flush()
    fetched.note(ids.request_id(SESSION, 1))
    with redis_server(server, tmp_path):
        await fetched._flush()
        assert all(0 < life <= 300 for life in (await lives(client))[:2])
        await client.aclose()
