"""Routed experts with adapters.

The matrices beside the model's width are shared by all experts, the others are each expert's own:

    gate   x W1^T + x A1^T B1[e]^T s        A1 [1, rank, hidden]   B1 [experts, inner, rank]
    up     x W3^T + x A3^T B3[e]^T s        A3, B3 the same
    down   g W2^T + g A2[e]^T B2^T s        A2 [experts, rank, inner]   B2 [1, hidden, rank]

with s = alpha / rank and g what gate and up come to. It is the scheme of Tinker, which calls them w1, w3 and
w2, and whose cookbook says so (hyperparam_utils.get_lora_param_count), and of vLLM (enable_moe_shared_loras).

A token's choices are rows, in the order of experts and of adapters within each. What is shared is computed
once a token, not once a choice: A1 and A3 before the rows are made of tokens, and B2 after rows were weighed
and summed.

Invariant: which experts a token has, and with what weights, is the base model's: routers are not adapted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.trainer.compute.lora.adapter import LinearShape
from services.trainer.compute.lora.products import Groups, product
from services.trainer.compute.lora.stack import Stack


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of routed experts that can be adapted, by name: those of transformers' common form, with a
    gate."""
    for name, module in model.named_modules():
        if getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj"):
            yield name, module


def shapes_of(experts: Any) -> dict[str, LinearShape]:
    """What is adapted of routed experts."""
    weight = experts.down_proj
    count, *features = getattr(weight, "ds_shape", weight.shape)
    inner, hidden = features if experts.is_transposed else reversed(features)
    outer = LinearShape(hidden, inner, experts=(1, count))
    return {"w1": outer, "w3": outer, "w2": LinearShape(inner, hidden, experts=(count, 1))}


def adapted_experts(
    experts: Any, name: str, stack: Stack, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """What a module of routed experts computes, with adapters.

    Args:
        experts: the module, of transformers' common form.
        name: under which the adapters have its matrices.
        hidden: [tokens, hidden].
        chosen: int64 [tokens, choices], the experts of each token.
        weights: [tokens, choices], theirs.

    Returns:
        [tokens, hidden] of the element type of `hidden`.
    """
    rows = _Rows(chosen, experts.num_experts, stack)
    whole, scale = stack.whole.groups, stack.whole.scale
    made = _linear(rows.of_tokens(hidden), experts, "gate_up_proj", rows)
    gate, up = (
        stack.product(
            f"{name}.{each}.lora_B",
            rows.of_tokens(stack.product(f"{name}.{each}.lora_A", hidden, whole, scale)),
            rows.own,
        )
        for each in ("w1", "w3")
    )
    if experts.is_concatenated:
        made = made + torch.cat([gate, up], dim=-1)
    else:
        made = made + torch.stack([gate, up], dim=-1).flatten(-2)
    gated = experts._apply_gate(made)
    weight = weights.reshape(-1)[rows.order][:, None]
    output = rows.to_tokens(_linear(gated, experts, "down_proj", rows) * weight).to(hidden.dtype)
    low = rows.to_tokens(stack.product(f"{name}.w2.lora_A", gated, rows.own) * weight).to(hidden.dtype)
    return output + stack.product(f"{name}.w2.lora_B", low, whole, scale)


class _Rows:
    """The choices of all tokens, in the order of experts and, within one, of adapters.

    Attributes:
        order: int64 [rows], which of all choices [tokens * choices] each row is.
        experts: int64 [rows], the expert of each.
        by_expert, own: the rows of each expert; of each expert and adapter.
    """

    def __init__(self, chosen: Tensor, experts: int, stack: Stack) -> None:
        self._choices, adapters = chosen.shape[-1], stack.adapters
        keys = chosen if adapters == 1 else chosen * adapters + stack.owners[:, None]
        # A replay must find the same order.
        ordered, self.order = keys.reshape(-1).sort(stable=True)
        places = torch.arange(len(ordered), device=ordered.device)
        self._back = torch.empty_like(self.order).scatter_(0, self.order, places)
        self.experts = ordered // adapters
        numbers = torch.arange(experts * adapters, device=ordered.device)
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        self.own = Groups(ends)
        self.by_expert = self.own if adapters == 1 else Groups(ends[adapters - 1 :: adapters].contiguous())

    def of_tokens(self, x: Tensor) -> Tensor:
        """Of each row its token's of x [tokens, n]: [rows, n]."""
        return cast(Tensor, _Moved.apply(x, self.order, self._back, self._choices, False))

    def to_tokens(self, x: Tensor) -> Tensor:
        """The sums of x [rows, n] over the choices of each token: [tokens, n]."""
        return cast(Tensor, _Moved.apply(x, self.order, self._back, self._choices, True))


class _Moved(torch.autograd.Function):
    """Rows of tokens, or if it gathers tokens of rows: each is the other's transpose. Sums are in the order
    of choices, so that a gradient is the same each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, choices: int, gathers: bool) -> Tensor:
        ctx.order, ctx.back, ctx.choices, ctx.gathers = order, back, choices, gathers
        return _moved(x, order, back, choices, gathers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grads[0], ctx.order, ctx.back, ctx.choices, not ctx.gathers), None, None, None, None


def _moved(x: Tensor, order: Tensor, back: Tensor, choices: int, gathers: bool) -> Tensor:
    if gathers:
        return x[back].unflatten(0, (-1, choices)).sum(1)
    return x[order // choices]


def _linear(x: Tensor, experts: Any, name: str, rows: _Rows) -> Tensor:
    """Rows [rows, in] through the frozen weights of their experts: [rows, out]."""
    weight = getattr(experts, name)
    made = product(x, weight if experts.is_transposed else weight.transpose(1, 2), rows.by_expert)
    return made + getattr(experts, f"{name}_bias")[rows.experts] if experts.has_bias else made
