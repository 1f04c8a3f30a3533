"""What vLLM is asked for one sequence.

Invariant: everything that a job asks for is said here; what is not said is vLLM's default, which changes
nothing about the distribution that is sampled from.
"""

from __future__ import annotations

from vllm import SamplingParams as VllmParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from services.sampler.engine.sampling import Constraint, Limits, SampleJob, sequence_seed, tokens_left
from services.sampler.worker.prompt_scores import CACHE_LIMIT_KEY, REQUEST_KEY, ScorePlan


def vllm_params(
    job: SampleJob, index: int, limits: Limits, plan: ScorePlan | None, *, stream: bool
) -> VllmParams:
    """How vLLM generates sequence `index` of a job.

    Args:
        plan: what the sequence scores of the prompt.
        stream: every output has the tokens since the last one; otherwise there is one, at the end.

    Raises:
        VLLMClientError: the constraint is none.
    """
    params = job.params
    return VllmParams(
        max_tokens=tokens_left(job, limits),
        seed=sequence_seed(params.seed, index),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        ignore_eos=params.ignore_eos,
        stop=list(params.stop_strings),
        stop_token_ids=list(params.stop_token_ids),
        include_stop_str_in_output=True,
        # Text is only made to find stop strings, which may name special tokens.
        detokenize=bool(params.stop_strings),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logprobs=job.scoring.topk_sample_logprobs,
        flat_logprobs=True,
        # A row that is scored needs its hidden state, which the prefix cache does not keep.
        extra_args=None
        if plan is None
        else {REQUEST_KEY: plan.to_wire(), CACHE_LIMIT_KEY: int(plan.needed()[0])},
        structured_outputs=_structured(job.constraint),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _structured(constraint: Constraint | None) -> StructuredOutputsParams | None:
    if constraint is None:
        return None
    if constraint.kind == "json_schema":
        return StructuredOutputsParams(json=constraint.source)
    return StructuredOutputsParams(structural_tag=constraint.source)
