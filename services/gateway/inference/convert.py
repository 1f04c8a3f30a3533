"""Inference's plain data to the messages of a sample, and back."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

from services.common.contract import errors, ids
from services.common.contract.errors import Internal
from services.gateway.inference.question import Constraint, Done, Question, Sequenced
from services.gateway.text.generated import Token
from services.gateway.text.told import Told
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import results_pb2, sampling_pb2, types_pb2

_MOST_ERROR_BYTES = 2**16


def sample_request(
    question: Question, prompt: int, sampling_session_id: str, seq_id: int
) -> sampling_pb2.SampleRequest:
    """The sample of one of a question's prompts."""
    tokens = array("i", question.prompts[prompt])
    first = prompt * question.num_samples
    stop = sampling_pb2.StopCondition()
    if question.stop:
        stop.strings.values.extend(question.stop)
    else:
        stop.model_eos.SetInParent()
    return sampling_pb2.SampleRequest(
        sampling_session_id=sampling_session_id,
        seq_id=seq_id,
        prompt=types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[len(tokens)], data=tokens.tobytes()),
        num_samples=question.num_samples,
        params=sampling_pb2.SamplingParams(
            max_tokens=question.max_tokens,
            seed=None if question.seed is None else (question.seed + first) % 2**64,
            stop=stop,
            temperature=question.temperature,
            top_k=question.top_k,
            top_p=question.top_p,
            min_p=question.steering.min_p,
            frequency_penalty=question.steering.frequency_penalty,
            presence_penalty=question.steering.presence_penalty,
            repetition_penalty=question.steering.repetition_penalty,
            logit_bias=[
                sampling_pb2.LogitBias(token_id=token, bias=more)
                for token, more in question.steering.logit_bias.items()
            ],
            bad_words=question.steering.bad_words,
        ),
        topk_sample_logprobs=question.likely,
        prompt_logprobs=question.prompt_likely is not None,
        topk_prompt_logprobs=question.prompt_likely or 0,
    )


def constraint(given: Constraint | None) -> sampler_pb2.Constraint | None:
    return None if given is None else sampler_pb2.Constraint(**{given.kind: given.source})


def check_done(result: bytes) -> None:
    """Looks whether a result is a failure, which is never large.

    Raises:
        TinsmithError: the sample failed.
    """
    if len(result) <= _MOST_ERROR_BYTES:
        outcome = results_pb2.OperationResult.FromString(result)
        if outcome.WhichOneof("kind") == "error":
            raise errors.from_pb(outcome.error)


def done(result: bytes, question: Question, prompt: int) -> Done:
    """What one prompt came to.

    Raises:
        TinsmithError: the sample failed.
    """
    outcome = results_pb2.OperationResult.FromString(result)
    if outcome.WhichOneof("kind") == "error":
        raise errors.from_pb(outcome.error)
    sample = outcome.sample
    if len(sample.sequences) != question.num_samples:
        raise Internal(f"the sample has {len(sample.sequences)} sequences, not {question.num_samples}")
    scored: Sequence[Token] = ()
    if question.prompt_likely is not None:
        logprobs = np.frombuffer(sample.prompt_logprobs.data, "<f4")
        scored = _told(np.array(question.prompts[prompt], "<i4"), logprobs, sample.topk_prompt_logprobs)
    return Done(
        prompt=prompt,
        sequences=[
            Sequenced(tokens_of(sequence), sequence.stop_reason == sampling_pb2.STOP_REASON_STOP)
            for sequence in sample.sequences
        ],
        prompt_tokens=len(question.prompts[prompt]),
        cached_tokens=sample.prompt_cache_hit_tokens,
        scored=scored,
    )


def tokens_of(sequence: sampling_pb2.SampledSequence) -> Told:
    """The tokens of a sequence, or of a part of one, with their log-probabilities."""
    tokens = np.frombuffer(sequence.tokens.data, "<i4")
    return _told(tokens, np.frombuffer(sequence.logprobs.data, "<f4"), sequence.topk_logprobs)


def _told(tokens: np.ndarray, logprobs: np.ndarray, topk: sampling_pb2.TopkLogprobs) -> Told:
    shape = tuple(topk.token_ids.shape) if topk.token_ids.data else (len(tokens), 0)
    likely = np.frombuffer(topk.token_ids.data, "<i4").reshape(shape)
    return Told(tokens, logprobs, likely, np.frombuffer(topk.logprobs.data, "<f4").reshape(shape))


def seeded(request: sampling_pb2.SampleRequest) -> tuple[sampling_pb2.SampleRequest, str]:
    """A sample that another replica goes on with as it was begun, and its request id. A seed that is not
    given follows from the id, so the same request stays the same."""
    request_id = ids.request_id(request.sampling_session_id, request.seq_id)
    if not request.params.HasField("seed"):
        changed = sampling_pb2.SampleRequest()
        changed.CopyFrom(request)
        changed.params.seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")
        request = changed
    return request, request_id


def sequences(result: bytes) -> Sequence[sampling_pb2.SampledSequence]:
    """The sequences of a sample.

    Raises:
        TinsmithError: it failed.
    """
    outcome = results_pb2.OperationResult.FromString(result)
    if outcome.WhichOneof("kind") == "error":
        raise errors.from_pb(outcome.error)
    return list(outcome.sample.sequences)
