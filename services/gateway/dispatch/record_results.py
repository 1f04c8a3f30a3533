"""What the gateway remembers of finished operations: models, checkpoints, sampling sessions.

Invariant: `record` may run any number of times for one operation with the same effect, and it
runs before the operation's future is resolved, so a client that saw the result finds the object: one that
cannot be recorded makes the operation fail.
"""

from __future__ import annotations

import logging
from typing import Literal

from services.common.contract import errors, ids
from services.common.contract.errors import InvalidRequest
from services.common.process import clock
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.model import ModelRecord
from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2

log = logging.getLogger(__name__)

Save = operation_pb2.SaveState | operation_pb2.SaveForSampler | operation_pb2.SaveExternal
KINDS: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""Kind of a checkpoint by the first part of its id."""

_SUPERSEDED_S = 60.0
"""By then no sample that was sent for the version before waits to begin."""


class ResultRecorder:
    """Writes the records that finished operations give rise to."""

    def __init__(self, stores: Stores) -> None:
        self._models = stores.models
        self._checkpoints = stores.checkpoints
        self._sampling_sessions = stores.sampling_sessions
        self._inflight = stores.inflight
        self._snapshots = stores.snapshots

    async def record(
        self, operation: operation_pb2.Operation, result: results_pb2.OperationResult
    ) -> results_pb2.OperationResult:
        """Records what an operation came to, and says what that is. Most leave nothing to record."""
        kind = operation.WhichOneof("kind")
        failed = result.WhichOneof("kind") == "error"
        if kind == "create_model":
            await self._models.set_status(operation.model_id, "failed" if failed else "ready")
        elif kind == "unload_model" and not failed:
            await self._models.note_unloaded(operation.model_id)
        elif kind == "save_for_sampler" and failed and operation.save_for_sampler.sampling_session_id:
            await self._give_back(operation)
        _tell_stand_in(operation, result)
        if failed or kind not in ("save_state", "save_for_sampler", "save_external"):
            return result
        model = await self._models.get(operation.model_id)
        if model is None:
            log.error("model %s of a finished %s is not known", operation.model_id, kind)
            return result
        if kind == "save_state":
            save = operation.save_state
            await self._put_checkpoint(model, operation.seq_id, save, result.save_state.size_bytes)
        elif kind == "save_external":
            external = operation.save_external
            await self._put_checkpoint(model, operation.seq_id, external, result.save_external.size_bytes)
        elif operation.save_for_sampler.checkpoint_id:
            sampler = operation.save_for_sampler
            size = result.save_for_sampler.size_bytes
            if not await self._put_checkpoint(model, operation.seq_id, sampler, size):
                return _name_taken(ids.tinker_path(model.model_id, sampler.checkpoint_id))
        else:
            size = result.save_for_sampler.size_bytes
            await self._snapshots.add(model.model_id, operation.seq_id, model.owner, size)
            if not await self._bind(model, operation.seq_id, operation.save_for_sampler):
                # Nobody will ask for it.
                await self._snapshots.supersede(model.model_id, operation.seq_id, clock.to_note())
                return _taken(operation.save_for_sampler.sampling_session_id)
        return result

    async def _give_back(self, save: operation_pb2.Operation) -> None:
        """The snapshot of a save that failed has no part any more of what its owner may have."""
        model = await self._models.get(save.model_id)
        if model is not None:
            await self._snapshots.expect_no_more(save.model_id, save.seq_id, model.owner)

    async def _put_checkpoint(
        self,
        model: ModelRecord,
        seq_id: int,
        save: Save,
        size_bytes: int,
    ) -> bool:
        """Whether the name was free, or what it named may be replaced."""
        now = clock.to_note()
        return await self._checkpoints.put(
            CheckpointRecord(
                model_id=model.model_id,
                checkpoint_id=save.checkpoint_id,
                owner=model.owner,
                kind=KINDS[save.checkpoint_id.partition("/")[0]],
                version=seq_id,
                size_bytes=size_bytes,
                created_at=now,
                expires_at=now + save.ttl_seconds if save.ttl_seconds else None,
                user_metadata={}
                if isinstance(save, operation_pb2.SaveExternal)
                else dict(save.user_metadata),
                base_model=model.base_model,
                lora_rank=model.lora_rank,
                train_attn=model.train_attn,
                train_mlp=model.train_mlp,
                train_unembed=model.train_unembed,
                role=model.role,
            )
        )

    async def _bind(self, model: ModelRecord, version: int, save: operation_pb2.SaveForSampler) -> bool:
        """Makes the sampling session that answers from a snapshot; whether its id was free."""
        sampling_session_id = save.sampling_session_id
        record = SamplingSessionRecord(
            sampling_session_id=sampling_session_id,
            session_id=ids.session_of(sampling_session_id),
            owner=model.owner,
            base_model=model.base_model,
            model_id=model.model_id,
            version=version,
            model_path="",
            inflight=save.inflight,
            full=model.lora_rank == 0,
        )
        stored = await self._sampling_sessions.create_if_absent(record, saved=True)
        if stored != record:
            return False
        if save.inflight:
            before = await self._inflight.current(model.model_id)
            if before is not None and before < version:
                at = clock.to_note() + _SUPERSEDED_S
                await self._snapshots.supersede(model.model_id, before, at)
            await self._inflight.move(model.model_id, version)
        return True


def _name_taken(path: str) -> results_pb2.OperationResult:
    error = InvalidRequest(
        f"{path} exists; choose another name: another request saved under it meanwhile", "checkpoint_exists"
    )
    return results_pb2.OperationResult(error=errors.to_pb(error))


def _taken(sampling_session_id: str) -> results_pb2.OperationResult:
    error = InvalidRequest(
        f"sampling session {sampling_session_id} was made by another request before this save completed; "
        "save again with the next sampling_session_seq_id",
        "sampling_session_taken",
    )
    return results_pb2.OperationResult(error=errors.to_pb(error))


def _tell_stand_in(operation: operation_pb2.Operation, result: results_pb2.OperationResult) -> None:
    """Adds to a result's metrics which loss ran in place of the one that was asked for, if one did."""
    if operation.asked_loss and result.WhichOneof("kind") == "forward_backward":
        # Equal in every chunk of a batch, so that the greatest is the value.
        name = f"{operation.asked_loss}_as_{operation.forward_backward.loss_fn}:max"
        result.forward_backward.metrics[name] = 1.0
