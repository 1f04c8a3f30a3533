"""A trainer and a sampler that follow a script, served over real gRPC and announced in real Redis.

They isolate the dispatchers. The trainer keeps the contract of trainer.proto (order, duplicates, fencing,
residency); its "state" is the list of operations that took effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import redis.asyncio

from services.common.contract import errors
from services.common.contract.errors import (
    ModelNotResident,
    ModelOpen,
    SnapshotNotFound,
    StaleEpoch,
    TinsmithError,
    Unavailable,
)
from services.common.process import rpc
from services.common.process.carrier.answering import Carrier
from services.common.state import registry
from services.common.state.journal import Journal
from services.common.state.registry import ServiceRecord
from tinsmith.internal.v1 import operation_pb2, sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tinsmith.v1 import results_pb2

BASE = "org/base"


class Model:
    """A model on the scripted trainer: seq_ids that took effect, in order."""

    def __init__(self, effects: list[int], applied: int) -> None:
        self.effects = effects
        self.applied = applied
        self.results: dict[int, results_pb2.OperationResult] = {}
        self.moved = asyncio.Condition()


class ScriptedTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """One start of a trainer. `disk` outlives it: model id -> (seq_id, effects).

    Attributes:
        executed: (model id, seq_id) of everything executed by this start, in order.
        before: called (and awaited) before an operation takes effect; may raise.
        fail: seq_id -> error that the operation comes to.
        dropped: models of which it had a copy from before they moved to another trainer.
        durable_steps: whether an optim_step makes the state durable.
        cannot_restore: what a restore comes to, if anything.
        restores: how often it was asked for one.
        strayed: models of which its copy has executed another operation than their journal has by now.
    """

    def __init__(self, journal: Journal, disk: dict[str, tuple[int, list[int]]]) -> None:
        self._journal = journal
        self.disk = disk
        self.models: dict[str, Model] = {}
        self.epochs: dict[str, int] = {}
        self.executed: list[tuple[str, int]] = []
        self.restored: list[str] = []
        self.parked: list[str] = []
        self.dropped: list[str] = []
        self.deleted: list[trainer_pb2.DeleteModelRequest] = []
        self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.parking = asyncio.Event()
        self.parking.set()
        self.fail: dict[int, TinsmithError] = {}
        self.raises: dict[int, TinsmithError] = {}
        self.durable_steps = True
        self.cannot_restore: TinsmithError | None = None
        self.restores = 0
        self.strayed: set[str] = set()

    def order(self, model_id: str) -> list[int]:
        """seq_ids executed for a model by this start."""
        return [seq_id for name, seq_id in self.executed if name == model_id]

    async def Execute(
        self, request: trainer_pb2.ExecuteRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.ExecuteResponse:
        self.calls += 1
        operation = request.operation
        self._fence(operation.model_id, request.epoch)
        if operation.seq_id in self.raises:
            raise self.raises.pop(operation.seq_id)
        if operation.model_id in self.strayed:
            raise ModelNotResident("it has executed another one")
        model = self.models.get(operation.model_id)
        if model is None:
            if operation.WhichOneof("kind") != "create_model":
                raise ModelNotResident(f"{operation.model_id} is not here")
            if operation.model_id in self.disk:
                raise ModelNotResident(f"{operation.model_id} exists; restore it")
            model = self.models[operation.model_id] = Model([], -1)
        async with model.moved:
            await model.moved.wait_for(lambda: model.applied >= request.after_seq_id)
        await self.gate.wait()
        async with model.moved:
            if self.models.get(operation.model_id) is not model:
                raise ModelNotResident(f"{operation.model_id} was not created")
            if operation.seq_id not in model.results:
                model.results[operation.seq_id] = await self._execute(model, operation)
                model.applied = max(model.applied, operation.seq_id)
                model.moved.notify_all()
            # Before the next one: what is durable is the state that this one left.
            await self._make_durable(model, operation, request.epoch)
        return trainer_pb2.ExecuteResponse(result=model.results[operation.seq_id])

    async def _execute(self, model: Model, operation: operation_pb2.Operation) -> results_pb2.OperationResult:
        self.executed.append((operation.model_id, operation.seq_id))
        kind = operation.WhichOneof("kind")
        failure = self.fail.get(operation.seq_id)
        if failure is not None:
            if kind == "create_model":
                del self.models[operation.model_id]
            return results_pb2.OperationResult(error=errors.to_pb(failure))
        if kind == "unload_model":
            del self.models[operation.model_id]
        if not (kind == "forward_backward" and operation.forward_backward.forward_only):
            model.effects.append(operation.seq_id)
        result = results_pb2.OperationResult()
        getattr(result, str(kind)).SetInParent()
        if kind == "optim_step":
            result.optim_step.metrics["steps"] = len(model.effects)
        return result

    async def _make_durable(self, model: Model, operation: operation_pb2.Operation, epoch: int) -> None:
        stepped = model.results[operation.seq_id].HasField("optim_step")
        if stepped and self.durable_steps:
            self.disk[operation.model_id] = (model.applied, list(model.effects))
            await self._journal.mark_durable(operation.model_id, epoch, model.applied, str(model.applied))

    async def Restore(
        self, request: trainer_pb2.RestoreRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.RestoreResponse:
        self.restores += 1
        self._drop_former(request.model_id, request.moved_epoch)
        self._fence(request.model_id, request.epoch)
        if self.cannot_restore is not None:
            raise self.cannot_restore
        if request.model_id not in self.disk:
            raise SnapshotNotFound("none")
        applied, effects = self.disk[request.model_id]
        if request.model_id not in self.models:
            self.models[request.model_id] = Model(list(effects), applied)
            self.restored.append(request.model_id)
        return trainer_pb2.RestoreResponse(seq_id=applied)

    async def Park(
        self, request: trainer_pb2.ParkRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.ParkResponse:
        await self.parking.wait()
        self._drop_former(request.model_id, request.moved_epoch)
        self._fence(request.model_id, request.epoch)
        if self.models.pop(request.model_id, None) is not None:
            self.parked.append(request.model_id)
        return trainer_pb2.ParkResponse()

    async def DeleteModel(
        self, request: trainer_pb2.DeleteModelRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.DeleteModelResponse:
        if not await self._journal.is_closed(request.model_id):
            raise ModelOpen("open")
        self.models.pop(request.model_id, None)
        self.disk.pop(request.model_id, None)
        self.deleted.append(request)
        return trainer_pb2.DeleteModelResponse()

    def _drop_former(self, model_id: str, moved: int) -> None:
        outdated = model_id in self.strayed or self.epochs.get(model_id, 0) < moved
        self.strayed.discard(model_id)
        if outdated and self.models.pop(model_id, None) is not None:
            self.dropped.append(model_id)

    def _fence(self, model_id: str, epoch: int) -> None:
        if epoch < self.epochs.get(model_id, 0):
            raise StaleEpoch("superseded")
        self.epochs[model_id] = epoch


class ScriptedSampler(sampler_pb2_grpc.SamplerServiceServicer):
    """Answers with the tokens of its own name.

    Attributes:
        deaf: so many words about samples are lost.
        early: so many words come before their sample.
        mute: so many questions for a sample are not answered.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.served: list[str] = []
        self.ended: list[str] = []
        self.kept: list[str] = []
        self.moved: list[tuple[str, str, int]] = []
        self.known: set[str] = set()
        self.deaf = self.early = self.mute = 0
        self.waiting = 0
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Callable[[sampler_pb2.SampleRequest], sampler_pb2.SampleResponse] | None = None

    async def Sample(
        self, request: sampler_pb2.SampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.SampleResponse:
        self.arrived.set()
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.waiting -= 1
        self.served.append(request.request_id)
        if self.answer is not None:
            return self.answer(request)
        reply = sampler_pb2.SampleResponse()
        reply.result.sequences.add().tokens.data = self.name.encode()
        return reply

    async def EndSample(
        self, request: sampler_pb2.EndSampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.EndSampleResponse:
        known = self._hears()
        if known and request.keep:
            self.kept.append(request.request_id)
            self.gate.set()
        elif known:
            self.ended.append(request.request_id)
        return sampler_pb2.EndSampleResponse(known=known)

    async def MoveSample(
        self, request: sampler_pb2.MoveSampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.MoveSampleResponse:
        known = self._hears()
        if known:
            self.moved.append((request.request_id, request.snapshot.model_id, request.snapshot.version))
        return sampler_pb2.MoveSampleResponse(known=known)

    def _hears(self) -> bool:
        if self.deaf:
            self.deaf -= 1
            raise Unavailable("the word was lost")
        self.early = max(0, self.early - 1)
        return not self.early

    async def FindSample(
        self, request: sampler_pb2.FindSampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.FindSampleResponse:
        if self.mute:
            self.mute -= 1
            raise Unavailable("the question was lost")
        return sampler_pb2.FindSampleResponse(known=request.request_id in self.known)


class Running:
    """A served and announced service that can be killed."""

    def __init__(self, server: rpc.RpcServer, announcer: registry.Announcer) -> None:
        self._server = server
        self._announcer = announcer
        self._killed = False

    async def unannounce(self) -> None:
        """Takes the record away; the service lives on."""
        await self._announcer.stop()

    async def announce(self) -> None:
        """The same start of the service is there again."""
        await self._announcer.start()

    async def kill(self) -> None:
        """Ends every call at once and takes the record away."""
        if not self._killed:
            self._killed = True
            await self._server.drain(0)
            await self._announcer.stop()


@asynccontextmanager
async def serving(
    client: redis.asyncio.Redis, servicer: ScriptedTrainer | ScriptedSampler, name: str, **announced: Any
) -> AsyncIterator[Running]:
    """Serves and announces a scripted service."""
    if isinstance(servicer, ScriptedTrainer):
        kind, add = "trainer", trainer_pb2_grpc.add_TrainerServiceServicer_to_server
        service = "tinsmith.internal.v1.TrainerService"
    else:
        kind, add = "sampler", sampler_pb2_grpc.add_SamplerServiceServicer_to_server
        service = "tinsmith.internal.v1.SamplerService"
    carrier = Carrier(add, servicer)
    server = await rpc.serve([(add, servicer, service), carrier.service], "127.0.0.1:0")
    address = f"127.0.0.1:{server.port}"
    announced.setdefault("base_model", BASE)
    record = ServiceRecord(kind=kind, id=name, address=address, **announced)
    running = Running(server, registry.Announcer(client, record))
    await running._announcer.start()
    try:
        yield running
    finally:
        await running.kill()
