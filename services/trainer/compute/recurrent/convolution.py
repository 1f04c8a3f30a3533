"""A short causal convolution that reaches over no boundary of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.layout import Place, Trees, tails, tokens_of


@dataclass(frozen=True)
class Reach:
    """Pieces of a flat batch of T tokens with room before each for those that its first token reaches back
    to: what it continues, and zeros where that is less.

    Attributes:
        back: tokens before each.
        size: tokens and room, of all pieces.
        places: int64 [T], each token's.
        tails: int64, the tokens that stand again before a piece which continues theirs; None: there are none.
        before: int64, where they do.
    """

    back: int
    size: int
    places: Tensor
    tails: Tensor | None = None
    before: Tensor | None = None

    @classmethod
    def of(cls, back: int, lengths: Sequence[int], trees: Trees, device: str) -> Reach:
        """That of pieces of these lengths, one after the other."""
        sizes = torch.tensor(lengths)
        rooms = back * (1 + torch.arange(len(lengths)))
        places = on_device(torch.arange(int(sizes.sum())) + rooms.repeat_interleave(sizes), device)
        size = int(sizes.sum() + rooms[-1])
        if not trees:
            return cls(back, size, places)
        begins = (sizes.cumsum(0) - sizes + rooms).tolist()
        again, before = list[Place](), list[Place]()
        for begin, runs in zip(begins, tails(back, lengths, trees), strict=True):
            again += runs
            before.append((begin - sum(stop - start for start, stop in runs), begin))
        return cls(back, size, places, *(on_device(tokens_of(each), device) for each in (again, before)))


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, reach: Reach) -> Tensor:
    """Of each feature of each token a weighted sum of it and the last few before it, as of F.conv1d over each
    sequence by itself. Differentiable.

    Args:
        x: [1, features, T], of pieces one after the other.
        weight: [features, taps], the last of which is the token's own.
        bias: [features].
        reach: of as many tokens as there are taps before the last.

    Returns:
        [1, features, T], in the element type of `weight`.
    """
    # A token's features lie together, so they are put where they go before they are turned.
    tokens = x[0].T.to(weight.dtype)
    spread = tokens.new_zeros(reach.size, weight.shape[0]).index_put((reach.places,), tokens)
    if reach.tails is not None and reach.before is not None:
        spread = spread.index_put((reach.before,), tokens.index_select(0, reach.tails))
    # It runs over all at once.
    made = F.conv1d(spread.T[None], weight[:, None], bias, groups=weight.shape[0])
    # What comes out stands where the first token went in that it is of.
    return made.index_select(2, reach.places - reach.back)
