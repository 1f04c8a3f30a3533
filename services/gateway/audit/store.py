"""The records of acts in Redis: streams of an owner's acts and of what it was refused, and one of strangers.

Invariants: who is refused, or does more than others, pushes out records of its own and nobody else's: streams
have bounded lengths, and of all together the longest are cut first. A record goes after `LIFE_S`, and a
stream with its last one. There are streams of so many owners, those who did something of late.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import redis.asyncio

from services.common.process import clock
from services.common.state import keys
from services.common.state.scripts import Script
from services.gateway.audit.pages import FIELD, Page, Pages, Place, Window
from services.gateway.audit.record import AuditRecord, Wanted

LIFE_S = 31 * 24 * 3600
MOST_OF_OWNER = 5_000
MOST_REFUSED = 500
MOST_OF_STRANGERS = 20_000
MOST_OF_OWNERS = 200_000
"""Of all owners together, after a sweep."""

MOST_OWNERS = 10_000
"""As many as there are API keys, after a sweep."""

_SWEEP_EVERY_S = 60
_SKEW_S = 300.0
"""So much may the clocks of gateways and Redis differ."""


class AuditStore:
    """The records in one Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._pages = Pages(client)
        self._claim = Script(client, "claim")

    async def add(self, records: Sequence[AuditRecord]) -> None:
        """Keeps records, all or none."""
        pipeline = self._redis.pipeline(transaction=True)
        owners: dict[str, float] = {}
        now = clock.to_note()
        for record in records:
            stream, most = _stream_of(record)
            pipeline.xadd(stream, {FIELD: msgspec.msgpack.encode(record)}, maxlen=most, approximate=True)
            pipeline.expire(stream, LIFE_S)
            if record.owner:
                owners[record.owner] = now
        if owners:
            pipeline.zadd(keys.AUDIT_OWNERS, owners, gt=True)
        await pipeline.execute()

    async def page(
        self,
        owner: str | None,
        window: Window,
        most: int,
        after: Place | None,
        wanted: Wanted,
        newest_first: bool,
    ) -> Page:
        """A page of an owner's records, or of all owners' and of strangers'.

        Args:
            owner: None = everybody.
            most: records, at least 1.
            after: `next` of the page before.
            wanted: which records.

        Raises:
            Unavailable: it takes too long.
        """
        if owner is not None:
            return await self._pages.read(streams_of(owner), window, most, after, wanted, newest_first)
        # Who did nothing since then has nothing in the window.
        owners = await self._owners(window.start - _SKEW_S)
        streams = [keys.AUDIT_STRANGERS, *(name for one in owners for name in streams_of(one))]
        return await self._pages.read(streams, window, most, after, wanted, newest_first)

    async def sweep(self) -> None:
        """Drops what is too old, and of the longest streams what is too much; once a minute at most."""
        # A claim, and not a mere SET: a sweep makes room.
        if await self._claim([keys.AUDIT_SWEPT], uuid.uuid4().hex, _SWEEP_EVERY_S * 1000, ""):
            return
        now = clock.to_judge()
        await self._redis.zremrangebyscore(keys.AUDIT_OWNERS, "-inf", now - LIFE_S)
        await self._drop_quietest()
        streams = [name for owner in await self._owners() for name in streams_of(owner)]
        oldest = str(round((now - LIFE_S) * 1000))
        pipeline = self._redis.pipeline(transaction=False)
        for name in (keys.AUDIT_STRANGERS, *streams):
            pipeline.xtrim(name, minid=oldest, approximate=False)
        for name in streams:
            pipeline.xlen(name)
        found = await pipeline.execute()
        lengths = dict(zip(streams, found[len(streams) + 1 :], strict=True))
        most = fair_share(list(lengths.values()), MOST_OF_OWNERS)
        pipeline = self._redis.pipeline(transaction=False)
        for name, length in lengths.items():
            if length > most:
                pipeline.xtrim(name, maxlen=most, approximate=False)
        await pipeline.execute()

    async def _drop_quietest(self) -> None:
        """Drops the records of those who did nothing for longest, where there are too many owners."""
        found: Any = await self._redis.zrange(keys.AUDIT_OWNERS, 0, -MOST_OWNERS - 1)
        if found:
            pipeline = self._redis.pipeline(transaction=True)
            for owner in (raw.decode() for raw in found):
                pipeline.delete(*streams_of(owner))
                pipeline.zrem(keys.AUDIT_OWNERS, owner)
            await pipeline.execute()

    async def _owners(self, since: float = 0.0) -> list[str]:
        found: Any = await self._redis.zrangebyscore(keys.AUDIT_OWNERS, since, "+inf")
        return [raw.decode() for raw in found]


def streams_of(owner: str) -> tuple[str, str]:
    """Of an owner's acts, and of what it was refused."""
    return keys.audit(owner, "done"), keys.audit(owner, "refused")


def _stream_of(record: AuditRecord) -> tuple[str, int]:
    """Where a record is kept, and how many are."""
    if not record.owner:
        return keys.AUDIT_STRANGERS, MOST_OF_STRANGERS
    done, refused = streams_of(record.owner)
    return (done, MOST_OF_OWNER) if record.done else (refused, MOST_REFUSED)


def fair_share(lengths: Sequence[int], most: int) -> int:
    """The greatest length to which all longer ones are cut so that together they are no more than `most`."""
    left, others = most, len(lengths)
    for length in sorted(lengths):
        if length * others > left:
            return max(1, left // others)
        left, others = left - length, others - 1
    return max(lengths, default=0)
