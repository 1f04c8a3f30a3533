"""What this gateway acknowledged of late, written again when Redis comes back without it.

A Redis that syncs its file every second loses up to the last second when its machine loses power. Invariant:
what a gateway acknowledged within KEPT_S before Redis went away it writes again as soon as Redis is back,
while it lives itself, and nothing is acknowledged of which a part went to the Redis of before. What there is
no room to keep is not accepted yet; what is larger than all of the room is not kept. Every write noted here
changes nothing when it is repeated, after those that it came after. Until that is surely done by every
gateway, an object that is not found counts as not restored yet, and not as unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import Overloaded, TinsmithError, Unavailable
from services.common.process import clock
from services.common.process.periodic import Periodic
from services.common.process.tasks import a_few_at_once, cancel_all, detached
from services.common.state import redis_client

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_S = 4.0
"""Redis may postpone a write by two seconds when a sync is slow; a sync is due every second."""
RESTORED_AFTER_S = 10.0
_TOGETHER_S = 0.05
"""Those who do not find something within this time share one look, however many ask for what never was."""
_LOOK_S = 0.5
_LOOK_DEADLINE_S = 120.0
"""Long enough for everything to be repeated. A look that breaks off is made up for by the next."""
_MOST_BYTES = 128 << 20
_ROOM_WITHIN_S = 10.0
"""What is kept now is surely gone then, unless Redis is away."""
_ENTRY_BYTES = 2048
"""Of a write without its payload."""


@dataclass(eq=False)
class _Write:
    """A write that was made.

    Attributes:
        size: bytes that are kept with it.
        accepted: it is something new, and not what that came to.
        began, made: when it was first made, seconds of the loop's clock.
        written: when it was written last.
    """

    again: Callable[[], Awaitable[Any]]
    size: int
    accepted: bool
    began: float
    made: float
    written: float


def unordered(writes: Iterable[_Write]) -> Iterator[list[_Write]]:
    """Runs of writes, in the order in which they were made, none of which began after another one of its run
    had been made: these may be made at once. They take no longer than they took at first."""
    run: list[_Write] = []
    for write in writes:
        if run and write.began >= run[0].made:
            yield run
            run = []
        run.append(write)
    if run:
        yield run


class RedoLog:
    """What one gateway wrote of late.

    Args:
        before_repeating: called when Redis has restarted.
        most_bytes: kept of what is accepted, and again as many of what it came to: beyond those the oldest
            writes are forgotten.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        before_repeating: Callable[[], None] = lambda: None,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._redis = client
        self._asks = redis_client.apart(client)
        self._before_repeating = before_repeating
        self._most_bytes = most_bytes
        self._writes: deque[_Write] = deque()
        self._accepted = self._results = 0
        self._door, self._forgot = asyncio.Lock(), asyncio.Event()
        self._run_id = ""
        self._restarts = 0
        self._restarted_at: float | None = None
        self._repeating = asyncio.Lock()
        self._asked: asyncio.Task[None] | None = None
        self._looks = Periodic("watch for restarts of Redis", _LOOK_S, self._look, _LOOK_DEADLINE_S)

    async def start(self) -> None:
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()
        await cancel_all([self._asked])
        await self._asks.aclose()

    async def perform(
        self,
        write: Callable[[], Awaitable[T]],
        size: int = 0,
        again: Callable[[], Awaitable[T]] | None = None,
        accepts: bool = True,
    ) -> T:
        """Makes a write that may be repeated, and remembers it. Where Redis restarted meanwhile it repeats it
        at once: nobody else would.

        Args:
            again: how to repeat it, when otherwise than by `write`.
            size: bytes of payload that are kept with it.
            accepts: something new, which waits until there is room to keep it.

        Raises:
            Overloaded: there was no room for seconds; nothing was written.
        """
        size += _ENTRY_BYTES
        if size > self._most_bytes:
            size = 0
        elif accepts:
            await self._room(size)
        self._take(size, accepts)
        try:
            restarts, began = self._restarts, asyncio.get_running_loop().time()
            result = await write()
            while restarts != self._restarts:
                restarts = self._restarts
                result = await (again or write)()
        except BaseException:
            self._take(-size, accepts)
            raise
        made = asyncio.get_running_loop().time()
        if size:
            self._writes.append(_Write(again or write, size, accepts, began, made, made))
        while self._writes and self._results > self._most_bytes:
            self._forget_oldest()
        return result

    async def _room(self, size: int) -> None:
        """Waits, in the order of those who come, until so many bytes may be kept too."""
        try:
            async with asyncio.timeout(_ROOM_WITHIN_S), self._door:
                while self._accepted + size > self._most_bytes:
                    self._forgot.clear()
                    await self._forgot.wait()
        except TimeoutError:
            raise Overloaded(
                "more was accepted in the last seconds than is kept; try again in a moment"
            ) from None

    def _take(self, size: int, accepted: bool) -> None:
        if accepted:
            self._accepted += size
            self._forgot.set()
        else:
            self._results += size

    async def refuse_while_restoring(self) -> None:
        """To be called when something is not found.

        Raises:
            Unavailable: it may be among what is being written again.
        """
        if self._asked is None:
            self._asked = detached(self._look_soon(), "look for a restart of Redis")
        await asyncio.shield(self._asked)
        if self._restarted_at is None:
            return
        if asyncio.get_running_loop().time() - self._restarted_at < RESTORED_AFTER_S:
            raise Unavailable("the state store has just restarted; try again in a moment")

    async def _look_soon(self) -> None:
        await asyncio.sleep(_TOGETHER_S)
        # Who does not find something from now on needs a look that is later still.
        self._asked = None
        await self._look()

    async def _look(self) -> None:
        """Repeats the last writes when Redis is another process than before; else forgets old ones."""
        now = asyncio.get_running_loop().time()
        # By a new connection, which leads to where the address does now: those that are there may lead to a
        # primary that does not know yet that a replica took over from it.
        await self._asks.connection_pool.disconnect(inuse_connections=False)
        info = await self._asks.info("server", "replication")
        if info.get("role", "master") != "master":
            await self._leave_connections()
            raise Unavailable("this Redis is a replica of another and takes no writes")
        clock.hear(info["server_time_usec"] / 1e6)
        run_id = str(info.get("run_id", ""))
        async with self._repeating:
            if self._run_id and run_id != self._run_id:
                self._restarted_at = asyncio.get_running_loop().time()
                await self._leave_connections()
                self._restarts += 1
                await self._repeat()
            else:
                while self._writes and self._writes[0].written < now - KEPT_S:
                    self._forget_oldest()
            self._run_id = run_id

    async def _leave_connections(self) -> None:
        """From now on all lead to where the address does by now, those in use when they are free again, and
        subscriptions when they look: a primary that a replica took over from may not know it yet, and would
        still take writes."""
        pool = self._redis.connection_pool
        await pool.update_active_connections_for_reconnect()
        with suppress(RedisError, OSError):
            await pool.disconnect(inuse_connections=False)

    async def _repeat(self) -> None:
        log.warning("Redis restarted; repeating the last %d acknowledged writes", len(self._writes))
        self._before_repeating()
        for together in list(unordered(self._writes)):
            await a_few_at_once(self._write_again, together)

    async def _write_again(self, write: _Write) -> None:
        try:
            await write.again()
        except TinsmithError as error:
            log.warning("an acknowledged write cannot be repeated: %s", error.message)
        write.written = asyncio.get_running_loop().time()

    def _forget_oldest(self) -> None:
        oldest = self._writes.popleft()
        self._take(-oldest.size, oldest.accepted)
