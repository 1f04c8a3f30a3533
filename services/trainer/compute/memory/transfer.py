"""Tensors on their way between the host and a device, for which nobody waits but who needs them.

Invariant: the host's side of a copy that is under way is page-locked and lives until the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Tensor, device: str) -> Tensor:
    """Values of the host on a device, where they are once what was started there before is done."""
    if device == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class ToHost:
    """Copies of tensors of one device, which begin at once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        given = [tensor.detach() for tensor in tensors]
        if all(tensor.device.type == "cpu" for tensor in given):
            self._copies = given
            return
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in given
        ]
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in order; of a CPU they are those that were given."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
