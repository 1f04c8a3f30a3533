"""Sessions: the client processes that models and sampling sessions belong to.

Invariant: every object is looked up together with its owner. Somebody else's object is answered as one that
does not exist, in the same words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.common.contract import ids
from services.common.contract.errors import Gone, NotFound
from services.common.process import clock
from services.common.process.tasks import detached
from services.common.state.room import Room
from services.gateway.access.limits import Limits
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.remembered import Remembered
from services.gateway.records.session import SessionRecord, SessionStore

log = logging.getLogger(__name__)

_FRESH_S = 1.0
_NOTED_S = 10.0
_CACHED = 4096

_Get = Callable[[str], Awaitable[SessionRecord | None]]


@dataclass(frozen=True)
class NewSession:
    """What a client tells about itself. Nothing but the labels' sizes is checked."""

    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: str = ""
    project_id: str = ""
    display_name: str = ""


class Sessions:
    """Creates, keeps alive and finishes sessions."""

    def __init__(self, store: SessionStore, limits: Limits, redo_log: RedoLog, room: Room) -> None:
        self._store = store
        self._room = room
        self._redo_log = redo_log
        self._limits = limits
        self._recent: Remembered[SessionRecord] = Remembered(_CACHED, _FRESH_S)
        self._noted: Remembered[bool] = Remembered(_CACHED, _NOTED_S)
        self._looks: dict[str, asyncio.Task[SessionRecord | None]] = {}

    async def create(self, owner: str, new: NewSession, idempotency_key: str | None) -> str:
        """Starts a session; repeating the idempotency key gives the same session id.

        Raises:
            InvalidRequest: a label or the metadata is too large.
            Overloaded: Redis is nearly full.
            LimitReached: the owner has as many sessions as it may.
        """
        self._room.check()
        self._limits.check_tags(new.tags)
        self._limits.check_labels(
            sdk_version=new.sdk_version,
            project_id=new.project_id,
            display_name=new.display_name,
            idempotency_key=idempotency_key or "",
        )
        self._limits.check_metadata(new.user_metadata or {})
        now = clock.to_note()
        record = SessionRecord(
            session_id=ids.new_session_id(),
            owner=owner,
            created_at=now,
            last_heartbeat=now,
            tags=list(new.tags),
            user_metadata=dict(new.user_metadata or {}),
            display_name=new.display_name,
            project_id=new.project_id,
            sdk_version=new.sdk_version,
        )
        if not (idempotency_key and await self._store.made_with(owner, idempotency_key)):
            self._limits.owners.check_sessions(await self._store.count(owner))
            await self.check_room(owner, record)
        stored = await self._redo_log.perform(lambda: self._store.create(record, idempotency_key))
        return stored.session_id

    async def open(self, owner: str, session_id: str) -> SessionRecord:
        """A session that may be used. What another gateway did is seen within a second.

        Raises:
            NotFound: no such session of the caller's.
            Gone: it was finished.
        """
        record = self._recent.get(session_id)
        if record is None or record.owner != owner:
            record = await self._owned(owner, session_id, self._look)
            self._recent[session_id] = record
        _check_running(record)
        await self.note_alive(session_id)
        return record

    async def open_for_more(self, owner: str, session_id: str) -> SessionRecord:
        """A session in which something is to be made that stays. Raises as `open`, and Overloaded when Redis
        is nearly full."""
        self._room.check()
        return await self.open(owner, session_id)

    async def check_room(self, owner: str, record: msgspec.Struct) -> None:
        """To be called before a record of an owner is made that stays.

        Raises:
            LimitReached: the owner holds too much of Redis, those of others taken into account.
        """
        self._room.check_share(*await self._store.held(owner), len(msgspec.json.encode(record)))

    async def note_alive(self, session_id: str) -> None:
        """Notes that the client of an existing session did something, every few seconds at most."""
        if self._noted.get(session_id) is None:
            self._noted[session_id] = True
            await self._store.touch(session_id)

    async def heartbeat(self, owner: str, session_id: str) -> None:
        """Notes that the client lives. Raises as `open`, from the newest record."""
        _check_running(await self._owned(owner, session_id))
        await self._store.touch(session_id)

    async def finish(self, owner: str, session_id: str, reason: str, detail: str) -> None:
        """Ends a session for good; the reason goes to the log. Raises NotFound as `open`."""
        await self._owned(owner, session_id)
        await self._store.finish(session_id, reason, detail)
        self._recent.pop(session_id, None)
        log.info("session %s of %s finished: %s %.200r", session_id, owner, reason, detail)

    async def discard(
        self, owner: str, session_id: str, idempotency_key: str | None, error: BaseException
    ) -> None:
        """Ends a session of the owner's in which nothing came to be, because of an error. Its records go
        soon, and the key that made it makes another one."""
        record = await self._store.get(session_id)
        if record is not None and record.owner == owner:
            await self._store.discard(record, idempotency_key, str(error))
            self._recent.pop(session_id, None)

    async def _look(self, session_id: str) -> SessionRecord | None:
        """Reads a session once for all who want it at this moment."""
        look = self._looks.get(session_id)
        if look is None:
            look = self._looks[session_id] = detached(self._store.get(session_id), f"look at {session_id}")
            look.add_done_callback(lambda _: self._looks.pop(session_id))
        return await asyncio.shield(look)

    async def _owned(self, owner: str, session_id: str, get: _Get | None = None) -> SessionRecord:
        record = await (get or self._store.get)(session_id) if ids.is_session_id(session_id) else None
        if record is None or record.owner != owner:
            await self._redo_log.refuse_while_restoring()
            raise NotFound(f"session {session_id[:100]!r} does not exist; create one first")
        return record


def _check_running(record: SessionRecord) -> None:
    if record.finished:
        why = "is over, because nothing was heard of it for long" if record.abandoned else "was finished"
        raise Gone(
            f"session {record.session_id} {why}; create a new one and load a checkpoint", "session_finished"
        )
