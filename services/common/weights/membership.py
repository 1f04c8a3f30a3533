"""Joining the weight group of a base model at an epoch."""

from __future__ import annotations

import torch

from services.common.state import keys, redis_client
from services.common.weights.base import WeightGroup
from services.common.weights.store import RedisStore


def join(
    base_model: str, epoch: int, rank: int, world_size: int, device: str, redis_url: str, timeout: float
) -> WeightGroup:
    """Joins; blocks until all members of the epoch have come.

    Args:
        base_model: whose group.
        epoch: number the trainer drew for this membership.
        rank: 0 for the trainer, 1 .. world_size - 1 for sampler workers.
        device: "cpu" (gloo) or "cuda[:n]" (NCCL).
        timeout: seconds to wait for the others.

    Raises:
        RuntimeError, torch.distributed.DistStoreError: a member did not come in time.
    """
    store = RedisStore(redis_client.connect_sync(redis_url), keys.weight_store(base_model, epoch), timeout)
    target = torch.device(device)
    if target.type == "cuda":
        from services.common.weights.nccl import NcclGroup

        return NcclGroup(store, epoch, rank, world_size, target, timeout)
    from services.common.weights.gloo import GlooGroup

    return GlooGroup(store, epoch, rank, world_size, timeout)
