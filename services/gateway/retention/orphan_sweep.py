"""Takes away sampler snapshots of models that nothing knows any more, and what saves that broke off left.

Every snapshot goes with its model or before; only when Redis lost the model is there nobody left to say so.
Invariants: only the directory of a model without a record goes, and only when it had none at any look since
a day before. Nothing goes by what another Redis knows than the one that the data directory belongs to, nor
by one that knows none of the models. All of this may be done twice, by any gateways, with the same effect.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import TinsmithError
from services.common.process import clock
from services.common.process.pools import DELETIONS
from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import clean_abandoned, delete_directory, written_once
from services.gateway.records.times import Times
from services.gateway.retention.daily import Daily

log = logging.getLogger(__name__)

_DAY_S = 24 * 3600.0


class OrphanSweep:
    """Looks once a day, whichever gateway does, for as long as its gateway lives."""

    def __init__(self, client: redis.asyncio.Redis, data: DataDir) -> None:
        self._redis = client
        self._times = Times(client)
        self._data = data
        self._looks = Daily(client, "search for orphaned snapshots", keys.ORPHAN_SEARCH, self._look)

    async def start(self) -> None:
        """Begins to look."""
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def _look(self) -> None:
        await self.look(clock.to_judge(), clock.to_note())

    async def look(self, now: float, noted: float) -> None:
        """Looks at every model that has snapshots.

        Args:
            now, noted: by the clock that judges, and by the one that notes.
        """
        found = await DELETIONS.run(_models_in, self._data.root / "snapshots")
        if not await self._knows_any(found):
            # More likely a Redis that lost its data than models that all were lost one by one.
            await self._redis.delete(keys.ORPHANED_MODELS)
            return
        if not await self._is_ours():
            log.warning(
                "orphaned snapshots in %s are not looked for: %s names another Redis; two clusters need two "
                "data directories. If its Redis is lost, delete that file",
                self._data.root,
                self._data.cluster_id,
            )
            return
        known: Any = await self._redis.zrange(keys.ORPHANED_MODELS, 0, -1, withscores=True)
        since = {member.decode(): at for member, at in known}
        for model_id in found:
            if await self._is_known(model_id):
                await _try(model_id, clean_abandoned, self._data.snapshots(model_id))
            elif model_id not in since:
                await self._times.note(keys.ORPHANED_MODELS, {model_id: noted})
            elif now - since[model_id] >= _DAY_S:
                log.warning("snapshots of %s are deleted: nothing knows the model any more", model_id)
                await _try(model_id, delete_directory, self._data.snapshots(model_id))
        for model_id in since:
            if model_id not in found or await self._is_known(model_id):
                await self._redis.zrem(keys.ORPHANED_MODELS, model_id)

    async def _is_ours(self) -> bool:
        """Whether the data directory belongs to this Redis; it comes to the first one that knows any of its
        models."""
        here: Any = await self._redis.get(keys.CLUSTER_ID)
        if here is None:
            await self._redis.set(keys.CLUSTER_ID, uuid.uuid4().hex, nx=True)
            here = await self._redis.get(keys.CLUSTER_ID)
        return here is not None and here.decode() == await DELETIONS.run(
            written_once, self._data.cluster_id, here.decode()
        )

    async def _knows_any(self, found: set[str]) -> bool:
        for model_id in found:
            if await self._is_known(model_id):
                return True
        return False

    async def _is_known(self, model_id: str) -> bool:
        """Whether the model has a record, be it one that cannot be read."""
        return bool(await self._redis.exists(keys.model(model_id)))


async def _try(model_id: str, delete: Callable[[Path], None], directory: Path) -> None:
    """Deletes something of a model; what fails is made up for by the next look."""
    try:
        await DELETIONS.run(delete, directory)
    except (TinsmithError, OSError) as error:
        log.warning("snapshots of %s stay for now: %s", model_id, error)


def _models_in(directory: Path) -> set[str]:
    """The models that have a directory there."""
    if not directory.is_dir():
        return set()
    return {path.name for path in directory.iterdir() if ids.is_model_id(path.name)}
