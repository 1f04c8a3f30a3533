"""Keeps unnamed sampler snapshots within their budgets, and takes away those that an inflight session left.

Invariants: all of this may be done twice, by any gateways, with the same effect; that a snapshot was let go
is remembered before its files go, so its clients are told; one that cannot be read or removed is tried again
later and stops no other. The lease between gateways only saves work.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Awaitable

import redis.asyncio
from prometheus_client import Gauge

from services.common.contract.errors import TinsmithError
from services.common.process.periodic import Periodic
from services.common.process.pools import DELETIONS
from services.common.state import keys
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import delete_directory
from services.gateway.records.snapshot import StoredSnapshot
from services.gateway.records.stores import Stores
from services.gateway.retention.snapshot_plan import SnapshotBudget, to_let_go
from services.gateway.retention.sweep_lease import SweepLease

log = logging.getLogger(__name__)

STORED = Gauge("tinsmith_snapshot_bytes", "Unnamed sampler snapshots, as the sweeping gateway counts them")
_SWEEP_S = 10.0
_DEADLINE_S = 300.0
_AT_ONCE = 256
_AGAIN_S = 60.0
_SHARE = 0.5
"""What unnamed snapshots may take of their volume, and one owner of that, when no number is given."""


def budget_on(data: DataDir, total_bytes: int, owner_bytes: int) -> SnapshotBudget:
    """The budgets; 0 = half of the volume for all, half of that for one owner."""
    total = total_bytes or int(shutil.disk_usage(data.root).total * _SHARE)
    return SnapshotBudget(total, owner_bytes or int(total * _SHARE))


class SnapshotSweep:
    """Sweeps for as long as its gateway lives."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        stores: Stores,
        data: DataDir,
        budget: SnapshotBudget,
        gateway_id: str,
    ) -> None:
        self._stores = stores
        self._data = data
        self._budget = budget
        self._lease = SweepLease(client, keys.SNAPSHOT_SWEEP_LEASE, gateway_id)
        self._sweeps = Periodic("snapshot sweep", _SWEEP_S, self._sweep_if_due, _DEADLINE_S)

    async def start(self) -> None:
        """Begins to sweep."""
        self._sweeps.start()

    async def stop(self) -> None:
        await self._sweeps.stop()

    async def _sweep_if_due(self) -> None:
        if await self._lease.take():
            await self.sweep()
        else:
            # Whoever sweeps tells it.
            STORED.set(0)

    async def sweep(self) -> None:
        """Looks once at what was superseded and at all budgets."""
        for model_id, version in await self._stores.snapshots.superseded(_AT_ONCE):
            # Whatever comes of it, the next ones have their turn.
            await self._stores.snapshots.supersede(model_id, version, time.time() + _AGAIN_S)
            await _try(f"{model_id}@{version}", self._superseded(model_id, version))
        owners = await self._stores.snapshots.owners()
        STORED.set(sum(owners.values()))
        candidates: list[StoredSnapshot] = []
        if sum(owners.values()) > self._budget.total_bytes:
            candidates += await self._stores.snapshots.oldest(_AT_ONCE)
        for owner, size in owners.items():
            if size > self._budget.owner_bytes:
                candidates += await self._stores.snapshots.oldest(_AT_ONCE, owner)
        for snapshot in to_let_go(candidates, owners, self._budget, time.time()):
            await _try(f"{snapshot.model_id}@{snapshot.version}", self._let_go(snapshot))

    async def _let_go(self, snapshot: StoredSnapshot) -> None:
        """Removes a snapshot to make room."""
        await self._stores.snapshots.mark_let_go(snapshot.model_id, snapshot.version)
        await self._remove(snapshot)
        log.info("snapshot %d of %s was let go to make room", snapshot.version, snapshot.model_id)

    async def _superseded(self, model_id: str, version: int) -> None:
        """Removes a snapshot that was only there for sessions which have moved on."""
        snapshot = await self._stores.snapshots.get(model_id, version)
        if snapshot is not None and not await self._is_sampled(model_id, version):
            await self._remove(snapshot)
        await self._stores.snapshots.settle(model_id, version)

    async def _is_sampled(self, model_id: str, version: int) -> bool:
        """Whether a session that is not over answers from exactly this version."""
        for sampling_session_id, _ in await self._stores.sampling_sessions.of_model(model_id, version):
            record = await self._stores.sampling_sessions.get(sampling_session_id)
            if record is None or record.inflight:
                continue
            session = await self._stores.sessions.get(record.session_id)
            if session is not None and not session.finished:
                return True
        return False

    async def _remove(self, snapshot: StoredSnapshot) -> None:
        path = self._data.snapshot(snapshot.model_id, snapshot.version)
        await DELETIONS.run(delete_directory, path)
        await self._stores.snapshots.forget(snapshot.model_id, snapshot.version, snapshot.owner)


async def _try(name: str, work: Awaitable[None]) -> None:
    """Does something about one snapshot; what fails is made up for by a later sweep."""
    try:
        await work
    except (TinsmithError, OSError) as error:
        log.warning("snapshot %s stays for now: %s", name, error)
