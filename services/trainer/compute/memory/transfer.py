"""Tensors on their way between the host and a device, for which nobody waits but who needs them.

Invariant: the host's side of a copy that is under way is page-locked and lives until the copy is done. Where
the host has no such memory there is no copy under way (staging.py): it is done when it is begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from services.common.weights.side_streams import side_stream
from services.trainer.compute.memory import staging
from services.trainer.compute.memory.failures import free_cache


def on_device(values: Tensor, device: str) -> Tensor:
    """Values of the host on a device, where they are once what was started there before is done."""
    if device == "cpu":
        return values
    staged = staging.room(values.shape, values.dtype).copy_(values)
    there = torch.empty(values.shape, dtype=values.dtype, device=device)
    staging.copy(there, staged)
    return there


class ToHost:
    """Copies of tensors on the host, which begin at once; of those that are there already there is none."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        given = [tensor.detach() for tensor in tensors]
        self._copies = [tensor if tensor.device.type == "cpu" else _on_host(tensor) for tensor in given]
        if any(tensor.device.type == "cuda" for tensor in given):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


class Copies:
    """Tensors that nobody changes any more, on a device or on their way from there to the host: the thread
    that computes made them, and goes on; another one takes them from there.

    Args:
        copies: as `copied`.
        device: of what they are copies of.
    """

    def __init__(self, copies: Sequence[Tensor], device: torch.device) -> None:
        self._copies = [copy.detach() for copy in copies]
        self._device = device
        self._begun: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._begun = torch.cuda.Event()
            self._begun.record()

    @property
    def on_device(self) -> bool:
        """Whether all of them are where the tensors were."""
        return all(copy.device == self._device for copy in self._copies)

    @contextmanager
    def beside(self) -> Iterator[list[Tensor]]:
        """The copies, in order, complete, for another thread, once: they are given up when the context ends,
        but for what somebody else has of them. On CUDA what is done with them there is on a stream beside
        the engine's, and is done by then: only then may they go."""
        try:
            if self._begun is None:
                yield self._copies
                return
            # The device is said too: this thread has the first one otherwise, and the end of the stream's
            # context would take memory of that for a rank that computes on another.
            device = self._device
            with side_stream(device) as stream, torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(self._begun)
                if not self.on_device:
                    self._begun.synchronize()
                try:
                    yield self._copies
                finally:
                    stream.synchronize()
        finally:
            self._copies = []


def copied(tensors: Iterable[Tensor], *, on_device: bool = True) -> list[Tensor]:
    """Copies of tensors of one device as they are now, for which nobody waits.

    Args:
        tensors: each is copied before the next one is asked for, after which it may go.
        on_device: copy them there. Otherwise, and where its memory does not do, they go to the host at once.
    """
    copies: list[Tensor] = []
    for tensor in tensors:
        copies.append(_copy(tensor.detach(), on_device))
        on_device = on_device and copies[-1].device == tensor.device
    return copies


def _copy(values: Tensor, on_device: bool) -> Tensor:
    """A copy on the device, or where that has no room on the host."""
    if on_device or values.device.type == "cpu":
        try:
            return values.clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            free_cache()
    return _on_host(values)


def _on_host(values: Tensor) -> Tensor:
    """A copy on the host, under way."""
    copy = staging.room(values.shape, values.dtype)
    staging.copy(copy, values)
    return copy
