"""The gated delta rule over all sequences of a flat batch at once.

Of each head there is a matrix, which each token decays, reads and corrects (Gated DeltaNet, Yang et al. 2024,
arXiv 2412.06464, eq. 10):

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

with decays a_t = exp(g_t) and rates b_t. What happens within a chunk is a triangular system (DeltaNet, Yang
et al. 2024, arXiv 2406.06484, section 3; with decays section 3.3 of the former), which is solved for all
chunks at once; then it goes from chunk to chunk, all sequences together that have one more.

Of sequences that begin alike that is computed once, and its state at its end is the one that what follows in
each of them begins with.

Invariant: the state of each sequence begins as zero, and no token of another sequence is ever in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.trainer.compute.recurrent.chunks import Begins, Chunks, Levels, Part

_NORM_EPSILON = 1e-6


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, levels: Levels, *, normed: bool
) -> Tensor:
    """What the tokens of each sequence read. Differentiable, and computed in float32.

    Args:
        query: [T, heads, key size], as `key`.
        value: [T, heads, value size].
        decay: [T, heads], the logarithm of what each token leaves of the state: 0 or less.
        rate: [T, heads], how much of what its key stands for each token corrects.
        levels: the pieces of the flat batch, and how they are cut.
        normed: queries and keys are brought to length 1 first.

    Returns:
        [T, heads, value size], in the element type of `query`.
    """
    given, scale = query.dtype, query.shape[-1] ** -0.5
    query, key, value, decay, rate = (each.float() for each in (query, key, value, decay, rate))
    if normed:
        query, key = _normed(query), _normed(key)
    query = query * scale
    whole: Iterable[Tensor] = (query, key, value, decay, rate)
    if levels.order is not None:
        # Once for all parts: each would have a gradient of all tokens.
        whole = [each.index_select(0, levels.order) for each in whole]
    sizes = [part.tokens for level in levels.levels for part in level]
    tokens = zip(*(each.split(sizes) for each in whole), strict=True)
    read: list[Tensor] = []
    states: Tensor | None = None
    for level in levels.levels:
        left = []
        for part in level:
            begun = None if states is None or part.begins is None else _Begun(states, part.begins)
            made, after = _Steps.of(part, *next(tokens)).through(begun)
            read.append(made)
            left += [] if after is None else [after]
        states = torch.cat(left) if left else None
    return (read[0] if levels.places is None else torch.cat(read).index_select(0, levels.places)).to(given)


class _Found(Protocol):
    """The states that the chunks of a step find."""

    def read_by(self, queries: Tensor) -> Tensor:
        """[chunks, heads, size, value size], by queries [chunks, heads, size, key size]."""

    def first(self, count: int) -> Tensor:
        """Those of the first chunks: [count, heads, key size, value size]."""


class _Own(NamedTuple):
    """Each chunk its own: [chunks, heads, key size, value size]."""

    states: Tensor

    def read_by(self, queries: Tensor) -> Tensor:
        return queries @ self.states

    def first(self, count: int) -> Tensor:
        return self.states[:count]


class _Begun(NamedTuple):
    """Several the same, of which none gets a copy to read: it may be of more elements than what reads it."""

    states: Tensor
    begins: Begins

    def read_by(self, queries: Tensor) -> Tensor:
        # All at once: each group would have a gradient of all queries.
        groups = queries.index_select(0, self.begins.order).split(self.begins.counts)
        parts = []
        for asking, state in zip(groups, self.states, strict=True):
            if count := len(asking):
                made = asking.transpose(0, 1).flatten(1, 2) @ state
                parts.append(made.unflatten(1, (count, -1)).transpose(0, 1))
        return torch.cat(parts).index_select(0, self.begins.places)

    def first(self, count: int) -> Tensor:
        return self.states.index_select(0, self.begins.of[:count])


@dataclass(frozen=True)
class _Steps:
    """What the chunks of each step of a part are computed from, [chunks, heads, ...] of each step.

    Attributes:
        scores: of each token by each before it in its chunk, and itself.
        written: what each corrects its key by, if the chunk finds a state of zero.
        read: what each corrects less by, of what the state is. Of none where all find a state of zero, as
            `query`.
        query: each token's, for the state that the chunk finds.
        key: each token's, for the state that the chunk leaves, transposed.
        decay: [..., 1, 1], of the state that a chunk finds, what it leaves.
    """

    chunks: Chunks
    scores: Sequence[Tensor]
    written: Sequence[Tensor]
    read: Sequence[Tensor]
    query: Sequence[Tensor]
    key: Sequence[Tensor]
    decay: Sequence[Tensor]

    @classmethod
    def of(cls, part: Part, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> _Steps:
        """Of a part's tokens: queries, keys and so on, as they are used."""
        chunks = part.chunks
        # [chunks, heads, size, ...] from here on; what fills up a chunk has keys, values and rates of zero.
        query, key, value = (chunks.cut(each) for each in (query, key, value))
        decayed = chunks.cut(decay).cumsum(-1)
        rate = chunks.cut(rate)[..., None]
        later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=query.device).triu(1)
        # Masked before, as exp of what comes later would overflow.
        between = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(later, -torch.inf).exp()
        since, until = decayed.exp()[..., None], (decayed[..., -1:] - decayed).exp()[..., None]
        weighted = key * rate
        system = weighted @ key.mT * between
        scores = query @ key.mT * between
        written = _solved(system, value * rate)
        # The first chunks of the first level need not read a state of zero.
        zero = chunks.counts[0] if part.begins is None else 0
        reading = chunks.counts[0] - zero, *chunks.counts[1:]
        return cls(
            chunks,
            scores=scores.split(chunks.counts),
            written=written.split(chunks.counts),
            read=_solved(system[zero:], (weighted * since)[zero:]).split(reading),
            query=(query * since)[zero:].split(reading),
            key=(key * until).mT.split(chunks.counts),
            decay=since[..., -1:, :].split(chunks.counts),
        )

    def through(self, found: _Found | None) -> tuple[Tensor, Tensor | None]:
        """What the tokens read, [tokens, heads, value size], and the states that the part leaves, if any.

        Args:
            found: by the first chunks; None: states of zero.
        """
        read, left = [], []
        for step, (going, leaving) in enumerate(self.chunks.steps):
            written = self.written[step]
            if found is None:
                read.append(self.scores[step] @ written)
            else:
                written = written - found.read_by(self.read[step])
                read.append(found.read_by(self.query[step]) + self.scores[step] @ written)
            # Those that have another chunk are the first, then those that leave a state.
            if count := going + leaving:
                states = self.key[step][:count] @ written[:count]
                if found is not None:
                    states = found.first(count) * self.decay[step][:count] + states
                found = _Own(states[:going])
                left.append(states[going:])
        return self.chunks.joined(torch.cat(read)), torch.cat(left) if any(self.chunks.leave) else None


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPSILON)


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """Of (1 + what is strictly below the diagonal of `system`) x = right."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
