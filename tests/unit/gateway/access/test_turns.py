"""Computing for API keys: in turns, and never more of it than there are threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from services.common.process.pools import Pool
from services.gateway.access.turns import Turns


class Threads:
    """A pool of which the work ends when it is told to."""

    def __init__(self) -> None:
        self.pool = Pool("work", 2, None)
        self.turns = Turns(self.pool, 2)
        self.begun: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.tasks: dict[str, asyncio.Task[str]] = {}

    async def want(self, owner: str, name: str) -> None:
        self.ends[name] = threading.Event()
        self.tasks[name] = asyncio.create_task(self.turns.run(owner, self._work, name))
        await self.settle()

    async def settle(self) -> None:
        """Until threads and loop have done what they can."""
        for _ in range(80):
            await asyncio.sleep(0.005)

    def _work(self, name: str) -> str:
        self.begun.append(name)
        self.ends[name].wait(30)
        return name

    async def end(self, name: str) -> str:
        self.ends[name].set()
        async with asyncio.timeout(60):
            found = await self.tasks[name]
        await self.settle()
        return found


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads()
    yield threads
    for end in threads.ends.values():
        end.set()
    await asyncio.gather(*threads.tasks.values(), return_exceptions=True)


async def test_a_key_waits_for_what_runs_and_not_for_the_queue_of_another(threads: Threads) -> None:
    for number in range(4):
        await threads.want("ann", f"a{number}")
    await threads.want("bob", "b0")
    assert threads.begun == ["a0", "a1"]
    assert await threads.end("a0") == "a0"
    assert threads.begun[2:] == ["b0"]
    await threads.end("b0")
    assert threads.begun[3:] == ["a2"]


async def test_work_that_takes_no_turns_is_next_however_much_waits_for_one(threads: Threads) -> None:
    for number in range(4):
        await threads.want("ann", f"a{number}")
    other = asyncio.create_task(threads.pool.run(threads.begun.append, "other"))
    await threads.settle()
    await threads.end("a0")
    await other
    assert threads.begun.index("other") == 2


async def test_who_gives_up_never_begins_and_who_has_begun_keeps_its_thread(threads: Threads) -> None:
    for name in ("a0", "a1", "a2", "a3"):
        await threads.want("ann", name)
    threads.tasks["a2"].cancel()
    threads.tasks["a0"].cancel()
    await threads.settle()
    # The thread of a0 is not free, so nothing takes its place.
    assert threads.begun == ["a0", "a1"]
    threads.ends["a0"].set()
    await threads.settle()
    assert threads.begun == ["a0", "a1", "a3"]
    assert threads.tasks["a0"].cancelled()


async def test_what_work_raises_is_raised(threads: Threads) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.turns.run("ann", lambda: 1 // 0)
    assert await threads.turns.run("ann", lambda: 1) == 1
