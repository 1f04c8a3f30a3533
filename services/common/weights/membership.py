"""Joining the weight group of a base model at an epoch.

Invariants: who has joined has met all others, and a byte has come to it over the medium. Members meet in
Redis first, where waiting has a deadline and leaves nothing behind; only then do they begin with the medium.
That may wait without end for a member that met the others and comes no further, as NCCL does when it makes a
communicator: who joins goes on at its deadline, as if that member had died.
"""

from __future__ import annotations

import contextlib
import time

import torch

from services.common.state import keys, redis_client
from services.common.weights.base import WeightGroup
from services.common.weights.store import RedisStore
from services.common.weights.within import within

_LATE_S = 1.0
_ABORT_S = 2.0


def join(
    base_model: str, epoch: int, rank: int, world_size: int, device: str, redis_url: str, timeout: float
) -> WeightGroup:
    """Joins; blocks until all members of the epoch have come and the medium carries.

    Args:
        base_model: whose group.
        epoch: number the trainer drew for this membership.
        rank: 0 for the trainer, 1 .. world_size - 1 for sampler workers.
        device: "cpu" (gloo) or "cuda[:n]" (NCCL).
        timeout: seconds that all of it may take.

    Raises:
        NotMet: members did not come in time.
        TimeoutError: the medium did not come to them all in time.
        RuntimeError, torch.distributed.DistStoreError: the medium does not reach all of them.
    """
    until = time.monotonic() + timeout
    store = RedisStore(redis_client.connect_sync(redis_url), keys.weight_store(base_model, epoch), timeout)
    store.meet(rank, world_size, timeout)
    group = _group(store, epoch, rank, world_size, torch.device(device), _left(until))
    left = _left(until)
    try:
        # A medium with a deadline of its own says more.
        within(left + _LATE_S, f"greeting in weight group {epoch}", lambda: group.greet(left))
    except BaseException:
        with contextlib.suppress(TimeoutError):
            within(_ABORT_S, f"end of weight group {epoch}", group.abort)
        raise
    return group


def _group(
    store: RedisStore, epoch: int, rank: int, world_size: int, device: torch.device, timeout: float
) -> WeightGroup:
    if device.type == "cuda":
        from services.common.weights.nccl import NcclGroup

        return NcclGroup(store, epoch, rank, world_size, device, timeout)
    from services.common.weights.gloo import GlooGroup

    return GlooGroup(store, epoch, rank, world_size, timeout)


def _left(until: float) -> float:
    """Seconds; for who met at the last moment, enough to find out that the others have given up."""
    return max(1.0, until - time.monotonic())
