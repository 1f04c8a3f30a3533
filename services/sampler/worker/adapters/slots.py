"""All that vLLM's layers have of adapters, as slots that are filled at once.

vLLM fills a slot layer by layer: for each part of each layer two copies from the host and two fillings with
zeros, a thousand small operations of a model of 36 layers, in front of a step. Here vLLM's layers put an
adapter into memory of the host first, in any thread, as they would put it into a slot; the engine's thread
then copies that to the device in one piece, and there into the slot in few operations, whose number depends
on how many widths the layers have and not on how many layers. No report was found of how many they are.

Invariants: a slot that is filled has nothing left of what it had before. What runs keeps its slot: an adapter
that comes takes a free one, or that of the one used least recently when a step needs it. What an adapter
needs of a device beside the slots lasts as long as the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from vllm.lora import lora_model, model_manager
from vllm.lora.lora_model import LoRAModel
from vllm.utils.torch_utils import PIN_MEMORY

from services.common.contract.errors import InvalidRequest
from services.sampler.worker.adapters.stacks import Group, Stack, grouped, stacks_of


class PackedAdapter(NamedTuple):
    """An adapter that a slot can be filled from."""

    id: int
    kept: torch.Tensor
    """uint8 [bytes], page-locked where there is a device: its own elements alone."""
    groups: tuple[Group, ...]
    """What is kept, and for which parts of a slot."""
    lacking: tuple[Stack, ...]
    """Of layers that it has nothing for."""

    @property
    def nbytes(self) -> int:
        """Of the host's memory: torch page-locks a power of two at a time."""
        own = self.kept.nbytes
        return 1 << (own - 1).bit_length() if own and self.kept.is_pinned() else own


class WorkerSlots:
    """The slots of one worker.

    Args:
        worker_manager: of the worker's adapters, vLLM's.
        staged: whether an adapter comes to the slots' device before it comes into a slot.
    """

    def __init__(self, worker_manager: Any, staged: bool) -> None:
        self._worker_manager = worker_manager
        self._manager = worker_manager._adapter_manager
        self._staged = staged
        self._stacks = {name: stacks_of(layer) for name, layer in self._manager.modules.items()}

    def install(self) -> None:
        """Has vLLM fill slots from packed adapters, which are the only ones that it knows from now on."""
        # What it makes of an adapter is packed and let go; page-locked memory of all its parts would be kept.
        lora_model.PIN_MEMORY = model_manager.PIN_MEMORY = False
        self._manager.activate_adapter = self.activate
        apply = self._worker_manager._apply_adapters

        def in_order(requests: Iterable[Any]) -> None:
            # vLLM goes through the adapters of a step in any order: one that comes could push out one that
            # the same step uses, and that one another (vllm-project/vllm#14497, closed).
            active = self._manager._active_adapters
            apply(sorted(filter(None, requests), key=lambda request: request.lora_int_id not in active))

        self._worker_manager._apply_adapters = in_order

    def pack(self, adapter: LoRAModel) -> PackedAdapter:
        """Does to an adapter all that can be done before a slot is known: its scale goes into B, the parts of
        fused layers come together, each worker takes its slice. For any thread.

        Args:
            adapter: with matrices of rank `adapter.rank` alone.

        Raises:
            InvalidRequest: it does not fit the slots; in a step that would end the engine.
            RuntimeError: the host has no memory for it.
        """
        # A pipeline stage may have no layer of it.
        if adapter.loras:
            with _refused():
                self._manager._validate_moe_lora_format(adapter)
                self._manager._create_merged_loras_inplace(adapter)
        of = self._manager._get_lora_layer_weights
        had = {name: lora for name in self._stacks if (lora := of(adapter, name)) is not None}
        groups = grouped((stack for name in had for stack in self._stacks[name]), adapter.rank)
        size = groups[-1].end if groups else 0
        kept = torch.empty(size, dtype=torch.uint8, pin_memory=self._staged and PIN_MEMORY)
        places = {
            id(stack.slots): part.view(stack.of_rank(adapter.rank))
            for group in groups
            for stack, part in zip(group.stacks, group.parts(group.of(kept)), strict=True)
        }
        for name, lora in had.items():
            with _refused():
                self._with_one_slot(name, places).set_lora(0, lora.lora_a, lora.lora_b)
        lacking = tuple(stack for name in self._stacks if name not in had for stack in self._stacks[name])
        return PackedAdapter(adapter.id, kept, groups, lacking)

    def _with_one_slot(self, name: str, places: Mapping[int, torch.Tensor]) -> Any:
        """A layer that has one slot, in these places."""
        layer = copy.copy(self._manager.modules[name])
        parts: dict[str, list[torch.Tensor]] = {}
        for stack in self._stacks[name]:
            parts.setdefault(stack.attribute, []).append(places[id(stack.slots)])
        for attribute, mine in parts.items():
            several = isinstance(vars(layer)[attribute], tuple)
            vars(layer)[attribute] = tuple(mine) if several else mine[0]
        return layer

    def register(self, adapter: PackedAdapter) -> None:
        """Makes an adapter known to vLLM, and puts it into a slot where one is free."""
        self._manager._registered_adapters[adapter.id] = adapter
        if len(self._manager._active_adapters) < self._manager.lora_slots:
            self.activate(adapter.id)

    def activate(self, adapter_id: int) -> bool:
        """Has an adapter in a slot, in place of the one used least recently where none is free. Returns
        whether it was in none."""
        manager, active = self._manager, self._manager._active_adapters
        comes = adapter_id not in active
        if comes:
            if len(active) >= manager.lora_slots:
                active.remove_oldest()
            slot = manager.lora_index_to_id.index(None)
            self.fill(slot, manager._registered_adapters[adapter_id])
            manager.lora_index_to_id[slot] = adapter_id
            active[adapter_id] = None
        active.touch(adapter_id)
        return comes

    def fill(self, slot: int, adapter: PackedAdapter) -> None:
        """Puts an adapter into a slot, in line with what the device has to do, and waits for nothing."""
        _empty(stack.slots.select(0, slot) for stack in adapter.lacking)
        if not self._staged:
            _fill_from_host(slot, adapter)
            return
        try:
            self._fill_by_staging(slot, adapter)
        except torch.OutOfMemoryError:
            # The engine takes nearly all of a device; what is in a slot needs no other memory of it.
            _fill_from_host(slot, adapter)

    def _fill_by_staging(self, slot: int, adapter: PackedAdapter) -> None:
        if not adapter.groups:
            return
        device = adapter.groups[0].stacks[0].slots.device
        kept = adapter.kept.to(device, non_blocking=True, copy=True)
        for group in adapter.groups:
            rows = group.of(kept)
            if group.used < group.width:
                rows = pad(rows, (0, group.width - group.used))
            # Of tensors that are laid out alike torch makes few kernels of many copies.
            into = [stack.slots.select(0, slot).view(-1) for stack in group.stacks]
            torch._foreach_copy_(into, group.parts(rows))


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InvalidRequest(f"the adapter does not fit this model: {error}") from error


def _fill_from_host(slot: int, adapter: PackedAdapter) -> None:
    for group in adapter.groups:
        into = [stack.slots.select(0, slot).view(-1, group.width) for stack in group.stacks]
        parts = group.parts(group.of(adapter.kept))
        torch._foreach_copy_(
            [each[:, : group.used] for each in into],
            [part.view(-1, group.used) for part in parts],
            non_blocking=True,
        )
        if group.used < group.width:
            torch._foreach_zero_([each[:, group.used :] for each in into])


def _empty(tensors: Iterable[torch.Tensor]) -> None:
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    for each in alike.values():
        torch._foreach_zero_(each)
