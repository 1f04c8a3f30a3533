"""Keeps unnamed sampler snapshots within their budgets, and takes away those that an inflight session left.

Invariants: all of this may be done twice, by any gateways, with the same effect; a snapshot that cannot be
read or removed is tried again later and stops no other. The lease between gateways only saves work.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable

import redis.asyncio
from prometheus_client import Gauge

from services.common.contract.errors import TinsmithError
from services.common.process import clock
from services.common.process.periodic import Periodic
from services.common.state import keys
from services.common.telemetry.repeats import Repeats
from services.gateway.records.stores import Stores
from services.gateway.retention.snapshot_room import SnapshotRoom
from services.gateway.retention.sweep_lease import SweepLease

log = logging.getLogger(__name__)

STORED = Gauge("tinsmith_snapshot_bytes", "Unnamed sampler snapshots, as the sweeping gateway counts them")
_SWEEP_S = 10.0
_DEADLINE_S = 300.0
_AT_ONCE = 256
_AGAIN_S = 60.0


class SnapshotSweep:
    """Sweeps for as long as its gateway lives."""

    def __init__(
        self, client: redis.asyncio.Redis, stores: Stores, room: SnapshotRoom, gateway_id: str
    ) -> None:
        self._stores = stores
        self._room = room
        self._stay = Repeats(log, "a snapshot that was superseded stays for now")
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
            await self._stores.snapshots.supersede(model_id, version, clock.to_note() + _AGAIN_S)
            await self._try(f"{model_id}@{version}", self._superseded(model_id, version))
        STORED.set(await self._room.keep_within())

    async def _superseded(self, model_id: str, version: int) -> None:
        """Removes a snapshot that was only there for sessions which have moved on."""
        snapshot = await self._stores.snapshots.get(model_id, version)
        if snapshot is not None and not await self._is_sampled(model_id, version):
            await self._room.remove(snapshot)
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

    async def _try(self, name: str, work: Awaitable[None]) -> None:
        """Does something about one snapshot; what fails is made up for by a later sweep."""
        try:
            await work
        except (TinsmithError, OSError) as error:
            self._stay.failed(name, error)
        else:
            self._stay.over(name)
