"""Which tokens of several sequences are alike from the start, and so need to be computed once. Pure.

Invariant: two sequences share the whole blocks of `BLOCK` tokens with which both begin, whatever other
sequences there are. So what some of them come to does not depend on what is known of the rest: a unit of an
operation is the same tree wherever it is cut out. Whether sequences that begin with the same block are
computed as a tree follows from the tokens of those alone that are computed together (`computed_tokens`).

Cost: sequences are sorted as bytes, and each is compared with one neighbour. Whatever they are, 10,000 of
one prefix too, that reads them as often as the logarithm of their number says, at the speed of memcmp, and
makes fewer than two pieces a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 16
"""Tokens. A piece of less would cost more to keep apart than to compute again."""

WORTH = 4
"""A tree is computed where it saves at least one of so many tokens. Attention over a tree takes longer than
over sequences, on a CPU several times, which a header that a whole data set has does not make up for."""

_TOKEN_BYTES = 4
_WORD = 8


@dataclass(frozen=True)
class Piece:
    """Tokens that are computed once.

    Attributes:
        parent: the piece that ends where this one starts, by number; -1: it begins its sequences.
        start, stop: its positions.
        sequence: the first sequence that has it.
    """

    parent: int
    start: int
    stop: int
    sequence: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as pieces.

    Attributes:
        pieces: after each come all those below it; those of one parent by their first sequence.
        last: of each sequence the piece that it ends with. It has that one and those above it.
    """

    pieces: tuple[Piece, ...]
    last: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """All that are to be computed."""
        return sum(piece.tokens for piece in self.pieces)

    def roots(self) -> list[int]:
        """Of each piece the one above it that begins its sequences, by number."""
        roots: list[int] = []
        for number, piece in enumerate(self.pieces):
            roots.append(number if piece.parent < 0 else roots[piece.parent])
        return roots


def computed_tokens(sent: int, tree: int) -> int:
    """Tokens that are computed of sequences that begin alike.

    Args:
        sent: tokens of the sequences, each with all of its own.
        tree: tokens of their tree.
    """
    return tree if (sent - tree) * WORTH >= sent else sent


def shared_tree(sequences: Sequence[bytes], block: int = BLOCK) -> PrefixTree:
    """Sequences as they are computed: the tree of those that begin alike where that is worth it, else each as
    a piece of its own. See `prefix_tree`."""
    tree = prefix_tree(sequences, block)
    roots = tree.roots()
    sent, kept = [0] * len(roots), [0] * len(roots)
    for was in tree.last:
        sent[roots[was]] += tree.pieces[was].stop
    for root, piece in zip(roots, tree.pieces, strict=True):
        kept[root] += piece.tokens
    apart = {root for root in roots if kept[root] < sent[root] == computed_tokens(sent[root], kept[root])}
    if not apart:
        return tree
    starts: list[int] = []
    stops: list[int] = []
    parents: list[int] = []
    last: list[int] = []
    places = {-1: -1}
    for number, piece in enumerate(tree.pieces):
        if roots[number] not in apart:
            places[number] = len(starts)
            starts.append(piece.start)
            stops.append(piece.stop)
            parents.append(places[piece.parent])
    for was in tree.last:
        if roots[was] in apart:
            last.append(len(starts))
            starts.append(0)
            stops.append(tree.pieces[was].stop)
            parents.append(-1)
        else:
            last.append(places[was])
    return _in_order(starts, stops, parents, last)


def prefix_tree(sequences: Sequence[bytes], block: int = BLOCK) -> PrefixTree:
    """The tree of sequences that share what they begin with.

    Args:
        sequences: int32 little-endian tokens, at least one each.
        block: tokens; prefixes are shared in multiples of it.
    """
    starts: list[int] = []
    stops: list[int] = []
    parents: list[int] = []
    last = [0] * len(sequences)
    path: list[int] = []
    previous = b""

    def add(start: int, stop: int, parent: int) -> int:
        starts.append(start)
        stops.append(stop)
        parents.append(parent)
        return len(starts) - 1

    for number in sorted(range(len(sequences)), key=sequences.__getitem__):
        sequence = sequences[number]
        shared = _alike(previous, sequence, block)
        # Of the path to the previous sequence what both have stays.
        while path and starts[path[-1]] >= shared:
            path.pop()
        if path and stops[path[-1]] > shared:
            below = path.pop()
            path.append(add(starts[below], shared, parents[below]))
            starts[below], parents[below] = shared, path[-1]
        length = len(sequence) // _TOKEN_BYTES
        if length > shared:
            path.append(add(shared, length, path[-1] if path else -1))
        last[number] = path[-1]
        previous = sequence
    return _in_order(starts, stops, parents, last)


def unshared(sequences: Sequence[bytes]) -> PrefixTree:
    """Each sequence as a piece of its own."""
    pieces = [Piece(-1, 0, len(each) // _TOKEN_BYTES, number) for number, each in enumerate(sequences)]
    return PrefixTree(tuple(pieces), tuple(range(len(pieces))))


def told_apart(sequences: Sequence[bytes], beside: Sequence[bytes]) -> list[bytes]:
    """Sequences that begin alike only as far as what belongs to their tokens is alike too.

    Args:
        sequences: int32 little-endian tokens, at least one each.
        beside: bytes that belong to the tokens of each, equally many to every token; empty:
            nothing does.

    Returns:
        Of each sequence as many int32 numbers as it has tokens, two of them equal where tokens and what
        belongs to them are. They mean nothing else.
    """
    widths = {
        len(more) // (len(each) // _TOKEN_BYTES) for each, more in zip(sequences, beside, strict=True) if more
    }
    if not widths:
        return list(sequences)
    # A token, whether anything belongs to it, and that.
    width = -(-(_TOKEN_BYTES + 1 + max(widths)) // _WORD) * _WORD
    rows = []
    for each, more in zip(sequences, beside, strict=True):
        row = np.zeros((len(each) // _TOKEN_BYTES, width), np.uint8)
        row[:, :_TOKEN_BYTES] = np.frombuffer(each, np.uint8).reshape(len(row), -1)
        if more:
            given = np.frombuffer(more, np.uint8).reshape(len(row), -1)
            row[:, _TOKEN_BYTES] = 1
            row[:, _TOKEN_BYTES + 1 : _TOKEN_BYTES + 1 + given.shape[1]] = given
        rows.append(row)
    numbers = _numbered(np.concatenate(rows))
    ends = np.cumsum([len(row) for row in rows])[:-1]
    return [part.astype("<i4").tobytes() for part in np.split(numbers, ends)]


def _numbered(rows: np.ndarray) -> np.ndarray:
    """A number for each of rows of bytes, the same for equal ones alone."""
    words = rows.view("<u8")
    factors = np.random.default_rng(0).integers(
        1, 2**64, words.shape[1], np.uint64, endpoint=False
    ) | np.uint64(1)
    hashed = (words * factors).sum(axis=1, dtype=np.uint64)
    _, first, numbers = np.unique(hashed, return_index=True, return_inverse=True)
    if (rows[first[numbers]] != rows).any():
        # Two that differ have one hash. Sorting rows takes many times as long.
        whole = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
        _, numbers = np.unique(whole, return_inverse=True)
    return numbers


def _alike(one: bytes, other: bytes, block: int) -> int:
    """Tokens of the whole blocks with which both begin."""
    size = block * _TOKEN_BYTES
    if one[:size] != other[:size]:
        return 0
    most = min(len(one), len(other)) // _TOKEN_BYTES
    differ = np.frombuffer(one, "<i4", most) != np.frombuffer(other, "<i4", most)
    alike = int(differ.argmax()) if differ.any() else most
    return alike // block * block


def _in_order(starts: list[int], stops: list[int], parents: list[int], last: list[int]) -> PrefixTree:
    count = len(starts)
    first = [len(last)] * count
    for number, piece in enumerate(last):
        first[piece] = min(first[piece], number)
    for piece in sorted(range(count), key=starts.__getitem__, reverse=True):
        if parents[piece] >= 0:
            first[parents[piece]] = min(first[parents[piece]], first[piece])
    below: list[list[int]] = [[] for _ in range(count + 1)]
    # Backwards, as the next piece is taken from the end. The last list is of those without a parent.
    for piece in sorted(range(count), key=first.__getitem__, reverse=True):
        below[parents[piece]].append(piece)
    places = [-1] * (count + 1)
    pieces: list[Piece] = []
    waiting = below[-1]
    while waiting:
        piece = waiting.pop()
        places[piece] = len(pieces)
        pieces.append(Piece(places[parents[piece]], starts[piece], stops[piece], first[piece]))
        waiting += below[piece]
    return PrefixTree(tuple(pieces), tuple(places[piece] for piece in last))
