"""Threads by what they wait for."""

import asyncio
import threading
import time

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


async def test_work_that_stands_still_is_not_waited_for_and_what_goes_on_is_for_as_long_as_it_takes() -> None:
    release, pool = threading.Event(), Pool("nap", 2, 60, 0.5)

    def busy() -> int:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
        return 7

    stands = asyncio.create_task(pool.run(release.wait, 60))
    try:
        assert await pool.run(busy) == 7
        with pytest.raises(Unavailable, match="nap"):
            await stands
    finally:
        release.set()


async def test_work_that_waits_for_a_thread_does_not_stand_still() -> None:
    release, pool = threading.Event(), Pool("nap", 1, 60, 0.2)
    with pytest.raises(Unavailable):
        await pool.run(release.wait, 60)
    waits = asyncio.create_task(pool.run(sum, [1, 2]))
    await asyncio.sleep(0.6)
    assert not waits.done()
    release.set()
    assert await waits == 3


async def test_what_work_raises_is_raised_also_a_timeout_of_its_own() -> None:
    def late() -> None:
        raise TimeoutError("the disk says so")

    with pytest.raises(TimeoutError, match="the disk says so"):
        await Pool("nap", 1, 5).run(late)
    with pytest.raises(TimeoutError, match="the disk says so"):
        await Pool("nap", 1, 5, 5).run(late)
