"""Many things to do, each under a name, of which none stands in the way of the others.

Invariants: one thing is under way at most once. What fails, or has to wait, rests for a while the second
time, and longer each time. What takes long goes on by itself: whoever asked for it waits no longer than its
patience.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError
from services.common.process.tasks import cancel_all
from services.common.telemetry.repeats import Repeats
from services.gateway.retention.plan import Rest, longer

log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[bool]]
"""Whether it is done."""


class Works:
    """Does things, several at once.

    Args:
        at_once: how many; those that are set aside do not count.
        patience: seconds after which nobody waits for them any more.
        first_rest, most_rest: seconds.
    """

    def __init__(self, at_once: int, patience: float, first_rest: float, most_rest: float) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._patience = patience
        self._first_rest = first_rest
        self._most_rest = most_rest
        self._rests: dict[str, Rest] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._failures = Repeats(log, "what nobody uses is not let go of yet")

    async def do(self, now: float, works: Mapping[str, Work]) -> None:
        """Begins all that neither rest nor are under way; returns when they are done, or after a while."""
        begun = [
            self._begin(now, name, work)
            for name, work in works.items()
            if name not in self._under_way and not self.rests(name, now)
        ]
        if begun:
            await asyncio.wait(begun, timeout=self._patience)

    def rests(self, name: str, now: float) -> bool:
        """Whether it is too early to try something again."""
        rest = self._rests.get(name)
        return rest is not None and now < rest.until

    def forget(self, now: float) -> None:
        """Forgets the rests of what was not tried again for long: it is not asked for any more."""
        kept = self._rests.items()
        self._rests = {name: rest for name, rest in kept if now < rest.until + self._most_rest}

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """For what may take its whole deadline: others are done meanwhile."""
        self._slots.release()
        try:
            yield
        finally:
            await self._slots.acquire()

    async def stop(self) -> None:
        """Ends what is under way."""
        await cancel_all(self._under_way.values())

    def _begin(self, now: float, name: str, work: Work) -> asyncio.Task[None]:
        task = self._under_way[name] = asyncio.create_task(self._one(now, name, work), name=f"retain {name}")
        task.add_done_callback(lambda _: self._under_way.pop(name, None))
        return task

    async def _one(self, now: float, name: str, work: Work) -> None:
        async with self._slots:
            try:
                done = await work()
            except Exception as error:
                # A later sweep goes on.
                self._failures.failed(name, error, isinstance(error, (TinsmithError, RedisError, OSError)))
                done = False
            else:
                self._failures.over(name)
        if done:
            self._rests.pop(name, None)
        else:
            self._rests[name] = longer(self._rests.get(name), now, self._first_rest, self._most_rest)
