"""Frozen weights that ranks hold, and gather, as int8.

DeepSpeed can gather such shards, but not make them here: its own quantiser is a CUDA kernel for float16, it
passes over weights that are frozen after they were loaded, and where it gathers several of them in one
collective it casts what it has dequantised back to int8. So shards are quantised here, in plain PyTorch on
any device, and `SETTINGS` has DeepSpeed gather them one by one.

Invariant: a weight that computes is the same on every rank, whatever their number, and no element of it is
off by more than 1/254 of the largest of its block of `BLOCK`, before rounding to the element type.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128
"""Elements that have one scale."""

SETTINGS = {"stage3_allgather_sequential": True}
"""What DeepSpeed's zero_optimization must have for them."""

_MOST = 127


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as int8, in their shape, and the float32 scale of each block.

    Args:
        values: of a number of elements that blocks divide.
    """
    blocks = values.detach().reshape(-1, BLOCK).float()
    scales = blocks.abs().amax(1) / _MOST
    # A block of zeros has no scale.
    units = blocks / scales.where(scales > 0, 1.0).unsqueeze(1)
    return units.round_().clamp_(-_MOST, _MOST).to(torch.int8).view(values.shape), scales


def dequantize(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What was quantised, in its shape."""
    made = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    torch.mul(quantized.reshape(-1, BLOCK), scales.unsqueeze(1), out=made.view(-1, BLOCK))
    return made


def quantize_shards(module: nn.Module, ranks: int) -> None:
    """Quantises this rank's part of every weight of a frozen module that is gathered for each use and whose
    parts are whole blocks. The others stay what they are."""
    from deepspeed.runtime.zero.partition_parameters import Init

    # What it dequantises with, by its names.
    Init.quantizer_module = SimpleNamespace(dequantize=dequantize)
    for parameter in module.parameters():
        weight: Any = parameter
        if weight.ds_persist or weight.ds_numel % (ranks * BLOCK):
            continue
        weight.ds_tensor = _quantized(weight.ds_tensor)
        if weight.ds_secondary_tensor is not None:
            weight.ds_secondary_tensor = _quantized(weight.ds_secondary_tensor)


def _quantized(part: Any) -> Any:
    values, scales = quantize(part)
    made: Any = values
    made.ds_quant_scale = scales
    made.ds_numel, made.status, made.final_location = part.ds_numel, part.status, part.final_location
    return made
