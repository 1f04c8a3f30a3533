"""Splits one operation into units of work and deals micro-batches to ranks. Pure.

Invariant: the split is a function of the operation's own tokens, the token budget and whether prefixes are
shared, so that a replay of the operation with the same settings, on the same device, computes bit for bit the
same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.trainer.order.prefixes import PrefixTree, computed_tokens, prefix_tree, unshared

SENT = 16
"""The tokens sent of a unit's datums are at most so many times the budget. Rows, targets and outputs
are there for each, however few are computed: about a hundred bytes, where the activations of one that is
computed take a thousand times that."""


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

    Datums that share a prefix stay together, at every fork those of the longest datum first: so neighbours
    are of similar length where nothing is shared, and the longest sequence, which needs the most memory, is
    met first. A datum longer than a budget is a unit of its own.

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
    for index in _by_prefix(tree):
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


def _by_prefix(tree: PrefixTree) -> list[int]:
    """Datums, those of one prefix after each other, at every fork the way to the longest datum first."""
    ending: list[list[int]] = [[] for _ in tree.pieces]
    for index, last in enumerate(tree.last):
        ending[last].append(index)
    longest = [piece.stop for piece in tree.pieces]
    # The last list is of the pieces without a parent.
    below: list[list[int]] = [[] for _ in range(len(tree.pieces) + 1)]
    for number in range(len(tree.pieces) - 1, -1, -1):
        parent = tree.pieces[number].parent
        below[parent].append(number)
        if parent >= 0:
            longest[parent] = max(longest[parent], longest[number])
    # Found from the end: what ends with a piece is shorter than what goes on, and comes after it.
    order: list[int] = []
    waiting = [-1]
    while waiting:
        piece = waiting.pop()
        if piece >= 0:
            order += reversed(ending[piece])
        waiting += sorted(below[piece], key=lambda each: (-longest[each], each))
    return order[::-1]


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
