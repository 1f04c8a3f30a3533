"""The adapters of a micro-batch, stacked.

A micro-batch is one run of tokens; those of one operation follow each other and form a segment. The matrices
of its adapters are stacked, so that one product of matrices multiplies the tokens of all of them.

Invariant: the autograd graph never touches the masters. A segment's gradient goes to its own operation alone,
so one operation can be dropped, and no token can reach another model's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.compute.lora.adapter import VALUE_HEAD, Adapter, layout_of, matrix
from services.trainer.compute.lora.products import Cut, Groups, add_outer, product
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.transfer import on_device


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that share an adapter. Critics' come last.

    Attributes:
        gradient: flat, what the backward pass adds to; None of a segment that only runs forward, as then all
            of a micro-batch do.
        fresh: nothing was added to the gradient yet, and what is in it does not count.
    """

    tokens: int
    adapter: Adapter
    gradient: Tensor | None = None
    fresh: bool = False


class Stack:
    """The adapters of a micro-batch: their matrices [segments, ...] and, if wanted, the gradients.

    Adapters of several shapes are stacked in one that holds them all, filled up with zeros, which change
    nothing. One adapter alone is not copied; its gradient, while fresh, is its operation's. What was added to
    a gradient first took the place of what was there: zeros would be a sweep over it for nothing.

    Attributes:
        tokens: of the micro-batch; `whole`: all of them, by adapter.
        anchor: what makes autograd go through linears whose input needs no gradient.
    """

    def __init__(self, segments: Sequence[Segment], buffers: FlatBuffers) -> None:
        self._segments, self._buffers = segments, buffers
        self._taken: list[Tensor] = []
        adapters = [segment.adapter for segment in segments]
        first = adapters[0]
        # Experts' matrices are many groups, also of one adapter.
        whole = first.spec.rank % 8 == 0 or all(each.experts is None for each in first.targets.values())
        self._alone = len(segments) == 1 and whole
        self._direct = self._alone and segments[0].fresh
        self._device = first.low.device
        self._same = all(_shape(adapter) == _shape(first) for adapter in adapters)
        # A grouped product wants rows of whole 16 bytes.
        if self._alone or (self._same and first.spec.rank % 8 == 0):
            self._layout, self._size = first.layout, first.low.numel()
        else:
            self._same = False
            targets = {name: shape for adapter in adapters for name, shape in adapter.targets.items()}
            rank = max(-(-adapter.spec.rank // 8) for adapter in adapters) * 8
            value_head = max(adapter.value_head for adapter in adapters)
            self._layout, self._size = layout_of(targets, rank, value_head)
        self._weights = self._stacked(adapters)
        self._gradients = self._unwritten() if segments[0].gradient is not None else None
        self._written: set[str] = set()
        # Made once and asked for in each pass: a view costs the host as much as the launch of a kernel.
        self._matrices: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self.tokens = sum(segment.tokens for segment in segments)
        self.whole = self.cut(0, self.tokens)
        self.anchor = torch.empty(0, device=self._device, requires_grad=self._gradients is not None)

    def has(self, name: str) -> bool:
        """Whether any of the adapters adapts the linear."""
        return f"{name}.lora_A" in self._layout

    def cut(self, start: int, stop: int) -> Cut:
        """The tokens from `start` to `stop`."""
        all_ends = accumulate(segment.tokens for segment in self._segments)
        within = [min(max(end, start), stop) - start for end in all_ends]
        tokens = tuple(end - begin for begin, end in zip([0, *within], within, strict=False))
        present = [number for number, count in enumerate(tokens) if count]
        if not present or stop - start == self.tokens:
            present = [0, len(tokens) - 1]
        some = slice(present[0], present[-1] + 1)
        scales = [segment.adapter.scale for segment in self._segments[some]]
        scale: Tensor | float = scales[0]
        if len(set(scales)) > 1:
            each = torch.tensor(scales).repeat_interleave(
                torch.tensor(tokens[some]), output_size=stop - start
            )
            scale = on_device(each, str(self._device))[:, None]
        ends = on_device(torch.tensor(within[some], dtype=torch.int32), str(self._device))
        return Cut(some, Groups(ends, tokens[some]), scale)

    @cached_property
    def owners(self) -> Tensor:
        """Which of the adapters each token has: int64 [tokens]."""
        tokens = torch.tensor([segment.tokens for segment in self._segments])
        each = torch.arange(len(tokens)).repeat_interleave(tokens, output_size=self.tokens)
        return on_device(each, str(self._device))

    @property
    def adapters(self) -> int:
        """How many there are."""
        return len(self._segments)

    def matrices(self, key: str) -> Tensor:
        """What the adapters have of a name, for each group of rows: [adapters, ...], of experts' matrices
        those of the first expert before those of the next [experts * adapters, ...]."""
        found = self._matrices.get(key)
        if found is None:
            found = matrix(self._weights, self._layout[key])
            if found.dim() == 3:
                self._matrices[key] = found
            else:
                # A copy of all that experts have, which is not kept.
                found = found.transpose(0, 1).flatten(0, 1)
        return found

    def accumulate(
        self,
        key: str,
        left: Tensor,
        right: Tensor,
        groups: Groups,
        scale: float = 1.0,
        some: slice = slice(None),
    ) -> None:
        """Adds scale left^T right of each group's rows to the gradient of its matrix; groups as in
        `matrices`, of some of them."""
        gradient = self._sums.get(key)
        if gradient is None:
            assert self._gradients is not None
            gradient = matrix(self._gradients, self._layout[key])
            gradient = gradient if gradient.dim() == 3 else gradient.transpose(0, 1)
            self._sums[key] = gradient
        first, mine = self._first(key), gradient[some]
        if first and len(mine) < len(gradient):
            gradient.zero_()
            first = False
        add_outer(mine, left, right, groups, scale, first)

    def product(self, key: str, x: Tensor, groups: Groups, scale: Tensor | float = 1.0) -> Tensor:
        """Rows x [rows, in] times scale and the transposed matrix of each row's group: [rows, out]."""
        return cast(Tensor, _Product.apply(x, self.anchor, self, key, groups, scale))

    def values(self, hidden: Tensor) -> Tensor:
        """See `LoraRouter.values`."""
        heads = [
            (number, segment) for number, segment in enumerate(self._segments) if segment.adapter.value_head
        ]
        parts = hidden.float().split([segment.tokens for _, segment in heads])
        values = []
        if heads and self._gradients is not None and self._first(VALUE_HEAD):
            matrix(self._gradients, self._layout[VALUE_HEAD]).zero_()
        for (number, segment), part in zip(heads, parts, strict=True):
            head = segment.adapter.value_weights.detach()
            if self._gradients is not None:
                head.requires_grad_()
                head.grad = matrix(self._gradients[number], self._layout[VALUE_HEAD])
            values.append((part @ head.T)[:, 0])
        # Also without tokens the graph goes through the hidden states, on all ranks of a collective alike.
        return torch.cat(values) if values else hidden.float().sum(-1)

    def commit(self) -> None:
        """Hands the gradients of a backward pass on to the operations."""
        if self._gradients is None:
            return
        for name in self._layout.keys() - self._written:
            matrix(self._gradients, self._layout[name]).zero_()
        if self._direct:
            return
        for fresh in (True, False):
            rows = [number for number, segment in enumerate(self._segments) if segment.fresh == fresh]
            if rows:
                (torch._foreach_copy_ if fresh else torch._foreach_add_)(*self._sums_of(rows))

    def release(self) -> None:
        """Nobody uses it any more."""
        for buffer in self._taken:
            self._buffers.give(buffer)

    def _first(self, key: str) -> bool:
        """Whether nothing was added to the gradient of these matrices yet; from now on something was."""
        if key in self._written:
            return False
        self._written.add(key)
        return True

    def _sums_of(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """What operations sum up their gradients in, and what is to be added, in the same order."""
        assert self._gradients is not None
        sums = [cast(Tensor, self._segments[number].gradient) for number in rows]
        added = [self._gradients[number] for number in rows]
        if self._same:
            return sums, added
        adapters = [self._segments[number].adapter for number in rows]
        return (
            [part for flat, each in zip(sums, adapters, strict=True) for part in each.views(flat).values()],
            [part for row, each in zip(added, adapters, strict=True) for part in self._parts(row, each)],
        )

    def _stacked(self, adapters: Sequence[Adapter]) -> Tensor:
        if self._alone:
            return adapters[0].low[None]
        stacked = self._take(adapters[0].low.dtype)
        if self._same:
            return torch.stack([adapter.low for adapter in adapters], out=stacked)
        parts = [
            part
            for row, adapter in zip(stacked.zero_(), adapters, strict=True)
            for part in self._parts(row, adapter)
        ]
        torch._foreach_copy_(
            parts, [own for adapter in adapters for own in adapter.views(adapter.low).values()]
        )
        return stacked

    def _parts(self, row: Tensor, adapter: Adapter) -> list[Tensor]:
        """An adapter's matrices within its row of the stack, in the order of its layout."""
        return [
            matrix(row, self._layout[name])[tuple(slice(size) for size in shape)]
            for name, (_, shape) in adapter.layout.items()
        ]

    def _unwritten(self) -> Tensor:
        if self._direct:
            return cast(Tensor, self._segments[0].gradient)[None]
        return self._take(torch.float32)

    def _take(self, dtype: torch.dtype) -> Tensor:
        """[adapters, elements of each], with whatever is in it."""
        elements = len(self._segments) * self._size
        buffer = self._buffers.take(-(-elements * dtype.itemsize // 4), self._device)
        self._taken.append(buffer)
        return buffer.view(dtype)[:elements].view(len(self._segments), self._size)


def _shape(adapter: Adapter) -> tuple[object, ...]:
    return adapter.spec.rank, adapter.value_head, adapter.targets


class _Product(torch.autograd.Function):
    """x M^T * scale, with each row's own M."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _anchor: Tensor, stack: Stack, key: str, groups: Groups, scale: Tensor | float
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stack, ctx.key, ctx.groups, ctx.scale = stack, key, groups, scale
        return scaled(product(x, stack.matrices(key).transpose(1, 2), groups), scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        above = (grad if _is_one(ctx.scale) else grad * ctx.scale).to(x.dtype).contiguous()
        ctx.stack.accumulate(ctx.key, above, x, ctx.groups)
        below = product(above, ctx.stack.matrices(ctx.key), ctx.groups) if ctx.needs_input_grad[0] else None
        return below, None, None, None, None, None


def _is_one(scale: Tensor | float) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def scaled(made: Tensor, scale: Tensor | float) -> Tensor:
    """In place."""
    return made if _is_one(scale) else made.mul_(scale)
