"""The unnamed sampler snapshots that are stored: whose they are, how large, when they were last of use.

Invariants: what an owner's snapshots come to is the sum over the snapshots that are listed; a snapshot is
listed before its client hears of it, and taken off the list only when its files are gone. From when it is
accepted until it is listed or has failed, it is to come, but no longer than a quarter of an hour, and not
where somebody asks and its save is over or was not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from cachetools import TTLCache

from services.common.process import clock
from services.common.state import keys
from services.common.state.scripts import Script
from services.gateway.records.times import Times

_NOTED_S = 60.0
_NOTED = 65_536
_COMING_S = 900
_ACCEPTED_S = 60.0
"""A save that is to be accepted has been by then."""
_LET_GO_TTL_S = 30 * 24 * 3600
"""For so long a client of a snapshot that was let go is told what became of it."""


@dataclass(frozen=True)
class StoredSnapshot:
    """One snapshot. `last_used`: when it was made or sampled, in seconds since the epoch."""

    model_id: str
    version: int
    owner: str
    size_bytes: int
    last_used: float


class SnapshotStore:
    """The list of all unnamed snapshots, least recently used first, with sums by owner."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._note = Script(client, "note_snapshot")
        self._forget = Script(client, "forget_snapshot")
        self._note_field = Script(client, "note_field")
        self._times = Times(client)
        self._noted: TTLCache[str, None] = TTLCache(_NOTED, _NOTED_S)

    async def add(self, model_id: str, version: int, owner: str, size_bytes: int) -> None:
        """Lists a snapshot that was just made, unless it is listed."""
        member = _member(model_id, version)
        names = [*_names(owner, model_id), keys.coming_snapshots(owner)]
        await self._note(names, member, owner, size_bytes, repr(clock.to_note()))

    async def expect(self, model_id: str, version: int, owner: str) -> bool:
        """Notes that a snapshot is to come; whether it was not noted before."""
        name = keys.coming_snapshots(owner)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.zremrangebyscore(name, "-inf", clock.to_judge() - _COMING_S)
            pipeline.zadd(name, {_member(model_id, version): clock.to_note()}, nx=True)
            pipeline.expire(name, _COMING_S)
            _, added, _ = await pipeline.execute()
        return bool(added)

    async def expect_no_more(self, model_id: str, version: int, owner: str) -> None:
        """A snapshot that was to come does not."""
        await self._redis.zrem(keys.coming_snapshots(owner), _member(model_id, version))

    async def look_for_those_to_come(self, owner: str, but: tuple[str, int]) -> None:
        """Strikes off what does not come any more and nobody said so, as where Redis was away when it failed.

        Args:
            but: is to be accepted now.
        """
        name, early = keys.coming_snapshots(owner), clock.to_judge() - _ACCEPTED_S
        noted: Any = await self._redis.zrange(name, 0, -1, withscores=True)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for member, _ in noted:
                pipeline.hget(keys.future(*_parse(member.decode())), "state")
            states = await pipeline.execute()
        gone = [
            member
            for (member, since), state in zip(noted, states, strict=True)
            if member.decode() != _member(*but) and (state == b"done" or (state is None and since < early))
        ]
        if gone:
            await self._redis.zrem(name, *gone)

    async def numbers(self, owner: str) -> tuple[int, int]:
        """How many of an owner's snapshots are listed, and how many are to come."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.zcard(keys.owner_snapshots(owner))
            pipeline.zcard(keys.coming_snapshots(owner))
            listed, coming = await pipeline.execute()
        return int(listed), int(coming)

    async def note_used(self, model_id: str, version: int, owner: str) -> None:
        """Notes that a snapshot is sampled now; at most once a minute, but until it is noted every time."""
        member = _member(model_id, version)
        if member in self._noted:
            return
        self._noted[member] = None
        lists = [keys.SNAPSHOTS_USED, keys.owner_snapshots(owner)]
        try:
            await self._times.note(lists, {member: clock.to_note()}, only="known")
        except BaseException:
            self._noted.pop(member, None)
            raise

    async def forget(self, model_id: str, version: int, owner: str) -> None:
        """Takes a snapshot off the list."""
        await self._forget(_names(owner, model_id), _member(model_id, version))

    async def owners(self) -> dict[str, int]:
        """Bytes of the listed snapshots of every owner that has any."""
        found: Any = await self._redis.hgetall(keys.SNAPSHOT_BYTES)
        return {owner.decode(): int(size) for owner, size in found.items()}

    async def oldest(self, limit: int, owner: str | None = None) -> list[StoredSnapshot]:
        """Those that were not of use for longest, of all owners or of one."""
        name = keys.SNAPSHOTS_USED if owner is None else keys.owner_snapshots(owner)
        found: Any = await self._redis.zrange(name, 0, limit - 1, withscores=True)
        return await self._read([(member, used) for member, used in found])

    async def of_model(self, model_id: str) -> list[StoredSnapshot]:
        """A model's."""
        found: Any = await self._redis.smembers(keys.model_snapshots(model_id))
        return await self._read([(member, 0.0) for member in found])

    async def get(self, model_id: str, version: int) -> StoredSnapshot | None:
        """The snapshot, if it is listed. Its last use is not looked up."""
        found = await self._read([(_member(model_id, version).encode(), 0.0)])
        return found[0] if found else None

    async def supersede(self, model_id: str, version: int, at: float) -> None:
        """Has a snapshot looked at at a time, because the sessions that followed its model moved on."""
        await self._times.note(keys.SNAPSHOTS_SUPERSEDED, {_member(model_id, version): at})

    async def superseded(self, limit: int) -> list[tuple[str, int]]:
        """(model, version) of snapshots to be looked at now."""
        now = clock.to_judge()
        found: Any = await self._redis.zrangebyscore(keys.SNAPSHOTS_SUPERSEDED, "-inf", now, 0, limit)
        return [_parse(member.decode()) for member in found]

    async def settle(self, model_id: str, version: int) -> None:
        """Nothing is left to be done about a superseded snapshot."""
        await self._redis.zrem(keys.SNAPSHOTS_SUPERSEDED, _member(model_id, version))

    async def mark_let_go(self, model_id: str, version: int) -> None:
        """Remembers that a snapshot is deleted to make room."""
        await self._note_field([keys.let_go(model_id)], version, repr(clock.to_note()), 0, _LET_GO_TTL_S)

    async def was_let_go(self, model_id: str, version: int) -> bool:
        """Whether a snapshot was deleted to make room."""
        return bool(await self._redis.hexists(keys.let_go(model_id), str(version)))

    async def _read(self, found: Iterable[tuple[bytes, float]]) -> list[StoredSnapshot]:
        listed = list(found)
        if not listed:
            return []
        sizes: Any = await self._redis.hmget(keys.SNAPSHOT_SIZES, [member for member, _ in listed])
        snapshots = []
        for (member, used), size in zip(listed, sizes, strict=True):
            if size is not None:
                size_bytes, _, owner = size.decode().partition(" ")
                model_id, version = _parse(member.decode())
                snapshots.append(StoredSnapshot(model_id, version, owner, int(size_bytes), used))
        return snapshots


def _member(model_id: str, version: int) -> str:
    return f"{model_id}@{version}"


def _parse(member: str) -> tuple[str, int]:
    model_id, _, version = member.rpartition("@")
    return model_id, int(version)


def _names(owner: str, model_id: str) -> list[str]:
    indexes = [keys.SNAPSHOTS_USED, keys.owner_snapshots(owner), keys.model_snapshots(model_id)]
    return [keys.SNAPSHOT_SIZES, keys.SNAPSHOT_BYTES, *indexes]
