"""Scores at prompt positions: what a worker is told to compute, and how its answer is read.

Row r of a prompt of N tokens is the distribution after tokens 0 .. r, over token r + 1; there are N - 1
rows. The plan travels to the worker with the request, as plain values; the answer travels back as one
int32 vector: own log-probabilities, top-k ids and log-probabilities, targets, drawn ids and their
log-probabilities, one after the other, float32 as their bits. No torch, no vLLM, no protobuf.

Invariant: plan and answer depend on the request alone, so an answer has exactly the numbers its plan
calls for. A log-probability that is not a number is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.contract.errors import Internal, InvalidRequest
from services.common.contract.matrices import HostMatrix
from services.common.contract.sample_schema import Scoring

REQUEST_KEY = "tinsmith_prompt_scores"
"""Key of a ScorePlan on the wire among the `extra_args` of vLLM's sampling parameters."""

CACHE_LIMIT_KEY = "tinsmith_cache_limit"
"""Key beside it: most tokens of the prompt that may come from the prefix cache."""

SAMPLED_KEY = "tinsmith_sampled_logprobs"
"""Key beside them: log-probabilities of sampled tokens are of the distribution that they were drawn from."""

ROUTED_KEY = "tinsmith_routed_experts"
"""Key beside them: which experts the model's layers give the tokens to is told."""

EMPTY_TOPK_LOGPROB = -99999.0
"""Log-probability of an empty cell of TopkLogprobs; its token id is 0."""

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def asked(params: Any, key: str) -> Any:
    """What a request asks for under one of these keys; None: nothing.

    Args:
        params: the SamplingParams of vLLM's that it has.
    """
    return (params.extra_args or {}).get(key)


@dataclass(frozen=True)
class TopkLogprobs:
    """k tokens at each of n positions: ids [n, k] and their log-probabilities [n, k]."""

    token_ids: Ids
    logprobs: Floats


@dataclass(frozen=True)
class PromptScores:
    """What a Scoring asks for at prompt positions; see SampleResult in sampling.proto."""

    prompt_logprobs: Floats | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: HostMatrix | None = None
    prompt_alt_tokens: TopkLogprobs | None = None


@dataclass(frozen=True)
class ScorePlan:
    """What a worker computes.

    Attributes:
        rows: of the prompt.
        first: row from which on the own and most likely tokens are scored.
        own: score the prompt's own tokens.
        topk: most likely tokens at each row.
        target_ids: int32 [cells], tokens to score, row by row.
        target_starts: int64 [rows + 1]; row r has the cells target_starts[r] up to target_starts[r + 1].
        draws: tokens to draw at each row.
        seed: unsigned 64 bits; decides the draws.
        temperature: of the draws; 0 = the most likely token.
    """

    rows: int
    first: int
    own: bool
    topk: int
    target_ids: Ids
    target_starts: npt.NDArray[np.int64]
    draws: int
    seed: int
    temperature: float

    @property
    def empty(self) -> bool:
        """Nothing is asked for."""
        return not (self.own or self.topk or self.target_ids.size or self.draws)

    def needed(self) -> npt.NDArray[np.int64]:
        """Rows whose distribution is needed, in order."""
        wanted = np.diff(self.target_starts) > 0
        if self.own or self.topk:
            wanted[self.first :] = True
        if self.draws:
            wanted[:] = True
        return np.flatnonzero(wanted)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for the request's way to the worker."""
        return {
            "rows": self.rows,
            "first": self.first,
            "own": self.own,
            "topk": self.topk,
            "target_ids": self.target_ids.tobytes(),
            "target_starts": self.target_starts.tobytes(),
            "draws": self.draws,
            "seed": self.seed,
            "temperature": self.temperature,
        }

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> ScorePlan:
        """The plan that `to_wire` wrote."""
        ids = np.frombuffer(wire["target_ids"], dtype=np.int32)
        starts = np.frombuffer(wire["target_starts"], dtype=np.int64)
        return ScorePlan(**{**wire, "target_ids": ids, "target_starts": starts})


def shapes(plan: ScorePlan) -> list[tuple[int, ...]]:
    """Of the arrays of an answer, in their order."""
    scored, cells = plan.rows - plan.first, plan.target_ids.size
    return [
        (scored if plan.own else 0,),
        (scored, plan.topk),
        (scored, plan.topk),
        (cells,),
        (plan.rows, plan.draws),
        (plan.rows, plan.draws),
    ]


class Buffers:
    """The answer while it is being computed. Every array is a view of `vector`."""

    def __init__(self, plan: ScorePlan, vector: Ids | None = None) -> None:
        """
        Args:
            vector: int32, an answer to read; None = a new one to fill.

        Raises:
            Internal: the answer has not the length that the plan calls for.
        """
        each = shapes(plan)
        sizes = [int(np.prod(shape)) for shape in each]
        self.vector: Ids = np.zeros(sum(sizes), dtype=np.int32) if vector is None else vector
        if self.vector.shape != (sum(sizes),):
            raise Internal(f"the engine gave {self.vector.shape} prompt scores instead of {sum(sizes)}")
        parts = np.split(self.vector, np.cumsum(sizes)[:-1])
        views = [part.reshape(shape) for part, shape in zip(parts, each, strict=True)]
        self.own: Floats = views[0].view(np.float32)
        self.topk_ids: Ids = views[1]
        self.topk_logprobs: Floats = views[2].view(np.float32)
        self.targets: Floats = views[3].view(np.float32)
        self.drawn_ids: Ids = views[4]
        self.drawn_logprobs: Floats = views[5].view(np.float32)


def plan_of(scoring: Scoring, prompt_length: int, seed: int, temperature: float) -> ScorePlan:
    """The plan for a prompt. Proportional to the targets."""
    rows = prompt_length - 1
    last_n = scoring.prompt_logprobs_last_n
    ids, starts = np.zeros(0, dtype=np.int32), np.zeros(rows + 1, dtype=np.int64)
    if scoring.targets is not None:
        named = scoring.targets.values >= 0
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(named, dtype=np.int64)])
        ids = scoring.targets.values[named].astype(np.int32)
        starts = before[scoring.targets.row_starts()]
    return ScorePlan(
        rows=rows,
        first=0 if last_n is None else rows - last_n,
        own=scoring.prompt_logprobs,
        topk=scoring.topk_prompt_logprobs,
        target_ids=ids,
        target_starts=starts,
        draws=scoring.prompt_alt_tokens_k,
        seed=seed,
        temperature=temperature,
    )


def read_answer(scoring: Scoring, plan: ScorePlan, vector: Ids | None) -> PromptScores:
    """What was asked for, in the layout of SampleResult.

    Args:
        vector: int32, the worker's answer; None = it gave none.

    Raises:
        Internal: there is no answer, or it has another length.
        InvalidRequest: a log-probability is not a number.
    """
    if vector is None:
        if plan.empty:
            return PromptScores()
        if plan.needed().size:
            raise Internal(f"the engine did not score the {plan.rows + 1} prompt tokens; try again")
        vector = Buffers(plan).vector
    answer = Buffers(plan, vector)
    for found in (answer.own, answer.topk_logprobs, answer.targets, answer.drawn_logprobs):
        check_logprobs(found)
    return PromptScores(
        _own(plan, answer) if scoring.prompt_logprobs else None,
        _topk(plan, answer) if scoring.topk_prompt_logprobs else None,
        _targets(scoring.targets, answer) if scoring.targets is not None else None,
        TopkLogprobs(answer.drawn_ids, answer.drawn_logprobs) if scoring.prompt_alt_tokens_k else None,
    )


def check_logprobs(logprobs: Floats) -> None:
    """
    Raises:
        InvalidRequest: one is not a number: the weights have diverged.
    """
    if np.isnan(logprobs).any():
        raise _diverged()


def check_numbers(logprobs: Sequence[float]) -> None:
    """The same of a list. Raises as `check_logprobs`."""
    if any(map(math.isnan, logprobs)):
        raise _diverged()


def _diverged() -> InvalidRequest:
    return InvalidRequest(
        "the model gives log-probabilities that are not numbers: these weights have diverged; sample an "
        "earlier version",
        "diverged_weights",
    )


def _own(plan: ScorePlan, answer: Buffers) -> Floats:
    own = np.full(plan.rows + 1, np.nan, dtype=np.float32)
    own[plan.first + 1 :] = answer.own
    return own


def _topk(plan: ScorePlan, answer: Buffers) -> TopkLogprobs:
    ids = np.zeros((plan.rows + 1, plan.topk), dtype=np.int32)
    logprobs = np.full(ids.shape, EMPTY_TOPK_LOGPROB, dtype=np.float32)
    ids[plan.first + 1 :], logprobs[plan.first + 1 :] = answer.topk_ids, answer.topk_logprobs
    return TopkLogprobs(ids, logprobs)


def _targets(targets: HostMatrix, answer: Buffers) -> HostMatrix:
    values = np.zeros(targets.values.shape, dtype=np.float32)
    values[targets.values >= 0] = answer.targets
    return targets.with_values(values)


def uniforms(seed: int, rows: npt.NDArray[np.int64], draws: int) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1), one for each draw at each row, float64 [len(rows), draws].

    A counter-based generator (the SplitMix64 finalizer over seed, row and draw): a number depends on
    nothing else, so chunks, batches and replicas cannot change it. 48 bits, so that neither bound is
    reached in float64.
    """
    with np.errstate(over="ignore"):
        counters = rows.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)
        start = _mix(np.array([seed], dtype=np.uint64))
        bits = _mix(start + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
