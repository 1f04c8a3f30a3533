"""Background work goes on whatever its steps come to."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.process.periodic import Periodic


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def failures() -> float:
    return REGISTRY.get_sample_value("tinsmith_periodic_failures_total", {"work": "work"}) or 0.0


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("periodic")]


async def test_a_step_is_repeated_and_never_beside_itself() -> None:
    runs = running = most = 0
    before = failures()

    async def step() -> None:
        nonlocal runs, running, most
        runs += 1
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0.005)
        finally:
            running -= 1

    work = Periodic("work", 0.0, step, deadline=1)
    work.start()
    await until(lambda: runs > 5)
    await work.stop()
    assert (most, running, failures() - before) == (1, 0, 0)


async def test_a_streak_of_failures_is_survived_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    errors = [RedisConnectionError("Redis is away"), ValueError("no such thing"), OSError("disk")]
    left = list(errors)
    runs, before = 0, failures()

    async def step() -> None:
        nonlocal runs
        runs += 1
        if left:
            raise left.pop(0)

    work = Periodic("work", 0.001, step, deadline=1)
    work.start()
    await until(lambda: runs > 5)
    await work.stop()
    assert failures() - before == len(errors)
    assert work.failures_in_a_row == 0
    assert messages(caplog) == [
        "work failed, again in 0.001 s: Redis is away",
        "work works again, after 3 failures",
    ]


async def test_a_mistake_of_the_program_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def step() -> None:
        raise KeyError("a")

    work = Periodic("work", 0.001, step, deadline=1)
    work.start()
    await until(lambda: work.failures_in_a_row > 1)
    await work.stop()
    record = next(record for record in caplog.records if record.name.endswith("periodic"))
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


async def test_a_step_that_hangs_is_cancelled_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    hangs = [True]
    runs, before = 0, failures()

    async def step() -> None:
        nonlocal runs
        runs += 1
        if hangs:
            hangs.pop()
            await asyncio.Event().wait()

    work = Periodic("work", 0.001, step, deadline=0.02)
    work.start()
    await until(lambda: runs > 2)
    await work.stop()
    assert failures() - before == 1
    assert messages(caplog)[0] == "work failed, again in 0.001 s: it took longer than 0.02 s"


async def test_stopping_ends_the_step_that_runs() -> None:
    ended = asyncio.Event()

    async def step() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    work = Periodic("work", 1, step, deadline=60)
    work.start()
    await asyncio.sleep(0)
    await work.stop()
    assert ended.is_set()


async def test_what_no_later_step_would_be_spared_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: asked.append(number))

    runs = 0

    async def step() -> None:
        nonlocal runs
        runs += 1
        raise MemoryError

    work = Periodic("work", 0.001, step, deadline=1)
    work.start()
    await until(lambda: bool(asked))
    await work.stop()
    assert asked == [signal.SIGTERM]
    assert runs == 1


def in_a_row(work: str) -> float | None:
    return REGISTRY.get_sample_value("tinsmith_periodic_failures_in_a_row", {"work": work})


async def test_how_long_a_work_has_failed_is_measured_until_it_does_not_or_stops() -> None:
    fails = asyncio.Event()
    fails.set()

    async def step() -> None:
        if fails.is_set():
            raise OSError("disk")

    works = [Periodic("a work that is measured", 0.001, step, deadline=1) for _ in range(2)]
    assert in_a_row("a work that is measured") == 0
    for work in works:
        work.start()
    await until(lambda: all(work.failures_in_a_row > 1 for work in works))
    assert in_a_row("a work that is measured") == sum(work.failures_in_a_row for work in works)
    await works[0].stop()
    assert in_a_row("a work that is measured") == works[1].failures_in_a_row
    fails.clear()
    await until(lambda: works[1].failures_in_a_row == 0)
    assert in_a_row("a work that is measured") == 0
    await works[1].stop()
