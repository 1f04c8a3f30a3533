"""Deletes the records of sessions that ended long ago.

Invariants: what a kept checkpoint needs stays: its model, its run, and their session, until the last
checkpoint is gone. A session is forgotten after all that it made, so a sweep that breaks off is made up
for by a later one; one that cannot be forgotten yet, or fails, is looked at again later and stops no other.
"""

from __future__ import annotations

import logging
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError
from services.common.process import clock
from services.common.process.periodic import Periodic
from services.common.state import keys
from services.gateway.checkpoints.files import sampled_versions
from services.gateway.records.model import ModelRecord
from services.gateway.records.stores import Stores
from services.gateway.records.times import Times
from services.gateway.retention.sweep_lease import SweepLease

log = logging.getLogger(__name__)

_SWEEP_S = 10.0
_DEADLINE_S = 300.0
_AT_ONCE = 100
_AGAIN_S = 24 * 3600.0
"""A session of which something is needed is looked at again after this long at most."""


class Forgetting:
    """Sweeps for as long as its gateway lives.

    Args:
        forget_after: seconds after its end for which a session's records stay.
    """

    def __init__(
        self, client: redis.asyncio.Redis, stores: Stores, gateway_id: str, forget_after: float
    ) -> None:
        self._redis = client
        self._times = Times(client)
        self._stores = stores
        self._forget_after = forget_after
        self._again = min(_AGAIN_S, forget_after)
        self._lease = SweepLease(client, keys.FORGET_LEASE, gateway_id)
        self._sweeps = Periodic("forgetting of old sessions", _SWEEP_S, self._sweep_if_due, _DEADLINE_S)

    async def start(self) -> None:
        """Begins to sweep."""
        self._sweeps.start()

    async def stop(self) -> None:
        await self._sweeps.stop()

    async def _sweep_if_due(self) -> None:
        if await self._lease.take():
            await self.sweep(clock.to_judge())

    async def sweep(self, now: float) -> None:
        """Looks at the sessions that ended longest ago."""
        before = now - self._forget_after
        due: Any = await self._redis.zrangebyscore(keys.OVER_SESSIONS, "-inf", before, 0, _AT_ONCE)
        for session_id in (raw.decode() for raw in due):
            # Whatever comes of it, the next ones have their turn.
            await self._times.note(keys.OVER_SESSIONS, {session_id: before + self._again})
            try:
                if await self._forget(session_id):
                    await self._redis.zrem(keys.OVER_SESSIONS, session_id)
            except (TinsmithError, RedisError, OSError) as error:
                log.warning("session %s is not forgotten yet: %s", session_id, error)

    async def _forget(self, session_id: str) -> bool:
        """Whether nothing is left to forget."""
        session = await self._stores.sessions.get(session_id)
        if session is not None and not session.finished:
            # It ended in what a Redis lost with its last second, and is not over.
            return True
        await self._forget_samplers(session_id)
        if session is not None:
            await self._stores.sessions.forget_samplers(session)
        left = False
        for model_id in await self._stores.sessions.models(session_id):
            if await self._needed(model_id):
                left = True
            else:
                await self._forget_model(session_id, model_id)
        if left:
            return False
        lists = (keys.session_models, keys.session_samplers, keys.timeline)
        await self._redis.delete(*(name(session_id) for name in lists))
        if session is None:
            await self._redis.delete(keys.session(session_id))
        else:
            await self._stores.sessions.forget(session)
        return True

    async def _forget_samplers(self, session_id: str) -> None:
        names = await self._stores.sampling_sessions.of_session(session_id)
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            pipeline = self._redis.pipeline(transaction=True)
            for name in some:
                record = await self._stores.sampling_sessions.get(name)
                if record is not None and record.model_id:
                    pipeline.zrem(keys.model_samplers(record.model_id), name)
                pipeline.delete(keys.sampling_session(name), keys.pending_samples(name))
            pipeline.srem(keys.session_samplers(session_id), *some)
            await pipeline.execute()

    async def _needed(self, model_id: str) -> bool:
        """Whether something of a model stands: a checkpoint, a journal, files, or sampling by somebody."""
        stores = self._stores
        return bool(
            await self._redis.zscore(keys.ENDED_MODELS, model_id) is not None
            or await self._redis.exists(keys.checkpoints(model_id), keys.journal_order(model_id))
            or await stores.snapshots.of_model(model_id)
            or await sampled_versions(model_id, stores.sampling_sessions, stores.sessions)
        )

    async def _forget_model(self, session_id: str, model_id: str) -> None:
        record: ModelRecord | None = await self._stores.models.get(model_id)
        names = (
            keys.model_samplers,
            keys.journal,
            keys.journal_order,
            keys.journal_pending,
            keys.journal_meta,
            keys.epoch,
            keys.inflight_version,
            keys.queue_state,
            keys.let_go,
        )
        await self._redis.delete(*(name(model_id) for name in names))
        if record is None:
            await self._redis.delete(keys.model(model_id))
            await self._redis.srem(keys.session_models(session_id), model_id)
        else:
            await self._stores.models.drop(record)
