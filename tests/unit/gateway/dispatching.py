"""The dispatching half of a gateway, and the operations that its tests have it dispatch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import InvalidRequest
from services.common.state.journal import Journal
from services.common.state.room import Room
from services.gateway.access.memory import Memory
from services.gateway.cluster.discovery import Discovery
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.records.stores import Stores
from services.gateway.results.futures import Futures
from services.gateway.timelines.timelines import Timelines
from tests.unit.gateway.scripted_services import BASE, ScriptedTrainer
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2, results_pb2, training_pb2

MODEL = ids.model_id("s", 0)
SETTINGS = DispatchSettings(gap_timeout=60, trainer_poll=0.2)


def create() -> operation_pb2.Operation:
    made = operation_pb2.CreateModel(base_model=BASE, lora=models_pb2.LoraConfig(rank=8))
    return operation_pb2.Operation(model_id=MODEL, seq_id=0, create_model=made)


def batch(seq_id: int, forward_only: bool = False) -> operation_pb2.Operation:
    made = training_pb2.ForwardBackward(loss_fn="cross_entropy", forward_only=forward_only)
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, forward_backward=made)


def step(seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.OptimStep(adam=training_pb2.AdamParams(learning_rate=0.1))
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, optim_step=made)


def load(seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.LoadState(source_model_id=ids.model_id("s", 1), checkpoint_id="weights/best")
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, load_state=made)


def refused(seq_id: int) -> operation_pb2.Operation:
    error = errors.to_pb(InvalidRequest("no data"))
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, refused=error)


class Gateway:
    """The dispatching half of a gateway."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        name: str,
        settings: DispatchSettings,
        ttl: float,
        memory: int = Memory.of().dispatch,
    ) -> None:
        self.journal = Journal(client, gateway_id=name)
        self.stores = Stores.over(client)
        self.futures = Futures(client)
        self.timelines = Timelines(client, Room())
        self.recorded: list[int] = []
        self.held: dict[int, asyncio.Event] = {}
        """seq_ids whose results are recorded only when the event is set."""
        self.discovery = Discovery(client, self.stores.poison)
        self.dispatcher = Dispatcher(
            client,
            self.journal,
            self.stores,
            self.discovery.trainers,
            self.futures,
            name,
            self._record,
            self.timelines,
            settings,
            ttl,
            memory,
        )

    async def _record(
        self, operation: operation_pb2.Operation, result: results_pb2.OperationResult
    ) -> results_pb2.OperationResult:
        if operation.seq_id in self.held:
            await self.held[operation.seq_id].wait()
        view = await self.futures.wait(ids.request_id(operation.model_id, operation.seq_id), 0)
        assert view.state == "pending", "records are written before the future is resolved"
        self.recorded.append(operation.seq_id)
        return result

    async def accept(self, *operations: operation_pb2.Operation) -> None:
        for operation in operations:
            accepted = await self.journal.accept(operation, "ann")
            self.dispatcher.wake(operation.model_id, operation if accepted.to_run else None)

    async def result(self, seq_id: int, within: float = 60) -> results_pb2.OperationResult:
        view = await self.futures.wait(ids.request_id(MODEL, seq_id), within)
        assert view.state == "done", f"operation {seq_id} is {view.state}: {view.queue_state_reason}"
        return results_pb2.OperationResult.FromString(view.result or b"")


GatewayFactory = Callable[..., Awaitable[Gateway]]


def again(trainer: ScriptedTrainer) -> ScriptedTrainer:
    """The trainer's next start, on the same disk."""
    return ScriptedTrainer(trainer._journal, trainer.disk)


@asynccontextmanager
async def started(
    client: redis.asyncio.Redis,
    name: str,
    settings: DispatchSettings,
    ttl: float,
    memory: int = Memory.of().dispatch,
) -> AsyncIterator[Gateway]:
    gateway = Gateway(client, name, settings, ttl, memory)
    await gateway.futures.start()
    await gateway.discovery.start()
    await gateway.dispatcher.start()
    try:
        yield gateway
    finally:
        await gateway.dispatcher.stop()
        await gateway.discovery.stop()
        await gateway.futures.stop()
