"""The gated delta rule over all sequences of a flat batch at once.

Of each head there is a matrix, which each token decays, reads and corrects (Gated DeltaNet, Yang et al. 2024,
arXiv 2412.06464, eq. 10):

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

with decays a_t = exp(g_t) and rates b_t. What happens within a chunk is a triangular system (DeltaNet, Yang
et al. 2024, arXiv 2406.06484, section 3; with decays section 3.3 of the former), which is solved for all
chunks at once; then it goes from chunk to chunk, all sequences together that have one more.

Invariant: the state of each sequence begins as zero, and no other sequence's is ever in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.compute.recurrent.chunks import Chunks

_NORM_EPSILON = 1e-6


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, chunks: Chunks, *, normed: bool
) -> Tensor:
    """What the tokens of each sequence read. Differentiable, and computed in float32.

    Args:
        query: [T, heads, key size], as `key`.
        value: [T, heads, value size].
        decay: [T, heads], the logarithm of what each token leaves of the state: 0 or less.
        rate: [T, heads], how much of what its key stands for each token corrects.
        chunks: how the tokens are cut.
        normed: queries and keys are brought to length 1 first.

    Returns:
        [T, heads, value size], in the element type of `query`.
    """
    given, size, scale = query.dtype, chunks.size, query.shape[-1] ** -0.5
    query, key, value, decay, rate = (each.float() for each in (query, key, value, decay, rate))
    if normed:
        query, key = _normed(query), _normed(key)
    query = query * scale
    # [chunks, heads, size, ...] from here on; what fills up a chunk has keys, values and rates of zero.
    query, key, value = (chunks.cut(each) for each in (query, key, value))
    decayed = chunks.cut(decay).cumsum(-1)
    rate = chunks.cut(rate)[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    # Masked before, as exp of what comes later would overflow.
    between = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(later, -torch.inf).exp()
    since, until = decayed.exp()[..., None], (decayed[..., -1:] - decayed).exp()[..., None]
    weighted = key * rate
    system = weighted @ key.mT * between
    scores = query @ key.mT * between
    written = _solved(system, value * rate)
    # The first chunks find a state of zero, which they need not read.
    first = chunks.counts[0]
    steps = _Steps(
        scores=scores.split(chunks.counts),
        written=written.split(chunks.counts),
        read=_solved(system[first:], (weighted * since)[first:]).split(chunks.counts[1:]),
        query=(query * since)[first:].split(chunks.counts[1:]),
        key=(key * until).mT.split(chunks.counts),
        left=since[..., -1:, :].split(chunks.counts),
    )
    return chunks.joined(torch.cat(list(steps.outputs()))).to(given)


@dataclass(frozen=True)
class _Steps:
    """What the chunks of each step are computed from, [chunks, heads, ...] of each step.

    Attributes:
        scores: of each token by each before it in its chunk, and itself.
        written: what each corrects its key by, if the chunk finds a state of zero.
        read: what each corrects less by, of what the state is. Not of the first step, as `query`.
        query: each token's, for the state that the chunk finds.
        key: each token's, for the state that the chunk leaves, transposed.
        left: [..., 1, 1], of the state that a chunk finds, what it leaves.
    """

    scores: Sequence[Tensor]
    written: Sequence[Tensor]
    read: Sequence[Tensor]
    query: Sequence[Tensor]
    key: Sequence[Tensor]
    left: Sequence[Tensor]

    def outputs(self) -> Iterator[Tensor]:
        """What the tokens of each step's chunks read: [chunks, heads, size, value size]."""
        yield self.scores[0] @ self.written[0]
        state, written = None, self.written[0]
        for step in range(1, len(self.written)):
            # Those that have another chunk are the first of the step before.
            count, last = len(self.written[step]), step - 1
            added = self.key[last][:count] @ written[:count]
            state = added if state is None else state[:count] * self.left[last][:count] + added
            written = self.written[step] - self.read[last] @ state
            yield self.query[last] @ state + self.scores[step] @ written


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPSILON)


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """Of (1 + what is strictly below the diagonal of `system`) x = right."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
