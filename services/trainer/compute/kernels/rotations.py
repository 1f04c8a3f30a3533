"""Rotary positions in three kernels instead of five, and three more backward instead of ten.

transformers rotates by a function of each architecture's module, which its attention looks up by name. The
attention of one model is given another one under that name; the module keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotations(model: nn.Module) -> None:
    """Has the attention of a model whose rotation is the plain one compute it by `_Rotation` on CUDA."""
    made: dict[FunctionType, FunctionType | None] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType):
            continue
        if forward not in made:
            rotate = forward.__globals__.get(NAME) if NAME in forward.__code__.co_names else None
            plain = rotate if rotate is not None and is_plain(rotate) else None
            made[forward] = None if plain is None else calling(forward, {NAME: partial(_rotated, plain)})
        own = made[forward]
        if own is not None:
            module.forward = MethodType(own, module)


def is_plain(rotate: Rotate) -> bool:
    """Whether a function computes x * cos + rotate_half(x) * sin in the precision of what it is given, where
    rotate_half swaps the halves of a head and negates the first, and nothing for heads of which only a part
    is rotated; found by trying, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1)]
    turns = torch.randn(2, 1, 3, 8, generator=generator)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            q, k, cos, sin = (each.to(dtype) for each in (*drawn, *turns))
            if not all(map(torch.equal, rotate(q, k, cos, sin), (_written_out(x, cos, sin) for x in (q, k)))):
                return False
    except Exception:
        # Whatever it lacked, it is another function.
        return False
    try:
        rotate(q, k, cos[..., :4], sin[..., :4])
    except RuntimeError:
        return True
    return False


def _written_out(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def calling(forward: FunctionType, others: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """The same function, for which these names of its module are others."""
    made = FunctionType(
        forward.__code__,
        {**forward.__globals__, **others},
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
        return _turned(x, cos, sin.chunk(2, -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # Transposed, it has the sines of each half in the other one, and negated.
        return _turned(grads[0], cos, sin.chunk(2, -1)[::-1], -1), None, None


def _turned(x: Tensor, cos: Tensor, sines: Sequence[Tensor], sign: int = 1) -> Tensor:
    made = x * cos
    (first, second), (own_first, own_second) = x.chunk(2, -1), made.chunk(2, -1)
    own_first.addcmul_(second, sines[0], value=-sign)
    own_second.addcmul_(first, sines[1], value=sign)
    return made
