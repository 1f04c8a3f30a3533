"""What a model is at one moment, taken without holding up what computes; and that of an adapter.

Invariant: a snapshot is the model as it was when it was taken, whatever the model does meanwhile. The thread
that computes makes copies on the device, of other ranks' parts too, and nothing else: what goes over a wire
or to the host is made of them beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from services.common.contract.roles import Role
from services.common.contract.tensors import HostTensor, sharing
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.compute.lora.adapter import Layout, matrices
from services.trainer.compute.memory.transfer import Copies, ToHost

T = TypeVar("T")


class Snapshot(ABC):
    """A model at one moment.

    Attributes:
        lora: what of an adapter it is; None: all weights of a model.
    """

    lora: LoraSpec | None

    @property
    def role(self) -> Role:
        """What the model's head computes."""
        return "policy" if self.lora is None else self.lora.role

    def state(self) -> ModelState:
        """It, on the host. Blocking; any thread may call it, once."""
        state, _ = self.unload(lambda _: None)
        return state

    @abstractmethod
    def unload(self, also: Callable[[Mapping[str, Tensor]], T]) -> tuple[ModelState, T | None]:
        """As `state`, and something else that is made of the weights where they are; None: they came to the
        host for want of room.

        Args:
            also: is given them by name, all on one device. What it makes of them may be used by any thread
                and stream.
        """


class NoSnapshot(Snapshot):
    """What a rank has that gave its parts to rank 0: a state without tensors."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.lora = state.lora

    def unload(self, also: Callable[[Mapping[str, Tensor]], T]) -> tuple[ModelState, None]:
        return self._state, None


class AdapterSnapshot(Snapshot):
    """An adapter's.

    Args:
        step: optimizer steps taken.
        masters, moments: copies that are this snapshot's, flat, float32 [size]; moments by name, those that
            are wanted.
        device: where the adapter is.
    """

    def __init__(
        self,
        lora: LoraSpec,
        layout: Layout,
        step: int,
        masters: Tensor,
        moments: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.lora = lora
        self._step = step
        self._layout = layout
        self._moments = tuple(moments)
        self._copies = Copies([masters, *moments.values()], device)

    def unload(self, also: Callable[[Mapping[str, Tensor]], T]) -> tuple[ModelState, T]:
        with self._copies.beside() as copies:
            made = also(matrices(copies[0], self._layout))
            adapter, *moments = (_named(self._layout, flat) for flat in ToHost(copies).wait())
        optimizer = {
            f"{name}.{moment}": array
            for moment, arrays in zip(self._moments, moments, strict=True)
            for name, array in arrays.items()
        }
        return ModelState(lora=self.lora, adapter=adapter, optimizer=optimizer, step=self._step), made


def _named(layout: Layout, flat: Tensor) -> dict[str, HostTensor]:
    """The matrices of a flat tensor on the host, which shares its memory."""
    return {name: sharing(view.numpy()) for name, view in matrices(flat, layout).items()}
