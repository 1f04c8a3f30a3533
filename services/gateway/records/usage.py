"""What owners used, counted by day.

Invariant: what an operation or a sample used is counted in the same step as its result is written, which
happens once: not when it is repeated, replayed, or written under an old epoch. So counts and results are
lost together, or not at all. A day goes by itself after `USE_LIFE_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.common.state.journal_records import STORED, USE_LIFE_S
from services.common.state.scripts import Script

_AT_ONCE = 256
_DAY_S = 24 * 3600


class Used(NamedTuple):
    """What an owner used on a day of one kind. Session and run are empty where many were told together."""

    owner: str
    day: date
    kind: str
    base_model: str
    session: str
    run: str
    amount: int


class UsageStore:
    """The counts in one Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._forget = Script(client, "forget_owner")

    async def owners(self) -> list[str]:
        """Who may have used anything, by name."""
        found: Any = await self._redis.smembers(keys.OWNERS)
        return sorted(raw.decode() for raw in found)

    async def used(self, owner: str, days: Sequence[date]) -> list[Used]:
        """What an owner used on some days; the bytes that were stored in its hours as one amount a day."""
        pipeline = self._redis.pipeline(transaction=False)
        for day in days:
            pipeline.hgetall(keys.used(owner, day.isoformat()))
        found: list[Used] = []
        for day, counts in zip(days, await pipeline.execute(), strict=True):
            stored = 0
            for name, amount in counts.items():
                kind, base_model, session, run = name.decode().split("\n")
                if kind == STORED:
                    stored += int(amount)
                else:
                    found.append(Used(owner, day, kind, base_model, session, run, int(amount)))
            if stored:
                found.append(Used(owner, day, STORED, "", "", "", stored))
        return found

    async def stored(self, owner: str) -> dict[str, tuple[int, int]]:
        """How many checkpoints of each session of an owner there are, and their bytes."""
        found: Any = await self._redis.hgetall(keys.owner_checkpoint_bytes(owner))
        stored: dict[str, tuple[int, int]] = {}
        for name, size in found.items():
            if name == b"total":
                continue
            session = ids.session_of(name.decode().removeprefix("tinker://"))
            count, total = stored.get(session, (0, 0))
            stored[session] = (count + 1, total + int(size))
        return stored

    async def note_stored(self, now: float) -> None:
        """Notes what owners' checkpoints take in this hour; again in the same hour it changes nothing. Owners
        who have no sessions any more are forgotten with the last day that they used anything."""
        day, hour = day_of(now).isoformat(), datetime.fromtimestamp(now, UTC).hour
        owners = await self.owners()
        for start in range(0, len(owners), _AT_ONCE):
            some = owners[start : start + _AT_ONCE]
            pipeline = self._redis.pipeline(transaction=False)
            for owner in some:
                pipeline.hget(keys.owner_checkpoint_bytes(owner), "total")
                pipeline.zcard(keys.owner_sessions(owner))
            replies = await pipeline.execute()
            totals, sessions = replies[::2], replies[1::2]
            pipeline = self._redis.pipeline(transaction=False)
            for owner, total in zip(some, totals, strict=True):
                if int(total or 0) > 0:
                    pipeline.hsetnx(keys.used(owner, day), f"{STORED}\n{hour:02d}\n\n", int(total))
                    pipeline.expire(keys.used(owner, day), USE_LIFE_S)
            await pipeline.execute()
            for owner, held in zip(some, sessions, strict=True):
                if not held:
                    await self.forget(owner, now)

    async def forget(self, owner: str, now: float) -> bool:
        """Takes an owner off the list, who has no sessions and used nothing that is told; whether it did."""
        # Of the day that begins somewhere else, too.
        kept = [day_of(now - age * _DAY_S).isoformat() for age in range(-1, USE_LIFE_S // _DAY_S + 2)]
        days = [keys.used(owner, day) for day in kept]
        return bool(await self._forget([keys.OWNERS, keys.owner_sessions(owner), *days], owner))


def day_of(at: float) -> date:
    """The day of a time in seconds since 1970, UTC."""
    return datetime.fromtimestamp(at, UTC).date()
