"""Accepted samples: resolved once, and told to their client's poller in order."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Conflict, Internal, Overloaded
from services.common.state import keys
from services.common.state.journal_records import Accepted
from services.gateway.records.sample_journal import Resolution, SampleJournal, Unclaimed
from services.gateway.results.futures import Futures
from tinsmith.v1 import results_pb2

SESSION = ids.sampling_session_id("s", 0)


def result(name: str = "") -> results_pb2.OperationResult:
    found = results_pb2.OperationResult()
    found.sample.sequences.add().tokens.data = name.encode()
    return found


async def accepted(journal: SampleJournal, *seq_ids: int, gateway: str = "gateway-0") -> list[str]:
    return [(await journal.accept(SESSION, seq_id, b"request", gateway)).request_id for seq_id in seq_ids]


async def names(journal: SampleJournal, cursor: int, clone: int = 0) -> tuple[list[str], int]:
    found, newest = await journal.completions(SESSION, clone, cursor)
    return [completion.request_id for completion in found], newest


async def test_a_sample_is_kept_with_its_gateway_until_it_is_resolved(any_redis: redis.asyncio.Redis) -> None:
    journal = SampleJournal(any_redis, gateway_samples=2)
    (request_id,) = await accepted(journal, 10**18)
    assert await journal.accept(SESSION, 10**18, b"request", "gateway-1") == Accepted(
        request_id, to_run=False
    )
    with pytest.raises(Conflict):
        await journal.accept(SESSION, 10**18, b"another", "gateway-0")
    assert await journal.claim(request_id, "gateway-1", "gateway-1") is Unclaimed.SETTLED
    assert await journal.samples_of("gateway-1") == set()
    assert await journal.claim(request_id, "gateway-0", "gateway-0") == b"request"
    assert await journal.claim(request_id, "gateway-0", "gateway-2") == b"request"
    assert await journal.samples_of("gateway-0") == set()
    assert await journal.samples_of("gateway-2") == {request_id}
    assert await journal.publish(request_id, result("first"))
    assert not await journal.publish(request_id, result("second"))
    assert await journal.samples_of("gateway-2") == set()
    assert (await Futures(any_redis).wait(request_id, 0)).result == result("first").SerializeToString()
    await accepted(journal, 1, 2, gateway="gateway-3")
    with pytest.raises(Overloaded):
        await accepted(journal, 3, gateway="gateway-3")


async def test_a_sample_whose_acceptance_is_under_way_stays_on_its_list(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    request_id = ids.request_id(SESSION, 7)
    await any_redis.sadd(keys.gateway_samples("gateway-0"), request_id)
    assert await journal.claim(request_id, "gateway-0", "gateway-0") is Unclaimed.UNKNOWN
    assert await journal.claim(request_id, "gateway-0", "gateway-1") is Unclaimed.UNKNOWN
    assert await journal.samples_of("gateway-0") == {request_id}
    assert await journal.samples_of("gateway-1") == set()
    assert await accepted(journal, 7) == [request_id]
    assert await journal.claim(request_id, "gateway-0", "gateway-1") == b"request"


async def test_what_was_never_accepted_can_be_given_up_and_nothing_else(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    never = ids.request_id(SESSION, 8)
    await any_redis.sadd(keys.gateway_samples("gateway-0"), never)
    (request_id,) = await accepted(journal, 9)
    for name in (never, request_id):
        await journal.give_up(name, "gateway-0")
    assert await journal.samples_of("gateway-0") == {request_id}


async def test_a_repeated_sample_is_on_a_list_although_its_gateway_was_struck_off(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    (request_id,) = await accepted(journal, 10)
    await any_redis.delete(keys.gateway_samples("gateway-0"), keys.SAMPLE_GATEWAYS)
    assert (await journal.accept(SESSION, 10, b"request", "gateway-1")).request_id == request_id
    assert await journal.samples_of("gateway-0") == {request_id}
    assert await journal.gateways() == {"gateway-0"}


async def test_completions_come_in_the_order_of_their_results_with_state_and_size(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    requests = await accepted(journal, 0, 1, 2)
    failure = results_pb2.OperationResult(error=errors.to_pb(Internal("lost")))
    for request_id, outcome in ((requests[2], result("x")), (requests[0], failure), (requests[1], result())):
        await journal.publish(request_id, outcome)
    found, cursor = await journal.completions(SESSION, 0, 0)
    assert [(c.request_id, c.state) for c in found] == [
        (requests[2], "finished"),
        (requests[0], "failed"),
        (requests[1], "finished"),
    ]
    assert found[0].size == result("x").ByteSize()
    assert await journal.completions(SESSION, 0, cursor) == ([], cursor)


async def test_an_answer_that_was_lost_is_given_again_and_an_acknowledged_one_is_not(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    requests = await accepted(journal, *range(4))
    await journal.publish(requests[0], result())
    first, cursor = await names(journal, 0)
    assert await names(journal, 0) == (first, cursor), "the first answer never arrived"
    await journal.publish(requests[1], result())
    second, later = await names(journal, cursor)
    assert (first, second) == (requests[:1], requests[1:2])
    assert later > cursor
    assert await names(journal, later) == ([], later)
    assert (await names(journal, 0))[0] == requests[1:2], "what a cursor acknowledged is forgotten"


async def test_cursors_grow_when_the_clock_goes_back_and_the_list_was_read(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    requests = await accepted(journal, 0, 1)
    await journal.publish(requests[0], result())
    _, cursor = await names(journal, 0)
    ahead = cursor + 10**12
    for member in (f"0:finished:{result().ByteSize()}", "newest"):
        await any_redis.zincrby(keys.completions(SESSION, 0), 10**12, member)
    assert (await names(journal, ahead)) == ([], ahead)
    await journal.publish(requests[1], result())
    found, newest = await names(journal, ahead)
    assert (found, newest > ahead) == (requests[1:], True)


async def test_clones_of_a_sampling_client_are_told_only_their_own(any_redis: redis.asyncio.Redis) -> None:
    journal = SampleJournal(any_redis)
    original, clone = await accepted(journal, 7, 3 * ids.CLONE_SEQ_IDS + 7)
    for request_id in (original, clone):
        await journal.publish(request_id, result())
    assert (await names(journal, 0))[0] == [original]
    assert (await names(journal, 0, clone=3))[0] == [clone]
    assert (await names(journal, 0, clone=1))[0] == []


async def test_a_cancelled_sample_fails_once_and_leaves_its_gateway(any_redis: redis.asyncio.Redis) -> None:
    journal = SampleJournal(any_redis)
    cancelled, finished = await accepted(journal, 0, 1)
    pubsub = any_redis.pubsub()
    await pubsub.subscribe(keys.CANCEL_CHANNEL)
    assert await journal.cancel(cancelled, "given up") is Resolution.NOW
    assert await journal.cancel(cancelled, "given up") is Resolution.BEFORE
    await journal.publish(finished, result())
    assert await journal.cancel(finished, "given up") is Resolution.BEFORE
    assert await journal.cancel(ids.request_id(SESSION, 9), "given up") is Resolution.UNKNOWN
    assert not await journal.publish(cancelled, result("late"))
    view = await Futures(any_redis).wait(cancelled, 0)
    error = results_pb2.OperationResult.FromString(view.result or b"").error
    assert (error.code, error.message) == ("cancelled", "given up")
    assert await journal.samples_of("gateway-0") == set()
    assert await journal.claim(cancelled, "gateway-0", "gateway-0") is Unclaimed.SETTLED
    found, _ = await journal.completions(SESSION, 0, 0)
    assert [(c.request_id, c.state) for c in found] == [(cancelled, "failed"), (finished, "finished")]
    told = []
    async with asyncio.timeout(60):
        while not told:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1)
            told += [message["data"].decode()] if message else []
    await pubsub.aclose()
    assert told == [cancelled]


async def test_a_result_is_published_although_redis_lost_the_acceptance(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    (request_id,) = await accepted(journal, 0)
    await any_redis.flushall()
    assert await journal.resolved([request_id]) == []
    assert await journal.publish(request_id, result("kept"))
    assert await journal.resolved([request_id]) == [request_id]
    assert (await names(journal, 0))[0] == [request_id]


async def test_completions_expire_with_the_results_they_announce(any_redis: redis.asyncio.Redis) -> None:
    journal = SampleJournal(any_redis)
    old, new = await accepted(journal, 0, 1)
    await journal.publish(old, result())
    key = keys.completions(SESSION, 0)
    day = 24 * 3600
    await any_redis.zincrby(key, -(day + 60) * 10**6, f"0:finished:{result().ByteSize()}")
    await journal.publish(new, result())
    assert (await names(journal, 0))[0] == [new]
    assert 0 < await any_redis.ttl(key) <= day


async def test_what_is_pending_of_many_sampling_sessions_is_looked_for_in_those_that_have_some(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = SampleJournal(any_redis)
    requests = await accepted(journal, 1, 2)
    others = [ids.sampling_session_id("other", number) for number in range(2000)]
    await any_redis.config_resetstat()
    assert sorted(await journal.pending([*others[:1000], SESSION, *others[1000:]])) == sorted(requests)
    asked = await any_redis.info("commandstats")
    calls = sum(stats["calls"] for name, stats in asked.items() if not name.startswith("cmdstat_config"))
    assert calls < 300
