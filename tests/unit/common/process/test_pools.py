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


@pytest.mark.parametrize("standstill", [None, 60.0])
async def test_what_takes_too_long_is_not_waited_for_and_never_runs_if_it_had_no_thread(
    standstill: float | None,
) -> None:
    release, ran = threading.Event(), threading.Event()
    pool = Pool("nap", 1, 0.05, standstill)
    try:
        for work in (release.wait, ran.set):
            with pytest.raises(Unavailable, match="nap"):
                await pool.run(work)
    finally:
        release.set()
    # All that was there before has had its turn.
    await pool.run(int)
    assert not ran.is_set()


@pytest.mark.parametrize("standstill", [None, 60.0])
async def test_what_its_caller_waits_for_no_more_never_runs_if_it_had_no_thread(
    standstill: float | None,
) -> None:
    release, ran = threading.Event(), threading.Event()
    pool = Pool("nap", 1, 60.0, standstill)
    waiting = [asyncio.create_task(pool.run(work)) for work in (release.wait, ran.set)]
    await asyncio.sleep(0.05)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    release.set()
    await pool.run(int)
    assert not ran.is_set()


async def test_what_comes_too_late_is_handed_over() -> None:
    release, handed = threading.Event(), threading.Event()

    def made() -> str:
        release.wait(30)
        return "made"

    def hand(found: str) -> None:
        if found == "made":
            handed.set()

    with pytest.raises(Unavailable):
        await Pool("nap", 1, 0.05, 60.0).run(made, late=hand)
    assert not handed.is_set()
    release.set()
    assert await asyncio.to_thread(handed.wait, 30)


async def test_what_comes_just_as_its_caller_is_cancelled_is_handed_over() -> None:
    made, handed = threading.Event(), threading.Event()
    waits = asyncio.create_task(Pool("nap", 1, 60.0, 60.0).run(made.set, late=lambda _: handed.set()))
    await asyncio.sleep(0)
    # The loop hears of both in one turn.
    assert made.wait(30)
    time.sleep(0.05)  # noqa: ASYNC251
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert await asyncio.to_thread(handed.wait, 30)


async def test_what_comes_in_time_is_its_callers_alone() -> None:
    handed: list[int] = []
    pool = Pool("nap", 1, 60.0, 60.0)
    assert await pool.run(sum, [1, 2], late=handed.append) == 3
    await pool.run(int)
    assert not handed


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
