"""Named checkpoints: who may read them, publishing, lifetime, deletion.

Invariants: a checkpoint belongs to the owner of its model. Others may read it, load it and sample from it
while it is published, and nothing more; what they opened or loaded meanwhile stays theirs. What they may not
read is to them as if it did not exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, NotFound, PermissionDenied, Unavailable
from services.common.process import clock
from services.gateway.access.limits import Limits
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.checkpoint import CheckpointPage, CheckpointRecord, CheckpointStore, key_of
from services.gateway.records.listed import Cursor
from services.gateway.records.model import ModelStore

log = logging.getLogger(__name__)

_MOST_CHANGES = 20


class Checkpoints:
    """The checkpoints of all models."""

    def __init__(
        self,
        store: CheckpointStore,
        models: ModelStore,
        files: CheckpointFiles,
        limits: Limits,
        redo_log: RedoLog,
    ) -> None:
        self._store = store
        self._models = models
        self._files = files
        self._limits = limits
        self._redo_log = redo_log

    async def readable(self, owner: str, model_id: str, checkpoint_id: str) -> CheckpointRecord:
        """A checkpoint of the caller's, or one that is published.

        Raises:
            NotFound: no such model or checkpoint, it expired, or it is somebody else's and not published.
            Unavailable: Redis has just restarted, and may be without it.
        """
        model_owner = await self._owner_of(model_id)
        record = await self._store.get(model_id, ids.check_checkpoint_id(checkpoint_id))
        if record is None:
            # What a save came to is recorded again after a restart, as it is published again.
            await self._redo_log.refuse_while_restoring()
        if model_owner != owner and not (record is not None and record.public):
            raise _no_run(model_id)
        if record is None:
            raise NotFound(f"{ids.tinker_path(model_id, checkpoint_id)} does not exist, or it expired")
        return record

    async def check_room(self, owner: str) -> None:
        """To be called before a checkpoint is accepted.

        Raises:
            LimitReached: the owner has as many as it may, or as many bytes of them.
        """
        self._limits.owners.check_checkpoints(*await self._store.totals(owner))

    async def training(self, owner: str, path: str) -> tuple[str, CheckpointRecord]:
        """The model that wrote the training state at a path, and its checkpoint. Raises as `readable`.

        Raises:
            InvalidRequest: the path has another form, or names something else.
        """
        model_id, checkpoint_id = ids.parse_tinker_path(path)
        if not checkpoint_id.startswith("weights/"):
            raise InvalidRequest(
                f"{path} has no training state; save_state writes one, at "
                "tinker://<training_run_id>/weights/<name>"
            )
        return model_id, await self.readable(owner, model_id, checkpoint_id)

    async def owned(self, owner: str, model_id: str, checkpoint_id: str) -> CheckpointRecord:
        """A checkpoint of one of the caller's models. Raises as `readable`.

        Raises:
            PermissionDenied: somebody else's, which is published.
        """
        record = await self.readable(owner, model_id, checkpoint_id)
        if record.owner != owner:
            raise PermissionDenied(f"checkpoint {_path(record)} belongs to another API key")
        return record

    async def of_model(self, owner: str, model_id: str) -> list[CheckpointRecord]:
        """All checkpoints of one of the caller's models, oldest first; of others' the published ones.

        Raises:
            NotFound: no such model, or somebody else's of which nothing is published.
        """
        model_owner = await self._owner_of(model_id)
        records = await self._store.of_model(model_id)
        if model_owner != owner:
            records = [record for record in records if record.public]
            if not records:
                raise _no_run(model_id)
        return records

    async def page(self, owner: str, offset: int, limit: int) -> CheckpointPage:
        """Some of the caller's checkpoints, newest first.

        Raises:
            InvalidRequest: offset or limit is out of range.
        """
        self._limits.check_page(offset, limit)
        return await self._store.page(owner, offset, limit)

    async def after(self, owner: str, limit: int, cursor: Cursor | None) -> CheckpointPage:
        """Some of the caller's checkpoints, newest first, from a cursor on.

        Raises:
            InvalidRequest: limit is out of range.
        """
        self._limits.check_page_size(limit)
        return await self._store.after(owner, limit, cursor)

    async def of_model_after(
        self, owner: str, model_id: str, limit: int, cursor: Cursor | None
    ) -> CheckpointPage:
        """Some of the checkpoints of one model, newest first, from a cursor on. Raises as `of_model`.

        Raises:
            InvalidRequest: limit is out of range.
        """
        self._limits.check_page_size(limit)
        every = await self.of_model(owner, model_id)
        newest = sorted(every, key=_place, reverse=True)
        left = [record for record in newest if cursor is None or _place(record) < _placed(cursor)]
        last = left[limit - 1] if 0 < limit < len(left) else None
        ended = None if last is None else Cursor(*_place(last))
        return CheckpointPage(left[:limit], len(every), ended)

    async def set_public(self, owner: str, model_id: str, checkpoint_id: str, public: bool) -> None:
        """Publishes a checkpoint, or ends that. Raises as `owned`."""
        await self._change(
            owner, model_id, checkpoint_id, lambda record: msgspec.structs.replace(record, public=public)
        )

    async def set_ttl(self, owner: str, model_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """Has a checkpoint expire so many seconds from now; None = never. Raises as `owned`.

        Raises:
            InvalidRequest: that is no lifetime which a checkpoint can have.
        """
        self._limits.check_ttl(ttl_seconds)
        expires_at = None if ttl_seconds is None else clock.to_note() + ttl_seconds
        await self._change(
            owner,
            model_id,
            checkpoint_id,
            lambda record: msgspec.structs.replace(record, expires_at=expires_at),
        )

    async def delete_if_there(self, owner: str, model_id: str, checkpoint_id: str) -> None:
        """Deletes a checkpoint of one of the caller's models, unless there is none.

        Raises:
            NotFound: no such model, or somebody else's.
            PermissionDenied: somebody else's, which is published.
        """
        if await self._owner_of(model_id) != owner:
            await self.owned(owner, model_id, checkpoint_id)
        with suppress(NotFound):
            await self.delete(owner, model_id, checkpoint_id)

    async def delete(self, owner: str, model_id: str, checkpoint_id: str) -> None:
        """Deletes a checkpoint. Its name is free at once. Raises as `owned`."""
        for _ in range(_MOST_CHANGES):
            record = await self.owned(owner, model_id, checkpoint_id)
            if await self._store.remove(record):
                log.info("checkpoint %s deleted by %s", _path(record), owner)
                await self._remove_files(record)
                return
        raise _changing(model_id, checkpoint_id)

    async def refuse_taken(self, model_id: str, checkpoint_id: str, seq_id: int) -> None:
        """Refuses a name that an earlier operation saved under. The operation itself, sent again after it
        ran, is not refused; and a checkpoint that expired makes way."""
        expired = await self._store.expired(model_id, checkpoint_id)
        if expired is not None and await self._store.remove(expired):
            await self._remove_files(expired)
        taken = await self._store.get(model_id, checkpoint_id)
        if taken is not None and taken.version != seq_id:
            raise InvalidRequest(f"{_path(taken)} exists; choose another name", "checkpoint_exists")

    async def _remove_files(self, record: CheckpointRecord) -> None:
        """Removes what can be removed now. What cannot is due for the sweep."""
        key = key_of(record)
        try:
            if record.kind != "sampler":
                again = await self._files.remove(key)
                if again is not None:
                    await self._store.look_again(key, clock.to_note() + again)
                else:
                    await self._store.settle(key)
        except OSError as error:
            log.warning("the files of %s stay for now: %s", key.path, error)

    async def _change(
        self,
        owner: str,
        model_id: str,
        checkpoint_id: str,
        change: Callable[[CheckpointRecord], CheckpointRecord],
    ) -> None:
        for _ in range(_MOST_CHANGES):
            record = await self.owned(owner, model_id, checkpoint_id)
            if await self._store.change(record, change(record)):
                return
        raise _changing(model_id, checkpoint_id)

    async def _owner_of(self, model_id: str) -> str:
        record = await self._models.get(model_id) if ids.is_model_id(model_id) else None
        if record is None:
            await self._redo_log.refuse_while_restoring()
            raise _no_run(model_id)
        return record.owner


def _no_run(model_id: str) -> NotFound:
    return NotFound(f"training run {model_id[:100]!r} does not exist")


def _place(record: CheckpointRecord) -> tuple[float, str]:
    """Where a checkpoint is among those of its model."""
    return record.version, record.checkpoint_id


def _placed(cursor: Cursor) -> tuple[float, str]:
    return cursor.created_at, cursor.name


def _path(record: CheckpointRecord) -> str:
    return ids.tinker_path(record.model_id, record.checkpoint_id)


def _changing(model_id: str, checkpoint_id: str) -> Unavailable:
    path = ids.tinker_path(model_id, checkpoint_id)
    return Unavailable(f"{path} is being changed by others all the time; try again")
