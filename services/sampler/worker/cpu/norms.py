"""Has vLLM 0.32 compute norms on a CPU with its own kernels (`RMSNorm`).

It has kernels of them for CPUs, and since its intermediate representation (vllm-project/vllm#33825) it uses
them on GPUs alone: without a compiler each norm is half a dozen of torch's functions, a tenth of a step of a
small model.

Invariant: the kernels are given what they are for, tensors of float32 whose rows follow one another and are
of whole vectors, and come to what vLLM's own way comes to, but for rounding; everything else goes that way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm

_VECTOR = 8
"""Elements; the kernels take rows of a multiple of them."""


def apply() -> None:
    """Puts the function in place. A layer that was made before keeps the one it has."""
    RMSNorm.forward_cpu = _forward


def _forward(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """As `RMSNorm.forward_native`; with a residual in place, as that may be too."""
    weight = norm.weight.data
    plain = norm.has_weight and norm.variance_size_override is None and not x.shape[-1] % _VECTOR
    if not plain or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return norm.forward_native(x, residual)
    if residual is None:
        # Heads of queries lie in rows of more than them, which the kernel takes to be of them alone.
        x = x.contiguous()
        made = torch.empty_like(x)
        torch.ops._C.rms_norm(made, x, weight, norm.variance_epsilon)
        return made
    if residual.dtype != torch.float32 or not (x.is_contiguous() and residual.is_contiguous()):
        return norm.forward_native(x, residual)
    torch.ops._C.fused_add_rms_norm(x, residual, weight, norm.variance_epsilon)
    return x, residual
