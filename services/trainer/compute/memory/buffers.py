"""Flat tensors that are used again.

On CPUs a fresh tensor of some megabytes costs as much as several passes over it, since the kernel clears it
page after page; an optimizer step of a small adapter would spend most of its time on that.

Invariant: a tensor has one user at a time, and what lies unused is bounded.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

KEPT_BYTES = 256 * 1024**2


class FlatBuffers:
    """float32 tensors that nobody uses, by size and device. One thread uses them.

    Args:
        kept_bytes: most that lies unused; of more than that, what was asked for longest ago goes.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._unused: OrderedDict[tuple[int, torch.device], list[Tensor]] = OrderedDict()

    def take(self, elements: int, device: str | torch.device) -> Tensor:
        """float32 [elements], with whatever is in it."""
        kind = elements, torch.device(device)
        unused = self._unused.get(kind)
        if not unused:
            return torch.empty(elements, dtype=torch.float32, device=device)
        self._unused.move_to_end(kind)
        found = unused.pop()
        self._bytes -= found.nbytes
        if not unused:
            del self._unused[kind]
        return found

    def clear(self) -> None:
        """Lets go of what nobody uses."""
        self._unused.clear()
        self._bytes = 0

    def move_to(self, others: FlatBuffers) -> None:
        """Gives what nobody uses to others."""
        for unused in self._unused.values():
            for tensor in unused:
                others.give(tensor)
        self.clear()

    def give(self, tensor: Tensor) -> None:
        """Takes a tensor back that nobody uses any more."""
        if tensor.nbytes > self._kept_bytes:
            return
        kind = tensor.numel(), tensor.device
        self._unused.setdefault(kind, []).append(tensor)
        self._unused.move_to_end(kind)
        self._bytes += tensor.nbytes
        while self._bytes > self._kept_bytes:
            stalest, unused = next(iter(self._unused.items()))
            self._bytes -= unused.pop().nbytes
            if not unused:
                del self._unused[stalest]
