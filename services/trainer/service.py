"""TrainerService over gRPC: protobuf in and out, nothing else."""

from __future__ import annotations

import asyncio

import grpc.aio

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest
from services.common.telemetry import subject
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.capacity import Capacity
from services.trainer.execution.executor import Executor
from services.trainer.execution.residency import Residency
from services.trainer.execution.resident_models import Model, OperationResult
from tinsmith.internal.v1 import trainer_pb2, trainer_pb2_grpc


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """See trainer.proto."""

    def __init__(
        self,
        executor: Executor,
        residency: Residency,
        models: dict[str, Model],
        engine: Engine,
        zero_stage: int,
        micro_batch_tokens: int,
        capacity: Capacity,
    ) -> None:
        """micro_batch_tokens: that the trainer was started for."""
        self._executor = executor
        self._residency = residency
        self._models = models
        self._engine = engine
        self._zero_stage = zero_stage
        self._micro_batch_tokens = micro_batch_tokens
        self._capacity = capacity

    async def Execute(
        self, request: trainer_pb2.ExecuteRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.ExecuteResponse:
        operation = request.operation
        _check_model_id(operation.model_id)
        request_id = ids.request_id(operation.model_id, operation.seq_id)
        subject.note(operation.origin.owner, operation.model_id, request_id)
        work = await self._executor.read(operation)
        found = self._executor.submit(operation, work, request.after_seq_id, request.epoch)
        # The operation goes on when this call is cancelled: the caller may come back for its result.
        result = found if isinstance(found, OperationResult) else await asyncio.shield(found)
        return trainer_pb2.ExecuteResponse(result=result)

    async def Restore(
        self, request: trainer_pb2.RestoreRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.RestoreResponse:
        _check_model_id(request.model_id)
        seq_id = await self._residency.restore(
            request.model_id, request.epoch, request.moved_epoch, self._executor.evict
        )
        return trainer_pb2.RestoreResponse(seq_id=seq_id)

    async def Park(
        self, request: trainer_pb2.ParkRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.ParkResponse:
        _check_model_id(request.model_id)
        await self._residency.park(request.model_id, request.epoch, request.moved_epoch, self._executor.evict)
        return trainer_pb2.ParkResponse()

    async def DeleteModel(
        self, request: trainer_pb2.DeleteModelRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.DeleteModelResponse:
        _check_model_id(request.model_id)
        await self._residency.delete(request.model_id)
        if request.snapshots:
            await self._residency.delete_snapshots(request.model_id, set(request.kept_versions))
        return trainer_pb2.DeleteModelResponse()

    async def GetTrainerStatus(
        self, request: trainer_pb2.GetTrainerStatusRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.GetTrainerStatusResponse:
        models = [
            trainer_pb2.ResidentModel(
                model_id=model.model_id,
                applied_seq_id=model.sequence.applied,
                durable_seq_id=model.durable_seq,
                queued=len(model.sequence.unfinished),
                lora_rank=model.lora.rank if model.lora is not None else 0,
                adapter_bytes=model.adapter_bytes,
                on_host=model.host_bytes > 0,
            )
            for model in self._models.values()
            if model.created
        ]
        locked = self._engine.page_locked.use()
        adapters = self._residency.adapters.used()
        memory = self._engine.memory(adapters)
        return trainer_pb2.GetTrainerStatusResponse(
            models=models,
            world_size=self._engine.world_size,
            zero_stage=self._zero_stage,
            max_sequence_tokens=self._capacity.sequence_tokens,
            max_forward_tokens=self._capacity.forward_tokens,
            max_operation_tokens=self._capacity.operation_tokens,
            adapter_bytes=adapters,
            adapter_room_bytes=self._capacity.adapter_bytes,
            adapter_host_bytes=self._residency.adapters.host.used(),
            adapter_host_room_bytes=self._capacity.adapter_host_bytes,
            page_locked_bytes=locked.used,
            page_locked_kept_bytes=locked.kept,
            shares_prefixes=self._engine.shares_prefixes,
            weight_bytes=int(memory["weights"]),
            pass_bytes=int(memory["pass"]),
            asked_micro_batch_tokens=self._micro_batch_tokens,
        )


def _check_model_id(model_id: str) -> None:
    if not ids.is_model_id(model_id):
        raise InvalidRequest(f"{model_id[:200]!r} is not a model id")
