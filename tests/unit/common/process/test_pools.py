"""Threads by what they wait for."""

import asyncio
import threading

import pytest

from services.common.contract.errors import Unavailable
from services.common.process.pools import COMPUTE, READS, Pool


async def test_work_is_done_in_a_thread_of_its_pool() -> None:
    assert (await COMPUTE.run(lambda: threading.current_thread().name)).startswith("compute")


async def test_reads_that_hang_take_no_thread_from_computing() -> None:
    release = threading.Event()
    hanging = [asyncio.create_task(READS.run(release.wait, 30)) for _ in range(100)]
    try:
        assert await asyncio.wait_for(COMPUTE.run(sum, [1, 2]), 60) == 3
    finally:
        release.set()
        await asyncio.gather(*hanging)


async def test_what_takes_too_long_is_not_waited_for() -> None:
    release = threading.Event()
    pool = Pool("nap", 1, 0.05)
    try:
        for _ in range(2):
            with pytest.raises(Unavailable, match="nap"):
                await pool.run(release.wait, 30)
    finally:
        release.set()


async def test_what_work_raises_is_raised_also_a_timeout_of_its_own() -> None:
    def late() -> None:
        raise TimeoutError("the disk says so")

    with pytest.raises(TimeoutError, match="the disk says so"):
        await Pool("nap", 1, 5).run(late)
