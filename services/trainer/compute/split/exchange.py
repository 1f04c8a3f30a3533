"""DeepSpeed's Ulysses: around attention, ranks exchange a part of the sequence for a part of the heads.

Before attention each rank has all heads of its own tokens, within it some heads of all tokens, after it what
it had before; and so around the rule of linear attention, whose short convolution needs a few tokens of the
rank before. That is `deepspeed.sequence.layer.DistributedAttention`, which does not care what attention is.
Its newer sibling for transformers, `UlyssesSPAttentionHF`, is not used: it takes keys and values of one size
in all layers, exchanges the positions in every layer, and puts itself in place of the model's attention for
sequences that one rank computes too.

Invariant: every function here is a collective, forward and backward; all ranks come to it in the same order,
with equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_SOME = 8
"""Elements of a head that are exchanged to try it."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys and values, each [1, heads, T, head size]: [1, T, heads, head size of the values]."""


class Exchange:
    """What the ranks of the world do together for a sequence. Made once, by all ranks, after the world has
    met: they exchange something at once."""

    def __init__(self, ranks: int, device: str) -> None:
        # Imports and compiles much of DeepSpeed, and needs to know the device.
        from deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll

        group = dist.group.WORLD
        self._distributed = DistributedAttention(_within, group, scatter_idx=2, gather_idx=1)
        self._exchanged = partial(_SeqAllToAll.apply, group)
        # NCCL connects each rank to each other one at the first exchange: what that takes of the device is
        # gone before anybody asks what is free there, and not when a pass has left nothing.
        some = torch.zeros(1, ranks, 1, _SOME, device=device)
        self.attend(lambda query, key, value: value.transpose(1, 2), some, some, some)

    def attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over the tokens of all ranks, one rank's after the other's.

        Args:
            attention: what computes some heads of all tokens.
            query: [1, heads, own tokens, head size]; `key` and `value` may have fewer heads, `value` another
                size.

        Returns:
            Of the own tokens all heads, [1, own tokens, heads, head size of `value`].
        """
        given = (each.transpose(1, 2) for each in (query, key, value))
        output: Tensor = self._distributed(*given, 0, None, attention)
        return output

    def by_heads(self, own: Tensor) -> Tensor:
        """Some heads of the tokens of all ranks, [1, tokens, heads / ranks, size], for all heads of the own
        ones, [1, own tokens, heads, size]."""
        found: Tensor = self._exchanged(own, 2, 1, 0)
        return found

    def by_tokens(self, part: Tensor) -> Tensor:
        """What `by_heads` was given, of what it gives."""
        found: Tensor = self._exchanged(part, 1, 2, 0)
        return found


def _within(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    return attention(*(each.transpose(1, 2) for each in (query, key, value)))


def before(own: Tensor, back: int) -> Tensor:
    """The last tokens before a rank's own ones, zeros where the sequence begins. Differentiable.

    Args:
        own: [1, features, own tokens].
        back: how many, at least 1.

    Returns:
        [1, features, back].
    """
    found: Tensor = _Before.apply(own, back)
    return found


class _Before(torch.autograd.Function):
    """Each rank tells all what its last tokens are, and what it makes of those of the ranks before."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, back: int) -> Tensor:
        ctx.tokens, tail = own.shape[-1], own[..., -back:].contiguous()
        everyone = [torch.empty_like(tail) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tail)
        end = dist.get_rank() * tail.shape[-1]
        ctx.known = min(back, end)
        return F.pad(torch.cat(everyone, dim=-1)[..., end - ctx.known : end], (back - ctx.known, 0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        back = gradient.shape[-1]
        tail = min(back, ctx.tokens)
        everyone = gradient.new_zeros(*gradient.shape[:-1], dist.get_world_size() * tail)
        end = dist.get_rank() * tail
        everyone[..., end - ctx.known : end] = gradient[..., back - ctx.known :]
        dist.all_reduce(everyone)
        return F.pad(everyone[..., end : end + tail], (ctx.tokens - tail, 0)), None


def joined(own: Tensor, counts: Sequence[int]) -> Tensor:
    """The numbers of all ranks, one rank's after the other's, differentiable in this rank's own.

    What every rank computes from all of them has, on each, the part of the gradient that is the rank's; so
    nothing is exchanged on the way back.

    Args:
        own: [n], as many as `counts` says of this rank.
        counts: of each rank, known to all.

    Returns:
        [sum of counts].
    """
    if not any(counts):
        return own
    given = own.new_zeros(max(counts))
    given[: own.numel()] = own.detach()
    everyone = [torch.empty_like(given) for _ in counts]
    dist.all_gather(everyone, given)
    parts = [part[:count] for part, count in zip(everyone, counts, strict=True)]
    parts[dist.get_rank()] = own
    return torch.cat(parts)
