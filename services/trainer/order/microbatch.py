"""Splits one operation into units of work and deals micro-batches to ranks. Pure.

Invariant: the split is a function of the operation's own tokens, the token budget and whether prefixes are
shared, so that a replay of the operation computes bit for bit the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.trainer.order.prefixes import PrefixTree, computed_tokens, prefix_tree, unshared

SENT = 16
"""A unit's datums have at most so many times the budget's tokens. Rows, targets and outputs are there for each
token that was sent, however few are computed; of these they take a small part at that many. It is what a
prompt saves whose answers are nothing beside it."""


@dataclass(frozen=True)
class Unit:
    """Datums of one operation that stay together in one micro-batch.

    Attributes:
        datums: their indices in the operation.
        tokens: that are computed for all of them; a prefix that they share counts once, if it is worth it.
    """

    datums: tuple[int, ...]
    tokens: int


def split_operation(sequences: Sequence[bytes], token_budget: int, *, shared: bool) -> list[Unit]:
    """Groups datums into units of at most `token_budget` computed tokens, and `SENT` times as many that were
    sent.

    Datums that share a prefix stay together. Longest first, so that neighbours are of similar length and the
    longest sequence, which needs the most memory, is met first. A datum longer than the budget is a unit of
    its own.

    Args:
        sequences: tokens of each datum, int32 little-endian, in request order.
        token_budget: at least 1.
        shared: the prefixes that datums share are computed once.

    Returns:
        Units; every index occurs exactly once.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    tree = prefix_tree(sequences) if shared else unshared(sequences)
    roots = tree.roots()
    units: list[Unit] = []
    datums: list[int] = []
    sent, size = 0, _Size()
    # The unit in which a piece was last met.
    met = [-1] * len(tree.pieces)
    for index in _by_prefix(tree, roots):
        last = tree.last[index]
        length = tree.pieces[last].stop
        missing = _missing(tree, last, met, len(units))
        grown = size.grown(roots[last], length, sum(tree.pieces[piece].tokens for piece in missing))
        sent += length
        if datums and (grown.tokens > token_budget or sent > SENT * token_budget):
            units.append(Unit(tuple(datums), size.tokens))
            datums, sent = [], length
            missing = _missing(tree, last, met, len(units))
            grown = _Size().grown(roots[last], length, length)
        for piece in missing:
            met[piece] = len(units)
        datums.append(index)
        size = grown
    return [*units, Unit(tuple(datums), size.tokens)] if datums else []


class _Size(NamedTuple):
    """What is in a unit so far. Datums that begin alike come one after the other.

    Attributes:
        before: computed tokens of all but those that begin like the last datum.
        root: the piece with which the last datum begins.
        sent: tokens of the datums that begin with it, each with all of its own.
        tree: tokens of their tree.
    """

    before: int = 0
    root: int = -1
    sent: int = 0
    tree: int = 0

    @property
    def tokens(self) -> int:
        """Computed ones."""
        return self.before + computed_tokens(self.sent, self.tree)

    def grown(self, root: int, length: int, added: int) -> _Size:
        """With one datum more, of so many tokens, `added` of them not in the tree yet."""
        if root != self.root:
            return _Size(self.tokens, root, length, added)
        return _Size(self.before, root, self.sent + length, self.tree + added)


def _by_prefix(tree: PrefixTree, roots: Sequence[int]) -> list[int]:
    """Datums, those of one prefix after each other, the prefix of the longest datum first."""
    longest = [0] * len(tree.pieces)
    for last in tree.last:
        longest[roots[last]] = max(longest[roots[last]], tree.pieces[last].stop)
    return sorted(
        range(len(tree.last)),
        key=lambda index: (
            -longest[roots[tree.last[index]]],
            roots[tree.last[index]],
            tree.last[index],
            index,
        ),
    )


def _missing(tree: PrefixTree, piece: int, met: Sequence[int], unit: int) -> list[int]:
    """The pieces of a datum that ends with `piece` that are not in the unit yet."""
    missing = []
    while piece >= 0 and met[piece] != unit:
        missing.append(piece)
        piece = tree.pieces[piece].parent
    return missing


def deal(count: int, world_size: int, first: int) -> list[list[int]]:
    """Batches 0..count-1 for each rank, in order: batch i goes to rank (first + i) % world_size.

    Args:
        first: for batches of one model alone, how many of its batches were dealt since its last step: then
            the rank of each depends on the model's own operations only. Else 0.
    """
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for batch in range(count):
        ranks[(first + batch) % world_size].append(batch)
    return ranks
