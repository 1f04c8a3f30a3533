"""Whether attention with sinks goes by a device's kernel, or by whole matrices of scores.

Invariant: no kernel computes it before it was tried, and then it does on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.trainer.compute.attention import give_kernel_sinks
from services.trainer.compute.exchange import least
from services.trainer.compute.prefix.flash import FlashAttention
from services.trainer.compute.prefix.trial import works_with_sinks
from services.trainer.compute.split.asked import Asked

Shape = tuple[int, int, int]
"""Heads, those of keys, and the size of each."""


def with_sinks(
    asked: Sequence[Asked], device: str, ranks: int, kernel: FlashAttention | None = None
) -> list[Asked]:
    """What layers ask for once a device was tried: those with sinks have its kernel where that is right with
    them, and from then on it computes them. All ranks call it.

    Args:
        asked: of each layer, as noted before, the same on all ranks.
        ranks: that share a sequence, each of which then computes some of a layer's heads.
        kernel: what is tried; None: torch's.
    """
    shapes = sorted({layer.shape for layer in asked if layer.sinks and not layer.kernel})
    tried = [sorted({shape, _of_one(shape, ranks)}) for shape in shapes]
    mine = [
        int(all(works_with_sinks(device, kernel or FlashAttention(), *each) for each in both))
        for both in tried
    ]
    right = {both[-1]: both for both, works in zip(tried, least(mine, device), strict=True) if works}
    for each in (each for both in right.values() for each in both):
        give_kernel_sinks(*each)
    return [replace(layer, kernel=layer.kernel or (layer.sinks and layer.shape in right)) for layer in asked]


def _of_one(shape: Shape, ranks: int) -> Shape:
    """What is left of it where ranks share its heads, if they can. Never more."""
    heads, key_heads, size = shape
    shares = heads % ranks == 0 and key_heads % ranks == 0
    return (heads // ranks, key_heads // ranks, size) if shares else shape
