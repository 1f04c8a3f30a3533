"""How the pieces of sequences lie in a flat batch.

Invariant: a piece comes before all that continue it, and what continues it follows without a gap. So who sees
a piece is one run of tokens, and a group's tokens are one run too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from services.trainer.order.prefixes import PrefixTree


@dataclass(frozen=True)
class TreeRun:
    """Tokens of a flat batch that are one tree.

    Attributes:
        lengths: tokens of each of its pieces.
        above: of each piece the one that it continues; -1: none, as of the first.
    """

    lengths: tuple[int, ...]
    above: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of all pieces."""
        return sum(self.lengths)

    @cached_property
    def seen(self) -> tuple[tuple[int, int, int], ...]:
        """(start, stop, end) of each piece that others continue, counted from the tree's first token: the
        tokens from `stop` to `end` see those from `start` to `stop`."""
        starts = list(accumulate(self.lengths, initial=0))
        ends = starts[1:]
        for piece in range(len(ends) - 1, -1, -1):
            if self.above[piece] >= 0:
                ends[self.above[piece]] = max(ends[self.above[piece]], ends[piece])
        places = zip(starts[:-1], starts[1:], ends, strict=True)
        return tuple((start, stop, end) for start, stop, end in places if end > stop)


Place = tuple[int, int]
"""The first token of a run, and the one after its last."""
Trees = Sequence[tuple[int, TreeRun]]
"""Of trees of several pieces in a flat batch where each starts, as a number of pieces, and what it is."""


def parents(pieces: int, trees: Trees) -> list[int]:
    """Of each piece of a flat batch the one that it continues; -1: none."""
    found = [-1] * pieces
    for first, tree in trees:
        found[first : first + len(tree.above)] = [above + first if above >= 0 else -1 for above in tree.above]
    return found


def tokens_of(runs: Sequence[Place]) -> Tensor:
    """Those of runs, one after the other: int64."""
    starts, stops = torch.tensor(runs, dtype=torch.int64).view(-1, 2).T
    sizes = stops - starts
    first = starts - (sizes.cumsum(0) - sizes)
    return torch.arange(int(sizes.sum())) + first.repeat_interleave(sizes)


def tails(tokens: int, lengths: Sequence[int], trees: Trees) -> list[list[Place]]:
    """Of each piece of a flat batch the last tokens above it, so many or all, in their order."""
    above, starts = parents(len(lengths), trees), list(accumulate(lengths, initial=0))
    found = []
    for piece in above:
        left, tail = tokens, list[Place]()
        while piece >= 0 and left > 0:
            start, stop = max(starts[piece], starts[piece + 1] - left), starts[piece + 1]
            # A run goes on in the one below it.
            tail = (
                [*tail[:-1], (start, tail[-1][1])] if tail and tail[-1][0] == stop else [*tail, (start, stop)]
            )
            left -= lengths[piece]
            piece = above[piece]
        found.append(tail[::-1])
    return found


@dataclass(frozen=True)
class Layout:
    """A flat batch of T tokens.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], each token's place in its sequences.
        lengths: tokens of each piece.
        trees: those of several pieces.
        places: of each sequence where its tokens are, int64.
        groups: tokens of each group.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    trees: Trees
    places: tuple[np.ndarray, ...]
    groups: tuple[int, ...]


def lay_out(groups: Sequence[tuple[Sequence[bytes], PrefixTree]]) -> Layout:
    """The flat batch of groups of sequences, at least one, one group after the other.

    Args:
        groups: sequences, int32 little-endian, and the tree of each group's.
    """
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    trees: list[tuple[int, TreeRun]] = []
    places: list[np.ndarray] = []
    sizes: list[int] = []
    base = 0
    for sequences, tree in groups:
        offsets = [0]
        for piece in tree.pieces:
            read = np.frombuffer(sequences[piece.sequence], "<i4", piece.tokens, 4 * piece.start)
            tokens.append(read.astype(np.int64))
            positions.append(np.arange(piece.start, piece.stop))
            offsets.append(offsets[-1] + piece.tokens)
        trees += [(len(tokens) - len(tree.pieces) + first, run) for first, run in _runs(tree)]
        places += [_places(tree, last, offsets, base) for last in tree.last]
        sizes.append(offsets[-1])
        base += offsets[-1]
    return Layout(
        np.concatenate(tokens),
        np.concatenate(positions),
        tuple(len(part) for part in tokens),
        tuple(trees),
        tuple(places),
        tuple(sizes),
    )


def _runs(tree: PrefixTree) -> Iterator[tuple[int, TreeRun]]:
    """The trees of more than one piece, and with which piece each starts."""
    roots = [number for number, piece in enumerate(tree.pieces) if piece.parent < 0]
    for first, after in pairwise([*roots, len(tree.pieces)]):
        if after - first > 1:
            pieces = tree.pieces[first:after]
            above = (-1, *(piece.parent - first for piece in pieces[1:]))
            yield first, TreeRun(tuple(piece.tokens for piece in pieces), above)


def _places(tree: PrefixTree, last: int, offsets: Sequence[int], base: int) -> np.ndarray:
    parts = []
    while last >= 0:
        parts.append(np.arange(base + offsets[last], base + offsets[last + 1]))
        last = tree.pieces[last].parent
    return np.concatenate(parts[::-1])
