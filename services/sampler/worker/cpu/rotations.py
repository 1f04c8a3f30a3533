"""Corrects how vLLM 0.32 rotates queries and keys on a CPU (`vllm._custom_ops.rotary_embedding`).

The kernel counts heads by the last dimension. The queries of latent attention have heads on a dimension of
their own: of each token it rotates the first head alone, and looks for it as if all were contiguous. In the
kernel for GPUs vllm-project/vllm#12777 corrected that; of CPUs no upstream report was found. Here it is given
a token's heads in one row.

Invariant: after `apply`, every head of every token is rotated, and nothing else is.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops


def apply() -> None:
    """Puts the corrected function in place."""
    rotate = _custom_ops.rotary_embedding

    def in_rows(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *rest: Any, **options: Any
    ) -> None:
        given = [heads for heads in (query, key) if heads is not None]
        rows = [heads.flatten(1) if heads.dim() == 3 else heads for heads in given]
        rotate(positions, rows[0], rows[1] if key is not None else None, *rest, **options)
        for heads, row in zip(given, rows, strict=True):
            # It works in place, and rows that are not together in memory were copied.
            if row.data_ptr() != heads.data_ptr():
                heads.copy_(row.view_as(heads))

    _custom_ops.rotary_embedding = in_rows
