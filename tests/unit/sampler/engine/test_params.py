"""What vLLM is asked for one sequence."""

from __future__ import annotations

import tracemalloc

from services.common.contract.sample_schema import Scoring
from services.common.contract.steering import Steering
from services.sampler.engine.params import Shared, vllm_params
from services.sampler.engine.sampling import Limits, SampleJob, SamplingParams, sequence_seed

LIMITS = Limits(vocab_size=100, context_length=32, max_sequences=8)
PARAMS = SamplingParams(max_tokens=5, seed=7, temperature=0.5, top_k=3, stop_token_ids=(9,))


def job(params: SamplingParams, topk: int = 0) -> SampleJob:
    return SampleJob("request", None, [1, 2], 2, params, Scoring(topk_sample_logprobs=topk))


def test_sequences_that_ask_alike_have_each_their_own_seed_length_and_stop_tokens() -> None:
    first, second, later = (
        vllm_params(job(PARAMS), index, LIMITS, None, Shared(), stream=False, start=start)
        for index, start in ((0, 0), (1, 0), (1, 3))
    )
    # As vLLM does with the tokens that end a text in the model's own files.
    first.update_from_generation_config({"eos_token_id": [11, 12]}, 11)
    assert (first.seed, second.seed, later.seed) == tuple(
        sequence_seed(7, index, start) for index, start in ((0, 0), (1, 0), (1, 3))
    )
    assert (first.max_tokens, second.max_tokens, later.max_tokens) == (5, 5, 2)
    assert sorted(first.stop_token_ids or ()) == [9, 12]
    assert second.stop_token_ids == [9]


def test_what_is_asked_for_is_said_also_after_others_asked_for_something_else() -> None:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    steered = SamplingParams(
        stop_strings=("end",), steering=Steering(min_p=0.1, logit_bias={3: -1.0}, bad_words=("no",))
    )
    for _ in range(2):
        one = vllm_params(job(greedy), 0, LIMITS, None, Shared(), stream=False)
        other = vllm_params(job(steered, topk=4), 0, LIMITS, None, Shared(bad_words=[[7]]), stream=True)
        assert (one.temperature, one.ignore_eos, one.stop, one.logprobs) == (0.0, True, [], 0)
        assert (one.seed, one.max_tokens, one.detokenize, one.extra_args) == (None, 30, False, None)
        assert (other.temperature, other.ignore_eos, other.stop, other.logprobs) == (1.0, False, ["end"], 4)
        assert (other.min_p, other.logit_bias, other.bad_words) == (0.1, {3: -1.0}, ["no"])
        assert other.detokenize and other.output_kind != one.output_kind


def test_what_is_large_is_made_once_a_job_and_not_kept_of_many() -> None:
    def asked(number: int, stop: str) -> object:
        params = SamplingParams(stop_strings=tuple(f"{stop}{number}-{place}" for place in range(200)))
        first, second = (
            vllm_params(job(params), index, LIMITS, None, Shared(), stream=False) for index in (0, 1)
        )
        # Copies of one: its lists are made once.
        assert first.stop is second.stop
        return first

    asked(0, "x")
    tracemalloc.start()
    try:
        for number in range(40):
            asked(number, "stop" * 200)
        assert tracemalloc.get_traced_memory()[0] < 2**21
    finally:
        tracemalloc.stop()
