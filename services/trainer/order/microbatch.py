"""Splits one operation into units of work and deals micro-batches to ranks. Pure.

Invariant: the split is a function of the operation's own tokens, the token budget and whether prefixes are
shared, so that a replay of the operation computes bit for bit the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.order.prefixes import PrefixTree, prefix_tree, unshared


@dataclass(frozen=True)
class Unit:
    """Datums of one operation that stay together in one micro-batch.

    Attributes:
        datums: their indices in the operation.
        tokens: that are computed for all of them; a prefix that they share counts once.
    """

    datums: tuple[int, ...]
    tokens: int


def split_operation(sequences: Sequence[bytes], token_budget: int, *, shared: bool) -> list[Unit]:
    """Groups datums into units of at most `token_budget` computed tokens.

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
    units: list[list[int]] = []
    sizes: list[int] = []
    # The unit in which a piece was last computed.
    computed = [-1] * len(tree.pieces)
    for index in _by_prefix(tree):
        added = _missing(tree, index, computed, len(units) - 1)
        if not units or sizes[-1] + sum(tree.pieces[piece].tokens for piece in added) > token_budget:
            units.append([])
            sizes.append(0)
            added = _missing(tree, index, computed, len(units) - 1)
        for piece in added:
            computed[piece] = len(units) - 1
            sizes[-1] += tree.pieces[piece].tokens
        units[-1].append(index)
    return [Unit(tuple(indices), size) for indices, size in zip(units, sizes, strict=True)]


def _by_prefix(tree: PrefixTree) -> list[int]:
    """Datums, those of one prefix after each other, the prefix of the longest datum first."""
    roots: list[int] = []
    for number, piece in enumerate(tree.pieces):
        roots.append(number if piece.parent < 0 else roots[piece.parent])
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


def _missing(tree: PrefixTree, index: int, computed: Sequence[int], unit: int) -> list[int]:
    """The pieces of a datum that are not in the unit yet."""
    missing = []
    piece = tree.last[index]
    while piece >= 0 and computed[piece] != unit:
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
