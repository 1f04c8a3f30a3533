"""How the sequences of a flat batch are cut into chunks, for a recurrence that goes from chunk to chunk.

Invariant: a chunk is of one sequence. The first chunks of all sequences come first, then the second ones of
those that have any, and so on; those of a sequence stand at the same place among each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.compute.memory.transfer import on_device

LONGEST = 64
"""Tokens of a chunk, as the library's has; the sizes are this one and its halves."""
_TOKEN, _PAIR, _STATE = 1536, 5, 2 * 128 * 128
"""Elements that are computed of each token of a chunk, of each pair of them, and of the state that goes on
from one chunk to the next; of heads of 128, as models of these families have."""


@dataclass(frozen=True)
class Chunks:
    """How sequences are cut.

    Attributes:
        size: tokens of each chunk; the last one of each sequence is filled up.
        counts: how many sequences have a first chunk, a second one, and so on. Never more than before.
        places: int64 [T], where each token is among those of all chunks, filled up.
    """

    size: int
    counts: tuple[int, ...]
    places: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: str) -> Chunks:
        """Chunks of sequences of these lengths, which lie one after the other."""
        size = size_for(lengths)
        tokens = torch.tensor(lengths)
        numbers = (tokens + size - 1) // size
        # The one with most chunks is the first, so that those which go on are the first of each step.
        order = numbers.argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        counts = (numbers > torch.arange(int(numbers.max()))[:, None]).sum(1)
        begins = counts.cumsum(0) - counts
        own = torch.arange(int(tokens.sum())) - (tokens.cumsum(0) - tokens).repeat_interleave(tokens)
        chunk = begins[own // size] + rank.repeat_interleave(tokens)
        return cls(size, tuple(counts.tolist()), on_device(chunk * size + own % size, device))

    @property
    def tokens(self) -> int:
        """Of all chunks, filled up."""
        return self.size * sum(self.counts)

    def cut(self, values: Tensor) -> Tensor:
        """Values of tokens [T, heads, ...] as [chunks, heads, size, ...], zeros where they are filled up."""
        # Copied by index_copy they would be kept for the backward pass.
        filled = values.new_zeros(self.tokens, *values.shape[1:]).index_put((self.places,), values)
        # Each product with it would be of a copy of its own, and keep that.
        return filled.view(-1, self.size, *values.shape[1:]).transpose(1, 2).contiguous()

    def joined(self, values: Tensor) -> Tensor:
        """[chunks, heads, size, ...] as values of tokens [T, heads, ...]."""
        return values.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def size_for(lengths: Sequence[int]) -> int:
    """Tokens of a chunk, of which least is to be computed: long ones are filled up where sequences are short,
    and of short ones more states go on. Pure."""

    def elements(size: int) -> int:
        chunks = [-(-length // size) for length in lengths]
        tokens, going_on = size * sum(chunks), sum(chunks) - len(chunks)
        return tokens * (_TOKEN + _PAIR * size) + going_on * _STATE

    return min((LONGEST >> halved for halved in range(LONGEST.bit_length())), key=elements)
