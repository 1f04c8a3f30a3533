"""The sampler's protobuf edge."""

from __future__ import annotations

import math
import struct
import tracemalloc

import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.matrices import HostMatrix
from services.common.contract.sample_schema import Scoring
from services.sampler import convert
from services.sampler.engine.sampling import Constraint, NewTokens, SampleOutput, SamplingParams, Sequence
from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.worker.prompt_scores import PromptScores, TopkLogprobs
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2, types_pb2

PROMPT = types_pb2.Tensor(
    dtype=types_pb2.DATA_TYPE_INT32, shape=[3], data=struct.pack("<3i", 4, 5, 2**31 - 1)
)


def request(**params: object) -> sampler_pb2.SampleRequest:
    return sampler_pb2.SampleRequest(
        request_id="r",
        snapshot=sampler_pb2.Snapshot(model_id="s:train:0", version=4),
        prompt=PROMPT,
        num_samples=2,
        params=sampling_pb2.SamplingParams(**params),  # type: ignore[arg-type]
    )


def test_a_request_becomes_a_job() -> None:
    job = convert.sample_job_from_pb(request(temperature=0.5, top_k=-1, top_p=0.9, seed=2**64 - 1))
    assert job.prompt == [4, 5, 2**31 - 1]
    assert job.snapshot == SnapshotKey("s:train:0", 4)
    assert job.params == SamplingParams(seed=2**64 - 1, temperature=0.5, top_p=0.9)


def test_parameters_are_read_once_for_samples_in_a_row_and_large_ones_not_kept_of_many() -> None:
    def read(text: str) -> SamplingParams:
        stop = sampling_pb2.StopCondition(strings={"values": [text]})
        first, second = (convert.sample_job_from_pb(request(stop=stop)).params for _ in range(2))
        assert first is second and first.stop_strings == (text,)
        return first

    small = read("small")
    tracemalloc.start()
    try:
        for number in range(64):
            read(f"{number}" * 2**16)
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()
    assert read("small") is small


def test_whose_log_probabilities_are_asked_for_is_kept_and_is_a_part_of_the_request() -> None:
    asked = request()
    assert not convert.sample_job_from_pb(asked).sampled_logprobs
    asked.sampled_logprobs = True
    assert convert.sample_job_from_pb(asked).sampled_logprobs
    assert convert.digest_of(asked) != convert.digest_of(request())


def test_experts_are_told_in_as_few_bytes_as_their_ids_take() -> None:
    asked = request()
    assert not convert.sample_job_from_pb(asked).routed_experts
    asked.routed_experts = True
    assert convert.sample_job_from_pb(asked).routed_experts
    experts = np.arange(24, dtype="<u2").reshape(4, 3, 2)[1:]
    sequences = [Sequence("stop", [1], [-1.0], experts=told) for told in (experts, None)]
    first, second = convert.answer(SampleOutput(sequences, 0)).response.result.sequences
    assert list(first.routed_experts.shape) == [3, 3, 2]
    assert first.routed_experts.ids == experts.tobytes()
    assert not second.HasField("routed_experts")


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_a_constraint_is_kept(kind: str) -> None:
    asked = request()
    assert convert.sample_job_from_pb(asked).constraint is None
    setattr(asked.constraint, kind, "{}")
    assert convert.sample_job_from_pb(asked).constraint == Constraint(kind, "{}")  # type: ignore[arg-type]


def test_new_tokens_are_told_with_their_place_and_version() -> None:
    told = convert.new_tokens_to_pb([NewTokens(1, 7, 3, [5, 6], [-0.5, -1.5])]).new_tokens.sequences
    assert [(part.index, part.start, part.version) for part in told] == [(1, 7, 3)]
    assert list(struct.unpack("<2i", told[0].added.tokens.data)) == [5, 6]
    assert list(struct.unpack("<2f", told[0].added.logprobs.data)) == [-0.5, -1.5]
    assert not told[0].added.HasField("topk_logprobs")


def test_every_kind_of_score_that_is_asked_for_is_kept() -> None:
    asked = request()
    asked.prompt_logprobs = True
    asked.topk_prompt_logprobs, asked.topk_sample_logprobs, asked.prompt_alt_tokens_k = 2, 3, 4
    assert convert.sample_job_from_pb(asked).scoring == Scoring(
        prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3, prompt_alt_tokens_k=4
    )
    asked.prompt_logprobs_last_n = 1
    asked.target_prompt_logprobs.CopyFrom(
        types_pb2.Matrix(
            values=types_pb2.Tensor(
                dtype=types_pb2.DATA_TYPE_INT64, shape=[2], data=struct.pack("<2q", 7, -1)
            ),
            shape=[2, 1],
        )
    )
    scoring = convert.sample_job_from_pb(asked).scoring
    assert scoring.prompt_logprobs_last_n == 1
    assert scoring.targets is not None
    assert (scoring.targets.shape, scoring.targets.values.tolist()) == ((2, 1), [7, -1])


def test_repeats_of_a_request_have_one_digest_also_when_its_model_moved_on_meanwhile() -> None:
    repeat = request(seed=3)
    repeat.snapshot.version = 5
    repeat.wait_seconds = 60
    # Another call of the client's, under another trace, may ask for it.
    repeat.origin.traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    assert convert.digest_of(repeat) == convert.digest_of(request(seed=3))
    assert repeat.snapshot.version == 5
    other = request(seed=3)
    other.prompt.data = struct.pack("<3i", 4, 5, 6)
    assert len({convert.digest_of(r) for r in (request(seed=3), request(seed=4), other)}) == 3


def test_no_model_id_means_the_base_model() -> None:
    assert convert.snapshot_from_pb(sampler_pb2.Snapshot()) is None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"model_eos": {}}, (False, (), ())),
        ({"never": {}}, (True, (), ())),
        ({"strings": {"values": ["a", "b"]}}, (False, ("a", "b"), ())),
        ({"tokens": {"ids": [3]}}, (False, (), (3,))),
    ],
)
def test_every_stop_condition_is_kept(stop: dict, expected: tuple) -> None:
    params = convert.sample_job_from_pb(request(stop=sampling_pb2.StopCondition(**stop))).params
    assert (params.ignore_eos, params.stop_strings, params.stop_token_ids) == expected


def test_a_stop_condition_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        convert.sample_job_from_pb(request(stop=sampling_pb2.StopCondition()))


def test_a_prompt_of_another_type_is_refused() -> None:
    wrong = request()
    wrong.prompt.dtype = types_pb2.DATA_TYPE_FLOAT32
    with pytest.raises(InvalidRequest, match="int32"):
        convert.sample_job_from_pb(wrong)


def pairs(ids: list[list[int]], logprobs: list[list[float]]) -> TopkLogprobs:
    return TopkLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))


def test_an_output_becomes_bytes_with_shapes() -> None:
    output = SampleOutput(
        [
            Sequence("stop", [7, 8], [-0.5, -1.5], pairs([[7], [1]], [[-0.5], [-0.25]])),
            Sequence("length", [9], [-2.0]),
        ],
        cached_prompt_tokens=128,
        scores=PromptScores(
            prompt_logprobs=np.array([math.nan, -1.0], np.float32),
            topk_prompt_logprobs=pairs([[0, 0], [3, 4]], [[-99999.0, -99999.0], [-0.1, -0.2]]),
            target_prompt_logprobs=HostMatrix((1, 3), np.array([-3, 0, -4], np.float32)),
            prompt_alt_tokens=pairs([[5]], [[-0.5]]),
        ),
    )
    result = convert.output_to_pb(output).result
    first, second = result.sequences
    assert first.stop_reason == sampling_pb2.STOP_REASON_STOP
    assert second.stop_reason == sampling_pb2.STOP_REASON_LENGTH
    assert struct.unpack("<2i", first.tokens.data) == (7, 8)
    assert struct.unpack("<2f", first.logprobs.data) == (-0.5, -1.5)
    assert list(first.tokens.shape) == [2]
    scores = struct.unpack("<2f", result.prompt_logprobs.data)
    assert math.isnan(scores[0]) and scores[1] == -1.0
    assert list(result.topk_prompt_logprobs.token_ids.shape) == [2, 2]
    assert result.prompt_cache_hit_tokens == 128
    assert list(first.topk_logprobs.token_ids.shape) == [2, 1]
    assert struct.unpack("<2i", first.topk_logprobs.token_ids.data) == (7, 1)
    assert not second.HasField("topk_logprobs")
    assert list(result.target_prompt_logprobs.shape) == [1, 3]
    assert struct.unpack("<3f", result.target_prompt_logprobs.values.data) == (-3, 0, -4)
    assert not result.target_prompt_logprobs.HasField("crow_indices")
    assert struct.unpack("<i", result.prompt_alt_tokens.token_ids.data) == (5,)


def test_scores_that_nobody_asked_for_are_unset() -> None:
    result = convert.output_to_pb(SampleOutput([Sequence("stop", [7], [-0.5])], 0)).result
    assert not result.HasField("prompt_logprobs")
    assert not result.HasField("topk_prompt_logprobs")
    assert not result.HasField("target_prompt_logprobs")
    assert not result.HasField("prompt_alt_tokens")


def test_a_transfer_without_tensors_or_timeout_is_refused() -> None:
    pb = sampler_pb2.ReceiveSnapshotRequest(
        epoch=1, snapshot=sampler_pb2.Snapshot(model_id="s:train:0", version=1), timeout_seconds=5
    )
    with pytest.raises(InvalidRequest):
        convert.incoming_from_pb(pb)
    pb.tensors.add(name="lm_head.lora_A", dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[4, 8])
    assert convert.incoming_from_pb(pb).specs[0].shape == (4, 8)
    pb.timeout_seconds = 0
    with pytest.raises(InvalidRequest):
        convert.incoming_from_pb(pb)
