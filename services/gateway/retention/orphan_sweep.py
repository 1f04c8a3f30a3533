"""Takes away sampler snapshots of models that nothing knows any more.

Every snapshot goes with its model or before; only when Redis lost the model is there nobody left to say so.
Invariants: only the directory of a model without a record goes, and only when it had none a day before
either; so a gateway that was pointed at another Redis by mistake deletes nothing that day. All of this may be
done twice, by any gateways, with the same effect.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import redis.asyncio

from services.common.contract import ids
from services.common.process.periodic import Periodic
from services.common.process.pools import DELETIONS
from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import delete_directory

log = logging.getLogger(__name__)

_LOOK_S = 60.0
_DAY_S = 24 * 3600.0
_DEADLINE_S = 6 * 3600.0
"""So long after a look that broke off there is another."""


class OrphanSweep:
    """Looks once a day, whichever gateway does, for as long as its gateway lives."""

    def __init__(self, client: redis.asyncio.Redis, data: DataDir) -> None:
        self._redis = client
        self._data = data
        self._looks = Periodic("search for orphaned snapshots", _LOOK_S, self._look_if_due, _DEADLINE_S)

    async def start(self) -> None:
        """Begins to look."""
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def _look_if_due(self) -> None:
        if await self._redis.set(keys.ORPHAN_SEARCH, "", nx=True, px=round(_DEADLINE_S * 1000)):
            await self.look(time.time())
            await self._redis.pexpire(keys.ORPHAN_SEARCH, round(_DAY_S * 1000))

    async def look(self, now: float) -> None:
        """Looks at every model that has snapshots."""
        found = await DELETIONS.run(_models_in, self._data.root / "snapshots")
        known: Any = await self._redis.zrange(keys.ORPHANED_MODELS, 0, -1, withscores=True)
        since = {member.decode(): at for member, at in known}
        for model_id in found:
            if await self._is_known(model_id):
                continue
            if model_id not in since:
                await self._redis.zadd(keys.ORPHANED_MODELS, {model_id: now})
            elif now - since[model_id] >= _DAY_S:
                log.warning("snapshots of %s are deleted: nothing knows the model any more", model_id)
                await DELETIONS.run(delete_directory, self._data.snapshots(model_id))
        for model_id in since:
            if model_id not in found or await self._is_known(model_id):
                await self._redis.zrem(keys.ORPHANED_MODELS, model_id)

    async def _is_known(self, model_id: str) -> bool:
        """Whether the model has a record, be it one that cannot be read."""
        return bool(await self._redis.exists(keys.model(model_id)))


def _models_in(directory: Path) -> set[str]:
    """The models that have a directory there."""
    if not directory.is_dir():
        return set()
    return {path.name for path in directory.iterdir() if ids.is_model_id(path.name)}
