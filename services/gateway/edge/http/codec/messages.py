"""JSON bodies of the tinker SDK (0.38), as strict structs.

Invariant: every field that the SDK can send is named here, so a field nobody knows is refused
with its name instead of being ignored. Fields that are not served are named too; the routes
refuse them with a reason when they are set. A field `type` is a constant of its message.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from services.common.contract.errors import InvalidRequest

T = TypeVar("T")

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Ordinal = Annotated[int, Meta(ge=0, le=999_999_999)]
"""Number of an object within its session: it is part of the object's id."""
Integers = list[int] | str
"""A list of integers, or the string that stands for a long one (`long_lists`)."""


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without fields that are not declared."""


class ClientConfig(Body):
    sdk_version: str | None = None


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeat(Body):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    reason: FinishReason
    detail: str | None = None


class LoraConfig(Body):
    rank: Int32
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: Ordinal
    base_model: str
    user_metadata: dict[str, str] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"


class GetInfo(Body):
    model_id: str
    type: Literal["get_info"] = "get_info"


class AdamParams(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: str
    seq_id: Int64
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body):
    model_id: str
    seq_id: Int64
    path: str | None = None
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSampler(Body):
    model_id: str
    seq_id: Int64
    path: str | None = None
    sampling_session_seq_id: Ordinal | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Int64 | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternal(Body):
    model_id: str
    seq_id: Int64
    path: str | None = None
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class UnloadModel(Body):
    model_id: str
    type: Literal["unload_model"] = "unload_model"


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Int64 | None = None
    session_id: str | None = None
    model_seq_id: Ordinal | None = None
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class WeightsInfo(Body):
    tinker_path: str


class CopyWeights(Body):
    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Ordinal | None = None
    ttl_seconds: Int64 | None = None
    weights_access_token: str | None = None


class SetTtl(Body):
    # There on purpose without a default: null keeps the checkpoint for ever.
    ttl_seconds: Int64 | None


class AssignProject(Body):
    project_id: str


class OwnSessions(Body, tag_field="type", tag="own"):
    pass


class AccessibleSessions(Body, tag_field="type", tag="accessible"):
    pass


class OfUsers(Body, tag_field="type", tag="user"):
    owner_urns: list[str]


class Active(Body, tag_field="type", tag="active"):
    kind: ClassVar[str] = "active"


class Cancelled(Body, tag_field="type", tag="cancelled"):
    kind: ClassVar[str] = "cancelled"


class Failed(Body, tag_field="type", tag="failed"):
    kind: ClassVar[str] = "failed"


class ClientFinished(Body, tag_field="type", tag="client_finished"):
    kind: ClassVar[str] = "client_finished"
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchCursor(Body):
    last_created_at: str
    last_session_id: str


class SearchSessions(Body):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: OwnSessions | AccessibleSessions | OfUsers = msgspec.field(default_factory=OwnSessions)
    statuses: list[Active | Cancelled | Failed | ClientFinished] | None = None
    limit: int = 50
    cursor: SearchCursor | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: Ordinal
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class EncodedTextChunk(Body, tag_field="type", tag="encoded_text"):
    tokens: Integers


class ImageChunk(Body, tag_field="type", tag="image"):
    data: str
    format: str
    expected_tokens: int | None = None


class ImageAssetPointerChunk(Body, tag_field="type", tag="image_asset_pointer"):
    location: str
    format: str
    expected_tokens: int | None = None


class DmelChunk(Body, tag_field="type", tag="dmel"):
    dmel: str


class ModelInput(Body):
    chunks: list[EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk]


class LossInput(Body):
    """Numbers, dense or (with both index lists) in compressed sparse rows."""

    # Or the string that stands for a long list of integers (`long_lists`).
    data: list[int | float] | str
    dtype: Literal["float32", "int64"]
    shape: list[Int64] | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class Datum(Body):
    model_input: ModelInput
    loss_fn_inputs: dict[str, LossInput]


class ForwardInput(Body):
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class Forward(Body):
    """Of SDKs before 0.22."""

    forward_input: ForwardInput
    model_id: str
    seq_id: Int32


class SamplingParams(Body):
    max_tokens: Int32 | None = None
    # Any unsigned 64-bit value; msgspec cannot express that bound.
    seed: int | None = None
    # Or the string that stands for a long list of integers (`long_lists`).
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: Int32 = -1
    top_p: float = 1.0


class TensorData(Body):
    """Integers, dense or (with both index lists) in compressed sparse rows."""

    data: Integers
    dtype: Literal["int64"]
    shape: list[Int64] | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class Sample(Body):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Int32 = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int32 = 0
    topk_sample_logprobs: Int32 = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Int32 = 0
    prompt_logprobs_last_n: Int32 | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class RetrieveFuture(Body):
    request_id: str
    # Results are always sent whole, which the protocol allows whatever the client prefers.
    allow_metadata_only: bool = False


class FuturesTarget(Body):
    sampling_session_id: str
    type: Literal["sampling_session"] = "sampling_session"
    cloned_sampler_id: Annotated[int, Meta(ge=0, le=10**9)] = 0


class RetrieveFutures(Body):
    target: FuturesTarget
    prev_cursor: Annotated[int, Meta(ge=0, le=2**53)] = 0
    # Seconds; None = as long as the service holds a poll.
    timeout: Annotated[float, Meta(ge=0)] | None = None
    retrieved_request_ids: list[str] = []


class CancelFuture(Body):
    request_id: str


def parse(kind: type[T], body: bytes) -> T:
    """The body as a struct of this kind.

    Raises:
        InvalidRequest: the body is no JSON, lacks a field, has one too many or one of the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"the JSON body cannot be read: {error}", "bad_body") from error
