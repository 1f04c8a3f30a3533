"""Looking for sessions: lists, details, search.

Invariant: only the caller's own sessions are found; nothing is shared between API keys but published
checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.contract.errors import InvalidRequest, NotFound
from services.common.process import clock
from services.gateway.access.limits import Limits
from services.gateway.records.checkpoint import CheckpointStore
from services.gateway.records.listed import Cursor, Listed
from services.gateway.records.session import SessionRecord, SessionStore
from services.gateway.records.usage import UsageStore

_ALIVE_S = 120.0
"""A session that was heard of this recently is running; clients send a heartbeat every ten seconds."""
_CHUNK = 200
_MOST_PROJECTS = 64
_MOST_SEEN = 5000
"""Sessions looked at for one page of a search; the next page goes on from there."""


@dataclass(frozen=True)
class SessionQuery:
    """What to look for. All that is set must hold, but of `session_id` and `display_name` one is enough.

    Attributes:
        after: the last session that the page before looked at.
        display_name: words that must each be in the name, in any case.
        statuses: kinds of `status_of`; None = all.
        reasons: with the status "client_finished", only these; None = all.
    """

    session_id: str | None
    display_name: str | None
    project_ids: Sequence[str] | None
    user_metadata: Mapping[str, str] | None
    statuses: Mapping[str, Sequence[str] | None] | None
    limit: int
    after: Cursor | None


@dataclass(frozen=True)
class FoundSession:
    """A session with what its checkpoints come to."""

    record: SessionRecord
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class SessionDetails:
    """A session with the ids of what it made."""

    record: SessionRecord
    model_ids: Sequence[str]
    sampling_session_ids: Sequence[str]


@dataclass(frozen=True)
class SearchPage:
    """Sessions found, newest first. `next` None = there are no more."""

    found: Sequence[FoundSession]
    next: Cursor | None


class SessionSearch:
    """Finds sessions."""

    def __init__(
        self, store: SessionStore, checkpoints: CheckpointStore, usage: UsageStore, limits: Limits
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._usage = usage
        self._limits = limits

    async def page(self, owner: str, offset: int, limit: int) -> list[str]:
        """Ids of some of the caller's sessions, newest first. Raises InvalidRequest."""
        self._limits.check_page(offset, limit)
        return await self._store.page(owner, offset, limit)

    async def after(self, owner: str, limit: int, cursor: Cursor | None) -> Listed:
        """Ids of some of the caller's sessions, newest first, from a cursor on. Raises InvalidRequest."""
        self._limits.check_page_size(limit)
        return await self._store.after(owner, limit, cursor)

    async def details(self, owner: str, session_id: str) -> SessionDetails:
        """A session of the caller's, running or over. Raises NotFound."""
        record = await self._owned(owner, session_id)
        models, samplers = await asyncio.gather(
            self._store.models(session_id), self._store.samplers(session_id)
        )
        return SessionDetails(record, models, samplers)

    async def assign_project(self, owner: str, session_id: str, project_id: str) -> None:
        """Puts a session, and all that it made, into a project. A project is a label, there when
        something is in it.

        Raises:
            InvalidRequest: the label is empty or too long.
            NotFound: as `details`.
        """
        if not project_id:
            message = "project_id is empty; a session cannot be taken out of a project"
            raise InvalidRequest(message, field="project_id")
        self._limits.check_labels(project_id=project_id)
        record = await self._owned(owner, session_id)
        await self._store.set_project(record, project_id)

    async def search(self, owner: str, query: SessionQuery) -> SearchPage:
        """One page of sessions. Raises InvalidRequest when the limit is out of range, or more is looked for
        than each session can be compared with."""
        if not 1 <= query.limit <= 200:
            raise InvalidRequest(f"limit must be 1 to 200, not {query.limit}", field="limit")
        self._limits.check_labels(display_name=query.display_name or "")
        self._limits.check_metadata(query.user_metadata or {})
        if len(query.project_ids or ()) > _MOST_PROJECTS:
            message = f"{len(query.project_ids or ())} project_ids; use at most {_MOST_PROJECTS}"
            raise InvalidRequest(message, field="project_ids")
        found: list[SessionRecord] = []
        after, seen = query.after, 0
        while len(found) < query.limit and seen < _MOST_SEEN:
            chunk = await self._chunk(owner, after)
            if not chunk:
                return SearchPage(await self._described(owner, found), None)
            records = await self._store.readable([session_id for session_id, _ in chunk])
            for (session_id, created_at), record in zip(chunk, records, strict=True):
                seen, after = seen + 1, Cursor(created_at, session_id)
                if record is not None and matches(query, record, clock.to_judge()):
                    found.append(record)
                    if len(found) == query.limit:
                        break
        return SearchPage(await self._described(owner, found), after)

    async def _chunk(self, owner: str, after: Cursor | None) -> list[tuple[str, float]]:
        """Sessions after a cursor. Its time may have been rounded to microseconds, as a client's are."""
        if after is None:
            return await self._store.created_before(owner, None, _CHUNK)
        place = (round(after.created_at, 6), after.name)
        chunk = await self._store.created_before(owner, place[0] + 1e-6, _CHUNK)
        return [one for one in chunk if (round(one[1], 6), one[0]) < place]

    async def _described(self, owner: str, records: Sequence[SessionRecord]) -> list[FoundSession]:
        if not records:
            return []
        await self._checkpoints.unlist_expired(owner)
        stored = await self._usage.stored(owner)
        return [FoundSession(record, *stored.get(record.session_id, (0, 0))) for record in records]

    async def _owned(self, owner: str, session_id: str) -> SessionRecord:
        record = await self._store.get(session_id)
        if record is None or record.owner != owner:
            raise NotFound(f"session {session_id[:100]!r} does not exist")
        return record


def status_of(record: SessionRecord, now: float) -> str | None:
    """ "active", "client_finished", "cancelled" (by the cluster), or None: silent for a while."""
    if record.finished:
        return "cancelled" if record.abandoned else "client_finished"
    return "active" if now - record.last_heartbeat < _ALIVE_S else None


def matches(query: SessionQuery, record: SessionRecord, now: float) -> bool:
    """Whether a session is one that is looked for."""
    named = []
    if query.session_id is not None:
        named.append(record.session_id == query.session_id)
    if query.display_name is not None:
        name = record.display_name.lower()
        named.append(all(word in name for word in query.display_name.lower().split()))
    if named and not any(named):
        return False
    if query.project_ids is not None and record.project_id not in query.project_ids:
        return False
    wanted = query.user_metadata or {}
    if any(record.user_metadata.get(key) != value for key, value in wanted.items()):
        return False
    if query.statuses is None:
        return True
    status = status_of(record, now)
    if status is None or status not in query.statuses:
        return False
    reasons = query.statuses[status]
    return reasons is None or record.finish_reason in reasons
