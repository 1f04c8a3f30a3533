"""Splits one operation into units of work and deals micro-batches to ranks. Pure.

Invariant: the split is a function of the operation's own tokens, of the token budget, the ranks and the
length of a sequence for one rank that the operation was journaled with, and of whether the device shares
prefixes. So a replay of the operation on the same device computes bit for bit the same gradient, unless the
trainer had, or has, a smaller budget, or ranks that hold shorter sequences, than the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.trainer.order.prefixes import PrefixTree, computed_tokens, prefix_tree, unshared

SENT = 16
"""The tokens sent of a unit's datums are at most so many times the budget. Rows, targets and outputs
are there for each, however few are computed: about a hundred bytes, where the activations of one that is
computed take a thousand times that."""


LEAST = 256
"""Tokens below which a micro-batch takes hardly less time: no operation is cut into smaller ones for the sake
of more ranks."""

EXTRA = 8
"""Prefixes that several ranks have to compute may add one to so many of an operation's tokens."""

_TRIES = 12


@dataclass(frozen=True)
class Unit:
    """Datums of one operation that stay together in one micro-batch.

    Attributes:
        datums: their indices in the operation.
        tokens: that are computed for all of them; a prefix that they share counts once, if it is worth it.
        split: it is one datum that no rank holds alone, and all compute together.
    """

    datums: tuple[int, ...]
    tokens: int
    split: bool = False


def split_operation(
    sequences: Sequence[bytes], token_budget: int, *, shared: bool, ranks: int = 1, one_rank: int = 0
) -> list[Unit]:
    """Groups datums into units of at most `token_budget` computed tokens, and `SENT` times as many that were
    sent; of nearly equal size, as many for each rank, where the operation is large enough for several.

    Datums that share a prefix stay together, at every fork those of the longest datum first: so neighbours
    are of similar length where nothing is shared, and the longest sequence, which needs the most memory, is
    met first. A datum longer than a budget is a unit of its own.

    Args:
        sequences: tokens of each datum, int32 little-endian, in request order.
        token_budget: at least 1.
        shared: the prefixes that datums share are computed once.
        ranks: that share the work.
        one_rank: tokens of a datum beyond which it is a unit of its own that all ranks compute together; 0 =
            none is. Those come first, the longest before the others.

    Returns:
        Units; every index occurs exactly once.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    lengths = [len(tokens) // 4 for tokens in sequences]
    beyond = {index for index, length in enumerate(lengths) if 0 < one_rank < length}
    longest_first = sorted(beyond, key=lambda index: (-lengths[index], index))
    together = [Unit((index,), lengths[index], split=True) for index in longest_first]
    within = [index for index in range(len(sequences)) if index not in beyond]
    apart = _units([sequences[index] for index in within], token_budget, shared, ranks)
    return together + [
        replace(unit, datums=tuple(within[number] for number in unit.datums)) for unit in apart
    ]


def _units(sequences: Sequence[bytes], token_budget: int, shared: bool, ranks: int) -> list[Unit]:
    """Units of datums that each rank holds."""
    tree = prefix_tree(sequences) if shared else unshared(sequences)
    whole = _split(tree, token_budget)
    total = sum(unit.tokens for unit in whole)
    while ranks > 1:
        units = _split_evenly(tree, token_budget, total, ranks)
        if sum(unit.tokens for unit in units) * EXTRA <= total * (EXTRA + 1):
            return units
        # Fewer parts have more prefixes to themselves.
        ranks //= 2
    return whole


def _split_evenly(tree: PrefixTree, token_budget: int, total: int, ranks: int) -> list[Unit]:
    """As many units for each of `ranks`, of the smallest size that is found to have no more."""
    rounds = -(-total // (ranks * token_budget))
    count = max(1, min(ranks * rounds, total // LEAST))
    size = -(-total // count)
    for _ in range(_TRIES):
        if size >= token_budget:
            break
        units = _split(tree, size)
        if len(units) <= count:
            return units
        # Datums that cannot be cut do not fill the units.
        size += max(1, size // 16)
    return _split(tree, token_budget)


def _split(tree: PrefixTree, token_budget: int) -> list[Unit]:
    """Units in the order of the tree, each as full as it can be."""
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


def deals_on(models: Collection[str], *, trains: bool) -> str | None:
    """The model whose ranks go on where its last pass ended, None: all batches are dealt anew. Pure.

    One that trains alone does, so that small passes of it load all ranks; the rank of each batch still
    depends on its own operations only. What only runs forward adds to no gradient, so any rank will do.

    Args:
        models: those of the pass.
    """
    return next(iter(models)) if trains and len(models) == 1 else None


def deal(tokens: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Batches 0..count-1 for each rank, in order, each to the one that has the least to do so far.

    Args:
        tokens: of each batch.
        loads: what each rank was dealt before; changed. For batches of one model alone those since its last
            step: then the rank of each depends on the model's own operations only.
    """
    ranks: list[list[int]] = [[] for _ in loads]
    for batch, size in enumerate(tokens):
        rank = min(range(len(loads)), key=loads.__getitem__)
        ranks[rank].append(batch)
        loads[rank] += size
    return ranks
