"""DeepSpeed's Ulysses: around attention, ranks exchange a part of the sequence for a part of the heads.

Before attention each rank has all heads of its own tokens, within it some heads of all tokens, after it what
it had before. That is `deepspeed.sequence.layer.DistributedAttention`, which does not care what attention is.
Its newer sibling for transformers, `UlyssesSPAttentionHF`, is not used: it takes keys and values of one size
in all layers, exchanges the positions in every layer, and puts itself in place of the model's attention for
sequences that one rank computes too.

Invariant: every function here is a collective, forward and backward; all ranks come to it in the same order,
with equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
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
        from deepspeed.sequence.layer import DistributedAttention

        group = dist.group.WORLD
        self._distributed = DistributedAttention(_within, group, scatter_idx=2, gather_idx=1)
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


def _within(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    return attention(*(each.transpose(1, 2) for each in (query, key, value)))


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
