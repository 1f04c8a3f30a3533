"""Products with frozen weights in float32 on a CPU, by oneDNN where torch would take MKL's slow way.

On CPUs of other vendors than Intel MKL leaves AVX-512 unused, and torch's other library does not. oneDNN
keeps what it compiles for each number of rows that it has seen: rows go in blocks of few sizes, and what is
left of them goes to MKL.

Invariant: only weights that are whole and never learn are multiplied so; everything else is torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CPUS = Path("/proc/cpuinfo")
BLOCKS = (256, 64, 16)
"""Rows that are multiplied at once. Of a block there is a copy of what it makes."""


def speed_up_linears(model: nn.Module) -> None:
    """Has the linears of a model compute themselves so, where that is faster."""
    if uses_onednn():
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        for each in cast(list[Any], linears):
            each.forward = partial(_forward, each)


@cache
def uses_onednn() -> bool:
    """Whether oneDNN uses more of this CPU than MKL does."""
    has = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has and _vendor() not in ("GenuineIntel", "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias. Differentiable.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].
    """
    if not uses_onednn() or not is_frozen(x, weight, bias):
        return F.linear(x, weight, bias)
    return cast(Tensor, FrozenProduct.apply(x, weight, bias))


def is_frozen(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether weights are float32, on a CPU, whole here and without gradients."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and all(
            # Of a weight that ZeRO-3 shards nothing is here by the time of the backward pass.
            weight is None
            or (weight.dtype == x.dtype and not weight.requires_grad and not hasattr(weight, "ds_id"))
            for weight in weights
        )
    )


class FrozenProduct(torch.autograd.Function):
    """x weight^T + bias, differentiated by x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        made = _product(x, weight)
        return made if bias is None else made.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _product(grads[0], ctx.weight.T), None, None


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight^T, of [out, in] in any layout."""
    made = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows, into = x.reshape(-1, x.shape[-1]), made.view(-1, weight.shape[0])
    start = 0
    for size in row_blocks(len(rows)):
        own = slice(start, start + size)
        if size in BLOCKS:
            into[own] = torch.ops.mkldnn._linear_pointwise(rows[own], weight, None, "none", [], "")
        else:
            torch.mm(rows[own], weight.T, out=into[own])
        start += size
    return made


def row_blocks(rows: int) -> Iterator[int]:
    """The sizes that so many rows are cut into: of BLOCKS, and one smaller than all of them."""
    for size in BLOCKS:
        yield from [size] * (rows // size)
        rows %= size
    if rows:
        yield rows


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _vendor() -> str:
    """Who made the CPU, as Linux says on x86; empty where it does not."""
    try:
        lines = _CPUS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(named, "")
