"""One gateway's retention over a scripted trainer, whose sweeps tests make by hand."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio

from services.common.contract import ids
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.room import Room
from services.common.storage.data_dir import DataDir
from services.gateway.access.limits import Limits
from services.gateway.cluster.discovery import Discovery
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.records.model import ModelRecord
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from services.gateway.results.futures import Futures
from services.gateway.retention.plan import RetentionSettings
from services.gateway.retention.retention import Retention
from services.gateway.sessions.sessions import NewSession, Sessions
from services.gateway.timelines.timelines import Timelines
from tests.unit.gateway.scripted_services import BASE, ScriptedTrainer
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2, results_pb2, training_pb2

SETTINGS = RetentionSettings(park_after=100, end_after=1000, snapshot_grace=50)
SETTLED = 3.0
DELETED = SETTLED + 6.0
"""Sweeps at these two times, after a session has ended, close its models and delete what they had."""


class Stage:
    """One gateway's dispatch and retention, over a scripted trainer. Sweeps are made by hand."""

    def __init__(self, client: redis.asyncio.Redis, trainer: ScriptedTrainer, data: DataDir) -> None:
        self.redis = client
        self.data = data
        self.trainer = trainer
        self.journal = Journal(client)
        self.futures = Futures(client)
        self.stores = stores = Stores.over(client)
        self.models, self.checkpoints, self.store = stores.models, stores.checkpoints, stores.sessions
        self.samplers = stores.sampling_sessions
        self.sessions = Sessions(self.store, Limits(), RedoLog(client), Room())
        self.discovery = Discovery(client, self.stores.poison)
        self.dispatcher = Dispatcher(
            client,
            self.journal,
            stores,
            self.discovery.trainers,
            self.futures,
            "gateway-0",
            ResultRecorder(stores).record,
            Timelines(client, Room()),
            DispatchSettings(idle_release=0.01),
        )
        self.cancelled: list[str] = []
        self.retention = self.another("gateway-0")

    def another(self, gateway_id: str) -> Retention:
        return Retention(
            self.redis,
            self.journal,
            self.stores,
            self.dispatcher,
            self.discovery.trainers,
            self._cancel_samples,
            self.data,
            gateway_id,
            SETTINGS,
        )

    async def _cancel_samples(self, session_id: str, reason: str) -> int:
        self.cancelled.append(session_id)
        return 0

    async def sweep(self, later: float = 0.0) -> None:
        """One sweep, as if some seconds had passed."""
        for _ in range(3000):
            if not self.dispatcher._leading:
                break
            await asyncio.sleep(0.01)
        await self.retention.sweep(time.time() + later)

    async def session(self) -> str:
        return await self.sessions.create("ann", NewSession(), None)

    async def record(self, session_id: str) -> SessionRecord:
        record = await self.store.get(session_id)
        assert record is not None
        return record

    async def model(self, session_id: str, base_model: str = BASE) -> str:
        """A model with one step done, durable."""
        model_id = ids.model_id(session_id, 0)
        lora = models_pb2.LoraConfig(rank=8)
        record = ModelRecord(
            model_id=model_id,
            session_id=session_id,
            owner="ann",
            base_model=base_model,
            lora_rank=8,
            created_at=time.time(),
        )
        await self.models.create_if_absent(record)
        made = operation_pb2.CreateModel(base_model=base_model, lora=lora)
        await self.run(model_id, 0, create_model=made)
        await self.step(model_id, 1)
        return model_id

    async def accept(self, model_id: str, seq_id: int, **kind: object) -> None:
        operation = operation_pb2.Operation(model_id=model_id, seq_id=seq_id, **kind)  # type: ignore[arg-type]
        await self.journal.accept(operation, "ann")
        self.dispatcher.wake(model_id)

    async def result(self, model_id: str, seq_id: int) -> results_pb2.OperationResult:
        view = await self.futures.wait(ids.request_id(model_id, seq_id), 10)
        assert view.state == "done", view
        return results_pb2.OperationResult.FromString(view.result or b"")

    async def run(self, model_id: str, seq_id: int, **kind: object) -> results_pb2.OperationResult:
        await self.accept(model_id, seq_id, **kind)
        return await self.result(model_id, seq_id)

    async def step(self, model_id: str, seq_id: int) -> results_pb2.OperationResult:
        adam = training_pb2.AdamParams(learning_rate=0.1)
        return await self.run(model_id, seq_id, optim_step=operation_pb2.OptimStep(adam=adam))

    async def journal_keys(self, model_id: str) -> set[str]:
        names = {
            keys.journal: "journal",
            keys.journal_order: "order",
            keys.journal_pending: "pending",
            keys.journal_meta: "meta",
        }
        return {name for key, name in names.items() if await self.redis.exists(key(model_id))}
