"""Weight group over gloo, which carries host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.common.weights.base import Arrived, WeightGroup, on_host


class GlooGroup(WeightGroup):
    """Joins on construction; returns when every member has come.

    Raises:
        RuntimeError: a member did not come within `timeout` seconds.
    """

    def __init__(self, store: dist.Store, epoch: int, rank: int, world_size: int, timeout: float) -> None:
        super().__init__(epoch, rank)
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))

    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float, arrived: Arrived) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout)
        self._group.broadcast([on_host(bucket)], options).wait()
        if self.rank != 0:
            arrived(bucket)

    def _abort_medium(self) -> None:
        self._group.abort()
