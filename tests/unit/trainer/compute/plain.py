"""Adapters in the library's own modules, as anybody would write them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.compute.lora.adapter import Adapter
from services.trainer.compute.lora.experts import find_experts


class Plain(nn.Module):
    """A linear with an adapter, as anybody would write it."""

    def __init__(self, linear: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        # Some models read them off their projections.
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T * self.scale


class PlainExperts(nn.Module):
    """Routed experts with an adapter, one token and one expert after the other."""

    def __init__(self, experts: Any, matrices: Mapping[str, Tensor], scale: float) -> None:
        super().__init__()
        self.experts, self.scale = experts, scale
        self.matrices = {name: values.clone().requires_grad_() for name, values in matrices.items()}

    def delta(self, part: str, expert: int) -> Tensor:
        """What the adapter adds to an expert's weight: [out, in]."""
        a, b = self.matrices[f"{part}.lora_A"], self.matrices[f"{part}.lora_B"]
        return b[expert if len(b) > 1 else 0] @ a[expert if len(a) > 1 else 0] * self.scale

    def one(self, x: Tensor, expert: int) -> Tensor:
        base = self.experts
        gate_up, down = base.gate_up_proj[expert], base.down_proj[expert]
        if base.is_transposed:
            gate_up, down = gate_up.T, down.T
        gate, up = self.delta("w1", expert), self.delta("w3", expert)
        both = torch.cat([gate, up]) if base.is_concatenated else torch.stack([gate, up], 1).flatten(0, 1)
        bias = (base.gate_up_proj_bias[expert], base.down_proj_bias[expert]) if base.has_bias else (0.0, 0.0)
        gated = base._apply_gate((gate_up + both) @ x + bias[0])
        return (down + self.delta("w2", expert)) @ gated + bias[1]

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.stack(
            [
                sum(
                    (self.one(x, int(expert)) * weight for expert, weight in zip(mine, each, strict=True)),
                    torch.zeros_like(x),
                )
                for x, mine, each in zip(hidden, chosen, weights, strict=True)
            ]
        )


def adapted(plain: Any, adapter: Adapter) -> tuple[Any, dict[str, Tensor]]:
    """A copy of the library's model with the adapter in it, and the adapter's matrices there."""
    model, views = copy.deepcopy(plain), adapter.views(adapter.flat)
    matrices: dict[str, Tensor] = {}
    experts = {name for name, _ in find_experts(plain)}
    for name in (name for name in adapter.targets if name.rpartition(".")[0] not in experts):
        each = Plain(
            model.get_submodule(name), views[f"{name}.lora_A"], views[f"{name}.lora_B"], adapter.scale
        )
        model.set_submodule(name, each)
        matrices |= {f"{name}.lora_A": each.a, f"{name}.lora_B": each.b}
    for name in experts if any(name.endswith(".w1") for name in adapter.targets) else ():
        own = {
            key.removeprefix(f"{name}."): view for key, view in views.items() if key.startswith(f"{name}.")
        }
        routed = PlainExperts(model.get_submodule(name), own, adapter.scale)
        model.set_submodule(name, routed)
        matrices |= {f"{name}.{key}": values for key, values in routed.matrices.items()}
    return model, matrices
