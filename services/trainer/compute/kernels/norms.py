"""Norms in one kernel each.

Written out as transformers does, a norm is eight kernels forward and more backward, each of which reads and
writes all there is: on a GPU a good part of a pass.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fuse_norms(model: nn.Module) -> None:
    """Has the plain norms of a model compute themselves by torch's own kernel on CUDA. Under bfloat16 that
    rounds once, where transformers rounds before the weight and after it."""
    kinds: set[type[nn.Module]] = {type(module) for module in model.modules()}
    plain = {kind for kind in kinds if is_plain(kind)}
    for module in model.modules():
        if type(module) in plain:
            module.forward = partial(_normed, module, module.forward)


def is_plain(kind: type[nn.Module]) -> bool:
    """Whether a class computes x / sqrt(mean(x^2) + variance_epsilon) * weight over the last dimension, found
    by trying: with nothing but these two it comes to the same as torch."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    # Large enough to see where it is added.
    norm: Any = SimpleNamespace(weight=torch.linspace(0.5, 1.5, 8), variance_epsilon=0.1)
    x = torch.linspace(-1.0, 2.0, 16).view(2, 8)
    try:
        made = kind.forward(norm, x)
        return torch.allclose(made, _fused(norm, x), rtol=1e-5, atol=1e-6)
    except Exception:
        # Whatever it lacked, it is another function.
        return False


def _normed(norm: Any, plain: Any, x: Tensor) -> Tensor:
    return _fused(norm, x) if x.is_cuda and x.dtype == norm.weight.dtype else plain(x)


def _fused(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
