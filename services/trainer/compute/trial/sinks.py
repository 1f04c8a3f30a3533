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


def with_sinks(asked: Sequence[Asked], device: str, kernel: FlashAttention | None = None) -> list[Asked]:
    """What layers ask for once a device was tried: those with sinks have its kernel where that is right with
    them, and from then on it computes them. All ranks call it.

    Args:
        asked: of each layer, as noted before, the same on all ranks.
        kernel: what is tried; None: torch's.
    """
    shapes = sorted({layer.shape for layer in asked if layer.sinks and not layer.kernel})
    mine = [int(works_with_sinks(device, kernel or FlashAttention(), *shape)) for shape in shapes]
    right = {shape for shape, works in zip(shapes, least(mine, device), strict=True) if works}
    for shape in right:
        give_kernel_sinks(*shape)
    return [replace(layer, kernel=layer.kernel or (layer.sinks and layer.shape in right)) for layer in asked]
