"""What a model that trains all weights computes with at one moment, taken without holding up what computes.

Invariant: it is the model as it was when it was taken. The thread that computes begins copies of the weights
and waits for none; they come to the host, and what goes over a wire is made of them, beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import ModelState
from services.trainer.compute.lora.snapshot import Snapshot
from services.trainer.compute.memory.transfer import Copies, ToHost

T = TypeVar("T")


class FullSnapshot(Snapshot):
    """That of all weights.

    Args:
        names: of the weights, by Hugging Face.
        copies: of them, in that order.
        step: optimizer steps taken.
    """

    lora = None

    def __init__(self, names: Sequence[str], copies: Copies, step: int) -> None:
        self._names = tuple(names)
        self._copies = copies
        self._step = step

    def unload(self, also: Callable[[Mapping[str, Tensor]], T]) -> tuple[ModelState, T | None]:
        with self._copies.beside() as copies:
            # What went to the host for want of room is sent from there.
            made = also(dict(zip(self._names, copies, strict=True))) if self._copies.on_device else None
            on_host = ToHost(copies).wait()
        weights = {name: _shared(copy) for name, copy in zip(self._names, on_host, strict=True)}
        return ModelState(lora=None, adapter=weights, optimizer={}, step=self._step), made


def _shared(values: Tensor) -> HostTensor:
    """A tensor of the host that nobody writes to any more, which shares its memory; numpy has no bfloat16."""
    elements = values.reshape(-1).view(torch.uint8).numpy()
    dtype = str(values.dtype).removeprefix("torch.")
    return HostTensor(dtype, tuple(values.shape), cast(bytes, elements.data))
