"""Models whose files hold quantised weights, as of DeepSeek (fp8) and GPT-OSS (mxfp4), are read as what these
stand for.

Invariant: what is trained has no quantised weight, whatever the device has kernels for. transformers would
keep them where it finds kernels, which compute no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from services.common.contract.errors import InvalidRequest

_READ = ("fp8", "mxfp4")
"""What transformers reads as what it stands for."""


def read_whole(config: Any, both: Any, model_path: str, *, sharded: bool) -> None:
    """Has transformers read a model's weights as what they stand for.

    Args:
        config: of the model that is read, as it will be given to transformers.
        both: that of its files, which are perhaps of a model that reads pictures too.
        sharded: it is loaded under ZeRO-3.

    Raises:
        InvalidRequest: they are quantised in a way that it only computes with, or each rank would have all of
            them.
    """
    quantised = getattr(both, "quantization_config", None) or getattr(config, "quantization_config", None)
    if quantised is None:
        return
    kind = quantised.get("quant_method")
    if kind not in _READ:
        raise InvalidRequest(
            f"{model_path}: its files are quantised ({kind}), and such a model cannot be trained; files in "
            f"{' and '.join(_READ)} are read as what they stand for: use these, or the model that was "
            "quantised"
        )
    if sharded:
        # transformers loads such files past ZeRO-3, all of them on every rank.
        raise InvalidRequest(
            f"{model_path}: its files are quantised ({kind}), and such files are not read with --zero-stage "
            "3: use another stage, or a model whose files are not quantised"
        )
    config.quantization_config = {**quantised, "dequantize": True}


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Within it transformers takes blocks of fp8 to be as large as files say, where the last ones of a weight
    are cut off too. It takes them to be equal parts of the weight (transformers 5.19; no upstream report
    found)."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize._dequantize_one

    def dequantised(self: Any, quantised: Tensor, scales: Tensor, output_dtype: Any = None) -> Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if not quantised.is_floating_point() or block is None or scales.dim() != quantised.dim():
            return theirs(self, quantised, scales, output_dtype)
        spread = scales.float()
        for dim, size in zip((-2, -1), block, strict=True):
            if scales.shape[dim] != -(-quantised.shape[dim] // size):
                return theirs(self, quantised, scales, output_dtype)
            spread = spread.repeat_interleave(size, dim).narrow(dim, 0, quantised.shape[dim])
        return (quantised.float() * spread).to(output_dtype or scales.dtype)

    Fp8Dequantize._dequantize_one = dequantised
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = theirs


def in_one_type(model: Any, dtype: torch.dtype) -> None:
    """Brings weights to the type that the model computes in: what was dequantised is bfloat16."""
    for weight in model.parameters():
        if weight.dtype == torch.bfloat16 != dtype:
            weight.data = weight.data.to(dtype)
