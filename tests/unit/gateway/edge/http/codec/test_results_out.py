"""Results, read back by the SDK's own decoder."""

import json
import math

import numpy as np
import pytest
from tinker.proto import response_conv
from tinker.types import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SampleResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
)

from services.gateway.edge.http.codec import results_out
from tinsmith.v1 import checkpoints_pb2, models_pb2, results_pb2, sampling_pb2, training_pb2, types_pb2

MODEL = "s:train:0"


def reply(**kind: object) -> results_out.Reply:
    return results_out.result(MODEL, results_pb2.OperationResult(**kind).SerializeToString())


def tensor(values: list, dtype: str, kind: int) -> types_pb2.Tensor:
    array = np.array(values, dtype)
    return types_pb2.Tensor(dtype=kind, shape=array.shape, data=array.tobytes())


def floats(values: list) -> types_pb2.Tensor:
    return tensor(values, "<f4", types_pb2.DATA_TYPE_FLOAT32)


def ints(values: list) -> types_pb2.Tensor:
    return tensor(values, "<i4", types_pb2.DATA_TYPE_INT32)


def longs(values: list) -> types_pb2.Tensor:
    return tensor(values, "<i8", types_pb2.DATA_TYPE_INT64)


def test_logprobs_arrive_per_datum_in_order() -> None:
    result = training_pb2.ForwardBackwardResult(metrics={"loss:sum": 1.5})
    logprobs = result.outputs["logprobs"]
    logprobs.dtype = types_pb2.DATA_TYPE_FLOAT32
    logprobs.data = np.array([-1, -2, -3], "<f4").tobytes()
    logprobs.offsets.extend([0, 8, 12])
    answer = reply(forward_backward=result)
    assert answer.content_type == "application/x-protobuf"
    output = response_conv.deserialize_forward_backward_output(answer.body)
    assert output.metrics == {"loss:sum": 1.5}
    assert [datum["logprobs"].tolist() for datum in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]


def test_logprobs_of_several_targets_keep_their_shape() -> None:
    result = training_pb2.ForwardBackwardResult()
    logprobs = result.outputs["logprobs"]
    logprobs.dtype = types_pb2.DATA_TYPE_FLOAT32
    logprobs.data = np.arange(6, dtype="<f4").tobytes()
    logprobs.offsets.extend([0, 24])
    logprobs.trailing_shape.append(2)
    output = response_conv.deserialize_forward_backward_output(reply(forward_backward=result).body)
    assert output.loss_fn_outputs[0]["logprobs"].shape == [3, 2]


def test_datums_with_different_numbers_of_targets_keep_each_its_shape() -> None:
    result = training_pb2.ForwardBackwardResult()
    logprobs = result.outputs["logprobs"]
    logprobs.dtype = types_pb2.DATA_TYPE_FLOAT32
    logprobs.data = np.arange(13, dtype="<f4").tobytes()
    logprobs.offsets.extend([0, 8, 12, 36, 44, 52])
    logprobs.columns.extend([0, 0, 3, 1, 2])
    output = response_conv.deserialize_forward_backward_output(reply(forward_backward=result).body)
    found = [datum["logprobs"] for datum in output.loss_fn_outputs]
    assert [array.shape for array in found] == [[2], [1], [2, 3], [2, 1], [1, 2]]
    assert [value for array in found for value in array.data] == list(range(13))


def test_a_sample_arrives_whole() -> None:
    result = sampling_pb2.SampleResult(
        sequences=[
            sampling_pb2.SampledSequence(
                stop_reason=sampling_pb2.STOP_REASON_STOP, tokens=ints([4, 5]), logprobs=floats([-0.5, -1])
            ),
            sampling_pb2.SampledSequence(
                stop_reason=sampling_pb2.STOP_REASON_LENGTH, tokens=ints([6]), logprobs=floats([-2])
            ),
        ],
        prompt_logprobs=floats([math.nan, -0.25]),
        topk_prompt_logprobs=sampling_pb2.TopkLogprobs(
            token_ids=ints([[0, 0], [3, 1]]), logprobs=floats([[-99999, -99999], [-0.1, -2]])
        ),
        prompt_cache_hit_tokens=1,
    )
    answer = reply(sample=result)
    assert answer.content_type == "application/x-protobuf"
    response = response_conv.deserialize_sample_response(answer.body)
    assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "length"]
    assert [list(sequence.tokens) for sequence in response.sequences] == [[4, 5], [6]]
    assert response.sequences[0].logprobs == [-0.5, -1.0]
    assert response.prompt_logprobs == [None, -0.25]
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[0] is None
    assert response.prompt_cache_hit_tokens == 1


def sampled(**scores: object) -> SampleResponse:
    """What the SDK reads of a result with one sequence."""
    topk = scores.pop("topk_logprobs", None)
    sequence = sampling_pb2.SampledSequence(
        stop_reason=sampling_pb2.STOP_REASON_STOP,
        tokens=ints([4]),
        logprobs=floats([-1]),
        topk_logprobs=topk,
    )
    result = sampling_pb2.SampleResult(sequences=[sequence], **scores)
    return response_conv.deserialize_sample_response(reply(sample=result).body)


def test_the_most_likely_sampled_tokens_arrive_with_their_sequence() -> None:
    topk = sampling_pb2.TopkLogprobs(token_ids=ints([[4, 7]]), logprobs=floats([[-1, -1.5]]))
    assert sampled(topk_logprobs=topk).sequences[0].topk_logprobs == [[(4, -1.0), (7, -1.5)]]
    assert sampled().sequences[0].topk_logprobs is None


def test_targets_arrive_in_the_layout_of_the_request() -> None:
    dense = types_pb2.Matrix(values=floats([-1, 0, -2, -3]), shape=[2, 2])
    target = sampled(target_prompt_logprobs=dense).target_prompt_logprobs
    assert target is not None and target.dtype == "float32"
    assert target.to_numpy().tolist() == [[-1, 0], [-2, -3]]
    indices = {"crow_indices": longs([0, 0, 1]), "col_indices": longs([2])}
    sparse = types_pb2.Matrix(values=floats([-4]), shape=[2, 3], **indices)
    target = sampled(target_prompt_logprobs=sparse).target_prompt_logprobs
    assert target is not None and target.sparse_col_indices == [2]
    assert target.to_numpy().tolist() == [[0, 0, 0], [0, 0, -4]]


def test_draws_arrive_as_two_tensors() -> None:
    for ids, logprobs in (([[1, 2], [3, 3]], [[-1, -2], [-3, -3]]), (np.zeros((0, 2)), np.zeros((0, 2)))):
        drawn = sampling_pb2.TopkLogprobs(token_ids=ints(ids), logprobs=floats(logprobs))
        found = sampled(prompt_alt_tokens=drawn).prompt_alt_tokens
        assert found is not None
        assert (found.tokens.dtype, found.logprobs.dtype) == ("int64", "float32")
        assert np.array_equal(found.tokens.to_numpy(), ids)
        assert np.array_equal(found.logprobs.to_numpy(), logprobs)


def test_prompt_logprobs_that_were_not_asked_for_are_absent() -> None:
    sequence = sampling_pb2.SampledSequence(
        stop_reason=sampling_pb2.STOP_REASON_STOP, tokens=ints([4]), logprobs=floats([-1])
    )
    response = response_conv.deserialize_sample_response(
        reply(sample=sampling_pb2.SampleResult(sequences=[sequence])).body
    )
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs is None


def test_a_sequence_that_ended_for_no_known_reason_is_an_error_and_not_a_length() -> None:
    answer = reply(sample=sampling_pb2.SampleResult(sequences=[sampling_pb2.SampledSequence()]))
    assert json.loads(answer.body)["category"] == "server"


def test_a_failure_tells_whose_fault_it_is() -> None:
    for pb, word in ((types_pb2.ERROR_CATEGORY_USER, "user"), (types_pb2.ERROR_CATEGORY_SERVER, "server")):
        answer = reply(error=types_pb2.Error(category=pb, code="x", message="change this"))
        assert answer.content_type == "application/json"
        assert json.loads(answer.body) == {"error": "change this", "category": word}


def test_metrics_that_are_not_numbers_survive() -> None:
    answer = reply(optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": math.nan, "lr": 0.1}))
    metrics = OptimStepResponse.model_validate(json.loads(answer.body)).metrics
    assert metrics is not None
    assert math.isnan(metrics["grad_norm"])
    assert metrics["lr"] == 0.1


@pytest.mark.parametrize(
    ("kind", "response", "expected"),
    [
        ({"create_model": models_pb2.CreateModelResult()}, CreateModelResponse, {"model_id": MODEL}),
        ({"create_model": models_pb2.CreateModelResult()}, LoadWeightsResponse, {"model_id": MODEL}),
        (
            {"save_state": checkpoints_pb2.SaveStateResult(path="tinker://s:train:0/weights/a")},
            SaveWeightsResponse,
            {"path": "tinker://s:train:0/weights/a"},
        ),
        (
            {"load_state": checkpoints_pb2.LoadStateResult(path="tinker://s:train:0/weights/a")},
            LoadWeightsResponse,
            {"path": "tinker://s:train:0/weights/a", "model_id": MODEL},
        ),
        (
            {"save_for_sampler": checkpoints_pb2.SaveForSamplerResult(path="tinker://p", version=3)},
            SaveWeightsForSamplerResponseInternal,
            {"path": "tinker://p", "sampling_session_id": None},
        ),
        (
            {"save_for_sampler": checkpoints_pb2.SaveForSamplerResult(sampling_session_id="s:sample:0")},
            SaveWeightsForSamplerResponseInternal,
            {"path": None, "sampling_session_id": "s:sample:0"},
        ),
    ],
)
def test_json_results_are_what_the_sdk_expects(kind: dict, response: type, expected: dict) -> None:
    read = response.model_validate(json.loads(reply(**kind).body))
    assert {name: getattr(read, name) for name in expected} == expected
