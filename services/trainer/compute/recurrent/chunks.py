"""How the sequences of a flat batch are cut into chunks, for a recurrence that goes from chunk to chunk.

What sequences share is a piece that others continue: its state at its end is the one that these begin with.
So pieces are computed level by level, those of a level all at once.

Invariant: a chunk is of one piece. Of a level the first chunks of all pieces come first, then the second ones
of those that have any, and so on; those of a piece stand at the same place among each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.layout import Trees, parents

LONGEST = 64
"""Tokens of a chunk, as the library's has; the sizes are this one and its halves."""
_TOKEN, _PAIR, _STATE = 1536, 5, 2 * 128 * 128
"""Elements that are computed of each token of a chunk, of each pair of them, and of the state that goes on
from one chunk to the next; of heads of 128, as models of these families have."""


@dataclass(frozen=True)
class Chunks:
    """How pieces are cut, T tokens in all.

    Attributes:
        size: tokens of each chunk; the last one of each piece is filled up.
        counts: how many pieces have a first chunk, a second one, and so on. Never more than before.
        leave: how many of them leave a state after it, as it is their last one and others continue them. They
            come after those that have another chunk, and before all others.
        places: int64 [T], where each token is among those of all chunks, filled up.
    """

    size: int
    counts: tuple[int, ...]
    leave: tuple[int, ...]
    places: Tensor

    @property
    def tokens(self) -> int:
        """Of all chunks, filled up."""
        return self.size * sum(self.counts)

    @property
    def steps(self) -> Iterator[tuple[int, int]]:
        """Of each step how many pieces have another chunk after it, and how many leave a state."""
        return zip((*self.counts[1:], 0), self.leave, strict=True)

    @property
    def leaving(self) -> list[int]:
        """Which of the first chunks those begin that leave a state, in the order in which they do."""
        return [first + at for first, count in self.steps for at in range(count)]

    def cut(self, values: Tensor) -> Tensor:
        """Values of tokens [T, heads, ...] as [chunks, heads, size, ...], zeros where they are filled up."""
        # Copied by index_copy they would be kept for the backward pass.
        filled = values.new_zeros(self.tokens, *values.shape[1:]).index_put((self.places,), values)
        # Each product with it would be of a copy of its own, and keep that.
        return filled.view(-1, self.size, *values.shape[1:]).transpose(1, 2).contiguous()

    def joined(self, values: Tensor) -> Tensor:
        """[chunks, heads, size, ...] as values of tokens [T, heads, ...]."""
        return values.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True)
class Begins:
    """With which states pieces begin.

    Attributes:
        of: int64 [pieces], of each first chunk the state.
        groups: of each state which first chunks begin with it, int64.
        places: int64 [pieces], where each first chunk is among those of all groups, one after the other.
    """

    of: Tensor
    groups: tuple[Tensor, ...]
    places: Tensor

    @classmethod
    def with_(cls, of: Sequence[int], device: str) -> Begins:
        """Of each first chunk the state."""
        states = torch.tensor(of)
        groups = [(states == state).nonzero()[:, 0] for state in range(int(states.max()) + 1)]
        on = [on_device(each, device) for each in (states, torch.cat(groups).argsort(), *groups)]
        return cls(on[0], tuple(on[2:]), on[1])


@dataclass(frozen=True)
class Level:
    """Pieces that have equally many above them.

    Attributes:
        tokens: theirs in the flat batch, in order, int64; or all of them.
        chunks: how they are cut.
        begins: with which of the states that the level above leaves, in the order in which it does. None:
            with a state of zero, as those of the first level do.
    """

    tokens: Tensor | slice
    chunks: Chunks
    begins: Begins | None = None


@dataclass(frozen=True)
class Levels:
    """The pieces of a flat batch of T tokens, from those that continue none on.

    Attributes:
        places: int64 [T], where each token is among those of all levels, one after the other. None: there is
            one level.
    """

    levels: tuple[Level, ...]
    places: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], trees: Trees, device: str) -> Levels:
        """Those of pieces of these lengths, one after the other."""
        above, starts = parents(len(lengths), trees), list(accumulate(lengths, initial=0))
        depths: list[int] = []
        for parent in above:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        continued, left = set(above), list[int]()
        levels, tokens = [], []
        for depth in range(max(depths) + 1):
            own = [piece for piece, found in enumerate(depths) if found == depth]
            chunks, order = _cut([(lengths[piece], piece in continued) for piece in own], device)
            begins = Begins.with_([left.index(above[own[at]]) for at in order], device) if left else None
            tokens.append(torch.cat([torch.arange(starts[piece], starts[piece + 1]) for piece in own]))
            places = on_device(tokens[-1], device) if trees else slice(None)
            levels.append(Level(places, chunks, begins))
            left = [own[order[at]] for at in chunks.leaving]
        return cls(tuple(levels), on_device(torch.cat(tokens).argsort(), device) if trees else None)


def _cut(pieces: Sequence[tuple[int, bool]], device: str) -> tuple[Chunks, list[int]]:
    """Chunks of pieces, of which each has so many tokens and is continued or not; and the pieces in the order
    of their first chunks."""
    size = size_for([length for length, _ in pieces])
    tokens, continued = (torch.tensor(each) for each in zip(*pieces, strict=True))
    numbers = (tokens + size - 1) // size
    # The one with most chunks is the first, so that those which go on are the first of each step.
    order = (2 * numbers + continued).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    steps = torch.arange(int(numbers.max()))[:, None]
    counts = (numbers > steps).sum(1)
    leave = ((numbers == steps + 1) & continued).sum(1)
    begins = counts.cumsum(0) - counts
    own = torch.arange(int(tokens.sum())) - (tokens.cumsum(0) - tokens).repeat_interleave(tokens)
    chunk = begins[own // size] + rank.repeat_interleave(tokens)
    places = on_device(chunk * size + own % size, device)
    return Chunks(size, tuple(counts.tolist()), tuple(leave.tolist()), places), order.tolist()


def size_for(lengths: Sequence[int]) -> int:
    """Tokens of a chunk, of which least is to be computed: long ones are filled up where sequences are short,
    and of short ones more states go on. Pure."""

    def elements(size: int) -> int:
        chunks = [-(-length // size) for length in lengths]
        tokens, going_on = size * sum(chunks), sum(chunks) - len(chunks)
        return tokens * (_TOKEN + _PAIR * size) + going_on * _STATE

    return min((LONGEST >> halved for halved in range(LONGEST.bit_length())), key=elements)
