"""Models whose files hold quantised weights, as of DeepSeek (fp8) and GPT-OSS (mxfp4), are read as what these
stand for.

Invariant: what is trained has no quantised weight, whatever the device has kernels for. transformers would
keep them where it finds kernels, which compute no gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from services.common.contract.errors import InvalidRequest

_READ = ("fp8", "mxfp4")
"""What transformers reads as what it stands for."""


def read_whole(config: Any, both: Any, model_path: str) -> None:
    """Has transformers read a model's weights as what they stand for.

    Args:
        config: of the model that is read, as it will be given to transformers.
        both: that of its files, which are perhaps of a model that reads pictures too.

    Raises:
        InvalidRequest: they are quantised in a way that it only computes with.
    """
    quantised = getattr(both, "quantization_config", None)
    if quantised is None:
        return
    kind = quantised.get("quant_method")
    if kind not in _READ:
        raise InvalidRequest(
            f"{model_path}: its files are quantised ({kind}), and such a model cannot be trained; files in "
            f"{' and '.join(_READ)} are read as what they stand for: use these, or the model that was "
            "quantised"
        )
    config.quantization_config = {**quantised, "dequantize": True}


def in_one_type(model: Any, dtype: torch.dtype) -> None:
    """Brings weights to the type that the model computes in: what was dequantised is bfloat16."""
    for weight in model.parameters():
        if weight.dtype == torch.bfloat16 != dtype:
            weight.data = weight.data.to(dtype)
