"""In which class an owner is, for what is measured of owners: a label must not name them.

Invariant: of what waits and runs in one place an owner is `heavy` with more than an even share of it, else
`light`; one alone is light. So what light ones wait is what others cost them.
"""

from __future__ import annotations

from collections.abc import Mapping

LIGHT, HEAVY = "light", "heavy"


def class_of(owner: str, held: Mapping[str, int], total: int) -> str:
    """The class of an owner.

    Args:
        held: how much each owner has there, more than nothing each.
        total: the sum.
    """
    return HEAVY if held.get(owner, 0) * len(held) > total else LIGHT


def by_class(held: Mapping[str, int]) -> dict[str, float]:
    """How much the owners of each class have there."""
    found, total = {LIGHT: 0.0, HEAVY: 0.0}, sum(held.values())
    for owner, amount in held.items():
        found[class_of(owner, held, total)] += amount
    return found
