"""Copies of checkpoints: runs of their own that hold one checkpoint and cannot be trained on.

Invariant: a copy is found whole or not at all, and from then on nothing that becomes of its source touches
it. A request that is repeated finds the copy that it made, or joins it while it is made; files of one that
broke off are due from before they were made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.common.contract import ids
from services.common.contract.errors import Conflict, NotFound
from services.common.process.pools import COPIES
from services.common.storage.base import Key, Storage, failure
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import directory_bytes, linked_files, publish_directory
from services.gateway.access.gate import Gate
from services.gateway.access.limits import Limits
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.checkpoint import CheckpointRecord, key_of
from services.gateway.records.model import ModelRecord
from services.gateway.records.stores import Stores
from services.gateway.sessions.sessions import NewSession, Sessions
from services.gateway.training.request_digest import digest

log = logging.getLogger(__name__)

_MADE_S = 3600.0
"""By then a copy has its record, or was given up."""


@dataclass(frozen=True)
class Wanted:
    """What is to be copied.

    Attributes:
        path: of the checkpoint.
        ttl_seconds: after which the copy expires; None = never.
        reader: whose checkpoint it may be, if not the caller's.
    """

    path: str
    ttl_seconds: int | None = None
    reader: str | None = None


class Copies:
    """Copies checkpoints.

    Args:
        storage: of training checkpoints and exports.
        data: where the snapshots of sampler checkpoints are.
        gate: counts a copy as a download of its owner for as long as it is made.
    """

    def __init__(
        self,
        stores: Stores,
        sessions: Sessions,
        checkpoints: Checkpoints,
        storage: Storage,
        data: DataDir,
        limits: Limits,
        redo_log: RedoLog,
        gate: Gate,
    ) -> None:
        self._models = stores.models
        self._records = stores.checkpoints
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._storage = storage
        self._data = data
        self._limits = limits
        self._redo_log = redo_log
        self._gate = gate
        self._making: dict[Key, asyncio.Task[None]] = {}

    async def into_project(
        self, owner: str, wanted: Wanted, project_id: str, idempotency_key: str | None = None
    ) -> str:
        """Copies a checkpoint into a project; the path of the copy.

        Args:
            idempotency_key: the same with the same request gives the same copy for a day.

        Raises:
            InvalidRequest: the path or the lifetime is none.
            NotFound, PermissionDenied: as Checkpoints.readable.
            LimitReached: the owner has as many sessions, models or checkpoints as it may, or makes as many
                copies at once.
            StorageFull, Internal: it could not be written.
            Unavailable: it took too long.
        """
        source = await self._source(owner, wanted)
        asked = digest("copy", wanted.path, project_id, wanted.ttl_seconds, idempotency_key).hex()
        new = NewSession(project_id=project_id, display_name=f"copy of {source.checkpoint_id}"[:128])
        session_id = await self._sessions.create(owner, new, asked if idempotency_key else None)
        path = await self._copied(owner, wanted, source, ids.model_id(session_id, 0))
        # Nothing more is made in the session; its records stay for as long as the copy does.
        await self._sessions.finish(owner, session_id, "success", f"holds a copy of {wanted.path}")
        return path

    async def into_session(self, owner: str, wanted: Wanted, session_id: str, model_seq_id: int) -> str:
        """Copies a checkpoint into a session of the caller's, as its model of this number; the path of the
        copy. Raises as `into_project`, and Gone when the session is over, Conflict when the number is used.
        """
        await self._sessions.open_for_more(owner, session_id)
        source = await self._source(owner, wanted)
        return await self._copied(owner, wanted, source, ids.model_id(session_id, model_seq_id))

    async def _source(self, owner: str, wanted: Wanted) -> CheckpointRecord:
        self._limits.check_ttl(wanted.ttl_seconds)
        return await self._checkpoints.readable(wanted.reader or owner, *ids.parse_tinker_path(wanted.path))

    async def _copied(self, owner: str, wanted: Wanted, source: CheckpointRecord, model_id: str) -> str:
        now = time.time()
        copy = msgspec.structs.replace(
            source,
            model_id=model_id,
            owner=owner,
            public=False,
            created_at=now,
            expires_at=None if wanted.ttl_seconds is None else now + wanted.ttl_seconds,
        )
        await self._put_run(copy, wanted.path)
        if await self._records.get(model_id, copy.checkpoint_id) is None:
            await self._checkpoints.check_room(owner)
            await self._put_copy(source, copy)
            log.info("checkpoint %s copied by %s to %s", wanted.path, owner, model_id)
        return ids.tinker_path(model_id, copy.checkpoint_id)

    async def _put_copy(self, source: CheckpointRecord, copy: CheckpointRecord) -> None:
        """Makes the copy, or waits for another request that does. It goes on when nobody waits any more."""
        key = key_of(copy)
        if key not in self._making:
            making = asyncio.create_task(self._make(source, copy), name=f"copy to {copy.model_id}")
            self._making[key] = making
            making.add_done_callback(lambda made: self._made(key, made))
        await asyncio.shield(self._making[key])

    def _made(self, key: Key, made: asyncio.Task[None]) -> None:
        del self._making[key]
        error = None if made.cancelled() else made.exception()
        if error is not None:
            log.info("copy to %s failed: %s", key.model_id, error)

    async def _make(self, source: CheckpointRecord, copy: CheckpointRecord) -> None:
        with self._gate.download(copy.owner):
            await self._records.look_again(key_of(copy), copy.created_at + _MADE_S)
            try:
                size = await COPIES.run(self._copy_files, key_of(source), key_of(copy))
            except OSError as error:
                raise failure(error, f"the copy of checkpoint {source.checkpoint_id}") from error
            if size is None:
                path = ids.tinker_path(source.model_id, source.checkpoint_id)
                raise NotFound(f"{path} does not exist any more")
            await self._records.put(copy)

    async def _put_run(self, copy: CheckpointRecord, source: str) -> None:
        """Stores the run that holds a copy, of which no trainer hears."""
        record = ModelRecord(
            model_id=copy.model_id,
            session_id=ids.session_of(copy.model_id),
            owner=copy.owner,
            base_model=copy.base_model,
            lora_rank=copy.lora_rank,
            train_attn=copy.train_attn,
            train_mlp=copy.train_mlp,
            train_unembed=copy.train_unembed,
            role=copy.role,
            created_at=copy.created_at,
            copy_of=source,
            status="ready",
        )
        stored = await self._models.get(record.model_id)
        if stored is None:
            self._limits.owners.check_models(await self._models.count(record.owner))
            stored = await self._redo_log.perform(lambda: self._models.create_if_absent(record))
        if stored.copy_of != source:
            raise Conflict(f"model {record.model_id} exists; use the next model_seq_id")

    def _copy_files(self, source: Key, target: Key) -> int | None:
        if not source.checkpoint_id.startswith("sampler_weights/"):
            return self._storage.copy(source, target)
        directory = self._data.snapshot(target.model_id, target.version)
        return _copy_snapshot(self._data.snapshot(source.model_id, source.version), directory)


def _copy_snapshot(source: Path, target: Path) -> int | None:
    """The bytes of a snapshot that is now in two places; None when it is gone."""
    try:
        files = linked_files(source)
        return publish_directory(target, files, replace=False, leave_reserve=True)
    except FileExistsError:
        return directory_bytes(target)
    except FileNotFoundError:
        return None
