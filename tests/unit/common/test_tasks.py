"""Background tasks end when they are told to."""

from __future__ import annotations

import asyncio

import redis.asyncio

from services.common.tasks import cancel_all


async def test_a_task_that_talks_to_redis_ends_whenever_it_is_cancelled(
    redis_client: redis.asyncio.Redis,
) -> None:
    async def work() -> None:
        while True:
            await redis_client.get("key")
            await asyncio.sleep(0)

    for turns in range(60):
        task = asyncio.create_task(work())
        for _ in range(turns % 12):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await cancel_all([task, None])
        assert task.cancelled()


async def test_a_task_that_has_ended_is_no_trouble() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    await cancel_all([task])
    assert not task.cancelled()
