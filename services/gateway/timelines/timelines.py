"""The timelines of sessions, in Redis.

Invariants: of a session the last `MOST_EVENTS` are kept, of an owner those of `MOST_SESSIONS` sessions, the
longest silent going first, and all end by themselves after `LIFE_S`. Events wait for Redis in bounded memory;
those that find no room, or a Redis that is half full, are counted and lost: nobody's work depends on them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import redis.asyncio
from prometheus_client import Counter

from services.common.contract import ids
from services.common.process.periodic import Periodic
from services.common.state import keys
from services.common.state.room import Room
from services.gateway.timelines.event import Event

MOST_EVENTS = 1000
MOST_SESSIONS = 10
LIFE_S = 24 * 3600

DROPPED = Counter(
    "tinsmith_timeline_dropped_total", "Requests that the timelines of their sessions do not tell of"
)

_MOST_WAITING = 20_000
_AT_ONCE = 512
_FLUSH_S = 0.5
_DEADLINE_S = 30.0
_SHARE = 0.5
"""Of the memory that Redis may use. What is in use beyond it is wanted for requests and results."""


class Timelines:
    """Notes events, and hands them out."""

    def __init__(
        self, client: redis.asyncio.Redis, room: Room, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis = client
        self._room = room
        self._clock = clock
        self._waiting: deque[tuple[str, Event]] = deque()
        self._flushes = Periodic("timelines of sessions", _FLUSH_S, self.flush, _DEADLINE_S)

    async def start(self) -> None:
        self._flushes.start()

    async def stop(self) -> None:
        await self._flushes.stop()

    def note(self, owner: str, event: Event) -> None:
        """Remembers what became of a request of an owner's. Returns at once. One that could not be read is
        nobody's, and in no timeline."""
        if not owner:
            return
        if len(self._waiting) >= _MOST_WAITING:
            DROPPED.inc()
            return
        self._waiting.append((owner, event))

    async def flush(self) -> None:
        """Hands Redis what waits. Raises RedisError; what was not handed over waits on."""
        while self._waiting:
            some = [self._waiting[index] for index in range(min(_AT_ONCE, len(self._waiting)))]
            if self._is_wanted_for_others():
                DROPPED.inc(len(some))
            else:
                await self._keep(some)
            for _ in some:
                self._waiting.popleft()

    async def of(self, session_id: str) -> list[Event]:
        """The last events of a session, in the order in which they ended or nearly so."""
        found: Any = await self._redis.lrange(keys.timeline(session_id), 0, -1)
        return [msgspec.msgpack.decode(raw, type=Event) for raw in found]

    def _is_wanted_for_others(self) -> bool:
        used, most = self._room.memory
        return most > 0 and used > _SHARE * most

    async def _keep(self, some: list[tuple[str, Event]]) -> None:
        of: dict[str, list[bytes]] = {}
        sessions: dict[str, dict[str, float]] = {}
        now = self._clock()
        for owner, event in some:
            session_id = ids.session_of(event.object_id)
            of.setdefault(session_id, []).append(msgspec.msgpack.encode(event))
            sessions.setdefault(owner, {})[session_id] = now
        pipeline = self._redis.pipeline(transaction=False)
        for session_id, events in of.items():
            name = keys.timeline(session_id)
            pipeline.rpush(name, *events)
            pipeline.ltrim(name, -MOST_EVENTS, -1)
            pipeline.expire(name, LIFE_S)
        for owner, seen in sessions.items():
            pipeline.zadd(keys.timelines_of(owner), dict(seen))
            pipeline.expire(keys.timelines_of(owner), LIFE_S)
        await pipeline.execute()
        for owner in sessions:
            await self._let_go(owner)

    async def _let_go(self, owner: str) -> None:
        """Forgets the timelines of the owner's sessions that were silent longest."""
        name = keys.timelines_of(owner)
        found: Any = await self._redis.zrange(name, 0, -MOST_SESSIONS - 1)
        if found:
            gone = [raw.decode() for raw in found]
            await self._redis.delete(*(keys.timeline(session_id) for session_id in gone))
            await self._redis.zrem(name, *gone)
