"""Takes away what expired, and the files of what was deleted or replaced.

Invariants: all of this may be done twice, by any gateways, with the same effect; a version leaves the set of
the due only when nothing of it is left or it has a record that stands. The lease between gateways only saves
work.
"""

from __future__ import annotations

import logging

import redis.asyncio

from services.common.contract.errors import TinsmithError
from services.common.process import clock
from services.common.process.periodic import Periodic
from services.common.process.pools import CLEANINGS
from services.common.state import keys
from services.common.storage.base import Key
from services.common.telemetry.repeats import Repeats
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.records.checkpoint import CheckpointStore, has_expired
from services.gateway.retention.daily import Daily
from services.gateway.retention.sweep_lease import SweepLease

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_SWEEP_DEADLINE_S = 600.0
_AT_ONCE = 200
_AGAIN_S = 60.0
"""Files that were not removed are tried again after this long."""


class CheckpointSweep:
    """Sweeps for as long as its gateway lives."""

    def __init__(
        self, client: redis.asyncio.Redis, store: CheckpointStore, files: CheckpointFiles, gateway_id: str
    ) -> None:
        self._store = store
        self._files = files
        self._stay = Repeats(log, "files of a checkpoint stay for now")
        self._lease = SweepLease(client, keys.CHECKPOINT_SWEEP_LEASE, gateway_id)
        self._sweeps = Periodic("checkpoint sweep", _SWEEP_S, self._sweep_if_due, _SWEEP_DEADLINE_S)
        self._cleanings = Daily(
            client, "cleaning of the checkpoint storage", keys.CHECKPOINT_CLEANING, self._clean
        )

    async def start(self) -> None:
        """Begins to sweep."""
        self._sweeps.start()
        self._cleanings.start()

    async def stop(self) -> None:
        await self._sweeps.stop()
        await self._cleanings.stop()

    async def _sweep_if_due(self) -> None:
        if await self._lease.take():
            await self.sweep()

    async def sweep(self) -> None:
        """Looks once at every version that is due."""
        for key in await self._store.due(_AT_ONCE):
            # Whatever comes of it, the next ones have their turn, also when this one hangs.
            await self._store.look_again(key, clock.to_note() + _AGAIN_S)
            try:
                await self._look(key)
            except (OSError, TinsmithError) as error:
                self._stay.failed(key.path, error)
            else:
                self._stay.over(key.path)

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
            await self._store.look_again(key, clock.to_note() + again)

    async def _clean(self) -> None:
        """Has the storage let go of what saves that broke off left behind."""
        await CLEANINGS.run(self._files.storage.clean)
