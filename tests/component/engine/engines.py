"""The engine of this process, which is one rank of a world that has met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.trainer.compute.engine import Engine


def engine_of(directory: Path, *, dtype: str = "float32", stage: int = 0, **more: Any) -> Engine:
    """On the CPU; more: as `Engine` takes it."""
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return Engine(model_path=str(directory), device="cpu", dtype=dtype, zero_stage=stage, **ranks, **more)
