"""What vLLM answered, as plain data.

Invariant: a sequence that leaves here has a log-probability for every token and a stop reason that vLLM gave;
anything else is an error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from services.common.contract.errors import Internal, InvalidRequest
from services.sampler.engine.sampling import NewTokens, SampleJob, SampleOutput, Sequence, StopReason
from services.sampler.worker.prompt_scores import ScorePlan, TopkLogprobs, check_logprobs, read_answer

_STOP_REASONS: dict[str | None, StopReason] = {"stop": "stop", "length": "length"}


def whole(job: SampleJob, plan: ScorePlan, outputs: list[RequestOutput]) -> SampleOutput:
    """What a job came to.

    Raises:
        InvalidRequest: its constraint cannot be made a grammar of.
        InvalidRequest, Internal: as `sequence`.
    """
    if job.constraint is not None and any(output.outputs[0].finish_reason == "error" for output in outputs):
        raise InvalidRequest(
            f"no grammar can be made of this {job.constraint.kind}: it is too large, or too deeply repeated; "
            "send a simpler one",
            "constraint_too_large",
        )
    return SampleOutput(
        [sequence(output.outputs[0], job.scoring.topk_sample_logprobs) for output in outputs],
        outputs[0].num_cached_tokens or 0,
        read_answer(job.scoring, plan, outputs[0].prompt_token_id_logprobs),
    )


def sequence(completion: CompletionOutput, topk: int) -> Sequence:
    """One whole sequence.

    Raises:
        InvalidRequest: the weights give no numbers.
        Internal: it ended for another reason than stop or length, or a log-probability is missing.
    """
    reason = _STOP_REASONS.get(completion.finish_reason)
    if reason is None:
        raise Internal(f"the engine ended a sequence with {completion.finish_reason!r}; try again")
    return Sequence(reason, *_tokens(completion, topk))


def new_tokens(output: RequestOutput, index: int, start: int, topk: int) -> NewTokens:
    """The tokens of one output of a stream. Raises as `sequence`, but for the reason."""
    return NewTokens(index, start, *_tokens(output.outputs[0], topk))


def _tokens(completion: CompletionOutput, topk: int) -> tuple[list[int], list[float], TopkLogprobs | None]:
    tokens = list(completion.token_ids)
    flat = completion.logprobs
    if not isinstance(flat, FlatLogprobs):
        raise Internal(f"the engine gave no log-probabilities of {len(tokens)} tokens")
    ids, logprobs = _rows(flat, len(tokens), topk + 1)
    if ids[:, 0].tolist() != tokens:
        raise Internal("the engine gave log-probabilities of other tokens than it sampled")
    check_logprobs(logprobs)
    likely = TopkLogprobs(ids[:, 1:], logprobs[:, 1:]) if topk else None
    return tokens, logprobs[:, 0].tolist(), likely


def _rows(
    flat: FlatLogprobs, count: int, width: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Of each position the sampled token, and then the most likely ones."""
    if len(flat) == count and len(flat.logprobs) == count * width:
        ids, logprobs = flat.token_ids, flat.logprobs
    else:
        # Where vLLM joined outputs of a stream, the sampled token is not repeated among the likely ones.
        ids, logprobs = [], []
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
            row = list(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
            if len(row) == width - 1:
                place = sum(logprob > row[0][1] for _, logprob in row[1:])
                row.insert(1 + place, row[0])
            if len(row) == width:
                ids += [token for token, _ in row]
                logprobs += [logprob for _, logprob in row]
    if len(ids) != count * width:
        raise Internal(f"the engine gave log-probabilities for not all of {count} tokens")
    shape = (count, width)
    return np.array(ids, dtype=np.int32).reshape(shape), np.array(logprobs, dtype=np.float32).reshape(shape)
