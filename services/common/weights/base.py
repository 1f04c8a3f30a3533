"""Packing of tensors into one stream of bytes, and the interface of a weight group.

On the wire tensors follow each other, each padded to 16 bytes, cut into buckets. A small set is packed into
one buffer (`pack`); a large one is streamed from where it is (`stream.py`). Both give the same bytes.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from services.common.contract.tensors import TensorSpec
from services.common.process import failpoints
from services.common.weights.checksums import Checksum
from services.common.weights.side_streams import side_stream

BUCKET_BYTES = 64 * 1024 * 1024
"""Most bytes of one broadcast; a larger buffer goes in several."""

SLOWEST_BYTES_PER_S = 20e6
_MEMBER_S = 10.0
"""In which a member takes part that is there, however busy."""

_ALIGNMENT = 16

Arrived = Callable[[torch.Tensor], None]
"""Is given what came, uint8, where the medium has it, before it goes anywhere else."""


def most_seconds(size: int) -> float:
    """Within which so many bytes have gone to all members that are there. Pure."""
    return _MEMBER_S + size / SLOWEST_BYTES_PER_S


def padded(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes of the stream."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def nbytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the buffer that holds these tensors, each padded to 16 bytes."""
    return sum(padded(spec.nbytes) for spec in specs)


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """What tensors are, in order."""
    return [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, uint8 [n]: a view, if its elements follow each other in memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[TensorSpec]]:
    """The tensors' bytes one after another (uint8 [nbytes], on their device) and what they are."""
    specs = specs_of(tensors)
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    buffer = torch.zeros(nbytes(specs), dtype=torch.uint8, device=device)
    offset = 0
    for spec, tensor in zip(specs, tensors.values(), strict=True):
        buffer[offset : offset + spec.nbytes] = bytes_of(tensor)
        offset += padded(spec.nbytes)
    return buffer, specs


def unpack(buffer: torch.Tensor, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors of a packed buffer, as views of it.

    Raises:
        ValueError: the buffer's size does not match.
    """
    specs = list(specs)
    if buffer.numel() != nbytes(specs):
        raise ValueError(f"buffer of {buffer.numel()} bytes for tensors of {nbytes(specs)} bytes")
    tensors = {}
    offset = 0
    for spec in specs:
        flat = buffer[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype))
        tensors[spec.name] = flat.view(spec.shape)
        offset += padded(spec.nbytes)
    return tensors


def on_host(values: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is in host memory; else a copy there, which waits for nothing that computes on the
    device. The tensor is complete already."""
    device = values.device
    if device.type == "cpu":
        return values
    # The device is said too: a thread has the first one otherwise, and the end of the stream's context would
    # take memory of that for this process. The copy is done when `cpu` returns, so the stream is free again.
    with side_stream(device) as stream, torch.cuda.device(device), torch.cuda.stream(stream):
        return values.cpu()


class WeightGroup(abc.ABC):
    """One trainer (rank 0) and the sampler workers of a base model (ranks 1 ..).

    Blocking; call from a thread. After any error the group is broken: abort it and join a new
    epoch. Broadcasts of one group must be issued one at a time.
    """

    def __init__(self, epoch: int, rank: int) -> None:
        self.epoch = epoch
        self.rank = rank
        self._aborted = False

    def greet(self, timeout: float) -> None:
        """Carries one byte from rank 0 to all others: some media connect no sooner.

        Raises:
            TimeoutError, RuntimeError: as `broadcast_buckets`.
        """
        self._check_whole()
        self._broadcast_bucket(torch.zeros(1, dtype=torch.uint8), timeout, lambda _: None)

    def broadcast_buckets(self, buckets: Iterable[torch.Tensor], timeout: float) -> None:
        """Sends the bytes of uint8 tensors of BUCKET_BYTES each (the last may be shorter), of any device,
        from rank 0 to all others. A bucket may be used again once the next one is asked for.

        Args:
            timeout: seconds for all of it. A bucket has `most_seconds` of its own bytes, so that a member
                that hangs is not waited for as long as the rest would take.

        Raises:
            TimeoutError, RuntimeError: a member did not take part in a bucket in time, or all of it took too
                long; or the connection to a member broke.
        """
        failpoints.hit("trainer.mid_broadcast")
        until = time.monotonic() + timeout
        for bucket in buckets:
            self._transfer(bucket, until)

    def receive(self, size: int, timeout: float) -> tuple[torch.Tensor, int]:
        """Receives `size` bytes from rank 0: uint8 [size] in host memory, and their checksum, which is of
        each bucket taken where the medium has it.

        Raises:
            TimeoutError, RuntimeError: as `broadcast_buckets`.
        """
        failpoints.hit("sampler.mid_receive")
        until = time.monotonic() + timeout
        buffer, checksum = torch.empty(size, dtype=torch.uint8), Checksum()
        for start in range(0, size, BUCKET_BYTES):
            bucket = buffer[start : start + BUCKET_BYTES]
            self._transfer(bucket, until, partial(checksum.add, offset=start))
        return buffer, checksum.value(size)

    def discard(self, size: int, timeout: float) -> None:
        """Takes part in the transfer of `size` bytes and keeps none of them.

        Raises:
            TimeoutError, RuntimeError: as `broadcast_buckets`.
        """
        until = time.monotonic() + timeout
        scratch = torch.empty(min(size, BUCKET_BYTES), dtype=torch.uint8)
        for start in range(0, size, BUCKET_BYTES):
            self._transfer(scratch[: size - start], until)

    def _transfer(self, bucket: torch.Tensor, until: float, arrived: Arrived = lambda _: None) -> None:
        self._check_whole()
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the transfer took too long")
        self._broadcast_bucket(bucket, min(left, most_seconds(bucket.numel())), arrived)

    def _check_whole(self) -> None:
        if self._aborted:
            raise RuntimeError(f"weight group {self.epoch} was given up")

    @abc.abstractmethod
    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float, arrived: Arrived) -> None:
        """Sends a bucket (rank 0), on the host or complete on a device, or fills one on the host; uint8.

        Args:
            arrived: called by who receives.
        """

    def abort(self) -> None:
        """Gives the group up.

        A transfer that waits in another thread fails at once over NCCL, and at its deadline over
        gloo, which cannot interrupt one; later transfers fail at once.
        """
        self._aborted = True
        self._abort_medium()

    @abc.abstractmethod
    def _abort_medium(self) -> None: ...
