"""What a worker is told to score at a prompt, and how its answer is laid out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.common.contract.errors import Internal, InvalidRequest
from services.common.contract.matrices import HostMatrix
from services.common.contract.sample_schema import Scoring
from services.sampler.worker.prompt_scores import (
    EMPTY_TOPK_LOGPROB,
    Buffers,
    PromptScores,
    ScorePlan,
    plan_of,
    read_answer,
    uniforms,
)

SPARSE = HostMatrix((3, 9), np.array([5, -1, 6]), np.array([0, 1, 1, 3]), np.array([2, 0, 8]))
DENSE = HostMatrix((3, 2), np.array([-1, -1, 7, -1, 8, 9]))


def plan(**scoring: object) -> ScorePlan:
    return plan_of(Scoring(**scoring), 4, seed=1, temperature=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scoring", "rows"),
    [
        ({}, []),
        ({"prompt_logprobs": True}, [0, 1, 2]),
        ({"topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 1}, [2]),
        ({"targets": DENSE}, [1, 2]),
        ({"targets": SPARSE}, [0, 2]),
        ({"targets": SPARSE, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}, [0, 1, 2]),
        ({"prompt_alt_tokens_k": 1, "prompt_logprobs": True, "prompt_logprobs_last_n": 1}, [0, 1, 2]),
    ],
)
def test_only_rows_that_something_is_asked_of_are_needed(scoring: dict, rows: list[int]) -> None:
    assert plan(**scoring).needed().tolist() == rows


def test_a_prompt_of_one_token_has_no_rows() -> None:
    scoring = Scoring(prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=3)
    made = plan_of(scoring, 1, seed=0, temperature=1.0)
    assert made.needed().size == 0
    scores = read_answer(scoring, made, None)
    assert scores.prompt_logprobs is not None and np.isnan(scores.prompt_logprobs).tolist() == [True]
    assert scores.topk_prompt_logprobs is not None
    assert scores.topk_prompt_logprobs.token_ids.tolist() == [[0, 0]]
    assert scores.prompt_alt_tokens is not None and scores.prompt_alt_tokens.token_ids.shape == (0, 3)


def test_a_plan_survives_the_wire() -> None:
    sent = plan(targets=SPARSE, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert sent.target_ids.tolist() == [5, 6]
    assert sent.target_starts.tolist() == [0, 1, 1, 2]
    got = ScorePlan.from_wire(sent.to_wire())
    assert got.to_wire() == sent.to_wire()


def answered(scoring: Scoring) -> PromptScores:
    """Reads an answer whose log-probabilities are -1, -2, -3 ... in each of its parts."""
    made = plan_of(scoring, 4, seed=1, temperature=1.0)
    buffers = Buffers(made)
    for part in (buffers.own, buffers.topk_logprobs, buffers.targets, buffers.drawn_logprobs):
        part[...] = -np.arange(1, part.size + 1, dtype=np.float32).reshape(part.shape)
    for ids in (buffers.topk_ids, buffers.drawn_ids):
        ids[...] = np.arange(ids.size).reshape(ids.shape)
    return read_answer(scoring, made, buffers.vector)


def test_positions_that_are_not_scored_are_empty() -> None:
    scores = answered(Scoring(prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=2))
    assert scores.prompt_logprobs is not None and scores.topk_prompt_logprobs is not None
    np.testing.assert_array_equal(scores.prompt_logprobs, [math.nan, math.nan, -1, -2])
    assert scores.topk_prompt_logprobs.token_ids.tolist() == [[0, 0], [0, 0], [0, 1], [2, 3]]
    empty = [EMPTY_TOPK_LOGPROB] * 2
    assert scores.topk_prompt_logprobs.logprobs.tolist() == [empty, empty, [-1, -2], [-3, -4]]


@pytest.mark.parametrize(("targets", "expected"), [(SPARSE, [-1, 0, -2]), (DENSE, [0, 0, -1, 0, -2, -3])])
def test_targets_come_back_where_they_were_asked_for(targets: HostMatrix, expected: list[int]) -> None:
    found = answered(Scoring(targets=targets, prompt_alt_tokens_k=1)).target_prompt_logprobs
    assert found is not None
    assert (found.values.tolist(), found.shape) == (expected, targets.shape)
    assert found.crow_indices is targets.crow_indices


def test_draws_come_back_row_by_row() -> None:
    drawn = answered(Scoring(prompt_alt_tokens_k=2, targets=SPARSE)).prompt_alt_tokens
    assert drawn is not None
    assert drawn.token_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert drawn.logprobs.tolist() == [[-1, -2], [-3, -4], [-5, -6]]


def test_what_was_not_asked_for_is_absent() -> None:
    assert answered(Scoring()) == PromptScores()


def test_an_answer_that_is_missing_or_of_another_length_is_an_error() -> None:
    scoring = Scoring(prompt_logprobs=True)
    made = plan_of(scoring, 4, seed=1, temperature=1.0)
    for vector in (None, np.zeros(2, np.int32)):
        with pytest.raises(Internal):
            read_answer(scoring, made, vector)


def test_a_log_probability_that_is_not_a_number_is_an_error_and_not_a_score() -> None:
    scoring = Scoring(prompt_logprobs=True)
    made = plan_of(scoring, 4, seed=1, temperature=1.0)
    buffers = Buffers(made)
    buffers.own[1] = math.nan
    with pytest.raises(InvalidRequest, match="diverged"):
        read_answer(scoring, made, buffers.vector)


def test_the_numbers_behind_draws_are_uniform_and_depend_on_seed_row_and_draw_alone() -> None:
    rows = np.arange(2000)
    whole = uniforms(2**64 - 1, rows, 8)
    assert whole.min() > 0 and whole.max() < 1
    counts, _ = np.histogram(whole, bins=20, range=(0, 1))
    assert np.abs(counts - 800).max() < 5 * math.sqrt(800)
    assert np.unique(whole).size == whole.size
    np.testing.assert_array_equal(uniforms(2**64 - 1, rows[700:703], 8), whole[700:703])
    assert abs(np.corrcoef(whole[:-1, 0], whole[1:, 0])[0, 1]) < 0.1
    assert not np.intersect1d(whole, uniforms(2**64 - 2, rows, 8)).size
