"""What is known of training runs: a run is a model, seen as the work that was done with it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from services.common.contract import ids
from services.common.contract.errors import NotFound, PermissionDenied
from services.common.process.tasks import a_few_at_once
from services.common.state.poison import Unreadable
from services.gateway.access.limits import Limits
from services.gateway.records.checkpoint import CheckpointRecord, CheckpointStore
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
    """Some of an owner's runs, newest first. `total` counts all."""

    runs: Sequence[Run]
    total: int


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
            NotFound: no such run.
            PermissionDenied: somebody else's.
        """
        record = await self._models.get(model_id) if ids.is_model_id(model_id) else None
        if record is None:
            raise NotFound(f"training run {model_id[:100]!r} does not exist")
        if record.owner != owner and not (accessible and await self._published(model_id)):
            raise PermissionDenied(f"training run {model_id} belongs to another API key")
        return await self._run(owner, record)

    async def _published(self, model_id: str) -> bool:
        return any(checkpoint.public for checkpoint in await self._checkpoints.of_model(model_id))

    async def page(self, owner: str, offset: int, limit: int, project_id: str | None = None) -> RunPage:
        """Some of the caller's runs, newest first; with a project, only of its sessions.

        Raises:
            InvalidRequest: offset or limit is out of range.
        """
        self._limits.check_page(offset, limit)
        if project_id is None:
            total, found = await self._models.page(owner, offset, limit)
        else:
            total, found = await self._page_of_project(owner, project_id, offset, limit)
        runs = await a_few_at_once(lambda model_id: self._readable(owner, model_id), found)
        return RunPage([run for run in runs if run is not None], total)

    async def _readable(self, owner: str, model_id: str) -> Run | None:
        """A run of a list, in which those that cannot be read are left out."""
        with suppress(Unreadable):
            record = await self._models.get(model_id)
            return None if record is None else await self._run(owner, record)
        return None

    async def _page_of_project(
        self, owner: str, project_id: str, offset: int, limit: int
    ) -> tuple[int, list[str]]:
        """How many runs the sessions of a project have, and the ids of some, newest session first."""
        sessions = await self._sessions.of_project(owner, project_id)
        counts = await self._sessions.model_counts(sessions)
        ends = list(accumulate(counts))
        first, last = bisect_right(ends, offset), bisect_left(ends, offset + limit)
        shown = sessions[first : last + 1] if limit else []
        models = await a_few_at_once(self._sessions.models, shown)
        found = [model_id for of_session in models for model_id in reversed(of_session)]
        start = offset - (ends[first - 1] if first else 0)
        return sum(counts), found[start : start + limit]

    async def _run(self, owner: str, record: ModelRecord) -> Run:
        checkpoints = await self._checkpoints.of_model(record.model_id)
        if record.owner != owner:
            checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.public]
        session = await self._sessions.get(record.session_id)
        last_seen = session.last_heartbeat if session is not None else 0.0
        return Run(
            record,
            max(record.created_at, last_seen),
            _newest(checkpoints, "training"),
            _newest(checkpoints, "sampler"),
        )


def _newest(checkpoints: Sequence[CheckpointRecord], kind: str) -> CheckpointRecord | None:
    found = [record for record in checkpoints if record.kind == kind]
    return max(found, key=lambda record: record.version) if found else None
