"""Corrects vLLM's functions for adapters on a CPU (`vllm.lora.ops.torch_ops` of vLLM 0.32), in each worker.

"No adapter" is index -1, and the CPU functions index the stacked weights with it: base-model rows get
whatever is (or was) in the *last* adapter slot. The functions here skip such rows. They also run one matrix
product per run of equal adapters instead of gathering a copy of the weights for every row, which for the
output head is the vocabulary times the rank per token.

Invariant: after `apply`, every row of every matrix product uses the adapter of its own request, and a row
of a base-model request uses none (for rows of prompts that are scored, see adapter_rows.py).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper import punica_cpu

Run = tuple[int, int, int]
"""Rows [start, end) use adapter slot `slot`."""


def apply() -> None:
    """Puts the corrected functions in place."""
    for name, function in _CPU_FUNCTIONS.items():
        if not hasattr(punica_cpu, name):
            raise RuntimeError(
                f"this vLLM has no punica_cpu.{name}; check services/sampler/worker/cpu_adapters.py"
            )
        setattr(punica_cpu, name, function)


def _runs(indices: torch.Tensor, lengths: torch.Tensor | None = None) -> list[Run]:
    if lengths is None:
        indices, lengths = torch.unique_consecutive(indices, return_counts=True)
    runs, start = [], 0
    for slot, length in zip(indices.tolist(), lengths.tolist(), strict=True):
        if slot >= 0:
            runs.append((start, start + length, slot))
        start += length
    return runs


def _shrink(x: torch.Tensor, stacked: torch.Tensor, out: torch.Tensor, runs: list[Run], scale: float) -> None:
    """out[rows, :r] = scale * x[rows] A^T for each run; other rows 0. stacked: [slots, 1, r, in]."""
    out.zero_()
    for start, end, slot in runs:
        a = stacked[slot].flatten(0, -2).to(out.dtype)
        out[start:end, : a.shape[0]] = scale * (x[start:end].to(out.dtype) @ a.T)


def _expand(
    x: torch.Tensor, stacked: torch.Tensor, out: torch.Tensor, runs: list[Run], offset: int, add: bool
) -> None:
    """out[rows, offset:] += x[rows] B^T for each run. stacked: [slots, 1, width, r]."""
    for start, end, slot in runs:
        b = stacked[slot].flatten(0, -2).to(out.dtype)
        target = out[start:end, offset : offset + b.shape[0]]
        # The stacked output head may be padded beyond the logits.
        delta = x[start:end].to(out.dtype) @ b[: target.shape[1]].T
        target.add_(delta) if add else target.copy_(delta)


def _sgmv_shrink(x: Any, w: Any, out: Any, starts: Any, lengths: Any, slots: Any, *rest: Any) -> None:
    _shrink(x, w, out, _runs(slots, lengths), rest[-1])


def _sgmv_expand(x: Any, w: Any, out: Any, starts: Any, lengths: Any, slots: Any, *rest: Any) -> None:
    _expand(x, w, out, _runs(slots, lengths), 0, rest[-1])


def _sgmv_expand_slice(x: Any, w: Any, out: Any, starts: Any, lengths: Any, slots: Any, *rest: Any) -> None:
    offset, _, add = rest[-3:]
    _expand(x, w, out, _runs(slots, lengths), offset, add)


def _bgmv_shrink(x: Any, w: Any, out: Any, slots: Any, scaling: float = 1.0) -> None:
    _shrink(x, w, out, _runs(slots), scaling)


def _bgmv_expand(x: Any, w: Any, out: Any, slots: Any, add_inputs: bool = True) -> None:
    _expand(x, w, out, _runs(slots), 0, add_inputs)


def _bgmv_expand_slice(
    x: Any, w: Any, out: Any, slots: Any, slice_offset: int, slice_size: int, add_inputs: bool = True
) -> None:
    _expand(x, w, out, _runs(slots), slice_offset, add_inputs)


_CPU_FUNCTIONS = {
    "sgmv_shrink": _sgmv_shrink,
    "sgmv_expand": _sgmv_expand,
    "sgmv_expand_slice": _sgmv_expand_slice,
    "bgmv_shrink": _bgmv_shrink,
    "bgmv_expand": _bgmv_expand,
    "bgmv_expand_slice": _bgmv_expand_slice,
}
