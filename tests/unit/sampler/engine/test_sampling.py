"""What a sampler accepts, and how seeds and lengths come out."""

from __future__ import annotations

import dataclasses
import math

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import Routing
from services.common.contract.sample_schema import Scoring
from services.common.contract.steering import Steering
from services.sampler.engine.sampling import (
    Constraint,
    Limits,
    SampleJob,
    SamplingParams,
    check,
    sequence_seed,
    tokens_left,
)

LIMITS = Limits(vocab_size=100, context_length=16, max_sequences=8)
JOB = SampleJob("request", None, [1, 2, 3], 1, SamplingParams())


def params(**changes: object) -> SampleJob:
    return dataclasses.replace(JOB, params=SamplingParams(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        dataclasses.replace(JOB, prompt=[99] * 15),
        dataclasses.replace(JOB, num_samples=8, scoring=Scoring(topk_prompt_logprobs=64)),
        params(max_tokens=10**6, seed=2**64 - 1, temperature=0.0, top_k=1, top_p=0.01),
        params(ignore_eos=True, temperature=2.0),
        params(stop_strings=("\n\n",), stop_token_ids=(0, 99)),
    ],
)
def test_what_the_engine_can_do_is_accepted(job: SampleJob) -> None:
    check(job, LIMITS)


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        (dataclasses.replace(JOB, prompt=[]), "0 tokens"),
        (dataclasses.replace(JOB, prompt=[1] * 16), "1 to 15"),
        (dataclasses.replace(JOB, prompt=[1, 100]), "token id 100"),
        (dataclasses.replace(JOB, prompt=[-1]), "token id -1"),
        (dataclasses.replace(JOB, num_samples=0), "num_samples"),
        (dataclasses.replace(JOB, num_samples=1025), "num_samples"),
        (dataclasses.replace(JOB, scoring=Scoring(topk_prompt_logprobs=65)), "topk"),
        (params(max_tokens=0), "max_tokens"),
        (params(temperature=0.001), "temperature"),
        (params(temperature=2.5), "temperature"),
        (params(temperature=math.nan), "temperature"),
        (params(top_k=-2), "top_k"),
        (params(top_p=0.0), "top_p"),
        (params(top_p=math.nan), "top_p"),
        (params(stop_strings=("a", "")), "stop string"),
        (params(stop_token_ids=(100,)), "token id 100"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_with_what_to_change(job: SampleJob, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint) as error:
        check(job, LIMITS)
    assert error.value.category == "user"


def test_experts_are_told_where_the_engine_can_and_of_one_version_of_the_weights() -> None:
    asking = dataclasses.replace(JOB, routed_experts=True)
    with pytest.raises(InvalidRequest, match="no sampler of this model tells"):
        check(asking, LIMITS)
    telling = dataclasses.replace(LIMITS, routing=Routing(2, 2, 8))
    check(asking, telling)
    with pytest.raises(InvalidRequest, match="let on_update be FINISH"):
        check(dataclasses.replace(asking, moves=True), telling)


@pytest.mark.parametrize("job", [params(ignore_eos=True), params(stop_token_ids=(7,))])
def test_a_constraint_beside_a_stop_condition_that_it_would_break_is_refused(job: SampleJob) -> None:
    check(job, LIMITS)
    with pytest.raises(InvalidRequest, match="choose model_eos, or strings"):
        check(dataclasses.replace(job, constraint=Constraint("regex", "a")), LIMITS)


def test_generation_ends_at_the_context_length() -> None:
    assert tokens_left(JOB, LIMITS) == 13
    assert tokens_left(params(max_tokens=50), LIMITS) == 13
    assert tokens_left(params(max_tokens=5), LIMITS) == 5


def test_sequence_i_has_the_seed_of_sequence_0_of_a_request_seeded_i_higher() -> None:
    assert [sequence_seed(40, 2), sequence_seed(41, 1), sequence_seed(42, 0)] == [sequence_seed(42, 0)] * 3
    assert sequence_seed(2**64 - 1, 1) == sequence_seed(0, 0)
    assert sequence_seed(None, 3) is None


def test_seeds_that_differ_only_in_high_bits_differ_in_the_low_bits_of_the_engine_seed() -> None:
    seeds = [0, 1, 2**32, 2**33, 2**63, 2**64 - 1]
    engine_seeds = [sequence_seed(seed, 0) for seed in seeds]
    assert all(seed is not None and 0 <= seed < 2**63 for seed in engine_seeds)
    assert len({(seed or 0) & 0xFFFFFFFF for seed in engine_seeds}) == len(seeds)


def test_what_goes_on_after_other_tokens_draws_from_a_stream_of_its_own() -> None:
    seeds = {sequence_seed(seed, index, start) for seed in (0, 1) for index in (0, 5) for start in (0, 1, 2)}
    assert len(seeds) == 12
    assert sequence_seed(40, 2, 7) == sequence_seed(42, 0, 7)
    assert sequence_seed(None, 0, 7) is None


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        (params(stop_strings=("a",)), "stop strings"),
        (params(steering=Steering(presence_penalty=0.1)), "presence_penalty"),
        (dataclasses.replace(JOB, constraint=Constraint("regex", "a")), "constraint"),
    ],
)
def test_a_job_that_moves_is_refused_what_cannot_be_followed_over_a_change_of_weights(
    job: SampleJob, hint: str
) -> None:
    check(job, LIMITS)
    with pytest.raises(InvalidRequest, match=hint):
        check(dataclasses.replace(job, moves=True), LIMITS)
    # To an engine that keeps its keys and values, it stays one request.
    check(dataclasses.replace(job, moves=True, keeps_kv=True), LIMITS)
