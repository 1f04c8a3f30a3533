"""A short causal convolution that reaches over no boundary of sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, sequences: int
) -> Tensor:
    """Of each feature of each token a weighted sum of it and the last few before it, as of F.conv1d over each
    sequence by itself. Differentiable.

    Between sequences there are as many zeros as the convolution reaches back, and it runs over all at once.

    Args:
        x: [1, features, T], of sequences one after the other.
        weight: [features, taps], the last of which is the token's own.
        bias: [features].
        positions: int64 [1, T], each token's place in its own sequence.
        sequences: how many there are.

    Returns:
        [1, features, T], in the element type of `weight`.
    """
    features, back = weight.shape[0], weight.shape[1] - 1
    tokens = x.shape[2]
    number = (positions[0] == 0).cumsum(0)
    places = torch.arange(tokens, device=x.device) + back * number
    # A token's features lie together, so they are put where they go before they are turned.
    spread = x.new_zeros(tokens + back * sequences, features, dtype=weight.dtype)
    spread = spread.index_put((places,), x[0].T.to(weight.dtype))
    made = F.conv1d(spread.T[None], weight[:, None], bias, groups=features)
    # What comes out stands where the first token went in that it is of.
    return made.index_select(2, places - back)
