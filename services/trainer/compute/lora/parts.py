"""Which part of an adapter each rank holds and steps, and how ranks put their parts together.

Every rank has an equal run of the flat tensor's elements, filled up with zeros at its end. A part begins
where vectors of a CPU, 16 bytes of a GPU and rows of a norm do, whatever the element type, so that AdamW
comes to the same bits on parts as on the whole.

Invariant: whatever is not pure here is a collective: all ranks call it, in the same order, with equal shapes.
What it comes to for one adapter depends on that adapter alone, and so is the same whoever else steps with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.compute.memory.failures import free_cache

ROW = 128
"""Elements that the part of one rank of several is a multiple of. AdamW's last few of a tensor, which fill no
vector, are rounded otherwise than those before, and a norm is put together from those of rows."""

_AT_ONCE = 2**22
"""Elements of each rank's part that are gathered at once: scratch of rank 0 where the whole has no room."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a flat tensor. Pure.

    Attributes:
        size: elements of the whole.
        elements: of each rank's part, with those that fill it up; all of one rank's, which has no others.
    """

    size: int
    ranks: int = 1
    rank: int = 0

    @property
    def elements(self) -> int:
        each = -(-self.size // self.ranks)
        return each if self.ranks == 1 else -(-each // ROW) * ROW

    @property
    def padded(self) -> int:
        """Elements of all ranks' parts together."""
        return self.ranks * self.elements

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole [size] or [padded], without what fills it up; it shares storage."""
        start = self.rank * self.elements
        return whole[min(start, self.size) : min(start + self.elements, self.size)]

    def filled(self, padded: Tensor) -> Tensor:
        """This rank's part of a whole [padded]: [elements]; it shares storage."""
        return padded[self.rank * self.elements : (self.rank + 1) * self.elements]


def begin_sum(padded: Tensor, part: Part) -> Any:
    """Has this rank's part of a whole [padded] be the sum of all ranks'; what else is in it is undefined.

    Returns:
        What is waited for.
    """
    if padded.device.type == "cpu":
        # Gloo scatters nothing: it would sum a copy of the whole and take the part of that.
        return dist.all_reduce(padded, async_op=True)
    return dist.reduce_scatter_single(part.filled(padded), padded, async_op=True)


def begin_share(padded: Tensor, part: Part) -> Any:
    """Has a whole [padded] be made of every rank's part of it. Returns what is waited for."""
    return dist.all_gather_single(padded, part.filled(padded), async_op=True)


def begin_joining(values: Tensor) -> Any:
    """Has float32 values be those of whichever rank has some; the others' are positive zeros. Returns what is
    waited for."""
    # Added up as numbers, a negative zero would become a positive one.
    return dist.all_reduce(values.view(torch.int32), async_op=True)


def wait(under_way: Iterable[Any]) -> None:
    """Waits for what was begun."""
    for work in under_way:
        work.wait()


def gathered(mine: Tensor, part: Part) -> Tensor | None:
    """The whole [size] of which each rank has a part [elements], on rank 0; nothing elsewhere. It is on the
    device of the parts, or on the host if that has no room for it: whoever computes waits for the host then,
    which is better than to fail."""
    whole = _room(mine, part) if part.rank == 0 else None
    for start in range(0, part.elements, _AT_ONCE):
        piece = mine[start : start + _AT_ONCE]
        if whole is None:
            dist.gather(piece, dst=0)
            continue
        places = [row[start : start + _AT_ONCE] for row in whole.view(part.ranks, -1)]
        if whole.device == mine.device:
            dist.gather(piece, places, dst=0)
            continue
        came = [torch.empty_like(piece) for _ in places]
        dist.gather(piece, came, dst=0)
        for place, values in zip(places, came, strict=True):
            place.copy_(values)
    return None if whole is None else whole[: part.size]


def _room(mine: Tensor, part: Part) -> Tensor:
    try:
        return mine.new_empty(part.padded)
    except torch.OutOfMemoryError:
        free_cache()
        return torch.empty(part.padded, dtype=mine.dtype)
