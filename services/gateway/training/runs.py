"""What is known of training runs: a run is a model, seen as the work that was done with it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, NotFound
from services.common.process.tasks import a_few_at_once
from services.common.state.poison import Unreadable
from services.gateway.access.limits import Limits
from services.gateway.records.checkpoint import CheckpointRecord, CheckpointStore
from services.gateway.records.listed import Cursor, Listed
from services.gateway.records.model import ModelRecord, ModelStore
from services.gateway.records.session import SessionStore


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        last_request: Unix time of the last sign of life of its session.
        last_checkpoint: newest training checkpoint that the caller may read.
        last_sampler_checkpoint: newest sampler checkpoint that the caller may read.
    """

    model: ModelRecord
    last_request: float
    last_checkpoint: CheckpointRecord | None
    last_sampler_checkpoint: CheckpointRecord | None


@dataclass(frozen=True)
class RunPage:
    """Some of an owner's runs, newest first. `total` counts all; `next` is where a page of a cursor ended,
    None = there are no more."""

    runs: Sequence[Run]
    total: int
    next: Cursor | None = None


@dataclass(frozen=True)
class _Project:
    """The sessions of a project, newest first, and how many runs they have with those before them."""

    sessions: Sequence[Cursor]
    ends: Sequence[int]

    @property
    def total(self) -> int:
        return self.ends[-1] if self.ends else 0


class Runs:
    """Training runs of all owners."""

    def __init__(
        self, models: ModelStore, sessions: SessionStore, checkpoints: CheckpointStore, limits: Limits
    ) -> None:
        self._models = models
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._limits = limits

    async def get(self, owner: str, model_id: str, accessible: bool = False) -> Run:
        """One run.

        Args:
            accessible: also somebody else's of which a checkpoint is published.

        Raises:
            NotFound: no such run, or somebody else's.
        """
        record = await self._models.get(model_id) if ids.is_model_id(model_id) else None
        if record is None or (record.owner != owner and not (accessible and await self._published(model_id))):
            raise NotFound(f"training run {model_id[:100]!r} does not exist")
        return await self._run(owner, record)

    async def _published(self, model_id: str) -> bool:
        async for checkpoint in self._checkpoints.each_of_model(model_id):
            if checkpoint.public:
                return True
        return False

    async def page(self, owner: str, offset: int, limit: int, project_id: str | None = None) -> RunPage:
        """Some of the caller's runs, newest first; with a project, only of its sessions.

        Raises:
            InvalidRequest: offset or limit is out of range.
        """
        self._limits.check_page(offset, limit)
        if project_id is None:
            total, found = await self._models.page(owner, offset, limit)
        else:
            project = await self._project(owner, project_id)
            total, found = project.total, await self._of_project(project, offset, limit)
        return RunPage(await self._all_readable(owner, found), total)

    async def after(
        self, owner: str, limit: int, cursor: Cursor | None, project_id: str | None = None
    ) -> RunPage:
        """Some of the caller's runs, newest first, from a cursor on; with a project, only of its sessions.

        Raises:
            InvalidRequest: limit is out of range, or the cursor names no run.
        """
        self._limits.check_page_size(limit)
        if project_id is None:
            listed = await self._models.after(owner, limit, cursor)
        else:
            listed = await self._of_project_after(owner, project_id, limit, cursor)
        return RunPage(await self._all_readable(owner, listed.names), listed.total, listed.next)

    async def _all_readable(self, owner: str, model_ids: Sequence[str]) -> list[Run]:
        runs = await a_few_at_once(lambda model_id: self._readable(owner, model_id), model_ids)
        return [run for run in runs if run is not None]

    async def _readable(self, owner: str, model_id: str) -> Run | None:
        """A run of a list, in which those that cannot be read are left out."""
        with suppress(Unreadable):
            record = await self._models.get(model_id)
            return None if record is None else await self._run(owner, record)
        return None

    async def _project(self, owner: str, project_id: str) -> _Project:
        sessions = await self._sessions.of_project(owner, project_id)
        counts = await self._sessions.model_counts([session.name for session in sessions])
        return _Project(sessions, list(accumulate(counts)))

    async def _of_project(self, project: _Project, offset: int, limit: int) -> list[str]:
        """Ids of some runs of a project's sessions, newest session first."""
        ends = project.ends
        first, last = bisect_right(ends, offset), bisect_left(ends, offset + limit)
        shown = project.sessions[first : last + 1] if limit else []
        models = await a_few_at_once(self._sessions.models, [session.name for session in shown])
        found = [model_id for of_session in models for model_id in reversed(of_session)]
        start = offset - (ends[first - 1] if first else 0)
        return found[start : start + limit]

    async def _of_project_after(
        self, owner: str, project_id: str, limit: int, cursor: Cursor | None
    ) -> Listed:
        project = await self._project(owner, project_id)
        offset = 0 if cursor is None else await self._place(project, cursor)
        found = await self._of_project(project, offset, limit)
        if not found or offset + len(found) >= project.total:
            return Listed(found, project.total, None)
        made = {session.name: session.created_at for session in project.sessions}
        return Listed(found, project.total, Cursor(made[ids.session_of(found[-1])], found[-1]))

    async def _place(self, project: _Project, cursor: Cursor) -> int:
        """How many runs of a project come before the place where a page ended, which is told by the creation
        of the last run's session and stays when that session moves to another project or is gone."""
        if not ids.is_model_id(cursor.name):
            message = "page_token is not one of ours; pass next_page_token back as it is"
            raise InvalidRequest(message, field="page_token")
        place = Cursor(cursor.created_at, ids.session_of(cursor.name))
        newer = sum(session > place for session in project.sessions)
        number, inside = _number(cursor.name), 0
        if newer < len(project.sessions) and project.sessions[newer] == place:
            inside = sum(_number(one) >= number for one in await self._sessions.models(place.name))
        return (project.ends[newer - 1] if newer else 0) + inside

    async def _run(self, owner: str, record: ModelRecord) -> Run:
        newest: dict[str, CheckpointRecord] = {}
        async for checkpoint in self._checkpoints.each_of_model(record.model_id):
            before = newest.get(checkpoint.kind)
            shown = record.owner == owner or checkpoint.public
            if shown and (before is None or before.version < checkpoint.version):
                newest[checkpoint.kind] = checkpoint
        session = await self._sessions.get(record.session_id)
        last_seen = session.last_heartbeat if session is not None else 0.0
        return Run(
            record,
            max(record.created_at, last_seen),
            newest.get("training"),
            newest.get("sampler"),
        )


def _number(model_id: str) -> int:
    """Place of a model in its session."""
    return int(model_id.rpartition(":")[2])
