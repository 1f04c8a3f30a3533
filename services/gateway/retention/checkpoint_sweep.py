"""Takes away what expired, and the files of what was deleted or replaced.

Invariants: all of this may be done twice, by any gateways, with the same effect; a version leaves the set of
the due only when nothing of it is left or it has a record that stands. The lease between gateways only saves
work.
"""

from __future__ import annotations

import asyncio
import logging
import time

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError
from services.common.process.tasks import cancel_all, keep_running
from services.common.state import keys
from services.common.storage.base import Key
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.records.checkpoint import CheckpointStore, has_expired
from services.gateway.retention.sweep_lease import SweepLease

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_CLEAN_S = 24 * 3600.0
_AT_ONCE = 200
_AGAIN_S = 60.0
"""Files that could not be removed are tried again after this long."""


class CheckpointSweep:
    """Sweeps for as long as its gateway lives."""

    def __init__(
        self, client: redis.asyncio.Redis, store: CheckpointStore, files: CheckpointFiles, gateway_id: str
    ) -> None:
        self._store = store
        self._files = files
        self._lease = SweepLease(client, keys.CHECKPOINT_SWEEP_LEASE, gateway_id)
        self._cleaned = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to sweep."""
        self._task = keep_running(self._keep_sweeping(), name="checkpoint sweep")

    async def stop(self) -> None:
        await cancel_all([self._task])

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                if await self._lease.take():
                    await self.sweep()
                    await self._clean()
            except (RedisError, OSError, TinsmithError) as error:
                log.warning("could not remove what expired, trying again: %s", error)
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """Looks once at every version that is due."""
        for key in await self._store.due(_AT_ONCE):
            try:
                await self._look(key)
            except OSError as error:
                log.warning("the files of %s stay for now: %s", key.path, error)
                await self._store.look_again(key, time.time() + _AGAIN_S)

    async def _look(self, key: Key) -> None:
        record = await self._store.get(key.model_id, key.checkpoint_id)
        if record is None:
            record = await self._store.expired(key.model_id, key.checkpoint_id)
        if record is not None and record.version == key.version:
            if not has_expired(record):
                if record.expires_at is None:
                    await self._store.settle(key)
                else:
                    await self._store.look_again(key, record.expires_at)
                return
            log.info("checkpoint %s expired", key.path)
            if not await self._store.remove(record):
                return
        again = await self._files.remove(key)
        if again is None:
            await self._store.settle(key)
        else:
            await self._store.look_again(key, time.time() + again)

    async def _clean(self) -> None:
        """Has the storage let go, once a day, of what saves that broke off left behind."""
        if time.monotonic() - self._cleaned > _CLEAN_S:
            self._cleaned = time.monotonic()
            await asyncio.to_thread(self._files.storage.clean)
