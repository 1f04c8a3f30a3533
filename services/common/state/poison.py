"""What is kept in Redis and cannot be read: damaged, or written by another version of this program.

Invariants: what cannot be read is an error of that record alone; whoever meets it notes it here and goes on
with the others. Notes are counted, bounded in number and length, and forgotten a day after the last one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio

from services.common.contract.errors import NotFound, TinsmithError
from services.common.process.periodic import Periodic
from services.common.state import keys
from services.common.state.scripts import Script

log = logging.getLogger(__name__)

_MOST = 200
_NAME_CHARS = 200
_REASON_CHARS = 300
_TTL_S = 24 * 3600
_WRITE_S = 5.0
_WRITE_DEADLINE_S = 60.0


class Unreadable(TinsmithError):
    """A record of this cluster cannot be read. `name`: its key in Redis, or what else says which it is."""

    default_code = "record_unreadable"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be read: {reason}; its operator can see it in `tinsmith status`")
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class Met:
    """Something that cannot be read. `count`: how often it was met; `last`: when (s since the epoch)."""

    name: str
    reason: str
    count: int
    last: float


class Poison:
    """What the processes of a cluster met and could not read."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._script = Script(client, "set_aside")
        self._counts: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._writes = Periodic("notes of what cannot be read", _WRITE_S, self.write, _WRITE_DEADLINE_S)

    async def start(self) -> None:
        """Begins to write notes down."""
        self._writes.start()

    async def stop(self) -> None:
        await self._writes.stop()

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Encloses the decoding of what is kept under a name: its key in Redis.

        Raises:
            Unreadable: it cannot be decoded. That is noted.
        """
        try:
            yield
        except (msgspec.MsgspecError, ValueError) as error:
            self.note(name, str(error))
            raise Unreadable(name, str(error)) from error

    def note(self, name: str, reason: str) -> None:
        """Notes something that cannot be read, and logs the first time. Never fails."""
        name, reason = name[:_NAME_CHARS], reason[:_REASON_CHARS]
        if name not in self._reasons:
            if len(self._reasons) >= _MOST:
                return
            log.error("set aside, because it cannot be read: %s: %s", name, reason)
        self._reasons[name] = reason
        self._counts[name] += 1

    async def write(self) -> None:
        """Writes down what was noted since the last time."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        found = [part for name, count in counts.items() for part in (name, self._reasons[name], count)]
        try:
            await self._script([keys.POISON], int(time.time()), _MOST, _TTL_S, *found)
        except BaseException:
            self._counts.update(counts)
            raise

    async def drop(self, name: str) -> bool:
        """Forgets something, and takes it out of the list where it was met, if that is where it was; whether
        it was taken out. What is met again is noted again.

        Raises:
            NotFound: nothing of this name is noted.
        """
        if not await self._redis.hdel(keys.POISON, name):
            raise NotFound(f"nothing that cannot be read is called {name[:_NAME_CHARS]!r}")
        self._reasons.pop(name, None)
        place, _, member = name.partition(" ")
        if place == keys.CHECKPOINTS_DUE:
            return bool(await self._redis.zrem(place, member))
        if keys.is_gateway_samples(place):
            return bool(await self._redis.srem(place, member))
        return False

    async def listed(self) -> list[Met]:
        """What was met of late, by name."""
        found: Any = await self._redis.hgetall(keys.POISON)
        met = []
        for name, value in found.items():
            count, last, reason = value.decode().split(" ", 2)
            met.append(Met(name.decode(), reason, int(count), float(last)))
        return sorted(met, key=lambda one: one.name)
