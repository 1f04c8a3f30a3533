"""What every DeepSpeed engine is told, and ZeRO-3 as it is told of that.

Invariants: an engine neither counts micro-batches nor measures time: who calls it does. Ranks have one group
for the second copy of weights, of which all models of a process are part; DeepSpeed itself would make one for
its first model, and refuse a second model.
"""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from services.common.worlds.sharding import Sharding
from services.trainer.compute.exchange import wait_alike

EVERY_ENGINE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    # To measure, the host would wait for all of the device before each forward pass.
    "timers": {"throughput": {"enabled": False}},
}

# Norms and biases stay on every rank: gathering them costs more than holding them.
_WHOLE = 10_000
_READ = ("conv1d", "conv", "dt_proj")
"""Layers within state-space layers, linear attention and short convolutions that are not called: whoever has
them hands their weights to a kernel. As transformers names them (`force_accelerate_hooks`)."""


def stage3(sharding: Sharding) -> dict[str, Any]:
    """What of DeepSpeed's zero_optimization is for stage 3. Pure."""
    found: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": _WHOLE}
    if sharding.replica_ranks > 1:
        found["zero_hpz_partition_size"] = sharding.replica_ranks
    if sharding.prefetch_elements is not None:
        found["stage3_prefetch_bucket_size"] = sharding.prefetch_elements
    return found


def with_exact_buffers(config: dict[str, Any], model_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration to load a model by that has buffers of the types which they have without ZeRO-3.

    DeepSpeed rounds all that a model's constructors make to the weights' type: rotary frequencies in bfloat16
    turn the thousandth token by as much as a radian too far. It is told which buffers are float32, before the
    library computes or reads what is in them.
    """
    if dtype == torch.float32:
        return config
    from deepspeed.runtime.keep_in_fp32 import KEEP_IN_FP32_AUTO, keep_in_fp32_pattern
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # It writes the type into the configuration.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=dtype)
    # Of these its class says so, for when it is read from files.
    own = keep_in_fp32_pattern(model, KEEP_IN_FP32_AUTO, dtype)
    names = [
        re.escape(name)
        for name, buffer in model.named_buffers()
        if buffer.dtype == torch.float32 or (own is not None and own.search(name))
    ]
    types = {**config.get("data_types", {}), "keep_in_fp32_modules": names}
    return {**config, "data_types": types}


def share_replicas() -> None:
    """Has DeepSpeed take the group of the second copy that there is. All ranks, before a model is loaded."""
    from deepspeed.utils import groups

    make = groups._create_zero_param_parallel_group
    if make.__module__ != groups.__name__:
        return

    def once(size: int) -> None:
        if groups._get_zero_param_intra_parallel_group() is None:
            make(size)
            wait_alike(groups._get_zero_param_intra_parallel_group())

    groups._create_zero_param_parallel_group = once


def gather_what_is_read(model: nn.Module) -> None:
    """Has a layer gather, with its own weights, those of layers in it that it reads and does not call: their
    own hooks would never gather them. Before DeepSpeed has the model."""
    import deepspeed

    for module in model.modules():
        for name, child in module.named_children():
            if name in _READ:
                for weight in child.parameters(recurse=False):
                    deepspeed.zero.register_external_parameter(module, weight)


def gathered(module: nn.Module) -> AbstractContextManager[Any]:
    """Within it every rank has all of a module's own weights. A collective, where they are sharded."""
    weights = list(module.parameters(recurse=False))
    if not any(hasattr(weight, "ds_id") for weight in weights):
        return nullcontext()
    import deepspeed

    found: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(weights)
    return found


def held_bytes(module: nn.Module) -> int:
    """What a rank holds of a sharded module's weights, a second copy and scales included."""
    weights: list[Any] = list(module.parameters())
    parts = [
        part
        for parameter in weights
        for part in (parameter.ds_tensor, parameter.ds_secondary_tensor)
        if part is not None
    ]
    scales = [part.ds_quant_scale for part in parts if hasattr(part, "ds_quant_scale")]
    return sum(tensor.nbytes for tensor in (*parts, *scales))
