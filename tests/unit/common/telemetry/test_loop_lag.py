"""The loop is seen to stand still."""

import asyncio
import time

import pytest

from services.common.telemetry.loop_lag import LoopLag


async def test_a_loop_that_stood_still_is_counted_and_logged_once_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lag = LoopLag()
    await lag.start()
    await asyncio.sleep(0.05)
    before = lag.seen
    for _ in range(2):
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0.05)
    await lag.stop()
    assert lag.seen.times >= before.times + 2
    assert lag.seen.longest >= 0.25
    assert lag.seen.seconds >= before.seconds + 0.5
    assert len([line for line in caplog.messages if "stood still" in line]) == 1


async def test_nothing_is_looked_at_after_the_end() -> None:
    lag = LoopLag()
    await lag.start()
    await lag.stop()
    time.sleep(0.2)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    assert lag.seen.times == 0
