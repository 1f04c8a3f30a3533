"""What vLLM answered, as plain data.

Invariant: a sequence that leaves here has a log-probability for every token and a stop reason that vLLM gave;
anything else is an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import Histogram
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from services.common.contract.errors import Internal, InvalidRequest, Overloaded
from services.common.telemetry.metrics import LONG_S
from services.sampler.engine.grammars.core import BUSY
from services.sampler.engine.grammars.steps import TOO_SLOW
from services.sampler.engine.logprobs.kept import KeptLogprobs
from services.sampler.engine.sampling import (
    Change,
    Constraint,
    NewTokens,
    SampleJob,
    SampleOutput,
    Sequence,
    StopReason,
    begun,
    joined,
    parts,
    spans,
)
from services.sampler.worker.prompt_scores import (
    EMPTY_TOPK_LOGPROB,
    PromptScores,
    ScorePlan,
    TopkLogprobs,
    check_logprobs,
    check_numbers,
    read_answer,
)

UPDATE_SECONDS = Histogram(
    "tinsmith_sample_update_seconds",
    "From when a running sample left its weights to the first token of one of its sequences on newer ones",
    buckets=LONG_S,
)

_STOP_REASONS: dict[str | None, StopReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


class Made(NamedTuple):
    """What vLLM made of a sequence, and with which weights."""

    output: RequestOutput
    changes: tuple[Change, ...]


def whole(job: SampleJob, plan: ScorePlan, made: list[Made | None]) -> SampleOutput:
    """What a job has come to, what it had come to before included.

    Args:
        made: of each sequence; None = it got no further, because it had ended or was interrupted.

    Raises:
        InvalidRequest: its constraint cannot be made a grammar of, or no token went on with it.
        Overloaded: others' constraints leave no thread to its own.
        InvalidRequest, Internal: as `sequence`.
    """
    if job.constraint is not None:
        for each in made:
            if each is not None and each.output.outputs[0].finish_reason == "error":
                raise _unmatched(job.constraint, job.params.steering.bad_words, each.output.outputs[0])
    sequences = [_further(job, index, each) for index, each in enumerate(made)]
    first, before = made[0], job.begun
    if before is not None and before.sequences[0].tokens:
        return SampleOutput(sequences, before.cached_prompt_tokens, before.scores)
    if first is None or not sequences[0].tokens:
        # The scores of the prompt come with the first token.
        return SampleOutput(sequences, 0, PromptScores())
    scores = read_answer(job.scoring, plan, first.output.prompt_token_id_logprobs)
    return SampleOutput(sequences, first.output.num_cached_tokens or 0, scores)


def _unmatched(
    constraint: Constraint, bad_words: tuple[str, ...], completion: CompletionOutput
) -> InvalidRequest | Overloaded:
    """Why vLLM gave a constrained sequence up: without a token if it could make no grammar, and otherwise
    with one that the grammar refuses, because it allowed none that could be sampled, or takes too long."""
    if completion.stop_reason == BUSY:
        return Overloaded(
            "all threads for grammars are at constraints that take long; send the request again, or to "
            "another one"
        )
    if not completion.token_ids:
        return InvalidRequest(
            f"no grammar can be made of this {constraint.kind}: it is too large, or too deeply repeated; "
            "send a simpler one",
            "constraint_too_large",
        )
    if completion.stop_reason == TOO_SLOW:
        return InvalidRequest(
            f"at token {len(completion.token_ids)} of a sequence, it takes too long to tell which tokens go "
            f"on with the text that this {constraint.kind} asks for; send a simpler one, without repetitions "
            "of what is repeated",
            "constraint_too_large",
        )
    what, to_change = (
        ("that bad_words leaves ", f"{constraint.kind} or bad_words") if bad_words else ("", "it")
    )
    return InvalidRequest(
        f"at token {len(completion.token_ids)} of a sequence, no token {what}goes on with the text that this "
        f"{constraint.kind} asks for; change {to_change}",
        "constraint_dead_end",
    )


def note_update(job: SampleJob, output: RequestOutput) -> None:
    """Measures how long newer weights kept a sequence waiting that went on with them."""
    # vLLM notes times where metrics are asked for, by the same clock.
    if job.left is not None and output.metrics is not None and output.outputs[0].token_ids:
        UPDATE_SECONDS.observe(output.metrics.first_token_ts - job.left)


def _further(job: SampleJob, index: int, made: Made | None) -> Sequence:
    if made is None:
        return begun(job, index)
    topk = job.scoring.topk_sample_logprobs
    told = sequence(made.output.outputs[0], topk, made.changes)
    if job.routed_experts:
        # Of a job that does not move: there is nothing before it.
        told = replace(told, experts=_experts(made.output.outputs[0], len(job.prompt)))
    return told if job.begun is None else joined(begun(job, index), told)


def _experts(completion: CompletionOutput, prompt: int) -> np.ndarray | None:
    """Those of all tokens that the model has read.

    Raises:
        Internal: they are not those of all.
    """
    if not completion.token_ids:
        return None
    read = prompt + len(completion.token_ids) - 1
    told = completion.routed_experts
    if told is None or len(told) != read:
        raise Internal(
            f"the engine told the experts of {0 if told is None else len(told)} tokens of {read}; try again"
        )
    return told


def sequence(completion: CompletionOutput, topk: int, changes: tuple[Change, ...]) -> Sequence:
    """One sequence, as far as one request of the engine made it.

    Raises:
        InvalidRequest: the weights give no numbers.
        Internal: it ended for another reason than stop, length or an interruption, or a log-probability is
            missing.
    """
    reason = _STOP_REASONS.get(completion.finish_reason)
    if reason is None:
        raise Internal(f"the engine ended a sequence with {completion.finish_reason!r}; try again")
    tokens, logprobs, likely = _tokens(completion, topk)
    return Sequence(reason, tokens, logprobs, likely, spans(changes, len(tokens)))


def new_tokens(job: SampleJob, made: Made, index: int, start: int) -> list[NewTokens]:
    """The tokens of one output of a stream, apart where the weights changed. Raises as `sequence`, but for
    the reason."""
    tokens = _tokens(made.output.outputs[0], job.scoring.topk_sample_logprobs)
    return parts(NewTokens(index, start, job.version, *tokens), made.changes)


def _tokens(completion: CompletionOutput, topk: int) -> tuple[list[int], list[float], TopkLogprobs | None]:
    tokens = list(completion.token_ids)
    told: Any = completion.logprobs
    if not topk and isinstance(told, KeptLogprobs):
        return tokens, _numbers(told, tokens), None
    if not isinstance(told, FlatLogprobs):
        raise Internal(f"the engine gave no log-probabilities of {len(tokens)} tokens")
    ids, logprobs = _rows(told, len(tokens), topk + 1)
    if ids[:, 0].tolist() != tokens:
        raise _of_others()
    check_logprobs(logprobs)
    likely = _filled(ids[:, 1:], logprobs[:, 1:]) if topk else None
    return tokens, logprobs[:, 0].tolist(), likely


def _numbers(kept: KeptLogprobs, tokens: list[int]) -> list[float]:
    if len(kept) != len(tokens):
        raise _of_not_all(len(tokens))
    if kept.token_ids.tolist() != tokens:
        raise _of_others()
    logprobs = kept.logprobs.tolist()
    # To make numpy's arrays of a few numbers takes longer than all else about them.
    check_numbers(logprobs)
    return logprobs


def _of_not_all(count: int) -> Internal:
    return Internal(f"the engine gave log-probabilities for not all of {count} tokens")


def _of_others() -> Internal:
    return Internal("the engine gave log-probabilities of other tokens than it sampled")


def _filled(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> TopkLogprobs:
    """Without tokens that could not be drawn: which of them vLLM names is chance."""
    none = np.isneginf(logprobs)
    return TopkLogprobs(np.where(none, 0, ids), np.where(none, np.float32(EMPTY_TOPK_LOGPROB), logprobs))


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
        raise _of_not_all(count)
    shape = (count, width)
    return np.array(ids, dtype=np.int32).reshape(shape), np.array(logprobs, dtype=np.float32).reshape(shape)
