"""Records of sessions in Redis.

Invariant: every record carries its owner; `create` never replaces a record that is there, so a repeated
request finds what the first one made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import redis.asyncio

from services.common.process import clock
from services.common.state import keys
from services.common.state.poison import Poison, Unreadable
from services.common.state.room import ACCOUNT
from services.common.state.scripts import Script
from services.gateway.records.listed import Cursor, Listed, Pages
from services.gateway.records.times import Times

_IDEMPOTENCY_TTL_S = 24 * 3600
_DETAIL_CHARS = 1000
_AT_ONCE = 500
_FIELDS = ("record", "last_heartbeat", "finished", "project_id", "reason", "detail")


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A client process. Times are seconds since the epoch. `abandoned`: finished because nothing was heard of
    it for long. `finish_reason`, `finish_detail`: as the client that finished it said."""

    session_id: str
    owner: str
    created_at: float
    last_heartbeat: float
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    display_name: str = ""
    project_id: str = ""
    sdk_version: str = ""
    finished: bool = False
    abandoned: bool = False
    finish_reason: str = ""
    finish_detail: str = ""


class SessionStore:
    """Sessions: a hash each, with what changes in fields of its own. Those that are not over are listed by
    their last sign of life."""

    def __init__(self, client: redis.asyncio.Redis, poison: Poison) -> None:
        self._redis = client
        self._poison = poison
        self._put = Script(client, "put_record")
        self._drop = Script(client, "drop_record")
        self._recount = Script(client, "recount_record")
        self._account = Script(client, "account")
        self._touch = Script(client, "touch_session")
        self._end_session = Script(client, "end_session")
        self._times = Times(client)
        self._pages = Pages(client)

    async def create(self, record: SessionRecord, idempotency_key: str | None = None) -> SessionRecord:
        """Stores a session; what is stored. Repeating the owner's key for a day gives the first one."""
        # The record goes first: a key never names a session that is not there.
        session = keys.session(record.session_id)
        # Only what is not there: the same may be written again after Redis lost it, or did not.
        await self._redis.hsetnx(session, "last_heartbeat", repr(record.last_heartbeat))
        await self._redis.hsetnx(session, "finished", str(int(record.finished)))
        await self._put([session, *ACCOUNT], record.owner, msgspec.json.encode(record))
        if idempotency_key:
            first: Any = await self._redis.set(
                keys.session_idempotency(record.owner, idempotency_key),
                record.session_id,
                nx=True,
                get=True,
                ex=_IDEMPOTENCY_TTL_S,
            )
            repeated = first is not None and first.decode() != record.session_id
            found = await self.get(first.decode()) if repeated else None
            if found is not None:
                await self._drop([session, *ACCOUNT], record.owner, record.session_id)
                return found
        await self._redis.zadd(keys.SESSION_LIFE, {record.session_id: record.last_heartbeat}, nx=True)
        created = {record.session_id: record.created_at}
        # In one step, so that an owner who comes back is not struck off between the two (`forget_owner.lua`).
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.sadd(keys.OWNERS, record.owner)
            pipeline.zadd(keys.owner_sessions(record.owner), created)
            if record.project_id:
                pipeline.zadd(keys.project_sessions(record.owner, record.project_id), created)
            await pipeline.execute()
        return record

    async def count(self, owner: str) -> int:
        """How many sessions of an owner are known, over or not."""
        found: int = await self._redis.zcard(keys.owner_sessions(owner))
        return found

    async def held(self, owner: str) -> tuple[int, int]:
        """Bytes that an owner holds of the room, and all owners."""
        mine, of_all, *_ = await self._account(ACCOUNT, owner)
        return int(mine), int(of_all)

    async def forget_samplers(self, record: SessionRecord) -> None:
        """A session counts no more for its sampling sessions, which are gone."""
        await self._recount([keys.session(record.session_id), *ACCOUNT], record.owner)

    async def forget(self, record: SessionRecord) -> None:
        """Deletes the record of a session of which nothing else is left."""
        name = record.session_id
        lists = [keys.owner_sessions(record.owner), keys.timelines_of(record.owner)]
        if record.project_id:
            lists.append(keys.project_sessions(record.owner, record.project_id))
        await self._drop([keys.session(name), *lists, *ACCOUNT], record.owner, name)

    async def made_with(self, owner: str, idempotency_key: str) -> bool:
        """Whether a session was made with this key in the last day."""
        return bool(await self._redis.exists(keys.session_idempotency(owner, idempotency_key)))

    async def get(self, session_id: str) -> SessionRecord | None:
        """The session as it is now. Raises Unreadable."""
        return self._decode(session_id, await self._redis.hmget(keys.session(session_id), _FIELDS))

    async def readable(self, session_ids: Sequence[str]) -> list[SessionRecord | None]:
        """Sessions as they are now; None for those that are not there or cannot be read."""
        pipeline = self._redis.pipeline(transaction=False)
        for session_id in session_ids:
            pipeline.hmget(keys.session(session_id), _FIELDS)
        found: list[SessionRecord | None] = []
        for session_id, fields in zip(session_ids, await pipeline.execute(), strict=True):
            record = None
            with suppress(Unreadable):
                record = self._decode(session_id, fields)
            found.append(record)
        return found

    def _decode(self, session_id: str, fields: Sequence[Any]) -> SessionRecord | None:
        raw, heartbeat, finished, project_id, reason, detail = fields
        if raw is None:
            return None
        with self._poison.reading(keys.session(session_id)):
            record = msgspec.json.decode(raw, type=SessionRecord)
            return msgspec.structs.replace(
                record,
                last_heartbeat=float(heartbeat) if heartbeat else record.last_heartbeat,
                finished=finished in (b"1", b"abandoned"),
                abandoned=finished == b"abandoned",
                project_id=record.project_id if project_id is None else project_id.decode(),
                finish_reason="" if reason is None else reason.decode(),
                finish_detail="" if detail is None else detail.decode(),
            )

    async def touch(self, session_id: str) -> None:
        """Notes that the client of a session is alive now, unless the session is over."""
        await self._touch([keys.session(session_id), keys.SESSION_LIFE], repr(clock.to_note()), session_id)

    async def finish(self, session_id: str, reason: str, detail: str) -> None:
        """Marks an existing session as over, for what it holds to be released."""
        said = ("finished", "1", "reason", reason, "detail", detail[:_DETAIL_CHARS])
        await self._end(session_id, "", *said)

    async def discard(self, record: SessionRecord, idempotency_key: str | None, detail: str) -> None:
        """Ends a session in which nothing came to be: it is forgotten soon, and its key makes another one."""
        if idempotency_key:
            await self._redis.delete(keys.session_idempotency(record.owner, idempotency_key))
        await self.finish(record.session_id, "failed", detail)
        await self._times.note(keys.OVER_SESSIONS, {record.session_id: 0.0})

    async def abandon(self, session_id: str, last_heartbeat: float) -> bool:
        """Marks a session as over for its silence, unless it was heard of meanwhile."""
        return await self._end(session_id, repr(last_heartbeat), "finished", "abandoned")

    async def list_ended(self, session_id: str) -> None:
        """Moves a session that is over from the list of the living to that of the ended."""
        await self._end(session_id, "")

    async def _end(self, session_id: str, last_heartbeat: str, *said: str) -> bool:
        lists = (keys.SESSION_LIFE, keys.PARKED_SESSIONS, keys.OVER_SESSIONS, keys.ENDED_SESSIONS)
        names = [keys.session(session_id), *lists]
        return bool(await self._end_session(names, session_id, repr(clock.to_note()), last_heartbeat, *said))

    async def models(self, session_id: str) -> list[str]:
        """Ids of the session's models, some perhaps never created."""
        return await self._members(keys.session_models(session_id))

    async def model_counts(self, session_ids: Sequence[str]) -> list[int]:
        """How many models each session has."""
        counts: list[int] = []
        for start in range(0, len(session_ids), _AT_ONCE):
            pipeline = self._redis.pipeline(transaction=False)
            for session_id in session_ids[start : start + _AT_ONCE]:
                pipeline.scard(keys.session_models(session_id))
            counts += await pipeline.execute()
        return counts

    async def samplers(self, session_id: str) -> list[str]:
        """Ids of the session's sampling sessions, some perhaps never made."""
        return await self._members(keys.session_samplers(session_id))

    async def _members(self, name: str) -> list[str]:
        """Ids of what a session made, in the order of their numbers. There may be very many: they are read in
        parts, and what is sorted in one go are whole numbers."""
        numbered = {}
        async for raw in self._redis.sscan_iter(name, count=_AT_ONCE):
            one = raw.decode()
            numbered[_number(one)] = one
        return [numbered[number] for number in sorted(numbered)]

    async def set_project(self, record: SessionRecord, project_id: str) -> None:
        """Moves an existing session into a project."""
        created = {record.session_id: record.created_at}
        await self._redis.zadd(keys.project_sessions(record.owner, project_id), created)
        await self._redis.hset(keys.session(record.session_id), "project_id", project_id)
        if record.project_id not in ("", project_id):
            await self._redis.zrem(keys.project_sessions(record.owner, record.project_id), record.session_id)

    async def of_project(self, owner: str, project_id: str) -> list[Cursor]:
        """An owner's sessions in a project with their creation, newest first."""
        name = keys.project_sessions(owner, project_id)
        found: Any = await self._redis.zrevrange(name, 0, -1, withscores=True)
        return [Cursor(created_at, raw.decode()) for raw, created_at in found]

    async def page(self, owner: str, offset: int, limit: int) -> list[str]:
        """Ids of some of an owner's sessions, newest first."""
        if not limit:
            return []
        found: Any = await self._redis.zrevrange(keys.owner_sessions(owner), offset, offset + limit - 1)
        return [raw.decode() for raw in found]

    async def after(self, owner: str, entries: int, cursor: Cursor | None) -> Listed:
        """Ids of an owner's sessions, newest first, from a cursor on."""
        return await self._pages.read(keys.owner_sessions(owner), entries, cursor)

    async def running(self, entries: int, cursor: Cursor | None) -> Listed:
        """Ids of all owners' sessions that are not over, last heard of first, from a cursor on."""
        return await self._pages.read(keys.SESSION_LIFE, entries, cursor)

    async def created_before(self, owner: str, at: float | None, limit: int) -> list[tuple[str, float]]:
        """(id, creation time) of an owner's sessions made until a time, newest first."""
        top: float | str = "+inf" if at is None else at
        found: Any = await self._redis.zrevrangebyscore(
            keys.owner_sessions(owner), top, "-inf", 0, limit, withscores=True
        )
        return [(raw.decode(), created_at) for raw, created_at in found]


def _number(object_id: str) -> int:
    """Place of a model or sampling session in its session."""
    return int(object_id.rpartition(":")[2])
