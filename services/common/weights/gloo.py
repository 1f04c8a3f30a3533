"""Weight group over gloo, which carries host memory."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.common.weights.base import Arrived, WeightGroup, on_host
from services.common.worlds.nodes import INTERFACE, WEIGHTS_INTERFACE


class GlooGroup(WeightGroup):
    """Joins on construction; returns when every member has come.

    Raises:
        RuntimeError: a member did not come within `timeout` seconds.
    """

    def __init__(self, store: dist.Store, epoch: int, rank: int, world_size: int, timeout: float) -> None:
        super().__init__(epoch, rank)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [gloo.create_device(interface=name) for name in _interfaces()]
        if not options._devices:
            options._devices = [gloo.create_default_device()]
        self._group = gloo(store, rank, world_size, options)

    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float, arrived: Arrived) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout)
        self._group.broadcast([on_host(bucket)], options).wait()
        if self.rank != 0:
            arrived(bucket)

    def _abort_medium(self) -> None:
        self._group.abort()


def _interfaces() -> list[str]:
    """Those that the environment names for weights, or for all that is gloo's."""
    named = os.environ.get(WEIGHTS_INTERFACE, os.environ.get(INTERFACE, ""))
    return [name for name in named.split(",") if name]
