"""Lets go of what nobody uses: parks silent sessions, takes down what is over.

Invariants: everything here may be done twice, by any gateways, with the same effect, so a sweep that breaks
off is made up for by the next one, and the lease between gateways only saves work. A model is parked or
closed only under its dispatch lease and only when none of its operations waits; its files are deleted only
after its journal says that it is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc.aio
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Gone, ModelBusy
from services.common.process import clock
from services.common.process.periodic import Periodic
from services.common.process.pools import DELETIONS
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.journal_records import Closing, error_result
from services.common.storage import model_files
from services.common.storage.data_dir import DataDir
from services.gateway.checkpoints.files import sampled_versions
from services.gateway.cluster.discovery import Services, call_error
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.leases import Lease
from services.gateway.records.snapshot import StoredSnapshot
from services.gateway.records.stores import Stores
from services.gateway.records.times import Times
from services.gateway.retention.plan import (
    EndedModel,
    ModelStep,
    RetentionSettings,
    SessionStep,
    model_step,
    session_step,
)
from services.gateway.retention.sweep_lease import SweepLease
from services.gateway.retention.works import Works
from tinsmith.internal.v1 import trainer_pb2, trainer_pb2_grpc

log = logging.getLogger(__name__)

_CONCURRENCY = 32
_PATIENCE_S = 5.0
"""So long each part of a sweep waits for what it began; trainers and storages may take longer."""
_CALLS = 4
"""To the trainers of one base model at once; others wait for their turn, and for a later sweep where one
that hangs has them all."""
_MOST_REST_S = 300.0
_MOST_SESSIONS = 1000
_PAGE = 500
"""Of long lists so much at a time: what reads and begins it stands in nobody's way."""
_CALL_S = 120.0
_DEADLINE_S = 600.0
"""Of a sweep, should Redis be slow; the next one makes up for what it did not come to."""
_SETTLED_S = 2.0
"""By then every gateway has seen that a session is over, and accepts nothing more for it."""

CancelSamples = Callable[[str, str], Awaitable[int]]
TrainerCall = Callable[[trainer_pb2_grpc.TrainerServiceStub], Awaitable[object]]


def _in_pages(listed: Sequence[tuple[str, float]]) -> Iterator[Sequence[tuple[str, float]]]:
    """A list in parts of a page."""
    return (listed[start : start + _PAGE] for start in range(0, len(listed), _PAGE))


class Retention:
    """Sweeps over silent and ended sessions for as long as its gateway lives.

    Args:
        cancel_samples: gives up the pending samples of a session, for a reason.
        data: where models of base models that are retired left files.
        gateway_id: stable over restarts of the gateway.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        journal: Journal,
        stores: Stores,
        dispatcher: Dispatcher,
        trainers: Services,
        cancel_samples: CancelSamples,
        data: DataDir,
        gateway_id: str,
        settings: RetentionSettings,
    ) -> None:
        self._redis = client
        self._times = Times(client)
        self._journal = journal
        self._dispatcher = dispatcher
        self._trainers = trainers
        self._cancel_samples = cancel_samples
        self._data = data
        self._settings = settings
        self._sessions = stores.sessions
        self._models = stores.models
        self._checkpoints = stores.checkpoints
        self._snapshots = stores.snapshots
        self._sampling_sessions = stores.sampling_sessions
        self._lease = SweepLease(client, keys.RETENTION_LEASE, gateway_id)
        self._works = Works(_CONCURRENCY, _PATIENCE_S, settings.sweep, _MOST_REST_S)
        self._calls: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, _CALLS))
        self._sweeps = Periodic("retention sweep", settings.sweep, self._sweep_if_due, _DEADLINE_S)

    async def start(self) -> None:
        """Begins to sweep."""
        self._sweeps.start()

    async def stop(self) -> None:
        await self._sweeps.stop()
        await self._works.stop()

    async def _sweep_if_due(self) -> None:
        if await self._lease.take():
            await self.sweep(clock.to_judge())

    async def sweep(self, now: float) -> None:
        """Looks once at every session and model that may hold something without need. What takes long goes
        on beside the sweeps that follow."""
        self._works.forget(now)
        steps = await self._session_steps(now)
        await self._works.do(now, {found[0]: partial(self._session, *found) for found in steps})
        for some in _in_pages(await self._listed(keys.ENDED_SESSIONS)):
            settled = [name for name, at in some if now - at >= _SETTLED_S]
            await self._works.do(now, {name: partial(self._end_session, name, now) for name in settled})
        for some in _in_pages(await self._listed(keys.ENDED_MODELS)):
            await self._works.do(now, {name: partial(self._take_down, name, at, now) for name, at in some})

    async def _listed(self, name: str) -> list[tuple[str, float]]:
        """What a list has. What moves meanwhile may be passed over, until the next sweep."""
        listed: list[tuple[str, float]] = []
        while True:
            page: Any = await self._redis.zrange(name, len(listed), len(listed) + _PAGE - 1, withscores=True)
            listed += [(member.decode(), at) for member, at in page]
            if len(page) < _PAGE:
                return listed

    async def _session_steps(self, now: float) -> list[tuple[str, float, SessionStep]]:
        """Sessions that were silent long enough for something to be done."""
        before = now - min(self._settings.park_after, self._settings.end_after)
        steps: list[tuple[str, float, SessionStep]] = []
        looked_at = 0
        while len(steps) < _MOST_SESSIONS:
            silent: Any = await self._redis.zrangebyscore(
                keys.SESSION_LIFE, "-inf", before, looked_at, _PAGE, withscores=True
            )
            if not silent:
                break
            looked_at += len(silent)
            names = [member for member, _ in silent]
            parked: Any = await self._redis.zmscore(keys.PARKED_SESSIONS, names)
            for (member, last_seen), parked_at in zip(silent, parked, strict=True):
                session_id = member.decode()
                step = session_step(last_seen, parked_at, now, self._settings)
                if step is not SessionStep.KEEP and not self._works.rests(session_id, now):
                    steps.append((session_id, last_seen, step))
        return steps[:_MOST_SESSIONS]

    async def _session(self, session_id: str, last_seen: float, step: SessionStep) -> bool:
        """Whether the step is done."""
        record = await self._sessions.get(session_id)
        if record is None or record.finished:
            # A finish broke off half-way, or Redis lost its last second.
            await self._sessions.list_ended(session_id)
        elif record.last_heartbeat > last_seen:
            # Heard of just now, or the list lost its last second.
            await self._times.note(keys.SESSION_LIFE, {session_id: record.last_heartbeat})
        elif step is SessionStep.END:
            if await self._sessions.abandon(session_id, record.last_heartbeat):
                log.info("session %s was silent for long and is over", session_id)
        else:
            await self._cancel_samples(session_id, f"nothing was heard of session {session_id} for long")
            models = await self._sessions.models(session_id)
            if not all([await self._park(model_id) for model_id in models]):
                return False
            await self._times.note(keys.PARKED_SESSIONS, {session_id: last_seen})
        return True

    async def _park(self, model_id: str) -> bool:
        """Frees a model's memory on its trainer; False when that has to wait."""

        index = await self._journal.index(model_id, -1, entries=0)
        if not index.base_model or index.closed:
            # No trainer ever heard of the model, or none will again.
            return True
        if index.pending or self._trainers.retired(index.base_model):
            # What waits for a retired base model fails, and then there is no memory to free.
            return not index.pending
        if not self._trainers.serving(index.base_model):
            return False

        async def park(lease: Lease) -> bool:
            now = await self._journal.index(model_id, -1, entries=0)
            if now.pending:
                return False
            request = trainer_pb2.ParkRequest(model_id=model_id, epoch=lease.epoch, moved_epoch=now.moved)
            return await self._on_trainers(index.base_model, lambda stub: stub.Park(request, timeout=_CALL_S))

        return await self._dispatcher.lead_idle(model_id, park)

    async def _on_trainers(self, base_model: str, call: TrainerCall) -> bool:
        """Has every trainer of a base model do something; whether there is one, and none was too busy.

        Raises:
            TinsmithError: a trainer failed or cannot be reached.
        """
        calls = self._calls[base_model]
        async with self._works.aside():
            try:
                # Thousands of sessions may end within minutes, and a call takes milliseconds.
                async with asyncio.timeout(_PATIENCE_S):
                    await calls.acquire()
            except TimeoutError:
                return False
            try:
                return await self._call_all(base_model, call)
            finally:
                calls.release()

    async def _call_all(self, base_model: str, call: TrainerCall) -> bool:
        trainers = self._trainers.serving(base_model)
        for record in trainers:
            try:
                await call(trainer_pb2_grpc.TrainerServiceStub(self._trainers.channel(record)))
            except grpc.aio.AioRpcError as raw:
                error = call_error(raw)
                if isinstance(error, ModelBusy):
                    return False
                raise error from raw
        return bool(trainers)

    async def _end_session(self, session_id: str, now: float) -> bool:
        """Puts what a session that is over has held on the list of what is to be taken down."""
        await self._cancel_samples(session_id, f"session {session_id} is over")
        models = await self._sessions.models(session_id)
        if models:
            await self._times.note(keys.ENDED_MODELS, dict.fromkeys(models, max(now, clock.to_note())))
        await self._redis.zrem(keys.ENDED_SESSIONS, session_id)
        return True

    async def _take_down(self, model_id: str, noted_at: float, now: float) -> bool:
        """Takes a model down, as far as can be done now; False when something stands in the way."""
        while True:
            index = await self._journal.index(model_id, -1, entries=1)
            session = await self._sessions.get(ids.session_of(model_id))
            state = EndedModel(
                noted_at=noted_at,
                session_over=session is None or session.finished,
                closed=bool(index.closed),
                pending=index.pending,
                erased=index.durable < 0 and not index.entries,
            )
            step = model_step(state, now, self._settings)
            if step is ModelStep.WAIT:
                return True
            if not await self._do(step, model_id, index.base_model):
                return False
            if step is ModelStep.CLOSE:
                await self._times.note(keys.ENDED_MODELS, {model_id: max(now, clock.to_note())})
                return True
            if step in (ModelStep.DROP, ModelStep.DELETE_SNAPSHOTS):
                await self._redis.zrem(keys.ENDED_MODELS, model_id)
                return True

    async def _do(self, step: ModelStep, model_id: str, base_model: str) -> bool:
        """Whether the step is done."""
        if step is ModelStep.CLOSE:
            return await self._dispatcher.lead_idle(model_id, self._close)
        request = trainer_pb2.DeleteModelRequest(model_id=model_id)
        gone: list[StoredSnapshot] = []
        if step is ModelStep.DELETE_SNAPSHOTS:
            request.snapshots = True
            named = self._checkpoints.each_of_model(model_id)
            kept = {record.version async for record in named if record.kind == "sampler"}
            kept |= await sampled_versions(model_id, self._sampling_sessions, self._sessions)
            request.kept_versions.extend(sorted(kept))
            gone = [one for one in await self._snapshots.of_model(model_id) if one.version not in kept]
        # Without a base model no creation was ever accepted, and no trainer has heard of the model.
        heard_of = bool(base_model) and step is not ModelStep.DROP
        if heard_of and not await self._delete(base_model, request):
            return False
        for snapshot in gone:
            await self._snapshots.forget(model_id, snapshot.version, snapshot.owner)
        if step is ModelStep.DELETE_STATE:
            log.info("deleted the training state of %s", model_id)
            return await self._journal.erase(model_id)
        return True

    async def _delete(self, base_model: str, request: trainer_pb2.DeleteModelRequest) -> bool:
        """Has a closed model's files deleted; False when that has to wait. Without its base model's trainer,
        when none will come back, this gateway does it."""
        if not self._trainers.retired(base_model):
            return await self._on_trainers(
                base_model, lambda stub: stub.DeleteModel(request, timeout=_CALL_S)
            )
        await DELETIONS.run(model_files.delete_state, self._data, request.model_id)
        if request.snapshots:
            kept = set(request.kept_versions)
            await DELETIONS.run(model_files.delete_snapshots, self._data, request.model_id, kept)
        return True

    async def _close(self, lease: Lease) -> bool:
        over = Gone(
            f"the session of model {lease.model_id} is over; load a checkpoint in a new session",
            "session_finished",
        )
        closing = error_result(errors.to_pb(over))
        if await self._journal.close(lease.model_id, lease.epoch, closing) is not Closing.CLOSED:
            return False
        await self._models.set_status(lease.model_id, "unloaded")
        return True
