"""What is checked before anything is accepted: pure functions over requests and limits.

Invariant: a request that passes here can be run by a trainer or sampler without an error that
the request itself causes, except for what only the weights or the disk can tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from services.common.contract import loss_schema, roles, sample_schema, tensors
from services.common.contract.errors import InvalidRequest, TooLarge
from services.common.contract.roles import Role
from services.gateway.access.limits import Limits
from services.gateway.cluster.base_models import BaseModel
from tinsmith.v1 import operation_pb2, tinsmith_pb2, types_pb2


def check_lora(lora: types_pb2.LoraConfig, role: Role, model: BaseModel, limits: Limits) -> None:
    """Refuses an adapter that the trainers or samplers of the base model cannot hold."""
    if not 1 <= lora.rank <= limits.lora_rank:
        raise InvalidRequest(
            f"lora rank must be 1 to {limits.lora_rank}, not {lora.rank}, or 0 (in gRPC: full) to train all "
            "weights"
        )
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise InvalidRequest("at least one of train_attn, train_mlp and train_unembed must be true")
    roles.check_trains_head(role, lora.train_unembed)
    for what, flag, largest in (
        ("trainers", "trainer", model.max_train_rank),
        # A critic is never sampled from.
        ("samplers", "sampler", model.max_sample_rank if role == "policy" else 0),
    ):
        if largest and lora.rank > largest:
            raise InvalidRequest(
                f"lora rank {lora.rank} is more than the {what} of {model.name} take ({largest}); use a "
                f"smaller rank or have the operator raise --max-lora-rank of the {flag}"
            )


def check_full(role: Role) -> None:
    """Refuses to train all weights of what cannot be trained so."""
    if role != "policy":
        raise InvalidRequest(f"a {role} trains an adapter; set a lora rank of at least 1", "wrong_role")


def check_adam(adam: types_pb2.AdamParams) -> None:
    """Refuses AdamW parameters outside of where AdamW is defined."""
    rules = (
        ("learning_rate", adam.learning_rate, adam.learning_rate >= 0, "0 or more"),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1, "at least 0 and below 1"),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1, "at least 0 and below 1"),
        ("eps", adam.eps, adam.eps > 0, "above 0"),
        ("weight_decay", adam.weight_decay, adam.weight_decay >= 0, "0 or more"),
        ("grad_clip_norm", adam.grad_clip_norm, adam.grad_clip_norm >= 0, "0 (no clipping) or more"),
    )
    for name, value, holds, rule in rules:
        if not (math.isfinite(value) and holds):
            raise InvalidRequest(f"{name} must be {rule}, not {value}")


def check_forward_backward(
    operation: operation_pb2.ForwardBackward, role: Role, model: BaseModel, limits: Limits
) -> None:
    """Refuses data that the loss cannot be computed from. Proportional to the data: run in a thread."""
    if not operation.data:
        raise InvalidRequest("data is empty; send at least one datum")
    if len(operation.data) > limits.datums:
        raise InvalidRequest(f"{len(operation.data)} datums in one request; send at most {limits.datums}")
    if operation.ByteSize() > limits.operation_bytes:
        raise TooLarge(
            f"the batch has {operation.ByteSize()} bytes; send at most {limits.operation_bytes} at once"
        )
    loss_schema.check_loss(operation.loss_fn, operation.loss_config)
    roles.check_loss(role, operation.loss_fn)
    for index, datum in enumerate(operation.data):
        name = f"data[{index}]"
        loss_schema.check_datum(
            operation.loss_fn,
            operation.loss_config,
            tensors.from_pb(datum.tokens, f"{name}: tokens"),
            {key: tensors.from_pb(tensor, f"{name}: {key}") for key, tensor in datum.loss_inputs.items()},
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            where=name,
        )


def check_sample(
    request: tinsmith_pb2.TinsmithServiceSampleRequest, model: BaseModel, limits: Limits
) -> None:
    """Refuses a sample request that a sampler of the base model could not run."""
    if not 0 <= request.seq_id < 2**63:
        raise InvalidRequest("seq_id must be 0 or more")
    most = min(limits.samples, model.max_samples or limits.samples)
    if not 1 <= request.num_samples <= most:
        raise InvalidRequest(f"num_samples must be 1 to {most}, not {request.num_samples}")
    _check_prompt(request.prompt, model)
    _check_sampling_params(request.params, model, limits)
    prompt_length = request.prompt.shape[0]
    left = model.context_length - prompt_length
    longest = min(request.params.max_tokens, left) if request.params.HasField("max_tokens") else left
    scoring = sample_schema.scoring_from_pb(request)
    sample_schema.check_answer(scoring, prompt_length, model.vocab_size, request.num_samples * longest)


def _check_prompt(prompt: types_pb2.Tensor, model: BaseModel) -> None:
    tensor = tensors.from_pb(prompt, "prompt")
    if tensor.dtype != "int32" or len(tensor.shape) != 1:
        raise InvalidRequest("prompt must be an int32 tensor of shape [N]")
    if tensor.numel == 0:
        raise InvalidRequest("prompt is empty; send at least one token")
    if tensor.numel >= model.context_length:
        raise InvalidRequest(
            f"prompt has {tensor.numel} tokens; {model.name} has a context length of {model.context_length}, "
            "with at least one token to generate, so shorten it"
        )
    ids = np.frombuffer(tensor.data, dtype="<i4")
    wrong = (ids < 0) | (ids >= model.vocab_size)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise InvalidRequest(
            f"prompt token {int(ids[place])} at position {place} is outside the vocabulary of {model.name} "
            f"(0 to {model.vocab_size - 1})",
            "token_out_of_range",
        )


def _check_sampling_params(params: operation_pb2.SamplingParams, model: BaseModel, limits: Limits) -> None:
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    sample_schema.check_decoding(params.temperature, params.top_k, params.top_p, max_tokens)
    kind = params.stop.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("stop is not set; choose model_eos, never, strings or tokens")
    values: list[str | int] = []
    if kind == "strings":
        values.extend(params.stop.strings.values)
    elif kind == "tokens":
        values.extend(params.stop.tokens.ids)
    else:
        return
    if not 1 <= len(values) <= limits.stop_items:
        raise InvalidRequest(f"stop must name 1 to {limits.stop_items} strings or tokens, not {len(values)}")
    for value in values:
        if isinstance(value, str) and not 1 <= len(value) <= limits.stop_string_chars:
            raise InvalidRequest(f"a stop string must have 1 to {limits.stop_string_chars} characters")
        if isinstance(value, int) and not 0 <= value < model.vocab_size:
            raise InvalidRequest(
                f"stop token {value} is outside the vocabulary of {model.name} (0 to {model.vocab_size - 1})",
                "token_out_of_range",
            )


def check_ttl(ttl_seconds: int | None, limits: Limits) -> None:
    """Refuses a lifetime that checkpoints cannot have. None = for ever."""
    if ttl_seconds is not None and not limits.min_ttl_seconds <= ttl_seconds <= limits.max_ttl_seconds:
        raise InvalidRequest(
            f"ttl_seconds must be {limits.min_ttl_seconds} to {limits.max_ttl_seconds}, not {ttl_seconds}; "
            "leave it out to keep the checkpoint for ever"
        )


def check_page(offset: int, limit: int, limits: Limits) -> None:
    """Refuses a page of a list that cannot be had."""
    if not 0 <= limit <= limits.page_entries:
        raise InvalidRequest(f"limit must be 0 to {limits.page_entries}, not {limit}")
    if not 0 <= offset < 2**53:
        raise InvalidRequest(f"offset must be 0 or more, not {offset}")


def check_metadata(metadata: Mapping[str, str], limits: Limits) -> None:
    """Refuses metadata larger than what may be kept with an object."""
    if len(msgspec.json.encode(metadata)) > limits.metadata_bytes:
        raise InvalidRequest(f"user_metadata is larger than {limits.metadata_bytes} bytes; keep less in it")


def check_labels(limits: Limits, **labels: str) -> None:
    """Refuses a name or tag that is too long."""
    for name, value in labels.items():
        if len(value) > limits.tag_chars:
            raise InvalidRequest(f"{name} has {len(value)} characters; use at most {limits.tag_chars}")
