"""The sampling half of a gateway, on a real Redis, and what tests of it wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import redis.asyncio

from services.common.contract import ids
from services.common.state import registry
from services.common.state.room import Room
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.cluster.discovery import Discovery
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.placement.placements import Placements
from services.gateway.records.model import ModelRecord
from services.gateway.records.stores import Stores
from services.gateway.results.futures import Futures
from services.gateway.sampling.admission import Admission
from services.gateway.sampling.dispatcher import SampleDispatcher
from services.gateway.sampling.replicas import Replicas
from services.gateway.timelines.timelines import Timelines
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tinsmith.internal.v1 import operation_pb2, sampler_pb2
from tinsmith.v1 import checkpoints_pb2, results_pb2

SESSION = ids.sampling_session_id("s", 0)


MODEL = ids.model_id("s", 0)


class Gateway:
    """The sampling half of a gateway."""

    def __init__(self, client: redis.asyncio.Redis, name: str, stall: float, room: int = 1000) -> None:
        self.name = name
        stores = Stores.over(client)
        self.journal = stores.samples
        self.futures = Futures(client)
        self.timelines = Timelines(client, Room())
        self.admission = Admission(room, 1 << 20)
        self.discovery = Discovery(client, stores.poison, refresh=0.1)
        self.dispatcher = SampleDispatcher(
            client,
            stores,
            Replicas(self.discovery.samplers, Placements(name, time.monotonic), AnswerRoom(2**20), stall),
            self.discovery.gateways,
            name,
            self.admission,
            self.timelines,
            self.futures,
            RedoLog(client),
            dead_after=1.0,
        )
        self.parts = (self.futures, self.discovery, self.dispatcher)

    async def sample(self, seq_id: int, prompt: bytes = b"", priority: int = 0, sequences: int = 1) -> str:
        name = ids.request_id(SESSION, seq_id)
        request = sampler_pb2.SampleRequest(request_id=name, num_samples=sequences, priority=priority)
        request.prompt.data = prompt
        request.origin.owner = "ann"
        payload = request.SerializeToString()
        accepted = await self.journal.accept(SESSION, seq_id, payload, self.name)
        self.dispatcher.submit(accepted, request)
        return accepted.request_id

    async def result(self, request_id: str, within: float = 60) -> results_pb2.OperationResult:
        view = await self.futures.wait(request_id, within)
        assert view.state == "done", f"{request_id} is {view.state}: {view.queue_state_reason}"
        return results_pb2.OperationResult.FromString(view.result or b"")

    async def tokens(self, request_id: str) -> bytes:
        result = await self.result(request_id)
        assert result.HasField("sample"), result
        return result.sample.sequences[0].tokens.data


GatewayFactory = Callable[..., Awaitable[Gateway]]


@asynccontextmanager
async def started(
    client: redis.asyncio.Redis, name: str, stall: float = 60, room: int = 1000
) -> AsyncIterator[Gateway]:
    """A live, announced gateway."""
    record = registry.ServiceRecord(kind="gateway", id=name, address="127.0.0.1:1")
    announcer = registry.Announcer(client, record)
    await announcer.start()
    gateway = Gateway(client, name, stall, room)
    for part in gateway.parts:
        await part.start()
    try:
        yield gateway
    finally:
        for part in reversed(gateway.parts):
            await part.stop()
        await announcer.stop()


@asynccontextmanager
async def running_sample(
    client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> AsyncIterator[tuple[Gateway, ScriptedSampler, str]]:
    """A gateway, and a sampler that has begun with its sample and is held there."""
    sampler = ScriptedSampler("a")
    sampler.gate.clear()
    async with serving(client, sampler, "sampler-0"):
        gateway = await gateway_on()
        request_id = await gateway.sample(0)
        await sampler.arrived.wait()
        yield gateway, sampler, request_id


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def inflight_session(client: redis.asyncio.Redis, session: str, version: int) -> None:
    """What a finished inflight save leaves behind."""
    model = ModelRecord(
        model_id=MODEL, session_id="s", owner="ann", base_model=BASE, lora_rank=4, created_at=0.0
    )
    stores = Stores.over(client)
    await stores.models.create_if_absent(model)
    recorder = ResultRecorder(stores)
    save = operation_pb2.SaveForSampler(sampling_session_id=session, inflight=True)
    operation = operation_pb2.Operation(model_id=MODEL, seq_id=version, save_for_sampler=save)
    result = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=session, version=version)
    await recorder.record(operation, results_pb2.OperationResult(save_for_sampler=result))
