"""Splits one operation into units of work and deals micro-batches to ranks. Pure.

Invariant: the split is a function of the operation's own datum lengths and the token budget alone, so
that a replay of the operation computes bit for bit the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_operation(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Groups datums into units of at most `token_budget` tokens.

    Longest first, so that neighbours are of similar length and the longest sequence, which needs the most
    memory, is met first. A datum longer than the budget is a unit of its own.

    Args:
        lengths: tokens of each datum, in request order.
        token_budget: at least 1.

    Returns:
        Units of datum indices; every index occurs exactly once.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    units: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if units and tokens + lengths[index] <= token_budget:
            units[-1].append(index)
            tokens += lengths[index]
        else:
            units.append([index])
            tokens = lengths[index]
    return units


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
