"""Products of rows with the matrices of their groups, in as few kernels as the device has for it.

Invariant: a group's matrix meets that group's rows and no others, and a group without rows adds nothing.
"""

from __future__ import annotations

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

    @cached_property
    def each(self) -> int:
        """Rows of every group, if the host knows that all have equally many; else 0."""
        return self._known[0] if self._known and len(set(self._known)) == 1 else 0

    @cached_property
    def calls(self) -> list[tuple[slice, Tensor, int]]:
        """What each call of a kernel takes: some of the groups, where their rows end, and of how many of them
        nothing is wanted. In a call after the first one all rows before its own are a group, since how many
        these are only the device knows."""
        count = len(self)
        calls = 1 if count <= _KERNEL_GROUPS else -(-count // (_KERNEL_GROUPS - 1))
        each = -(-count // calls)
        found = []
        for begin in range(0, count, each):
            others = min(begin, 1)
            some = slice(begin - others, min(begin + each, count))
            found.append((some, self.ends[some], others))
        return found

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
    """How a run of tokens is shared by stacked adapters.

    Attributes:
        adapters: those from the first to the last that have any of it; of all tokens, and of none, all.
        groups: the tokens of each of them.
        scale: what each token's update is multiplied by, float32 [tokens, 1], or one number for all.
    """

    adapters: slice
    groups: Groups
    scale: Tensor | float


def product(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """x [rows, k] times the matrix of each row's group, of [groups, k, n]: [rows, n]. Differentiable."""
    if len(groups) == 1:
        return x @ matrices[0]
    if _is_batched(groups, x, matrices):
        return torch.bmm(_by_group(x, groups), matrices).flatten(0, 1)
    if not is_grouped(x, matrices):
        parts = zip(x.split(groups.rows), matrices, strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    calls = groups.calls
    if len(calls) == 1:
        return F.grouped_mm(x, matrices, offs=groups.ends)
    made, number = x.new_zeros(()), torch.arange(len(x), device=x.device)[:, None]
    for some, ends, others in calls:
        ours = (number >= (ends[0] if others else 0)) & (number < ends[-1])
        # Also of the gradient nothing is there for other rows, or something else.
        made = torch.where(ours, F.grouped_mm(torch.where(ours, x, 0.0), matrices[some], offs=ends), made)
    return made


def outer(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """left^T [m, rows] times right [rows, n] of each group's rows: [groups, m, n]."""
    if len(groups) == 1:
        return (left.T @ right)[None]
    if _is_batched(groups, left, right):
        return torch.bmm(_by_group(left, groups).transpose(1, 2), _by_group(right, groups))
    if not is_grouped(left, right):
        parts = zip(left.split(groups.rows), right.split(groups.rows), strict=True)
        return torch.stack([part.T @ other for part, other in parts])
    made = [F.grouped_mm(left.T, right, offs=ends)[others:] for _, ends, others in groups.calls]
    found = made[0] if len(made) == 1 else torch.cat(made)
    groups.clear_empty(found)
    return found


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, fresh: bool = False) -> None:
    """Adds scale left [m, k] right [k, n] to a matrix [m, n], which may be of more precision.

    Args:
        fresh: what is in the matrix does not count, whatever it is.
    """
    beta = 0 if fresh else 1
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta, alpha=scale)
    elif total.device.type != "cpu":
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, beta=beta, alpha=scale, out=total)
    else:
        _add(total, left @ right, scale, fresh)


def add_products(total: Tensor, x: Tensor, matrices: Tensor, groups: Groups, scale: float = 1.0) -> None:
    """Adds scale times `product` to rows [rows, n], which may be of more precision."""
    if len(groups) == 1:
        add_product(total, x, matrices[0], scale)
    elif total.dtype == x.dtype and _is_batched(groups, x, matrices):
        _by_group(total, groups).baddbmm_(_by_group(x, groups), matrices, alpha=scale)
    elif not groups.each and _is_loop(x, matrices):
        # To add what another loop has made would be another sweep over all rows.
        for part, rows, matrix in zip(total.split(groups.rows), x.split(groups.rows), matrices, strict=True):
            add_product(part, rows, matrix, scale)
    else:
        total.add_(product(x, matrices, groups), alpha=scale)


def add_outer(
    total: Tensor, left: Tensor, right: Tensor, groups: Groups, scale: float = 1.0, fresh: bool = False
) -> None:
    """Adds scale times `outer` to matrices, [groups, m, n] or of as many dimensions before m and n as there
    are; fresh as in `add_product`."""
    if len(groups) == 1:
        add_product(total.view(total.shape[-2:]), left.T, right, scale, fresh)
    elif total.dim() == 3 and total.dtype == left.dtype and _is_batched(groups, left, right):
        lefts, rights = _by_group(left, groups).transpose(1, 2), _by_group(right, groups)
        total.baddbmm_(lefts, rights, beta=0 if fresh else 1, alpha=scale)
    elif not groups.each and total.dim() == 3 and _is_loop(left, right):
        for matrix, part, other in zip(total, left.split(groups.rows), right.split(groups.rows), strict=True):
            add_product(matrix, part.T, other, scale, fresh)
    else:
        _add(total, outer(left, right, groups).view_as(total), scale, fresh)


def _add(total: Tensor, made: Tensor, scale: float, fresh: bool) -> None:
    if not fresh:
        total.add_(made, alpha=scale)
        return
    total.copy_(made)
    if scale != 1.0:
        total.mul_(scale)


def _is_batched(groups: Groups, *operands: Tensor) -> bool:
    """Whether one batched product does it: of equally many rows each, where no kernel takes any groups."""
    return bool(groups.each) and _is_loop(*operands)


def _is_loop(*operands: Tensor) -> bool:
    """Whether a grouped product is a loop over the groups, as a CPU's is."""
    return operands[0].device.type == "cpu" or not is_grouped(*operands)


def _by_group(rows: Tensor, groups: Groups) -> Tensor:
    return rows.unflatten(0, (len(groups), groups.each))


def is_grouped(*operands: Tensor) -> bool:
    """Whether one kernel multiplies them: on CUDA that is for bfloat16, and rows are of whole 16 bytes."""
    device, dtype = operands[0].device.type, operands[0].dtype
    return (device != "cuda" or dtype == torch.bfloat16) and all(
        stride == 1 or stride * operand.element_size() % 16 == 0
        for operand in operands
        for stride in operand.stride()
    )
