"""Weight group over NCCL, for CUDA tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.common.weights.base import WeightGroup


class NcclGroup(WeightGroup):
    """Joins on construction; the first broadcast builds the communicator.

    The group is not the process's default group, so it stands beside DeepSpeed's or vLLM's own.
    """

    def __init__(
        self, store: dist.Store, epoch: int, rank: int, world_size: int, device: torch.device, timeout: float
    ) -> None:
        super().__init__(epoch, rank, world_size)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        on_device = (
            bucket.to(self._device) if self.rank == 0 else torch.empty_like(bucket, device=self._device)
        )
        # A side stream of its own: computation on the default stream goes on meanwhile.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work = self._group.broadcast([on_device], options)
        if not work.wait(timedelta(seconds=timeout)):
            raise TimeoutError(f"broadcast of {bucket.numel()} bytes did not finish in {timeout:.0f} s")
        self._stream.synchronize()
        if self.rank != 0:
            bucket.copy_(on_device)

    def _abort_medium(self) -> None:
        self._group.abort()
