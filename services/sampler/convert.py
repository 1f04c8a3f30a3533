"""The sampler's protobuf edge: messages to dataclasses and back."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.contract import errors, matrices, steering, tensors
from services.common.contract.errors import InvalidRequest
from services.common.contract.sample_schema import scoring_from_pb
from services.common.contract.tensors import TensorSpec
from services.common.process.memory.remembered import Remembered
from services.common.weights.medium import Medium
from services.sampler.engine.sampling import (
    Constraint,
    NewTokens,
    SampleJob,
    SampleOutput,
    SamplingParams,
    Sequence,
    StopReason,
)
from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.incoming import IncomingSnapshot
from services.sampler.worker.prompt_scores import TopkLogprobs
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2, types_pb2

_SMALL_BYTES = 1024
_STOP_REASONS: dict[StopReason, sampling_pb2.StopReason.ValueType] = {
    "stop": sampling_pb2.STOP_REASON_STOP,
    "length": sampling_pb2.STOP_REASON_LENGTH,
    "cancelled": sampling_pb2.STOP_REASON_CANCELLED,
}


def snapshot_from_pb(pb: sampler_pb2.Snapshot) -> SnapshotKey | None:
    """None = the base model."""
    return SnapshotKey(pb.model_id, pb.version) if pb.model_id else None


def sample_job_from_pb(pb: sampler_pb2.SampleRequest) -> SampleJob:
    """
    Raises:
        InvalidRequest: the prompt is no int32 vector, the stop condition is not set, or the targets are
            malformed.
    """
    return SampleJob(
        request_id=pb.request_id,
        snapshot=snapshot_from_pb(pb.snapshot),
        prompt=_prompt_from_pb(pb.prompt),
        num_samples=pb.num_samples,
        params=_params_of(pb.params.SerializeToString()),
        scoring=scoring_from_pb(pb),
        cache_namespace=pb.cache_namespace,
        constraint=_constraint_from_pb(pb.constraint),
        moves=pb.moves,
        keeps_kv=pb.keeps_kv,
        sampled_logprobs=pb.sampled_logprobs,
        routed_experts=pb.routed_experts,
    )


def _constraint_from_pb(pb: sampler_pb2.Constraint) -> Constraint | None:
    kind = pb.WhichOneof("kind")
    return None if kind is None else Constraint(kind, getattr(pb, kind))


def _prompt_from_pb(pb: types_pb2.Tensor) -> list[int]:
    if pb.dtype == types_pb2.DATA_TYPE_INT32 and len(pb.shape) == 1 and 4 * pb.shape[0] == len(pb.data):
        return _int32(pb.data)
    prompt = tensors.from_pb(pb, "prompt")
    raise InvalidRequest(
        f"prompt must be an int32 vector, but is {prompt.dtype} {list(prompt.shape)}", "bad_dtype"
    )


def _params_of(data: bytes) -> SamplingParams:
    """Of serialized ones: many samples in a row have the same."""
    return _read(len(data) > _SMALL_BYTES, data)


@Remembered
def _read(data: bytes) -> SamplingParams:
    return _params_from_pb(sampling_pb2.SamplingParams.FromString(data))


def _params_from_pb(pb: sampling_pb2.SamplingParams) -> SamplingParams:
    kind = pb.stop.WhichOneof("kind")
    if pb.HasField("stop") and kind is None:
        raise InvalidRequest("stop is set but says nothing; set model_eos, never, strings or tokens")
    return SamplingParams(
        max_tokens=pb.max_tokens if pb.HasField("max_tokens") else None,
        seed=pb.seed if pb.HasField("seed") else None,
        ignore_eos=kind == "never",
        stop_strings=tuple(pb.stop.strings.values) if kind == "strings" else (),
        stop_token_ids=tuple(pb.stop.tokens.ids) if kind == "tokens" else (),
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=pb.top_p,
        steering=steering.from_pb(pb),
    )


def digest_of(pb: sampler_pb2.SampleRequest) -> bytes:
    """The same for all repeats of a request; an inflight one may have moved to another version meanwhile."""
    same = sampler_pb2.SampleRequest()
    same.CopyFrom(pb)
    same.snapshot.version = 0
    same.ClearField("wait_seconds")
    same.ClearField("origin")
    return hashlib.blake2b(same.SerializeToString(deterministic=True), digest_size=16).digest()


def incoming_from_pb(pb: sampler_pb2.ReceiveSnapshotRequest) -> IncomingSnapshot:
    """
    Raises:
        InvalidRequest: no model id, no tensors, an unknown dtype or no timeout.
    """
    key = snapshot_from_pb(pb.snapshot)
    if key is None or not pb.tensors:
        raise InvalidRequest("snapshot.model_id and tensors must be set")
    if pb.timeout_seconds <= 0:
        raise InvalidRequest("timeout_seconds must be above 0")
    specs = tuple(TensorSpec(t.name, tensors.dtype_from_pb(t.dtype), tuple(t.shape)) for t in pb.tensors)
    rank = pb.lora.rank if pb.HasField("lora") else None
    return IncomingSnapshot(pb.epoch, key, rank, specs, pb.checksum, pb.timeout_seconds)


def output_to_pb(output: SampleOutput) -> sampler_pb2.SampleResponse:
    """A successful answer, but for what `answer` adds."""
    # Made in place: what is made apart is copied into what it is a part of.
    response = sampler_pb2.SampleResponse()
    result = response.result
    result.prompt_cache_hit_tokens = output.cached_prompt_tokens
    for sequence in output.sequences:
        _sequence_to_pb(sequence, result.sequences.add())
    scores = output.scores
    if scores.prompt_logprobs is not None:
        result.prompt_logprobs.CopyFrom(_array_to_pb(scores.prompt_logprobs))
    if scores.topk_prompt_logprobs is not None:
        result.topk_prompt_logprobs.CopyFrom(_topk_to_pb(scores.topk_prompt_logprobs))
    if scores.target_prompt_logprobs is not None:
        result.target_prompt_logprobs.CopyFrom(matrices.to_pb(scores.target_prompt_logprobs))
    if scores.prompt_alt_tokens is not None:
        result.prompt_alt_tokens.CopyFrom(_topk_to_pb(scores.prompt_alt_tokens))
    result.SetInParent()
    return response


def progress_to_pb(tokens: int) -> sampler_pb2.SampleResponse:
    """How far a sample is that has not finished."""
    return sampler_pb2.SampleResponse(progress=sampler_pb2.SampleProgress(tokens=tokens))


def new_tokens_to_pb(new: Iterable[NewTokens]) -> sampler_pb2.StreamSampleResponse:
    """What was generated since the last answer of a stream."""
    return sampler_pb2.StreamSampleResponse(
        new_tokens=sampler_pb2.NewTokens(sequences=[_delta_to_pb(part) for part in new])
    )


def _delta_to_pb(part: NewTokens) -> sampler_pb2.SequenceDelta:
    pb = sampler_pb2.SequenceDelta(index=part.index, start=part.start, version=part.version)
    _tokens_to_pb(part.tokens, part.logprobs, part.topk, pb.added)
    return pb


class Answer(NamedTuple):
    """What a request is answered with, and its bytes where a repeat of the request may be given it; None = it
    has to be asked anew."""

    response: sampler_pb2.SampleResponse
    bytes_to_keep: int | None


def answer(output: SampleOutput) -> Answer:
    """A successful answer. Experts may be 64 MiB, which are copied when a message becomes a part of another
    one, and when a message is asked for its size: they come last, to where they belong."""
    response = output_to_pb(output)
    size = response.ByteSize()
    for sequence, pb in zip(output.sequences, response.result.sequences, strict=True):
        if sequence.experts is not None:
            pb.routed_experts.ids = sequence.experts.tobytes()
            pb.routed_experts.shape.extend(sequence.experts.shape)
            size += sequence.experts.nbytes
    return Answer(response, size)


def refusal(error: BaseException) -> Answer:
    """A failure of the request itself."""
    return Answer(sampler_pb2.SampleResponse(error=errors.to_pb(error)), None)


def snapshot_to_pb(key: SnapshotKey) -> sampler_pb2.Snapshot:
    return sampler_pb2.Snapshot(model_id=key.model_id, version=key.version)


def _sequence_to_pb(sequence: Sequence, pb: sampling_pb2.SampledSequence) -> None:
    _tokens_to_pb(sequence.tokens, sequence.logprobs, sequence.topk, pb)
    pb.stop_reason = _STOP_REASONS[sequence.stop_reason]
    for span in sequence.versions:
        pb.versions.add(version=span.version, tokens=span.tokens, kv_kept=span.kv_kept)


def _tokens_to_pb(
    tokens: list[int], logprobs: list[float], topk: TopkLogprobs | None, pb: sampling_pb2.SampledSequence
) -> None:
    count = len(tokens)
    ids, values = pb.tokens, pb.logprobs
    ids.dtype, values.dtype = types_pb2.DATA_TYPE_INT32, types_pb2.DATA_TYPE_FLOAT32
    ids.shape.append(count)
    values.shape.append(count)
    ids.data, values.data = array("i", tokens).tobytes(), array("f", logprobs).tobytes()
    if topk is not None:
        pb.topk_logprobs.CopyFrom(_topk_to_pb(topk))


def _topk_to_pb(topk: TopkLogprobs) -> sampling_pb2.TopkLogprobs:
    return sampling_pb2.TopkLogprobs(
        token_ids=_array_to_pb(topk.token_ids), logprobs=_array_to_pb(topk.logprobs)
    )


def _int32(data: bytes) -> list[int]:
    return array("i", data).tolist()


def _array_to_pb(values: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> types_pb2.Tensor:
    return tensors.to_pb(tensors.from_values(values))


def medium_from_pb(medium: int) -> Medium:
    """The medium of a weight group.

    Raises:
        InvalidRequest: it is not set.
    """
    if medium == sampler_pb2.WEIGHT_MEDIUM_GLOO:
        return "gloo"
    if medium == sampler_pb2.WEIGHT_MEDIUM_NCCL:
        return "nccl"
    raise InvalidRequest("medium is not set; choose WEIGHT_MEDIUM_GLOO or WEIGHT_MEDIUM_NCCL")
