"""The rules of a sample request that gateway and sampler share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.matrices import HostMatrix
from services.common.contract.sample_schema import MAX_CELLS, Scoring, check_answer, check_decoding

VOCAB = 100


def targets(values: list[list[int]]) -> HostMatrix:
    array = np.array(values, np.int64)
    return HostMatrix(array.shape, array.reshape(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_that_the_engine_keeps_are_accepted(temperature: float) -> None:
    check_decoding(temperature, -1, 1.0, None)
    check_decoding(temperature, 2**31 - 1, 1e-9, 1)
    check_decoding(temperature, 0, 1.0, 1)


@pytest.mark.parametrize("temperature", [-0.1, 1e-6, 0.0099, 2.01, math.inf, math.nan])
def test_a_temperature_that_the_engine_would_change_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        check_decoding(temperature, -1, 1.0, None)


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(),
        Scoring(True, 64, 64, targets([[-1], [99]]), 64, 2),
        Scoring(topk_prompt_logprobs=1, prompt_logprobs_last_n=1),
    ],
)
def test_scores_that_exist_are_accepted(scoring: Scoring) -> None:
    check_answer(scoring, prompt_length=3, vocab_size=VOCAB, sampled_tokens=10)


@pytest.mark.parametrize(
    ("scoring", "says"),
    [
        (Scoring(topk_prompt_logprobs=-1), "topk_prompt_logprobs"),
        (Scoring(topk_sample_logprobs=65), "topk_sample_logprobs"),
        (Scoring(prompt_alt_tokens_k=65), "prompt_alt_tokens_k"),
        (Scoring(prompt_logprobs_last_n=1), "ask for one of them"),
        (Scoring(prompt_logprobs=True, prompt_logprobs_last_n=0), "prompt_logprobs_last_n is 0"),
        (Scoring(prompt_logprobs=True, prompt_logprobs_last_n=3), "the first one follows nothing"),
        (Scoring(targets=targets([[1]])), "needs 2"),
        (Scoring(targets=targets([[-1], [-1]])), "no token"),
        (Scoring(targets=targets([[0], [100]])), "has 100"),
        (Scoring(targets=targets([[0], [-2]])), "has -2"),
    ],
)
def test_scores_that_do_not_exist_are_refused(scoring: Scoring, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_answer(scoring, prompt_length=3, vocab_size=VOCAB, sampled_tokens=10)


def test_no_more_candidates_are_asked_for_than_there_are_tokens() -> None:
    check_answer(Scoring(topk_prompt_logprobs=8), 3, vocab_size=8, sampled_tokens=1)
    with pytest.raises(InvalidRequest, match="0 to 8"):
        check_answer(Scoring(topk_prompt_logprobs=9), 3, vocab_size=8, sampled_tokens=1)


def test_the_size_of_an_answer_is_bounded_by_what_is_scored() -> None:
    length = MAX_CELLS // 20 + 1
    check_answer(Scoring(topk_prompt_logprobs=20), length, VOCAB, 1)
    for scoring in (Scoring(topk_prompt_logprobs=20), Scoring(prompt_alt_tokens_k=20)):
        with pytest.raises(InvalidRequest, match="use at most 19"):
            check_answer(scoring, length + 1, VOCAB, 1)
    check_answer(Scoring(topk_prompt_logprobs=64, prompt_logprobs_last_n=9), length + 1, VOCAB, 1)
    with pytest.raises(InvalidRequest, match="topk_sample_logprobs is 2"):
        check_answer(Scoring(topk_sample_logprobs=2), 3, VOCAB, MAX_CELLS)
    check_answer(Scoring(), 3, VOCAB, 2**24)
    with pytest.raises(InvalidRequest, match="may sample 16777217 tokens"):
        check_answer(Scoring(), 3, VOCAB, 2**24 + 1)
    wide = HostMatrix((2, MAX_CELLS), np.zeros(2 * MAX_CELLS, np.int64))
    with pytest.raises(InvalidRequest, match="sparse layout"):
        check_answer(Scoring(targets=wide), 3, VOCAB, 1)
