"""How the sequences of a flat batch are cut into chunks, for a recurrence that goes from chunk to chunk.

What sequences share is a piece that others continue: its state at its end is the one that these begin with.
So pieces are computed level by level, those of a level that are cut alike all at once.

Invariant: a chunk is of one piece. The first chunks of all pieces come first, then the second ones of those
that have any, and so on; those of a piece stand at the same place among each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from services.trainer.compute.memory.transfer import on_device
from services.trainer.compute.prefix.layout import Trees, parents, tokens_of

LONGEST = 64
"""Tokens of a chunk, as the library's has; the sizes are this one and its halves."""
_TOKEN, _PAIR, _STATE = 1536, 5, 2 * 128 * 128
"""Elements that are computed of each token of a chunk, of each pair of them, and of the state that goes on
from one chunk to the next; of heads of 128, as models of these families have."""
_SHORT, _WORTH = 16, 0.8
"""Tokens of a short piece; and of what is computed of all, what short and long ones apart must come to."""


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
        order: int64 [pieces], the first chunks, those that begin with one state after those with another.
        counts: how many begin with each.
        places: int64 [pieces], where each first chunk is in that order.
    """

    of: Tensor
    order: Tensor
    counts: tuple[int, ...]
    places: Tensor

    @classmethod
    def grouped(cls, of: Sequence[int], states: int, device: str) -> Begins:
        """Those of first chunks that each begin with one of so many states."""
        found = torch.tensor(of)
        order = found.argsort(stable=True)
        on = [on_device(each, device) for each in (found, order, order.argsort())]
        return cls(on[0], on[1], tuple(torch.bincount(found, minlength=states).tolist()), on[2])


@dataclass(frozen=True)
class Part:
    """Pieces that have equally many above them, and are cut into chunks of one size.

    Attributes:
        tokens: of all of them.
        begins: with which of the states that the level above leaves; each of its parts leaves them in the
            order in which pieces end. None: with a state of zero, as on the first level.
    """

    tokens: int
    chunks: Chunks
    begins: Begins | None = None


@dataclass(frozen=True)
class Levels:
    """The pieces of a flat batch of T tokens, from those that continue none on.

    Attributes:
        order: int64 [T], the tokens of all parts, one part after the other; None: as they come.
        places: int64 [T], where each token is in that order.
    """

    levels: tuple[tuple[Part, ...], ...]
    order: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], trees: Trees, device: str) -> Levels:
        """Those of pieces of these lengths, one after the other."""
        above, places = parents(len(lengths), trees), list(pairwise(accumulate(lengths, initial=0)))
        depths: list[int] = []
        for parent in above:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        by_depth: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for piece, depth in enumerate(depths):
            by_depth[depth].append(piece)
        continued, left, order = set(above), dict[int, int](), list[int]()
        levels = []
        for own in by_depth:
            parts, leaving = [], dict[int, int]()
            for pieces in alike(own, lengths):
                chunks, first = _cut([(lengths[piece], piece in continued) for piece in pieces], device)
                of = [left[above[pieces[at]]] for at in first] if left else []
                begins = Begins.grouped(of, len(left), device) if left else None
                parts.append(Part(sum(lengths[piece] for piece in pieces), chunks, begins))
                order += pieces
                for at in chunks.leaving:
                    leaving[pieces[first[at]]] = len(leaving)
            levels.append(tuple(parts))
            left = leaving
        if sum(len(level) for level in levels) == 1:
            return cls(tuple(levels))
        tokens = tokens_of([places[piece] for piece in order])
        return cls(tuple(levels), on_device(tokens, device), on_device(tokens.argsort(), device))


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
    counts = numbers.bincount(minlength=1).flip(0).cumsum(0).flip(0)[1:]
    leave = numbers[continued].bincount(minlength=len(counts) + 1)[1:]
    begins = counts.cumsum(0) - counts
    own = torch.arange(int(tokens.sum())) - (tokens.cumsum(0) - tokens).repeat_interleave(tokens)
    chunk = begins[own // size] + rank.repeat_interleave(tokens)
    places = on_device(chunk * size + own % size, device)
    return Chunks(size, tuple(counts.tolist()), tuple(leave.tolist()), places), order.tolist()


def alike(pieces: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Pieces that are cut into chunks of one size: short ones apart from long ones, where that is worth it.
    One size for both would fill up the short ones, or have a state go on after every few tokens of the long
    ones. Pure."""
    short = [piece for piece in pieces if lengths[piece] <= _SHORT]
    long = [piece for piece in pieces if lengths[piece] > _SHORT]
    if not short or not long:
        return [list(pieces)]
    apart = sum(_least([lengths[piece] for piece in each])[0] for each in (short, long))
    together = _least([lengths[piece] for piece in pieces])[0]
    return [short, long] if apart < _WORTH * together else [list(pieces)]


def size_for(lengths: Sequence[int]) -> int:
    """Tokens of a chunk, of which least is to be computed: long ones are filled up where sequences are short,
    and of short ones more states go on. Pure."""
    return _least(lengths)[1]


def _least(lengths: Sequence[int]) -> tuple[int, int]:
    """Elements that are computed, and the size of a chunk with which these are the fewest."""
    tokens = np.asarray(lengths)

    def elements(size: int) -> int:
        chunks = int((-(-tokens // size)).sum())
        return size * chunks * (_TOKEN + _PAIR * size) + (chunks - len(tokens)) * _STATE

    return min((elements(LONGEST >> halved), LONGEST >> halved) for halved in range(LONGEST.bit_length()))
