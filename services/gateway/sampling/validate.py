"""What a sample request is checked for before it is accepted: pure functions over requests and limits.

Invariant: a request that passes here can be run by a sampler without an error that the request itself causes,
except for what only a sampler can tell, by its weights, tokenizer and grammars.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.common.contract import sample_schema, steering, tensors
from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import Limits
from services.gateway.cluster.base_models import BaseModel
from tinsmith.v1 import sampling_pb2, types_pb2

MAX_PRIORITY = 100

_MOVE = {
    sampling_pb2.ON_UPDATE_CONTINUE: "CONTINUE",
    sampling_pb2.ON_UPDATE_CONTINUE_KEEP_KV: "CONTINUE_KEEP_KV",
}
_LOGPROBS_OF = frozenset(sampling_pb2.LogprobsOf.values())
_SPAN_BYTES = 16
_FEW_BYTES = 256


def check_sample(request: sampling_pb2.SampleRequest, model: BaseModel, limits: Limits) -> int:
    """Bytes of the largest answer of a sample request; refuses one that a sampler could not run."""
    if not 0 <= request.seq_id < 2**63:
        raise InvalidRequest("seq_id must be 0 or more", field="seq_id")
    if not 1 <= request.num_samples <= limits.samples:
        message = f"num_samples must be 1 to {limits.samples}, not {request.num_samples}"
        raise InvalidRequest(message, field="num_samples")
    if abs(request.priority) > MAX_PRIORITY:
        message = f"priority must be -{MAX_PRIORITY} to {MAX_PRIORITY}, not {request.priority}"
        raise InvalidRequest(message, field="priority")
    for name in ("prompt", "params"):
        if not request.HasField(name):
            raise InvalidRequest(f"{name} is not set; a sample needs one", field=name)
    _check_prompt(request.prompt, model)
    _check_sampling_params(request.params, model, limits)
    prompt_length = request.prompt.shape[0]
    left = model.context_length - prompt_length
    longest = min(request.params.max_tokens, left) if request.params.HasField("max_tokens") else left
    scoring = sample_schema.scoring_from_pb(request)
    sampled = request.num_samples * longest
    sample_schema.check_answer(scoring, prompt_length, model.vocab_size, sampled)
    answer = sample_schema.answer_bytes(scoring, prompt_length, sampled)
    moves = request.on_update in _MOVE
    if request.routed_experts:
        read = request.num_samples * prompt_length + sampled
        answer += sample_schema.check_routed(model.sampled_routing, read, moves=moves)
    # At worst every token was made by another version.
    return answer + _SPAN_BYTES * sampled if moves else answer


def check_told(model: BaseModel, *, full: bool) -> None:
    """Refuses a sample of an adapter, or of all weights, where samplers that tell experts cannot run it."""
    if not (model.tells_of_full_models if full else model.tells_of_adapters):
        which = "models that train all weights" if full else "adapters"
        raise InvalidRequest(
            f"the samplers of {model.name} that tell routed_experts run no {which}; leave them out",
            sample_schema.ROUTED_NOT_SUPPORTED,
            field="routed_experts",
        )


class OnUpdate(NamedTuple):
    """What becomes of a sample when its model has newer weights: it goes on with them, and if so, with the
    keys and values that it has."""

    moves: bool = False
    keeps_kv: bool = False


def check_on_update(request: sampling_pb2.SampleRequest, inflight: bool, constrained: bool) -> OnUpdate:
    """Whether a sample goes on with newer weights, and how; refuses one that could not.

    Args:
        inflight: its sampling session follows its model.
        constrained: there is a constraint, wherever it was given.
    """
    asked = request.on_update
    if asked in (sampling_pb2.ON_UPDATE_UNSPECIFIED, sampling_pb2.ON_UPDATE_FINISH):
        return OnUpdate()
    if asked not in _MOVE:
        raise InvalidRequest(f"on_update {asked} is not one of OnUpdate", field="on_update")
    if not inflight:
        raise InvalidRequest(
            f"on_update is {_MOVE[asked]}, but the sampling session answers from one snapshot for ever; open "
            "one with SaveForSampler and inflight, or leave on_update out",
            field="on_update",
        )
    if asked == sampling_pb2.ON_UPDATE_CONTINUE_KEEP_KV:
        return OnUpdate(moves=True, keeps_kv=True)
    stops_at_text = request.params.stop.WhichOneof("kind") == "strings"
    steering.check_continued(steering.from_pb(request.params), stops_at_text, constrained)
    return OnUpdate(moves=True)


def check_logprobs_of(request: sampling_pb2.SampleRequest) -> bool:
    """Whether log-probabilities of sampled tokens are to be of what they were drawn from."""
    asked = request.logprobs_of
    if asked not in _LOGPROBS_OF:
        raise InvalidRequest(f"logprobs_of {asked} is not one of LogprobsOf", field="logprobs_of")
    return asked == sampling_pb2.LOGPROBS_OF_SAMPLED


def _check_prompt(prompt: types_pb2.Tensor, model: BaseModel) -> None:
    if prompt.dtype != types_pb2.DATA_TYPE_INT32 or len(prompt.shape) != 1:
        raise InvalidRequest("prompt must be an int32 tensor of shape [N]", field="prompt")
    try:
        tensor = tensors.from_pb(prompt, "prompt")
    except InvalidRequest as error:
        raise InvalidRequest(error.message, error.code, field="prompt") from None
    if tensor.numel == 0:
        raise InvalidRequest("prompt is empty; send at least one token", field="prompt")
    if tensor.numel >= model.context_length:
        raise InvalidRequest(
            f"prompt has {tensor.numel} tokens; {model.name} has a context length of {model.context_length}, "
            "with at least one token to generate, so shorten it",
            field="prompt",
        )
    # One below 0 is a large one without its sign: so there is one number to be looked for.
    if _largest(tensor.data) >= model.vocab_size:
        ids = np.frombuffer(tensor.data, dtype="<u4")
        place = int(np.argmax(ids >= model.vocab_size))
        token = int(ids.view("<i4")[place])
        raise InvalidRequest(
            f"prompt token {token} at position {place} is outside the vocabulary of {model.name} "
            f"(0 to {model.vocab_size - 1})",
            "token_out_of_range",
            field="prompt",
        )


def _largest(ids: bytes) -> int:
    """Of 32-bit numbers without signs. Of a few it is found sooner than numpy is begun with."""
    if len(ids) > _FEW_BYTES:
        return int(np.frombuffer(ids, dtype="<u4").max())
    return max(memoryview(ids).cast("I"))


def _check_constraint(constraint: sampling_pb2.OutputConstraint) -> None:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(
            "constraint is set but says nothing; set json_schema or regex", field="params.constraint"
        )
    steering.check_constraint(getattr(constraint, kind), kind)


def _check_sampling_params(params: sampling_pb2.SamplingParams, model: BaseModel, limits: Limits) -> None:
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    sample_schema.check_decoding(params.temperature, params.top_k, params.top_p, max_tokens)
    steering.check(steering.from_pb(params), model.vocab_size)
    if params.HasField("constraint"):
        _check_constraint(params.constraint)
    kind = params.stop.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(
            "stop is not set; choose model_eos, never, strings or tokens", field="params.stop"
        )
    if params.HasField("constraint"):
        steering.check_constrained(kind == "never", kind == "tokens")
    values: list[str | int] = []
    if kind == "strings":
        values.extend(params.stop.strings.values)
    elif kind == "tokens":
        values.extend(params.stop.tokens.ids)
    else:
        return
    most = limits.stop_strings if kind == "strings" else limits.stop_tokens
    if not 1 <= len(values) <= most:
        raise InvalidRequest(
            f"stop must name 1 to {most} {kind}, not {len(values)}", field=f"params.stop.{kind}"
        )
    for value in values:
        if isinstance(value, str) and not 1 <= len(value) <= limits.stop_string_chars:
            message = f"a stop string must have 1 to {limits.stop_string_chars} characters"
            raise InvalidRequest(message, field="params.stop.strings")
        if isinstance(value, int) and not 0 <= value < model.vocab_size:
            raise InvalidRequest(
                f"stop token {value} is outside the vocabulary of {model.name} (0 to {model.vocab_size - 1})",
                "token_out_of_range",
                field="params.stop.tokens",
            )
