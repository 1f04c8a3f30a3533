"""Tensors on their way between the host and a device, for which nobody waits but who needs them.

Invariant: the host's side of a copy that is under way is page-locked and lives until the copy is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from services.trainer.compute.memory.failures import free_cache


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


class Copies:
    """Tensors of one device that nobody changes any more, on that device: the thread that computes made them,
    and goes on; another one takes them from there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._ready: torch.cuda.Event | None = None
        self._copies = [tensor.detach() for tensor in tensors]
        if any(tensor.device.type == "cuda" for tensor in self._copies):
            self._ready = torch.cuda.Event()
            self._ready.record()

    @contextmanager
    def beside(self) -> Iterator[list[Tensor]]:
        """The copies, in order, for another thread. On CUDA what is done with them there is on a stream of
        its own, and is done when the context ends: only then may they go."""
        if self._ready is None:
            yield self._copies
            return
        device = next(tensor.device for tensor in self._copies if tensor.device.type == "cuda")
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            try:
                yield self._copies
            finally:
                stream.synchronize()


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one device as they are now, on that device, or on the host if it has no room."""
    given = [tensor.detach() for tensor in tensors]
    try:
        return [tensor.clone() for tensor in given]
    except torch.OutOfMemoryError:
        # Whoever computes waits for the host then, which is better than to fail.
        free_cache()
        return [tensor.cpu() for tensor in given]
