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


def test_a_machine_that_is_busy_for_a_day_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lag = LoopLag()
    for second in range(24 * 3600):
        lag._count(0.06, float(second))
    assert lag.seen.times == 24 * 3600
    assert len(caplog.messages) == 144
    assert "(601 times, 36.1 s in all, 60 ms at most)" in caplog.messages[1]


def test_a_stall_that_is_far_longer_than_those_before_is_told_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lag = LoopLag()
    for late in (0.06, 0.07, 0.3, 0.3, 2.0, 0.06):
        lag._count(late, 1.0)
    told = [message.split(" ms")[0].rpartition(" ")[2] for message in caplog.messages]
    assert told == ["60", "300", "2000"]


async def test_nothing_is_looked_at_after_the_end() -> None:
    lag = LoopLag()
    await lag.start()
    await lag.stop()
    time.sleep(0.2)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    assert lag.seen.times == 0
