"""What DeepSpeed makes of what it is told, asked of DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from deepspeed.utils.config import get_timers_config

from services.common.worlds.sharding import Sharding
from services.trainer.compute.base_model import _deepspeed_config
from services.trainer.compute.full.config import FullModelConfig


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_no_engine_waits_for_its_device_to_measure_time(zero_stage: int) -> None:
    full = FullModelConfig("model", "cuda:0", torch.bfloat16, zero_stage, False, True, Sharding())
    base = _deepspeed_config(zero_stage, torch.bfloat16, Sharding())
    for config in (full.deepspeed(), base):
        assert not get_timers_config(config).enabled
