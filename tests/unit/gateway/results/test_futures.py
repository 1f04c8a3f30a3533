"""Waiting for results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest
from services.common.state import keys
from services.common.state.journal_records import Published
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.results.futures import Futures, FutureView
from tinsmith.v1 import results_pb2

SESSION = ids.sampling_session_id("s", 0)


def result(name: str = "") -> results_pb2.OperationResult:
    found = results_pb2.OperationResult()
    found.sample.sequences.add().tokens.data = name.encode()
    return found


RESULT = result()


@pytest.fixture
async def futures(redis_client: redis.asyncio.Redis) -> AsyncIterator[Futures]:
    found = Futures(redis_client)
    await found.start()
    yield found
    await found.stop()


async def sample(client: redis.asyncio.Redis, seq_id: int) -> str:
    journal = SampleJournal(client)
    return (await journal.accept(SESSION, seq_id, b"request", "gateway-0", owner="ann")).request_id


async def test_a_waiter_is_woken_by_the_result_and_can_fetch_it_again(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await SampleJournal(redis_client).publish(request_id, RESULT)
    async with asyncio.timeout(8):
        view = await waiting
    assert (view.state, view.result) == ("done", RESULT.SerializeToString())
    assert await futures.wait(request_id, 10) == view


async def test_what_this_process_resolves_a_future_with_needs_no_second_look(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await asyncio.sleep(0.05)

    async def publish() -> Published:
        return Published.PUBLISHED

    assert await futures.resolve(request_id, b"a result", publish) is Published.PUBLISHED
    async with asyncio.timeout(8):
        view = await waiting
    assert (view.state, view.result) == ("done", b"a result")


class Looks:
    """Counts how often futures are looked at."""

    def __init__(self, futures: Futures, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        look = futures._look

        async def counted(request_id: str) -> FutureView:
            self.number += 1
            return await look(request_id)

        monkeypatch.setattr(futures, "_look", counted)


async def test_nobody_looks_at_what_this_process_is_about_to_resolve(
    redis_client: redis.asyncio.Redis, futures: Futures, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, request_id = Looks(futures, monkeypatch), await sample(redis_client, 1)
    futures.expect(request_id)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await asyncio.sleep(0.05)

    async def publish() -> Published:
        return Published.PUBLISHED

    await futures.resolve(request_id, b"a result", publish)
    async with asyncio.timeout(8):
        assert (await waiting).result == b"a result"
    assert looks.number == 0
    # How it is now is looked at, and so is what becomes of it once the wait is over.
    assert (await futures.wait(request_id, 0)).state == "pending"
    assert (await futures.wait(request_id, 0.05)).state == "pending"
    assert looks.number == 2


async def test_who_asks_first_for_what_this_process_has_resolved_needs_no_look(
    redis_client: redis.asyncio.Redis, futures: Futures, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, request_id = Looks(futures, monkeypatch), await sample(redis_client, 1)

    async def publish() -> Published:
        await SampleJournal(redis_client).publish(request_id, RESULT)
        return Published.PUBLISHED

    await futures.resolve(request_id, RESULT.SerializeToString(), publish)
    first = await futures.wait(request_id, 0)
    assert looks.number == 0
    # An answer may be lost on its way.
    assert await futures.wait(request_id, 0) == first
    assert looks.number == 1


async def test_what_this_process_did_not_resolve_a_future_with_is_not_handed_out_later(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)

    async def publish_after_another() -> Published:
        await SampleJournal(redis_client).publish(request_id, RESULT)
        return Published.NOT_PENDING

    await futures.resolve(request_id, b"too late", publish_after_another)
    assert (await futures.wait(request_id, 0)).result == RESULT.SerializeToString()


async def test_what_may_be_told_first_is_had_by_all_who_ask_while_it_is_written(
    redis_client: redis.asyncio.Redis, futures: Futures, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, request_id = Looks(futures, monkeypatch), await sample(redis_client, 1)
    result, may_write = RESULT.SerializeToString(), asyncio.Event()

    async def publish() -> Published:
        await may_write.wait()
        await SampleJournal(redis_client).publish(request_id, RESULT)
        return Published.PUBLISHED

    futures.expect(request_id)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await asyncio.sleep(0.05)
    resolving = asyncio.create_task(futures.resolve(request_id, result, publish, told_first=True))
    async with asyncio.timeout(8):
        assert (await waiting).result == result
    assert (await futures.wait(request_id, 10)).result == result
    assert looks.number == 0
    assert not resolving.done()
    may_write.set()
    assert await resolving is Published.PUBLISHED
    # From now on it is what was written.
    futures.expect_no_longer(request_id)
    assert (await futures.wait(request_id, 10)).result == result
    assert looks.number == 1


async def test_what_was_told_first_and_not_written_is_told_no_more(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)

    async def publish() -> Published:
        raise ConnectionError("Redis is away")

    with pytest.raises(ConnectionError):
        await futures.resolve(request_id, b"a result", publish, told_first=True)
    assert (await futures.wait(request_id, 0)).state == "pending"


async def test_who_waits_looks_when_this_process_will_not_resolve_it(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)
    futures.expect(request_id)
    # Another process resolves it, and the word is heard before anybody waits.
    await SampleJournal(redis_client).publish(request_id, RESULT)
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    futures.expect_no_longer(request_id)
    async with asyncio.timeout(8):
        assert (await waiting).result == RESULT.SerializeToString()


async def test_a_result_that_came_too_late_is_not_handed_out(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await asyncio.sleep(0.05)

    async def publish_after_another() -> Published:
        await SampleJournal(redis_client).publish(request_id, RESULT)
        return Published.NOT_PENDING

    await futures.resolve(request_id, b"too late", publish_after_another)
    async with asyncio.timeout(8):
        assert (await waiting).result == RESULT.SerializeToString()


async def test_a_wait_that_runs_out_says_pending(redis_client: redis.asyncio.Redis, futures: Futures) -> None:
    request_id = await sample(redis_client, 1)
    view = await futures.wait(request_id, 0.05)
    assert (view.state, view.result, view.queue_state) == ("pending", None, "active")
    await SampleJournal(redis_client).note_waiting(request_id, "no sampler")
    view = await futures.wait(request_id, 0)
    assert (view.queue_state, view.queue_state_reason) == ("paused_capacity", "no sampler")


async def test_an_unknown_request_is_known_to_be_unknown(futures: Futures) -> None:
    assert (await futures.wait(ids.request_id(SESSION, 5), 10)).state == "unknown"
    with pytest.raises(InvalidRequest):
        await futures.wait("nonsense", 10)


async def subscribed(client: redis.asyncio.Redis) -> None:
    """Somebody listens for what is resolved."""
    async with asyncio.timeout(60):
        while not (await client.pubsub_numsub(keys.DONE_CHANNEL))[0][1]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_thousand_wait_over_one_subscription(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    count = 1000
    journal = SampleJournal(redis_client)
    requests = []
    for start in range(0, count, 100):
        accepting = [
            journal.accept(SESSION, seq_id, b"", "gateway-0") for seq_id in range(start, start + 100)
        ]
        requests += [accepted.request_id for accepted in await asyncio.gather(*accepting)]
    waits = [asyncio.create_task(futures.wait(request_id, 30)) for request_id in requests]
    await subscribed(redis_client)
    assert (await redis_client.info("clients"))["pubsub_clients"] == 1
    for start in range(0, count, 200):
        batch = requests[start : start + 200]
        await asyncio.gather(*(journal.publish(name, result(name)) for name in batch))
    views = await asyncio.gather(*waits)
    assert [view.result for view in views] == [result(name).SerializeToString() for name in requests]
    assert not futures._waiters


async def test_waiters_survive_the_loss_of_the_subscription(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)
    waiting = asyncio.create_task(futures.wait(request_id, 30))
    await subscribed(redis_client)
    assert await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") == 1
    # Published while nobody listens.
    await SampleJournal(redis_client).publish(request_id, RESULT)
    async with asyncio.timeout(60):
        assert (await waiting).result == RESULT.SerializeToString()


async def test_a_cancelled_waiter_leaves_nothing_behind(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    request_id = await sample(redis_client, 1)
    waiting = asyncio.create_task(futures.wait(request_id, 30))
    other = asyncio.create_task(futures.wait(request_id, 30))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await SampleJournal(redis_client).publish(request_id, RESULT)
    assert (await other).result == RESULT.SerializeToString()
    assert waiting.cancelled()
    assert not futures._waiters


async def test_draining_ends_all_waits_as_they_are_and_later_ones_at_their_first_look(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    requests = [await sample(redis_client, seq_id) for seq_id in range(20)]
    waits = [asyncio.create_task(futures.wait(request_id, 30)) for request_id in requests]
    await asyncio.sleep(0.1)
    assert not futures.draining
    futures.drain()
    async with asyncio.timeout(60):
        views = await asyncio.gather(*waits)
        assert {view.state for view in views} == {"pending"}
        assert (await futures.wait(requests[0], 30)).state == "pending"
        await SampleJournal(redis_client).publish(requests[1], RESULT)
        assert (await futures.wait(requests[1], 30)).state == "done"
    assert futures.draining
    assert not futures._waiters


async def test_a_message_that_cannot_be_read_is_passed_over(
    redis_client: redis.asyncio.Redis, futures: Futures
) -> None:
    told: list[str] = []

    def on_resolved(text: str) -> None:
        ids.parse_request_id(text)
        told.append(text)

    futures.listen(on_resolved, lambda: None)
    request_id = await sample(redis_client, 1)
    waiting = asyncio.create_task(futures.wait(request_id, 10))
    await subscribed(redis_client)
    for text in (b"\xff\xfe", b"no request id"):
        assert await redis_client.publish(keys.DONE_CHANNEL, text) == 1
    await SampleJournal(redis_client).publish(request_id, RESULT)
    async with asyncio.timeout(8):
        assert (await waiting).state == "done"
    assert told == [request_id]
