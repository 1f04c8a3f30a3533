"""Requests of the public gRPC service, translated to the application layer's terms."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from google.protobuf.timestamp_pb2 import Timestamp

from services.common.contract import errors, ids, loss_schema, roles, stand_ins
from services.common.contract.errors import InvalidRequest, TinsmithError
from services.gateway.access.limits import MAX_GET_RESULT_SECONDS, Limits
from services.gateway.cluster.base_models import BaseModel
from services.gateway.inference.streams import Accepted, Ended, New
from services.gateway.records.checkpoint import CheckpointRecord
from services.gateway.records.model import ModelRecord, ModelStatus
from services.gateway.records.sample_journal import Completion
from services.gateway.records.session import SessionRecord
from services.gateway.results.futures import FutureView
from services.gateway.sampling.completions import Target
from services.gateway.sessions.search import SessionDetails
from services.gateway.sessions.sessions import NewSession
from services.gateway.training import adapter_shape
from services.gateway.training.runs import Run
from services.gateway.training.saves import SaveOptions
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    runs_pb2,
    sampling_pb2,
    server_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)

_MAX_ORDINAL = 999_999_999


_REASONS = {
    sessions_pb2.FINISH_REASON_UNSPECIFIED: "success",
    sessions_pb2.FINISH_REASON_SUCCESS: "success",
    sessions_pb2.FINISH_REASON_ERRORED: "errored",
    sessions_pb2.FINISH_REASON_INTERRUPTED: "interrupted",
}
_STATUSES: dict[ModelStatus, models_pb2.ModelStatus.ValueType] = {
    "creating": models_pb2.MODEL_STATUS_CREATING,
    "ready": models_pb2.MODEL_STATUS_READY,
    "failed": models_pb2.MODEL_STATUS_FAILED,
    "unloaded": models_pb2.MODEL_STATUS_UNLOADED,
}


_KINDS = {
    "training": checkpoints_pb2.CHECKPOINT_KIND_TRAINING,
    "sampler": checkpoints_pb2.CHECKPOINT_KIND_SAMPLER,
    "external": checkpoints_pb2.CHECKPOINT_KIND_EXTERNAL,
}


def new_session(request: sessions_pb2.CreateSessionRequest) -> NewSession:
    return NewSession(
        tags=list(request.tags),
        user_metadata=dict(request.user_metadata),
        display_name=request.display_name,
        project_id=request.project_id,
    )


def finish_reason(reason: sessions_pb2.FinishReason.ValueType) -> str:
    """The reason's word in the log.

    Raises:
        InvalidRequest: a number that is no reason.
    """
    if reason not in _REASONS:
        raise InvalidRequest(f"reason {reason} is not one of FinishReason", field="reason")
    return _REASONS[reason]


def adapter(request: models_pb2.CreateModelRequest) -> models_pb2.LoraConfig | None:
    """The adapter that a new model trains; None: all its weights.

    Raises:
        InvalidRequest: neither is asked for, or both.
    """
    if request.HasField("full") == request.HasField("lora"):
        raise InvalidRequest("set either lora or full", field="lora")
    return request.lora if request.HasField("lora") else None


def save_options(
    request: checkpoints_pb2.SaveStateRequest | checkpoints_pb2.SaveForSamplerRequest,
) -> SaveOptions:
    """What a named checkpoint is saved with."""
    return SaveOptions(request.ttl_seconds or None, dict(request.user_metadata))


def check_save_for_sampler(request: checkpoints_pb2.SaveForSamplerRequest) -> None:
    """Refuses what belongs to a named checkpoint without a name, and what does not with one."""
    if not request.name:
        ordinal("sampling_session_seq_id", request.sampling_session_seq_id)
        if request.ttl_seconds or request.user_metadata:
            raise InvalidRequest("ttl_seconds and user_metadata belong to named checkpoints; set name too")
    elif request.inflight:
        raise InvalidRequest("a named checkpoint never changes; leave name or inflight out")
    elif request.sampling_session_seq_id:
        raise InvalidRequest("set either name (a checkpoint) or sampling_session_seq_id")


def model_info(record: ModelRecord, tokenizer: str) -> models_pb2.ModelInfo:
    """What is known of a model."""
    found = models_pb2.ModelInfo(
        model_id=record.model_id,
        session_id=record.session_id,
        base_model=record.base_model,
        tokenizer=tokenizer,
        lora=adapter_shape.lora_of(record),
        role=roles.to_pb(record.role),
        status=_STATUSES[record.status],
        user_metadata=record.user_metadata,
    )
    if record.lora_seed is not None:
        found.lora.seed = record.lora_seed
    set_time(found.created_at, record.created_at)
    return found


def set_time(target: Timestamp, seconds: float) -> None:
    """Sets a timestamp to a Unix time."""
    target.FromMilliseconds(round(seconds * 1000))


def checkpoint(record: CheckpointRecord) -> checkpoints_pb2.Checkpoint:
    """What is known of a checkpoint."""
    found = checkpoints_pb2.Checkpoint(
        path=ids.tinker_path(record.model_id, record.checkpoint_id),
        model_id=record.model_id,
        kind=_KINDS[record.kind],
        base_model=record.base_model,
        lora=adapter_shape.lora_of(record),
        size_bytes=record.size_bytes,
        public=record.public,
        user_metadata=record.user_metadata,
    )
    set_time(found.created_at, record.created_at)
    if record.expires_at is not None:
        set_time(found.expires_at, record.expires_at)
    return found


def training_run(run: Run, tokenizer: str) -> runs_pb2.TrainingRun:
    """What is known of a run."""
    found = runs_pb2.TrainingRun(model=model_info(run.model, tokenizer), owner=run.model.owner)
    set_time(found.last_request_at, run.last_request)
    if run.last_checkpoint is not None:
        found.last_checkpoint.CopyFrom(checkpoint(run.last_checkpoint))
    if run.last_sampler_checkpoint is not None:
        found.last_sampler_checkpoint.CopyFrom(checkpoint(run.last_sampler_checkpoint))
    return found


def metadata(record: SessionRecord) -> dict[str, str]:
    """A session's metadata. What HTTP clients gave may be any JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in record.user_metadata.items()
    }


def session(details: SessionDetails) -> sessions_pb2.Session:
    """What is known of a session."""
    record = details.record
    found = sessions_pb2.Session(
        session_id=record.session_id,
        finished=record.finished,
        tags=record.tags,
        user_metadata=metadata(record),
        display_name=record.display_name,
        project_id=record.project_id,
        model_ids=details.model_ids,
        sampling_session_ids=details.sampling_session_ids,
    )
    set_time(found.created_at, record.created_at)
    set_time(found.last_seen_at, record.last_heartbeat)
    return found


def ordinal(name: str, value: int) -> int:
    """A number that becomes part of an object's id.

    Raises:
        InvalidRequest: it is negative or has more than nine digits.
    """
    if not 0 <= value <= _MAX_ORDINAL:
        raise InvalidRequest(f"{name} must be 0 to {_MAX_ORDINAL}, not {value}", field=name)
    return value


def forward_backward(request: training_pb2.ForwardBackwardRequest) -> training_pb2.ForwardBackward:
    """The operation of a request.

    Raises:
        InvalidRequest: it is not set.
    """
    if not request.HasField("forward_backward"):
        raise InvalidRequest("forward_backward is not set")
    return request.forward_backward


def adam(request: training_pb2.OptimStepRequest) -> training_pb2.AdamParams:
    """The parameters of a step.

    Raises:
        InvalidRequest: they are not set.
    """
    if not request.HasField("adam"):
        raise InvalidRequest("adam is not set; every field of AdamParams must be given")
    return request.adam


def base_model(model: BaseModel, limits: Limits) -> models_pb2.BaseModel:
    ranks = [rank for rank in (model.max_train_rank, model.max_sample_rank, limits.lora_rank) if rank]
    return models_pb2.BaseModel(
        name=model.name,
        max_context_length=model.context_length,
        trainable=model.trainable,
        sampleable=model.sampleable,
        vocab_size=model.vocab_size,
        architecture=model.arch,
        max_lora_rank=min(ranks),
        samples_adapters=model.sampleable and model.samples_adapters,
        tells_routed_experts=model.sampled_routing is not None,
        replays_routed_experts=model.trained_routing is not None,
    )


def server_info(models: Iterable[BaseModel], limits: Limits) -> server_pb2.GetServerInfoResponse:
    """What this service is."""
    return server_pb2.GetServerInfoResponse(
        version=_version(),
        limits=server_pb2.ServerLimits(
            message_bytes=limits.grpc_message_bytes,
            message_entries=limits.message_entries,
            message_fields=limits.message_fields,
            datums=limits.datums,
            samples=limits.samples,
            lora_rank=limits.lora_rank,
            metadata_bytes=limits.metadata_bytes,
            result_seconds=MAX_GET_RESULT_SECONDS,
            min_ttl_seconds=limits.min_ttl_seconds,
            max_ttl_seconds=limits.max_ttl_seconds,
        ),
        losses=sorted({*loss_schema.LOSS_SCHEMAS, *stand_ins.served(limits.stable_reinforce_as)}),
        models=[base_model(model, limits) for model in models],
    )


PIECE_BYTES = 1024 * 1024
"""Most bytes of a piece of something that comes in pieces."""

_MOST_REQUESTS = 1024


def check_request_ids(request_ids: Sequence[str]) -> None:
    """Refuses to look for the results of none, or of more than are looked for at once."""
    if not 1 <= len(request_ids) <= _MOST_REQUESTS:
        message = f"{len(request_ids)} request_ids; send 1 to {_MOST_REQUESTS}"
        raise InvalidRequest(message, field="request_ids")


def result_piece(request_id: str, result: bytes, start: int) -> results_pb2.ReadResultsResponse:
    """The piece of a result that begins at a byte."""
    return results_pb2.ReadResultsResponse(request_id=request_id, piece=_piece(result, start))


def watched_piece(sample: Completion, result: bytes, start: int) -> results_pb2.WatchSamplesResponse:
    """The same, with the cursor when it is the last."""
    told = results_pb2.WatchSamplesResponse(request_id=sample.request_id, piece=_piece(result, start))
    if start + PIECE_BYTES >= len(result):
        told.cursor = sample.cursor
    return told


def watched_error(sample: Completion, error: TinsmithError) -> results_pb2.WatchSamplesResponse:
    """Why there is no result of a sample any more."""
    return results_pb2.WatchSamplesResponse(
        request_id=sample.request_id, cursor=sample.cursor, error=errors.to_pb(error)
    )


def _piece(result: bytes, start: int) -> results_pb2.ResultPiece:
    return results_pb2.ResultPiece(data=result[start : start + PIECE_BYTES], total_bytes=len(result))


def watched(request: results_pb2.WatchSamplesRequest) -> Target:
    """Whose samples are watched.

    Raises:
        InvalidRequest: clone or cursor is negative.
    """
    for name, value in (("clone", request.clone), ("cursor", request.cursor)):
        if value < 0:
            raise InvalidRequest(f"{name} must be 0 or more, not {value}", field=name)
    return Target(request.sampling_session_id, request.clone)


def stream_part(part: Accepted | New | Ended) -> sampling_pb2.StreamSampleResponse:
    """What a stream tells of a sample."""
    if isinstance(part, Accepted):
        return sampling_pb2.StreamSampleResponse(request_id=part.request_id)
    if isinstance(part, Ended):
        end = sampling_pb2.SequenceEnd(index=part.index)
        end.stop_reason = part.reason  # type: ignore[assignment]
        for version, count, kept in part.versions:
            end.versions.add(version=version, tokens=count, kv_kept=kept)
        return sampling_pb2.StreamSampleResponse(end=end)
    shape = [len(part.tokens) // 4]
    tokens = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=shape, data=part.tokens)
    logprobs = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=shape, data=part.logprobs)
    new = sampling_pb2.NewTokens(
        index=part.index, start=part.start, tokens=tokens, logprobs=logprobs, version=part.version
    )
    return sampling_pb2.StreamSampleResponse(new_tokens=new)


def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tinsmith")
    return ""


def result(view: FutureView) -> results_pb2.GetResultResponse:
    """The response for a future; without a result while it is pending."""
    response = results_pb2.GetResultResponse(waiting_for=view.queue_state_reason or "")
    if view.result is not None:
        response.result.ParseFromString(view.result)
    return response
