"""Frozen weights as int8, and what DeepSpeed is told of ZeRO-3."""

from __future__ import annotations

import pytest
import torch

from services.common.worlds.sharding import Sharding
from services.trainer.compute.sharding.quantized import BLOCK, dequantize, quantize
from services.trainer.compute.sharding.stage3 import stage3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_element_is_off_by_more_than_a_254th_of_the_largest_of_its_block(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-12, 6, 40).unsqueeze(1)
    values = (torch.randn(40, 2 * BLOCK, generator=generator) * sizes).to(dtype)
    quantized, scales = quantize(values)
    assert (quantized.dtype, quantized.shape, scales.dtype) == (torch.int8, values.shape, torch.float32)
    back = dequantize(quantized, scales, torch.float32)
    blocks, found = values.float().view(-1, BLOCK), back.view(-1, BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    assert bool(((found - blocks).abs() <= most / 254 * (1 + 1e-4)).all())
    # The largest of a block is itself.
    assert torch.allclose(found.abs().amax(1, keepdim=True), most, rtol=1e-6)
    assert torch.equal(dequantize(quantized, scales, dtype), back.to(dtype))


def test_zeros_stay_zeros() -> None:
    values = torch.zeros(2, BLOCK)
    values[1, 3] = 2.0
    assert torch.equal(dequantize(*quantize(values), torch.float32), values)


def test_parts_of_whole_blocks_are_quantised_as_the_whole_is() -> None:
    values = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(2))
    quantized, scales = quantize(values)
    parts = [quantize(part) for part in values.chunk(4)]
    assert torch.equal(torch.cat([part for part, _ in parts]), quantized)
    assert torch.equal(torch.cat([scale for _, scale in parts]), scales)


def test_what_is_not_asked_for_is_left_to_deepspeed() -> None:
    assert stage3(Sharding()).keys() == {"stage", "stage3_param_persistence_threshold"}
    told = stage3(Sharding(replica_ranks=4, prefetch_elements=0))
    assert (told["zero_hpz_partition_size"], told["stage3_prefetch_bucket_size"]) == (4, 0)
