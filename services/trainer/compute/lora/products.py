"""Products of rows with the matrices of their groups, in as few kernels as the device has for it.

Invariant: a group's matrix meets that group's rows and no others, and a group without rows adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

_KERNEL_GROUPS = 1023
"""That one kernel takes on CUDA."""


class Groups:
    """How consecutive rows are shared by matrices. A group may have no rows.

    Args:
        ends: int32 [groups], where each one's rows end.
        rows: of each, where the host knows.
    """

    def __init__(self, ends: Tensor, rows: tuple[int, ...] | None = None) -> None:
        self.ends = ends
        self._known = rows

    def __len__(self) -> int:
        return self.ends.numel()

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of each group. The host waits for the device unless it knows them."""
        return tuple(self._sizes().tolist()) if self._known is None else self._known

    def clear_empty(self, made: Tensor) -> None:
        """Zeroes what belongs to groups without rows, of [groups, ...]: some devices leave what was there
        before (pytorch/pytorch#172439)."""
        if self._known is None:
            made.masked_fill_((self._sizes() == 0).view(-1, *(1,) * (made.dim() - 1)), 0)
            return
        for number, rows in enumerate(self._known):
            if not rows:
                made[number].zero_()

    def _sizes(self) -> Tensor:
        return self.ends.diff(prepend=self.ends.new_zeros(1))


@dataclass(frozen=True)
class Cut:
    """How a run of tokens is shared by the stacked adapters, some of which may have none of it.

    Attributes:
        groups: the tokens of each adapter.
        scale: what each token's update is multiplied by, float32 [tokens, 1], or one number for all.
    """

    groups: Groups
    scale: Tensor | float


def product(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """x [rows, k] times the matrix of each row's group, of [groups, k, n]: [rows, n]. Differentiable."""
    if len(groups) == 1:
        return x @ matrices[0]
    if not is_grouped(x, matrices):
        parts = zip(x.split(groups.rows), matrices, strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    made = [F.grouped_mm(x[rows], matrices[some], offs=ends) for some, rows, ends in _kernels(groups)]
    return made[0] if len(made) == 1 else torch.cat(made)


def outer(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """left^T [m, rows] times right [rows, n] of each group's rows: [groups, m, n]."""
    if len(groups) == 1:
        return (left.T @ right)[None]
    if not is_grouped(left, right):
        parts = zip(left.split(groups.rows), right.split(groups.rows), strict=True)
        return torch.stack([part.T @ other for part, other in parts])
    made = [F.grouped_mm(left[rows].T, right[rows], offs=ends) for _, rows, ends in _kernels(groups)]
    found = made[0] if len(made) == 1 else torch.cat(made)
    groups.clear_empty(found)
    return found


def is_grouped(*operands: Tensor) -> bool:
    """Whether one kernel multiplies them: on CUDA that is for bfloat16, and rows are of whole 16 bytes."""
    device, dtype = operands[0].device.type, operands[0].dtype
    return (device != "cuda" or dtype == torch.bfloat16) and all(
        stride == 1 or stride * operand.element_size() % 16 == 0
        for operand in operands
        for stride in operand.stride()
    )


def _kernels(groups: Groups) -> Iterator[tuple[slice, slice, Tensor]]:
    """What each call takes: some of the groups, their rows, and where these end within them. Of more groups
    than a kernel takes the host must know the rows."""
    if len(groups) <= _KERNEL_GROUPS:
        yield slice(None), slice(None), groups.ends
        return
    begin = 0
    for first in range(0, len(groups), _KERNEL_GROUPS):
        some = slice(first, first + _KERNEL_GROUPS)
        end = begin + sum(groups.rows[some])
        yield some, slice(begin, end), groups.ends[some] - begin
        begin = end
