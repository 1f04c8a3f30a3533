"""Results as the tinker SDK reads them.

Invariant: a forward_backward or sample result is the SDK's protobuf; everything else is a JSON
object without the keys ("error", "type", "status") that the SDK takes for something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby

import msgspec
import numpy as np

from services.common.contract.errors import Internal
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import results_pb2, sampling_pb2, training_pb2, types_pb2

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_STOP_REASONS = {
    sampling_pb2.STOP_REASON_STOP: tinker_pb2.TINKER_STOP_REASON_STOP_UNSPECIFIED,
    sampling_pb2.STOP_REASON_LENGTH: tinker_pb2.TINKER_STOP_REASON_LENGTH,
    # Kept over gRPC when it was cancelled. The SDK's word for what could go on.
    sampling_pb2.STOP_REASON_CANCELLED: tinker_pb2.TINKER_STOP_REASON_LENGTH,
}


class Reply(msgspec.Struct, frozen=True):
    """Body of a finished future and its content type."""

    content_type: str
    body: bytes


def result(model_id: str, data: bytes) -> Reply:
    """Reply to retrieve_future for a serialized OperationResult. Proportional to its size.

    Args:
        model_id: the model or sampling session that the request belongs to.
    """
    outcome = results_pb2.OperationResult.FromString(data)
    try:
        return _reply(model_id, outcome)
    except Internal as error:
        # Final for the client, who could only ask for the same result again.
        return _json({"error": error.message, "category": error.category})


def _reply(model_id: str, outcome: results_pb2.OperationResult) -> Reply:
    kind = outcome.WhichOneof("kind")
    if kind == "forward_backward":
        return Reply(PROTOBUF, forward_backward(outcome.forward_backward).SerializeToString())
    if kind == "sample":
        return Reply(PROTOBUF, sample(outcome.sample).SerializeToString())
    if kind == "error":
        return _json({"error": outcome.error.message, "category": _category(outcome.error.category)})
    if kind == "create_model":
        return _json({"model_id": model_id})
    if kind == "optim_step":
        return _json({"metrics": dict(outcome.optim_step.metrics)})
    if kind == "save_state":
        return _json({"path": outcome.save_state.path})
    if kind == "load_state":
        return _json({"path": outcome.load_state.path, "model_id": model_id})
    if kind == "save_for_sampler":
        saved = outcome.save_for_sampler
        named = {"path": saved.path} if saved.path else {}
        return _json(named or {"sampling_session_id": saved.sampling_session_id})
    if kind == "save_external":
        external = outcome.save_external
        return _json({"path": external.path, "size_bytes": external.size_bytes})
    if kind == "unload_model":
        # The SDK's word for what it is would be the key "type", which retrieve_future reserves.
        return _json({"model_id": model_id})
    raise Internal(f"a result of kind {kind} has no HTTP form")


def _json(value: Mapping[str, object]) -> Reply:
    # json and not msgspec: a metric that is not a number must arrive as NaN, not as null.
    return Reply(JSON, json.dumps(value).encode())


def _category(category: types_pb2.ErrorCategory.ValueType) -> str:
    return "user" if category == types_pb2.ERROR_CATEGORY_USER else "server"


def forward_backward(result: training_pb2.ForwardBackwardResult) -> tinker_pb2.TinkerForwardBackwardOutput:
    """An ArrayRecord with every output of the batch; of datums whose outputs differ in shape, one for each
    run of equal ones."""
    output = tinker_pb2.TinkerForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(result.metrics)
    for start, stop in _equally_shaped(result):
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        for name, batched in result.outputs.items():
            offsets = np.asarray(batched.offsets[start : stop + 1], dtype="<i8")
            field = record.fields[name]
            field.data = batched.data[offsets[0] : offsets[-1]]
            field.offsets = (offsets - offsets[0]).tobytes()
            field.dtype = _dtype(batched.dtype)
            field.trailing_shape.extend(_trailing(batched, start))
    return output


def _equally_shaped(result: training_pb2.ForwardBackwardResult) -> list[tuple[int, int]]:
    """(first, last + 1) of the runs of datums that have the same shape per position in every output."""
    shapes = [
        tuple(_trailing(batched, datum) for batched in result.outputs.values())
        for datum in range(max((len(batched.offsets) - 1 for batched in result.outputs.values()), default=0))
    ]
    runs = [[number for number, _ in run] for _, run in groupby(enumerate(shapes), key=lambda each: each[1])]
    return [(run[0], run[-1] + 1) for run in runs]


def _trailing(batched: training_pb2.BatchedTensor, datum: int) -> tuple[int, ...]:
    """Shape of one position of a datum."""
    if not batched.columns:
        return tuple(batched.trailing_shape)
    return (batched.columns[datum],) if batched.columns[datum] else ()


def sample(result: sampling_pb2.SampleResult) -> tinker_pb2.TinkerSampleResponse:
    """The sampled sequences, in the order of the sequence ids that asample returned.

    Raises:
        Internal: a sequence ended for a reason that the SDK has no word for.
    """
    output = tinker_pb2.TinkerSampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        reason = _STOP_REASONS.get(sequence.stop_reason)
        if reason is None:
            raise Internal(f"a sequence ended with stop reason {sequence.stop_reason}")
        added = output.sequences.add(
            stop_reason=reason, tokens=sequence.tokens.data, logprobs=sequence.logprobs.data
        )
        if sequence.HasField("topk_logprobs"):
            added.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk_logprobs))
    if result.HasField("prompt_logprobs"):
        output.prompt_logprobs = result.prompt_logprobs.data
    if result.HasField("topk_prompt_logprobs"):
        output.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt_logprobs))
    if result.HasField("target_prompt_logprobs"):
        output.target_prompt_logprobs.CopyFrom(_matrix(result.target_prompt_logprobs))
    if result.HasField("prompt_alt_tokens"):
        drawn = result.prompt_alt_tokens
        output.prompt_alt_tokens.tokens.CopyFrom(_tensor(drawn.token_ids))
        output.prompt_alt_tokens.logprobs.CopyFrom(_tensor(drawn.logprobs))
    return output


def _topk(topk: sampling_pb2.TopkLogprobs) -> tinker_pb2.TinkerTopkLogprobs:
    length, k = topk.token_ids.shape
    return tinker_pb2.TinkerTopkLogprobs(
        token_ids=topk.token_ids.data, logprobs=topk.logprobs.data, k=k, length=length
    )


def _tensor(tensor: types_pb2.Tensor) -> tinker_pb2.TinkerTensor:
    return tinker_pb2.TinkerTensor(dense=tensor.data, dtype=_dtype(tensor.dtype), shape=tensor.shape)


def _matrix(matrix: types_pb2.Matrix) -> tinker_pb2.TinkerTensor:
    found = tinker_pb2.TinkerTensor(dtype=_dtype(matrix.values.dtype), shape=matrix.shape)
    if matrix.HasField("crow_indices"):
        found.sparse_csr.values = matrix.values.data
        found.sparse_csr.crow_indices = matrix.crow_indices.data
        found.sparse_csr.col_indices = matrix.col_indices.data
    else:
        found.dense = matrix.values.data
    return found


def _dtype(dtype: types_pb2.DataType.ValueType) -> tinker_pb2.TinkerDataType.ValueType:
    # The enums are numbered alike on purpose.
    return tinker_pb2.TinkerDataType.ValueType(dtype)
