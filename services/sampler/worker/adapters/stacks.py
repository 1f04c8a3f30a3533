"""The tensors in which vLLM's layers have the parts of all slots, and what of one adapter goes into them.

Those of a part of a layer are [slots, experts or 1, rank, in] for A and [slots, experts or 1, out, rank] for
B, with the largest rank that the engine takes. Of an adapter of a smaller rank only its own elements are
kept: groups of matrices whose rows get wider alike, so that a device widens each group at once.

Invariant: every tensor of a slot is in one group of an adapter or in what it lacks. No vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

# A layer of experts has a list of views beside, under the first two of these names, for vLLM's warm-up alone.
_STACKED = (
    *("lora_a_stacked", "lora_b_stacked", "w13_lora_a_stacked", "w13_lora_b_stacked"),
    *("w2_lora_a_stacked", "w2_lora_b_stacked"),
)
_ENABLED = "adapter_enabled"
# What a device copies fastest begins at such bytes.
_ALIGNMENT = 16


class Stack(NamedTuple):
    """One tensor of a layer, with its part of every slot."""

    attribute: str
    """Of the layer, which has a tensor there or a tuple of them."""

    shape: tuple[int, ...]
    """As the layer has it."""

    slots: torch.Tensor
    """The same memory, [slots, rows, rank, inner]; of one number a slot, [slots, 1, 1, 1]."""

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The shape of one slot for adapters of this rank, as the layer has it."""
        if len(self.shape) == 1:
            return (1,)
        _, experts, rows, columns = self.shape
        return (1, experts, rank, columns) if "lora_a" in self.attribute else (1, experts, rows, rank)


class Group(NamedTuple):
    """What an adapter has for stacks of one type and one width of rows, in bytes that are kept elsewhere."""

    stacks: tuple[Stack, ...]
    start: int
    """The first of its bytes."""
    rows: int
    """Of all stacks."""
    used: int
    """Elements of a row that the adapter has."""
    width: int
    """Elements of a row in a slot."""

    @property
    def end(self) -> int:
        """Behind the last of its bytes."""
        return self.start + self.rows * self.used * self.stacks[0].slots.itemsize

    def of(self, kept: torch.Tensor) -> torch.Tensor:
        """What it has, [rows, used], in all that is kept of an adapter: uint8 [bytes]."""
        return kept[self.start : self.end].view(self.stacks[0].slots.dtype).view(self.rows, self.used)

    def parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """What each stack has of [rows, any width], flat."""
        each = [stack.slots.shape[1] * rows.shape[1] for stack in self.stacks]
        return list(rows.reshape(-1).split(each))


def stacks_of(layer: Any) -> list[Stack]:
    """Those of one of vLLM's layers.

    Raises:
        RuntimeError: it has none, or others than this knows.
    """
    found = []
    for attribute, value in vars(layer).items():
        tensors = [value] if isinstance(value, torch.Tensor) else value
        if attribute == _ENABLED:
            found.append(Stack(attribute, tuple(value.shape), value.view(-1, 1, 1, 1)))
        elif attribute in _STACKED and not isinstance(value, list):
            found += [_stack(attribute, each) for each in tensors]
    if not found or any(len(stack.shape) not in (1, 4) for stack in found):
        raise RuntimeError(f"this vLLM's {type(layer).__name__} has its adapters elsewhere; check {__name__}")
    return found


def _stack(attribute: str, tensor: torch.Tensor) -> Stack:
    shape = tuple(tensor.shape)
    if len(shape) == 4:
        slots, experts, rows, columns = shape
        of_a = "lora_a" in attribute
        tensor = tensor.view((slots, experts, rows, columns) if of_a else (slots, experts * rows, columns, 1))
    return Stack(attribute, shape, tensor)


def grouped(stacks: Iterable[Stack], rank: int) -> tuple[Group, ...]:
    """Where what an adapter of this rank has for these stacks is kept."""
    alike: dict[tuple[torch.dtype, int, int], list[Stack]] = {}
    for stack in stacks:
        _, _, most, inner = stack.slots.shape
        alike.setdefault((stack.slots.dtype, most, inner), []).append(stack)
    groups: list[Group] = []
    start = 0
    for (_, most, inner), members in alike.items():
        rows = sum(stack.slots.shape[1] for stack in members)
        groups.append(Group(tuple(members), start, rows, min(rank, most) * inner, most * inner))
        start = -(-groups[-1].end // _ALIGNMENT) * _ALIGNMENT
    return tuple(groups)
