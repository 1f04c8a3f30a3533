"""How models that train all weights are held, and what DeepSpeed is told of it. Pure.

Optimizer state is always sharded, since nothing is gained by holding it twice: a trainer of ZeRO stage 0
gives its full models stage 1. Under bfloat16 the least is stage 2, which accumulates gradients in float32 on
every stage above; master weights and moments are always float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.common.worlds.sharding import Sharding
from services.trainer.compute.sharding.stage3 import EVERY_ENGINE, stage3

BUCKET = 1 << 25
"""Elements that DeepSpeed reduces or gathers at once."""


@dataclass(frozen=True)
class FullModelConfig:
    """How full models are held.

    Attributes:
        model_path: local directory or hub id of the base model.
        device: device of this rank, for example "cpu" or "cuda:0".
        dtype: element type of the weights that compute, torch.float32 or torch.bfloat16.
        zero_stage: the trainer's, 0..3.
        offload: hold master weights and moments, and step, on the CPU.
        activation_checkpointing: keep of each block only the input for the backward pass.
        sharding: how ZeRO-3 shares weights; none of these is quantised.
    """

    model_path: str
    device: str
    dtype: torch.dtype
    zero_stage: int
    offload: bool
    activation_checkpointing: bool
    sharding: Sharding

    @property
    def stage(self) -> int:
        """ZeRO's, 1..3."""
        return max(self.zero_stage, 2 if self.dtype == torch.bfloat16 else 1)

    def deepspeed(self) -> dict[str, Any]:
        """The engine's configuration."""
        bfloat16 = self.dtype == torch.bfloat16
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
        }
        if self.zero_stage == 3:
            zero |= stage3(self.sharding)
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device != "cpu"}
        return {
            **EVERY_ENGINE,
            "managed_gradient_accumulation": False,
            "zero_optimization": zero,
            # torch's AdamW steps offloaded states too: DeepSpeed's own would need a compiler at run time.
            "zero_force_ds_cpu_optimizer": False,
            # Without it a bfloat16 gradient that is not finite would be applied.
            "bf16": {"enabled": bfloat16, "check_grad_overflow": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
