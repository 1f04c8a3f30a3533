"""What a training request is checked for before it is accepted: pure functions over requests and limits.

Invariant: a request that passes here can be run by a trainer without an error that the request itself causes,
except for what only the weights or the disk can tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.common.contract import loss_schema, roles, tensors
from services.common.contract.errors import InvalidRequest, TooLarge
from services.common.contract.experts import routing
from services.common.contract.experts.routing import RoutedExperts
from services.common.contract.roles import Role
from services.gateway.access.limits import Limits
from services.gateway.cluster.base_models import BaseModel
from tinsmith.v1 import models_pb2, training_pb2


def check_lora(lora: models_pb2.LoraConfig, role: Role, model: BaseModel, limits: Limits) -> None:
    """Refuses an adapter that the trainers or samplers of the base model cannot hold."""
    if not 1 <= lora.rank <= limits.lora_rank:
        raise InvalidRequest(
            f"lora rank must be 1 to {limits.lora_rank}, not {lora.rank}, or 0 (in gRPC: full) to train all "
            "weights",
            field="lora.rank",
        )
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        message = "at least one of train_attn, train_mlp and train_unembed must be true"
        raise InvalidRequest(message, field="lora")
    roles.check_trains_head(role, lora.train_unembed)
    for what, flag, largest in (
        ("trainers", "trainer", model.max_train_rank),
        # A critic is never sampled from.
        ("samplers", "sampler", model.max_sample_rank if role == "policy" else 0),
    ):
        if largest and lora.rank > largest:
            raise InvalidRequest(
                f"lora rank {lora.rank} is more than the {what} of {model.name} take ({largest}); use a "
                f"smaller rank or have the operator raise --max-lora-rank of the {flag}",
                field="lora.rank",
            )


def check_full(role: Role) -> None:
    """Refuses to train all weights of what cannot be trained so."""
    if role != "policy":
        raise InvalidRequest(f"a {role} trains an adapter; set a lora rank of at least 1", "wrong_role")


def check_adam(adam: training_pb2.AdamParams) -> None:
    """Refuses AdamW parameters outside of where AdamW is defined."""
    rules = (
        ("learning_rate", adam.learning_rate, adam.learning_rate >= 0, "0 or more"),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1, "at least 0 and below 1"),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1, "at least 0 and below 1"),
        ("eps", adam.eps, adam.eps > 0, "above 0"),
        ("weight_decay", adam.weight_decay, adam.weight_decay >= 0, "0 or more"),
        ("grad_clip_norm", adam.grad_clip_norm, True, "a finite number (0 and below: no clipping)"),
    )
    for name, value, holds, rule in rules:
        if not (math.isfinite(value) and holds):
            raise InvalidRequest(f"{name} must be {rule}, not {value}")


def check_forward_backward(
    operation: training_pb2.ForwardBackward, role: Role, model: BaseModel, limits: Limits
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
    lengths = [max(datum.tokens.shape, default=0) for datum in operation.data]
    _check_fits(lengths, model, backward=not operation.forward_only)
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
        if datum.HasField("routed_experts"):
            _check_routed(datum, model, name)


def _check_routed(datum: training_pb2.Datum, model: BaseModel, name: str) -> None:
    if model.trained_routing is None:
        raise InvalidRequest(
            f"{name}: the trainers of {model.name} replay no routed_experts: the model has none, or routes "
            "in a way of its own; leave them out",
            "routed_experts_not_supported",
        )
    # A longer shape than any is refused by its begin: it may have millions of sizes.
    shape = tuple(datum.routed_experts.shape[: routing.DIMENSIONS + 1])
    given = RoutedExperts(shape, datum.routed_experts.ids)
    routing.check(given, model.trained_routing, datum.tokens.shape[0], f"{name}: routed_experts")


def _check_fits(lengths: Sequence[int], model: BaseModel, *, backward: bool) -> None:
    """Refuses what the memory of the trainers does not hold. A context that is too long is said first.

    Args:
        backward: a backward pass follows, for which activations are kept; what only runs forward keeps few.
    """
    longest = max(lengths, default=0)
    held = model.max_sequence_tokens if backward else model.max_forward_tokens
    if 0 < held < longest <= model.context_length:
        raise InvalidRequest(
            f"data[{lengths.index(longest)}]: {longest} tokens are more than the {held} of one sequence that "
            f"the memory of the trainers of {model.name} holds in "
            f"{'training' if backward else 'a forward pass'}; shorten the input",
            "beyond_trainer_memory",
        )
    if 0 < model.max_operation_tokens < sum(lengths):
        raise InvalidRequest(
            f"the batch has {sum(lengths)} tokens, more than the {model.max_operation_tokens} of one "
            f"operation that the memory of the trainers of {model.name} holds; send fewer datums at once",
            "beyond_trainer_memory",
        )
