"""Background tasks end when they are told to."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest
import redis.asyncio

from services.common.process.tasks import a_few_at_once, cancel_all


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
        async with asyncio.timeout(60):
            await cancel_all([task, None])
        assert task.cancelled()


async def test_a_task_that_has_ended_is_no_trouble() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    await cancel_all([task])
    assert not task.cancelled()


PROGRAM = """
import asyncio
from services.common.process.tasks import cancel_all, keep_running

async def work(fail):
    await asyncio.sleep(0.05)
    if fail:
        raise KeyError("unforeseen")
    await asyncio.sleep(60)

async def main(fail):
    task = keep_running(work(fail), name="the work")
    await asyncio.sleep(0.5)
    await cancel_all([task])
    await asyncio.sleep(0.1)

asyncio.run(main({fail}))
"""


@pytest.mark.parametrize(("fail", "status"), [(True, -signal.SIGTERM), (False, 0)])
def test_only_a_lasting_task_that_fails_stops_its_process(fail: bool, status: int) -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(fail=fail)], capture_output=True, text=True, timeout=60
    )
    assert program.returncode == status, program.stderr
    assert ("unforeseen" in program.stderr) == fail


async def test_however_many_items_there_are_a_few_calls_run_at_once() -> None:
    running = most = 0

    async def double(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 2 * item

    assert await a_few_at_once(double, range(25), at_once=4) == list(range(0, 50, 2))
    assert most == 4
    assert await a_few_at_once(double, []) == []
