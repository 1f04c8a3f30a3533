"""Flat float32 tensors that are used again.

On CPUs a fresh tensor of some megabytes costs as much as several passes over it, since the kernel clears it
page after page; an optimizer step of a small adapter would spend most of its time on that.

Invariant: a tensor has one user at a time, and what lies unused is bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_BYTES = 256 * 1024**2


class FlatBuffers:
    """Flat tensors of one device by size. One thread uses them."""

    def __init__(self, device: str | torch.device, kept_bytes: int = KEPT_BYTES) -> None:
        self._device = device
        self._left = kept_bytes
        self._unused: dict[int, list[Tensor]] = {}

    def take(self, elements: int) -> Tensor:
        """float32 [elements], with whatever is in it."""
        unused = self._unused.get(elements)
        if not unused:
            return torch.empty(elements, dtype=torch.float32, device=self._device)
        self._left += unused[-1].nbytes
        return unused.pop()

    def give(self, tensor: Tensor) -> None:
        """Takes a tensor back that nobody uses any more."""
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._unused.setdefault(tensor.numel(), []).append(tensor)
