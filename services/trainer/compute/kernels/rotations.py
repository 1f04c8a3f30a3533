"""Rotary positions in three kernels instead of five, and three more backward instead of ten.

transformers rotates by a function of each architecture's module, which its attention looks up by name. The
attention of one model is given another one under that name; the module keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotations(model: nn.Module) -> None:
    """Has the attention of a model whose rotation is the plain one compute it by `_Rotation` on CUDA."""
    made: dict[FunctionType, FunctionType] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        if forward not in made:
            rotate = forward.__globals__[NAME]
            made[forward] = _with(forward, partial(_rotated, rotate)) if is_plain(rotate) else forward
        module.forward = MethodType(made[forward], module)


def is_plain(rotate: Rotate) -> bool:
    """Whether a function computes x * cos + rotate_half(x) * sin, where rotate_half swaps the halves of a
    head and negates the first, and nothing for heads of which only a part is rotated; found by trying."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
    cos, sin = torch.randn(2, 1, 3, 8, generator=generator)
    try:
        made = rotate(q, k, cos, sin)
    except (RuntimeError, TypeError):
        return False
    expected = (_turned(x, cos[:, None], sin[:, None]) for x in (q, k))
    if not all(map(partial(torch.allclose, rtol=1e-5, atol=1e-6), made, expected)):
        return False
    try:
        rotate(q, k, cos[..., :4], sin[..., :4])
    except RuntimeError:
        return True
    return False


def _with(forward: FunctionType, rotate: Rotate) -> FunctionType:
    """The same function, for which NAME is another one."""
    made = FunctionType(
        forward.__code__,
        {**forward.__globals__, NAME: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _rotated(
    plain: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    if not (q.is_cuda and q.dtype == k.dtype == cos.dtype == sin.dtype):
        return plain(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return cast(Tensor, _Rotation.apply(q, cos, sin)), cast(Tensor, _Rotation.apply(k, cos, sin))


class _Rotation(torch.autograd.Function):
    """x [..., size] by cos and sin, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # Transposed, it has the sines of each half in the other one, and negated.
        return _turned(grads[0], cos, sin.roll(sin.shape[-1] // 2, -1), -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    made = x * cos
    (first, second), (own_first, own_second) = x.chunk(2, -1), made.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)
    own_first.addcmul_(second, sin_first, value=-sign)
    own_second.addcmul_(first, sin_second, value=sign)
    return made
