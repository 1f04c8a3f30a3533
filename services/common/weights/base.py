"""Packing of tensors into one stream of bytes, its checksum, and the interface of a weight group.

On the wire tensors follow each other, each padded to 16 bytes, cut into buckets. A small set is packed into
one buffer (`pack`); a large one is streamed out of host memory (`stream.py`). Both give the same bytes.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Iterable, Mapping

import torch

from services.common.contract.tensors import TensorSpec
from services.common.process import failpoints

BUCKET_BYTES = 64 * 1024 * 1024
"""Most bytes of one broadcast; a larger buffer goes in several."""

_ALIGNMENT = 16


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def nbytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the buffer that holds these tensors, each padded to 16 bytes."""
    return sum(_padded(spec.nbytes) for spec in specs)


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[TensorSpec]]:
    """The tensors' bytes one after another (uint8 [nbytes], on their device) and what they are."""
    specs = [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    buffer = torch.zeros(nbytes(specs), dtype=torch.uint8, device=device)
    offset = 0
    for spec, tensor in zip(specs, tensors.values(), strict=True):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[offset : offset + spec.nbytes] = flat
        offset += _padded(spec.nbytes)
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
        offset += _padded(spec.nbytes)
    return tensors


def on_host(values: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is in host memory; else a copy there, which waits for nothing that computes on the
    device. The tensor is complete already."""
    if values.device.type == "cpu":
        return values
    with torch.cuda.stream(torch.cuda.Stream(values.device)):
        return values.cpu()


def crc32(buffer: torch.Tensor) -> int:
    """CRC-32 of a uint8 buffer's bytes."""
    return zlib.crc32(buffer.cpu().numpy().data)


class WeightGroup(abc.ABC):
    """One trainer (rank 0) and the sampler workers of a base model (ranks 1 ..).

    Blocking; call from a thread. After any error the group is broken: abort it and join a new
    epoch. Broadcasts of one group must be issued one at a time.
    """

    def __init__(self, epoch: int, rank: int, world_size: int) -> None:
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self._aborted = False

    def greet(self, timeout: float) -> None:
        """Carries one byte from rank 0 to all others: some media connect no sooner.

        Raises:
            TimeoutError, RuntimeError: as `broadcast`.
        """
        self._transfer(torch.zeros(1, dtype=torch.uint8), timeout)

    def broadcast(self, buffer: torch.Tensor, timeout: float) -> None:
        """Sends a uint8 buffer from rank 0 to all others.

        Raises:
            TimeoutError: a member did not take part in a bucket within `timeout` seconds.
            RuntimeError: the connection to a member broke.
        """
        self.broadcast_buckets(buffer.split(BUCKET_BYTES), timeout)

    def broadcast_buckets(self, buckets: Iterable[torch.Tensor], timeout: float) -> None:
        """Sends the bytes of uint8 tensors of BUCKET_BYTES each (the last may be shorter), of any device.

        A bucket may be used again once the next one is asked for.

        Raises:
            TimeoutError, RuntimeError: as `broadcast`.
        """
        failpoints.hit("trainer.mid_broadcast")
        for bucket in buckets:
            self._transfer(bucket, timeout)

    def receive(self, size: int, timeout: float) -> torch.Tensor:
        """Receives `size` bytes from rank 0 as a uint8 tensor in host memory.

        Raises:
            TimeoutError, RuntimeError: as `broadcast`.
        """
        failpoints.hit("sampler.mid_receive")
        buffer = torch.empty(size, dtype=torch.uint8)
        for bucket in buffer.split(BUCKET_BYTES):
            self._transfer(bucket, timeout)
        return buffer

    def discard(self, size: int, timeout: float) -> None:
        """Takes part in the transfer of `size` bytes and keeps none of them.

        Raises:
            TimeoutError, RuntimeError: as `broadcast`.
        """
        scratch = torch.empty(min(size, BUCKET_BYTES), dtype=torch.uint8)
        for start in range(0, size, BUCKET_BYTES):
            self._transfer(scratch[: size - start], timeout)

    def _transfer(self, bucket: torch.Tensor, timeout: float) -> None:
        if self._aborted:
            raise RuntimeError(f"weight group {self.epoch} was given up")
        self._broadcast_bucket(bucket, timeout)

    @abc.abstractmethod
    def _broadcast_bucket(self, bucket: torch.Tensor, timeout: float) -> None:
        """Sends a bucket (rank 0), on the host or complete on a device, or fills one on the host; uint8."""

    def abort(self) -> None:
        """Gives the group up.

        A transfer that waits in another thread fails at once over NCCL, and at its deadline over
        gloo, which cannot interrupt one; later transfers fail at once.
        """
        self._aborted = True
        self._abort_medium()

    @abc.abstractmethod
    def _abort_medium(self) -> None: ...
