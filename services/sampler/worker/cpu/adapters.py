"""Corrects what vLLM computes for adapters on a CPU (`PunicaWrapperCPU` of vLLM 0.32), in each worker.

"No adapter" is slot -1, and vLLM's functions index the stacked weights with it: base-model rows get whatever
is (or was) in the *last* slot (vllm-project/vllm#48421). And they gather a copy of the weights for every row,
which for the output head is the vocabulary times the rank per token. Here rows are brought into the order of
their adapters, once for each step, and each adapter multiplies all of its rows at once.

Invariant: every row of every matrix product uses the adapter of its own request, and a row of a base-model
request uses none (for rows of prompts that are scored, see adapter_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class Rows(NamedTuple):
    """The rows of a step by adapter."""

    slots: list[int]
    """Of each run of rows, in the order of adapters; -1 = none."""
    counts: list[int]
    """Rows of each run."""
    order: Tensor | None
    """[rows], the row at each place of that order. None: they are in it."""
    back: Tensor | None
    """[rows], the place of each row."""

    @property
    def adapted(self) -> bool:
        """Whether any row has an adapter. What a layer does around none takes as long as a small product."""
        return self.slots != [-1]


def by_adapter(slots: Tensor) -> Rows:
    """Rows in the order of their adapters.

    Args:
        slots: [rows], the slot of each; -1 = none.
    """
    found, counts = torch.unique_consecutive(slots, return_counts=True)
    order = back = None
    if len(found.unique()) < len(found):
        order = slots.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        found, counts = torch.unique_consecutive(slots[order], return_counts=True)
    return Rows(found.tolist(), counts.tolist(), order, back)


class CpuAdapters(PunicaWrapperCPU):
    """What layers ask for the part of their adapters. Stacked weights are [slots, 1, out, in]."""

    _tokens: Rows | None = None
    _sampled: Rows | None = None
    """By adapter, since layers asked for them in this step."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._tokens = self._sampled = None

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """y += scale * x A^T B^T in each slice; y: [tokens, all slices], x: [tokens, in]."""
        rows = self._token_rows()
        if not rows.adapted:
            return
        x, y = _ordered(_flat(x), rows).float(), _flat(y)
        low = [_shrunk(x, a, rows, scale) for a in lora_a_stacked]
        _expand(y, low, lora_b_stacked, output_slices, rows)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """y += scale * x A^T B^T in the columns that y and B both have; y: [sampled tokens, columns], x:
        [sampled tokens, in]."""
        if self._sampled is None:
            self._sampled = by_adapter(self.sampler_indices)
        rows = self._sampled
        if not rows.adapted:
            return
        x, y = _ordered(_flat(x), rows).float(), _flat(y)
        low = _shrunk(x, lora_a_stacked, rows, scale)
        # vLLM pads the output head to a multiple of 64 tokens, and so these logits, but no adapter of it.
        _expand(y, [low], [lora_b_stacked], [min(y.shape[1], lora_b_stacked.shape[2])], rows)

    def add_shrink(self, *_: Any, **__: Any) -> NoReturn:
        """Layers of embeddings, and those of vLLM's `fully_sharded_loras`, ask for these: a sampler adapts no
        embeddings and never shards so, and vLLM's own functions would take slot -1 as said above."""
        raise NotImplementedError(f"a layer asked for what no sampler serves; check {__name__}")

    add_expand = add_lora_embedding = add_shrink

    def _token_rows(self) -> Rows:
        if self._tokens is None:
            self._tokens = by_adapter(self.token_lora_indices)
        return self._tokens


def _flat(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _ordered(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.order is None else x.index_select(0, rows.order)


def _shrunk(x: Tensor, a: Tensor, rows: Rows, scale: float) -> Tensor:
    """scale * x A^T by adapter, [rows, rank]; 0 for rows without one. x: [rows, in], in order."""
    low = x.new_zeros(len(x), a.shape[-2])
    weights = a[:, 0].transpose(1, 2).unbind()
    for slot, mine, out in zip(rows.slots, x.split(rows.counts), low.split(rows.counts), strict=True):
        if slot >= 0:
            torch.mm(mine, weights[slot].to(x.dtype), out=out)
    return low.mul_(scale)


def _expand(
    y: Tensor,
    low: Sequence[Tensor],
    stacked: Sequence[Tensor],
    widths: Sequence[int],
    rows: Rows,
) -> None:
    """Adds low[i] B[i]^T by adapter to columns of y. low[i]: [rows, rank], in order."""
    offset = 0
    for each, b, width in zip(low, stacked, widths, strict=True):
        target, each = y[:, offset : offset + width], each.to(y.dtype)
        offset += width
        # Where rows have no order to come back from, they are added to where they are.
        delta = target if rows.back is None else y.new_zeros(target.shape)
        weights = b[:, 0, :width].transpose(1, 2).unbind()
        for slot, mine, out in zip(
            rows.slots, each.split(rows.counts), delta.split(rows.counts), strict=True
        ):
            if slot >= 0:
                out.addmm_(mine, weights[slot].to(y.dtype))
        if rows.back is not None:
            target += delta[rows.back]


def correct(manager: Any) -> None:
    """Has the layers of an engine's adapters ask `CpuAdapters`.

    Args:
        manager: vLLM's manager of adapters; its layers hold the wrapper that it has made for them.
    """
    for wrapper in manager.punica_wrapper_mapping.values():
        if type(wrapper) is not PunicaWrapperCPU:
            raise RuntimeError(
                f"this vLLM's adapters on a CPU are {type(wrapper).__name__}'s; check {__name__}"
            )
        wrapper.__class__ = CpuAdapters
