"""Weight group over NCCL, which carries device memory: what is there already is sent from where it is.

Invariants: no failure of another member ends this process; and nothing here waits for, or is waited for by,
what computes on the device meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.common.weights.base import Arrived, WeightGroup

_ERRORS_ARE_OURS = "TORCH_NCCL_BLOCKING_WAIT"
"""Of a group that is made with it PyTorch has no thread that watches for errors. Such a thread ends the
process when a member dies or is late; and told to leave that, it still raises a flag that all groups of the
process have in common, for which the first of them, whatever that was made with, ends the process minutes
later."""
_constructing = threading.Lock()


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """A group that is made within it leaves errors to who uses it. PyTorch reads the setting when it makes a
    group, and knows no other way; the groups of those who compute are made before, and keep theirs."""
    with _constructing:
        before = os.environ.get(_ERRORS_ARE_OURS)
        os.environ[_ERRORS_ARE_OURS] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERRORS_ARE_OURS]
            else:
                os.environ[_ERRORS_ARE_OURS] = before


class NcclGroup(WeightGroup):
    """The first broadcast builds the communicator.

    The group is not the process's default group, so it stands beside DeepSpeed's or vLLM's own.
    """

    def __init__(
        self, store: dist.Store, epoch: int, rank: int, world_size: int, device: torch.device, timeout: float
    ) -> None:
        super().__init__(epoch, rank)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        with _errors_are_ours():
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float, arrived: Arrived) -> None:
        limit = timedelta(seconds=timeout)
        # Else a bucket would have as long as joining had.
        self._group._set_default_timeout(limit)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # A side stream of its own: the default stream is where others compute. What is sent out of device
        # memory was complete there before it came here. The device is said too: a thread has the first one
        # otherwise, and the end of the stream's context would take memory of that for this process.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = (
                bucket.to(self._device) if self.rank == 0 else torch.empty_like(bucket, device=self._device)
            )
            # With a deadline it waits on this thread, not on the stream.
            if not self._group.broadcast([on_device], options).wait(limit):
                raise TimeoutError(f"broadcast of {bucket.numel()} bytes did not finish in {timeout:.0f} s")
            if self.rank != 0:
                arrived(on_device)
                bucket.copy_(on_device)
            self._stream.synchronize()

    def _abort_medium(self) -> None:
        self._group.abort()
