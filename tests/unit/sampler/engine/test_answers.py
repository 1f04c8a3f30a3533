"""What vLLM answers, as plain data: a few tokens and many, with and without likely ones."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from services.common.contract.errors import Internal, InvalidRequest
from services.sampler import convert
from services.sampler.engine import answers
from services.sampler.engine.logprobs.kept import KeptLogprobs
from services.sampler.engine.sampling import Change, SampleJob, SampleOutput, SamplingParams
from services.sampler.worker.prompt_scores import plan_of


def completion(tokens: Sequence[int], ids: list[int], logprobs: list[float], width: int) -> CompletionOutput:
    """Of each position `width` tokens with their log-probabilities, the sampled one first."""
    if width == 1:
        kept: Any = KeptLogprobs(array("i", ids), array("f", logprobs))
        return CompletionOutput(0, "", tokens, None, kept, finish_reason="length")
    starts = list(range(0, len(ids), width))
    flat = FlatLogprobs(
        start_indices=starts,
        end_indices=[start + width for start in starts],
        token_ids=ids,
        logprobs=logprobs,
        ranks=[1] * len(ids),
        decoded_tokens=[None] * len(ids),
    )
    return CompletionOutput(0, "", tokens, None, flat, finish_reason="length")


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_tokens_and_their_logprobs_arrive_bit_for_bit(count: int) -> None:
    tokens = list(range(7, 7 + count))
    logprobs = (-np.arange(1, count + 1, dtype=np.float32) / np.float32(3)).tolist()
    made = answers.sequence(completion(tokens, tokens, logprobs, 1), topk=0, changes=(Change(0, 4),))
    assert (made.tokens, made.logprobs, made.topk) == (tokens, logprobs, None)
    pb = convert.output_to_pb(SampleOutput([made], 0)).result.sequences[0]
    assert np.frombuffer(pb.tokens.data, "<i4").tolist() == tokens
    assert np.frombuffer(pb.logprobs.data, "<f4").tolist() == logprobs
    assert list(pb.tokens.shape) == list(pb.logprobs.shape) == [count]


def test_the_sampled_token_is_told_apart_from_likely_ones() -> None:
    made = answers.sequence(
        completion([5, 6], [5, 9, 6, 8], [-2.0, -1.0, -3.0, -0.5], 2), topk=1, changes=(Change(0, 1),)
    )
    assert (made.tokens, made.logprobs) == ([5, 6], [-2.0, -3.0])
    assert made.topk is not None
    assert made.topk.token_ids.tolist() == [[9], [8]]
    assert made.topk.logprobs.tolist() == [[-1.0], [-0.5]]


@pytest.mark.parametrize(("ids", "topk"), [([5, 6], 0), ([5, 9, 6, 8], 1)], ids=["alone", "with likely ones"])
def test_a_logprob_that_is_no_number_is_an_error_of_the_weights(ids: list[int], topk: int) -> None:
    logprobs = [-1.0] * len(ids)
    logprobs[-1] = math.nan
    with pytest.raises(InvalidRequest, match="diverged"):
        answers.sequence(completion([5, 6], ids, logprobs, 1 + topk), topk, changes=(Change(0, 1),))


@pytest.mark.parametrize("ids", [[5, 7], [5], [5, 6, 7]], ids=["other tokens", "too few", "too many"])
def test_logprobs_of_other_tokens_than_the_sampled_ones_are_an_error(ids: list[int]) -> None:
    with pytest.raises(Internal, match="log-probabilities"):
        answers.sequence(completion([5, 6], ids, [-1.0] * len(ids), 1), topk=0, changes=(Change(0, 1),))


def test_cells_of_tokens_that_could_not_be_drawn_are_empty() -> None:
    never = -math.inf
    made = answers.sequence(
        completion([5], [5, 5, 8, 3], [-0.5, -0.5, -1.0, never], 4), topk=3, changes=(Change(0, 1),)
    )
    assert made.topk is not None
    assert made.topk.token_ids.tolist() == [[5, 8, 0]]
    assert made.topk.logprobs.tolist() == [[-0.5, -1.0, -99999.0]]


@pytest.mark.parametrize("told", [None, 2, 4])
def test_experts_of_fewer_or_more_tokens_than_were_read_are_an_error(told: int | None) -> None:
    job = SampleJob("request", None, [1, 2], 1, SamplingParams(), routed_experts=True)
    made = completion([5, 6], [5, 6], [-1.0, -1.0], 1)
    made.routed_experts = None if told is None else np.zeros((told, 1, 2), np.uint8)
    output = RequestOutput("request", None, [1, 2], None, [made], finished=True)
    told_of: list[answers.Made | None] = [answers.Made(output, (Change(0, 0),))]
    with pytest.raises(Internal, match=f"experts of {told or 0} tokens of 3"):
        answers.whole(job, plan_of(job.scoring, 2, 0, 1.0), told_of)
    made.routed_experts = np.zeros((3, 1, 2), np.uint8)
    (sequence,) = answers.whole(job, plan_of(job.scoring, 2, 0, 1.0), told_of).sequences
    assert sequence.experts is made.routed_experts
