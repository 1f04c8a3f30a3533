"""What of a causal language model adapters can be for, and how they come into it.

Invariant: a weight that a flag promises to train is either found here as one that adapters are for, or named
as one that none can be for.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from services.trainer.compute.lora.adapter import HEAD, LinearShape, kind_of, promised_by
from services.trainer.compute.lora.experts import find_experts, shapes_of
from services.trainer.compute.lora.grouped import LoraRouter


def hook_adapters(model: Any, router: LoraRouter) -> None:
    """Makes a causal language model add what is routed to it, but for the output head."""
    for name in _linears(model):
        router.hook(model.get_submodule(name), name)
    for name, experts in find_experts(model):
        router.hook_experts(experts, name)


def find_linears(model: Any) -> dict[str, LinearShape]:
    """Every linear of a causal language model that an adapter may adapt, by name, those of routed experts
    after the others and the output head's last."""
    found = {name: LinearShape(each.in_features, each.out_features) for name, each in _linears(model).items()}
    for name, experts in find_experts(model):
        found |= {f"{name}.{part}": shape for part, shape in shapes_of(experts).items()}
    head = model.get_output_embeddings()
    found[HEAD] = LinearShape(head.in_features, head.out_features)
    return found


def head_name(model: Any) -> str:
    """What a causal language model calls its output head, whose adapters are called `HEAD` here."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def _linears(model: Any) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and kind_of(name) is not None and name != HEAD
    }


def find_unadapted(model: Any) -> list[str]:
    """The weights of blocks that a flag might be said to promise and no adapter can be for, by name: matrices
    that are neither of a linear of a known place nor of routed experts of the common form."""
    adapted = {*_linears(model), *(name for name, _ in find_experts(model))}
    return [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if name not in adapted and _is_of_a_block(name) and not _is_left_out(module) and promised_by(name)
        for weight, values in module.named_parameters(recurse=False)
        if sum(size > 1 for size in getattr(values, "ds_shape", values.shape)) > 1
    ]


def _is_of_a_block(name: str) -> bool:
    """Blocks have numbers."""
    return any(part.isdigit() for part in name.split("."))


def _is_left_out(module: nn.Module) -> bool:
    """Whether adapters are not expected for a module's weights: convolutions, embeddings and norms."""
    return isinstance(module, _ConvNd | nn.Embedding) or "Norm" in type(module).__name__
