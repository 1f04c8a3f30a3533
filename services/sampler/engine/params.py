"""What vLLM is asked for one sequence.

Invariant: everything that a job asks for is said here; what is not said is vLLM's default, which changes
nothing about the distribution that is sampled from.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensInput, tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.input_processor import InputProcessor

from services.common.contract.errors import InvalidRequest
from services.common.process.memory.remembered import Remembered
from services.sampler.config import MAX_BAD_WORD_TOKENS
from services.sampler.engine.sampling import (
    Limits,
    SampleJob,
    SamplingParams,
    sequence_seed,
    tokens_left,
)
from services.sampler.engine.snapshot_key import Weights
from services.sampler.worker.prompt_scores import (
    CACHE_LIMIT_KEY,
    REQUEST_KEY,
    ROUTED_KEY,
    SAMPLED_KEY,
    ScorePlan,
)

_SMALL = 256


@dataclass(frozen=True)
class Shared:
    """What is made of a job once, for all of its sequences.

    Attributes:
        constraint: the job's, checked.
        bad_words: the tokens of each, in every form that is not sampled; None = there are none.
    """

    constraint: StructuredOutputsParams | None = None
    bad_words: list[list[int]] | None = None


class _Checked(VllmParams):
    """Parameters of which a job's `Shared` was checked. vLLM would parse the constraint and encode the bad
    words again for every sequence, on the loop. Where tokens are drafted it would refuse what its own check
    of them cannot do, and ours can."""

    def update_from_tokenizer(self, tokenizer: TokenizerLike) -> None:
        pass

    def _validate_structured_outputs(self, *args: object) -> None:
        pass

    def _validate_spec_decode(self, *args: object) -> None:
        pass


async def bad_word_ids(words: tuple[str, ...], processor: InputProcessor) -> list[list[int]] | None:
    """What vLLM takes bad words for, made in a thread. None of none.

    Raises:
        InvalidRequest: one has no tokens, or all have too many.
    """
    return await asyncio.to_thread(_tokens_of, words, processor.tokenizer) if words else None


def _tokens_of(words: tuple[str, ...], tokenizer: TokenizerLike) -> list[list[int]]:
    params = VllmParams(bad_words=list(words))
    try:
        params.update_from_tokenizer(tokenizer)
    except VLLMClientError as error:
        raise InvalidRequest(str(error)) from error
    found = params.bad_words_token_ids or []
    if (tokens := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
        # A worker that finds no room for them would end the engine.
        raise InvalidRequest(
            f"bad_words are {tokens} tokens in all; send fewer, at most {MAX_BAD_WORD_TOKENS} are taken"
        )
    return found


def vllm_prompt(job: SampleJob, before: list[int], weights: Weights) -> TokensInput:
    """What a sequence that has come to `before` goes on from, with the engine's weights."""
    # The salt keys the prefix cache, as an adapter's name does: keys and values that one set of weights made
    # never serve another, and still stand when it comes back.
    salt = "/".join(part for part in (str(weights or ""), job.cache_namespace) if part)
    return tokens_input(prompt_token_ids=job.prompt + before, cache_salt=salt or None)


def vllm_params(
    job: SampleJob,
    index: int,
    limits: Limits,
    plan: ScorePlan | None,
    shared: Shared,
    *,
    stream: bool,
    start: int = 0,
) -> VllmParams:
    """How vLLM generates sequence `index` of a job.

    Args:
        start: tokens of the sequence that were generated before.
        plan: what the sequence scores of the prompt.
        shared: made of the job.
        stream: every output has the tokens since the last one; otherwise there is one, at the end.
    """
    params, steering = job.params, job.params.steering
    made = copy.copy(
        _common(
            _is_large(params),
            params.temperature,
            params.top_k,
            params.top_p,
            params.ignore_eos,
            params.stop_strings,
            params.stop_token_ids,
            steering.min_p,
            steering.frequency_penalty,
            steering.presence_penalty,
            steering.repetition_penalty,
            tuple(steering.logit_bias.items()),
            job.scoring.topk_sample_logprobs,
            stream,
        )
    )
    made.max_tokens = tokens_left(job, limits) - start
    made.seed = sequence_seed(job.params.seed, index, start)
    made.extra_args = _extra(job, plan)
    made.structured_outputs = shared.constraint
    if shared.bad_words is not None:
        made.bad_words, made._bad_words_token_ids = list(steering.bad_words), shared.bad_words
    return made


# What many sequences in a row are asked is made and checked once. Each has a copy, in which vLLM replaces
# what it changes.
@Remembered
def _common(
    temperature: float,
    top_k: int,
    top_p: float,
    ignore_eos: bool,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    min_p: float,
    frequency_penalty: float,
    presence_penalty: float,
    repetition_penalty: float,
    logit_bias: tuple[tuple[int, float], ...],
    topk: int,
    stream: bool,
) -> _Checked:
    """What sequences are asked alike."""
    return _Checked(
        max_tokens=1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=dict(logit_bias) or None,
        ignore_eos=ignore_eos,
        stop=list(stop),
        stop_token_ids=list(stop_token_ids),
        include_stop_str_in_output=True,
        # Text is only made to find stop strings, which may name special tokens.
        detokenize=bool(stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logprobs=topk,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        # Made for one sequence, and asked with once: vLLM would copy all that is in it.
        skip_clone=True,
    )


def _is_large(params: SamplingParams) -> bool:
    """By characters and tokens."""
    listed = len(params.stop_token_ids) + len(params.steering.logit_bias)
    return listed + sum(map(len, params.stop_strings)) > _SMALL


def _extra(job: SampleJob, plan: ScorePlan | None) -> dict[str, Any] | None:
    """What the workers are told of a sequence."""
    extra: dict[str, Any] = {SAMPLED_KEY: True} if job.sampled_logprobs else {}
    if plan is not None:
        # A row that is scored needs its hidden state, which the prefix cache does not keep.
        extra |= {REQUEST_KEY: plan.to_wire(), CACHE_LIMIT_KEY: int(plan.needed()[0])}
    if job.routed_experts:
        # Nor does it keep the experts of a token.
        extra |= {ROUTED_KEY: True, CACHE_LIMIT_KEY: 0}
    return extra or None
