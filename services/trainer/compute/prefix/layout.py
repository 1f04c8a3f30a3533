"""How the pieces of sequences lie in a flat batch.

Invariant: a piece comes before all that continue it, and what continues it follows without a gap. So who sees
a piece is one run of tokens, and a group's tokens are one run too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.order.prefixes import PrefixTree


@dataclass(frozen=True)
class TreeRun:
    """Tokens of a flat batch that are one tree.

    Attributes:
        lengths: tokens of each of its pieces.
        seen: (start, stop, end) of each piece that others continue, counted from the tree's first token: the
            tokens from `stop` to `end` see those from `start` to `stop`.
    """

    lengths: tuple[int, ...]
    seen: tuple[tuple[int, int, int], ...]

    @property
    def tokens(self) -> int:
        """Of all pieces."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Layout:
    """A flat batch of T tokens.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], each token's place in its sequences.
        lengths: tokens of each piece.
        trees: where a tree of several pieces starts, as a number of pieces, and what it is; in order.
        places: of each sequence where its tokens are, int64.
        groups: tokens of each group.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    trees: tuple[tuple[int, TreeRun], ...]
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
        trees += [(len(tokens) - len(tree.pieces) + first, run) for first, run in _runs(tree, offsets)]
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


def _runs(tree: PrefixTree, offsets: Sequence[int]) -> list[tuple[int, TreeRun]]:
    """The trees of more than one piece, and with which piece each starts."""
    ends = list(offsets[1:])
    for number in range(len(tree.pieces) - 1, -1, -1):
        parent = tree.pieces[number].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
    roots = [number for number, piece in enumerate(tree.pieces) if piece.parent < 0]
    runs = []
    for first, after in zip(roots, [*roots[1:], len(tree.pieces)], strict=True):
        if after - first == 1:
            continue
        begin = offsets[first]
        seen = tuple(
            (offsets[number] - begin, offsets[number + 1] - begin, ends[number] - begin)
            for number in range(first, after)
            if ends[number] > offsets[number + 1]
        )
        lengths = tuple(piece.tokens for piece in tree.pieces[first:after])
        runs.append((first, TreeRun(lengths, seen)))
    return runs


def _places(tree: PrefixTree, last: int, offsets: Sequence[int], base: int) -> np.ndarray:
    parts = []
    while last >= 0:
        parts.append(np.arange(base + offsets[last], base + offsets[last + 1]))
        last = tree.pieces[last].parent
    return np.concatenate(parts[::-1])
