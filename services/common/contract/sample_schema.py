"""What a sample request may ask for: the rules that gateway and sampler share.

Invariant: the gateway refuses what a sampler would refuse, because both apply these functions, except for
what only a sampler can tell, by its weights, tokenizer and grammars. What is accepted is done exactly as
asked: nothing is clamped but `max_tokens`, to what the context leaves.
"""

from __future__ import annotations

import msgspec

from services.common.contract import matrices
from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import MAX_BYTES as MAX_ROUTED_BYTES
from services.common.contract.experts.routing import Routing
from services.common.contract.matrices import HostMatrix
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import sampling_pb2

# vLLM raises temperatures below 0.01 to 0.01 and rejects those above 2.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0

MAX_SAMPLES = 1024
"""Sequences of one request. An engine that generates fewer at once generates the others after them."""
MAX_TOPK = 64
"""Largest k of topk_prompt_logprobs, topk_sample_logprobs and prompt_alt_tokens_k."""

MAX_CELLS = 2**21
"""Most (token, log-probability) pairs that one such field may make a request answer with."""

MAX_SAMPLED_TOKENS = 2**24
"""Most tokens that one request may sample, over all its sequences: an answer must fit into a message."""

ROUTED_NOT_SUPPORTED = "routed_experts_not_supported"
"""The code of a sample whose experts are told by no sampler that runs it."""

_TARGETS = "target_prompt_logprobs"


class Scoring(msgspec.Struct, frozen=True):
    """Log-probabilities that are asked for besides those of the sampled tokens.

    Attributes:
        prompt_logprobs: of the prompt's own tokens.
        topk_prompt_logprobs: of the k most likely tokens at each prompt position; 0 = no.
        topk_sample_logprobs: of the k most likely tokens at each sampled position; 0 = no.
        targets: int64 token ids, -1 = none; row i is scored at prompt position i + 1.
        prompt_alt_tokens_k: draws at each prompt position but the first; 0 = no.
        prompt_logprobs_last_n: positions, counted from the end of the prompt, that prompt_logprobs and
            topk_prompt_logprobs cover; None = all.
    """

    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    targets: HostMatrix | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


def scoring_from_pb(
    pb: sampling_pb2.SampleRequest | sampler_pb2.SampleRequest,
) -> Scoring:
    """
    Raises:
        InvalidRequest: target_prompt_logprobs is malformed.
    """
    targets = pb.target_prompt_logprobs if pb.HasField("target_prompt_logprobs") else None
    return Scoring(
        prompt_logprobs=pb.prompt_logprobs,
        topk_prompt_logprobs=pb.topk_prompt_logprobs,
        topk_sample_logprobs=pb.topk_sample_logprobs,
        targets=None if targets is None else matrices.from_pb(targets, _TARGETS),
        prompt_alt_tokens_k=pb.prompt_alt_tokens_k,
        prompt_logprobs_last_n=pb.prompt_logprobs_last_n if pb.HasField("prompt_logprobs_last_n") else None,
    )


def check_decoding(temperature: float, top_k: int, top_p: float, max_tokens: int | None) -> None:
    """Refuses parameters that have no meaning, and those that the engine would change.

    Raises:
        InvalidRequest: with what to change.
    """
    if max_tokens is not None and max_tokens < 1:
        message = f"max_tokens is {max_tokens}; it must be at least 1, or left out"
        raise InvalidRequest(message, field="params.max_tokens")
    if temperature != 0.0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {temperature}; use 0 for greedy decoding, or a value from {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE:g}: vLLM, which samples, knows no others (it refuses higher ones, and takes "
            f"lower ones for {MIN_TEMPERATURE})",
            field="params.temperature",
        )
    if top_k < -1:
        message = f"top_k is {top_k}; it must be at least 1, or 0 or -1 for all tokens"
        raise InvalidRequest(message, field="params.top_k")
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"top_p is {top_p}; it must be above 0 and at most 1", field="params.top_p")


def check_answer(scoring: Scoring, prompt_length: int, vocab_size: int, sampled_tokens: int) -> None:
    """Refuses scores that do not exist, and answers that would be too large.

    Args:
        sampled_tokens: most tokens that the request can sample, over all its sequences.

    Raises:
        InvalidRequest: with what to change.
    """
    if sampled_tokens > MAX_SAMPLED_TOKENS:
        raise InvalidRequest(
            f"this may sample {sampled_tokens} tokens; lower max_tokens or num_samples, or send several "
            f"requests: one may sample {MAX_SAMPLED_TOKENS}"
        )
    last_n = scoring.prompt_logprobs_last_n
    if last_n is not None:
        _check_last_n(last_n, scoring, prompt_length)
    scored = prompt_length - 1 if last_n is None else last_n
    for name, k, positions in (
        ("topk_prompt_logprobs", scoring.topk_prompt_logprobs, scored),
        ("topk_sample_logprobs", scoring.topk_sample_logprobs, sampled_tokens),
        ("prompt_alt_tokens_k", scoring.prompt_alt_tokens_k, prompt_length - 1),
    ):
        _check_k(name, k, positions, vocab_size)
    if scoring.targets is not None:
        _check_targets(scoring.targets, prompt_length, vocab_size)


def check_routed(routing: Routing | None, tokens: int, *, moves: bool) -> int:
    """Bytes of the experts of a sample's tokens; refuses a sample whose experts cannot be told.

    Args:
        routing: how the model routes, where a sampler tells it.
        tokens: most that they are told of, over all sequences.
        moves: it goes on with newer weights.

    Raises:
        InvalidRequest: with what to change.
    """
    field = "routed_experts"
    if routing is None:
        raise InvalidRequest(
            "no sampler of this model tells routed_experts: the model has none, or its samplers are on a GPU "
            "without --routed-experts, in several pipeline stages, or route in a kernel; leave them out",
            ROUTED_NOT_SUPPORTED,
            field=field,
        )
    if moves:
        raise InvalidRequest(
            "routed_experts are those of one version of the weights, and on_update has the sample go on with "
            "newer ones; leave one of them out, or let on_update be FINISH",
            field=field,
        )
    if (told := routing.nbytes(tokens)) > MAX_ROUTED_BYTES:
        raise InvalidRequest(
            f"routed_experts of up to {tokens} tokens are {told} bytes; lower max_tokens or num_samples, or "
            f"send several requests: one is answered with up to {MAX_ROUTED_BYTES}",
            field=field,
        )
    return told


def answer_bytes(scoring: Scoring, prompt_length: int, sampled_tokens: int) -> int:
    """Bytes of the largest answer to a request that passes `check_answer`, but for a few a sequence."""
    # A token or its log-probability is 4 bytes.
    cells = 2 * sampled_tokens * (1 + scoring.topk_sample_logprobs)
    cells += prompt_length * (1 + 2 * scoring.topk_prompt_logprobs + 2 * scoring.prompt_alt_tokens_k)
    if scoring.targets is not None:
        cells += 4 * scoring.targets.values.size + 2 * prompt_length
    return 4 * cells


def _check_last_n(last_n: int, scoring: Scoring, prompt_length: int) -> None:
    if not (scoring.prompt_logprobs or scoring.topk_prompt_logprobs):
        raise InvalidRequest(
            "prompt_logprobs_last_n narrows prompt_logprobs and topk_prompt_logprobs; ask for one of them",
            field="prompt_logprobs_last_n",
        )
    if not 1 <= last_n <= prompt_length - 1:
        raise InvalidRequest(
            f"prompt_logprobs_last_n is {last_n}; a prompt of {prompt_length} tokens has "
            f"{prompt_length - 1} that can be scored, because the first one follows nothing",
            field="prompt_logprobs_last_n",
        )


def _check_k(name: str, k: int, positions: int, vocab_size: int) -> None:
    # Draws are with replacement, but more than there are tokens is a mistake too.
    most = min(MAX_TOPK, vocab_size)
    if not 0 <= k <= most:
        raise InvalidRequest(f"{name} is {k}; it must be from 0 to {most}", field=name)
    if k * positions > MAX_CELLS:
        raise InvalidRequest(
            f"{name} is {k} at up to {positions} positions; use at most {MAX_CELLS // positions}, or split "
            f"the request: one answer has at most {MAX_CELLS} of them",
            field=name,
        )


def _check_targets(targets: HostMatrix, prompt_length: int, vocab_size: int) -> None:
    rows = targets.shape[0]
    if rows != prompt_length - 1:
        raise InvalidRequest(
            f"{_TARGETS} has {rows} rows; a prompt of {prompt_length} tokens needs {prompt_length - 1}: "
            "row i is scored at position i + 1"
        )
    ids = targets.values
    if ids.size > MAX_CELLS:
        raise InvalidRequest(
            f"{_TARGETS} has {ids.size} cells; send at most {MAX_CELLS}, in the sparse layout where few are "
            "used"
        )
    if not (ids >= 0).any():
        raise InvalidRequest(f"{_TARGETS} names no token; leave it out, or set a cell to a token id")
    if ids.min() < -1 or ids.max() >= vocab_size:
        wrong = next(int(value) for value in ids.tolist() if not -1 <= value < vocab_size)
        raise InvalidRequest(
            f"{_TARGETS} has {wrong}; use token ids 0 to {vocab_size - 1}, and -1 for none",
            "token_out_of_range",
        )
