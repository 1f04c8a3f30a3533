"""The bytes of many tensors as a stream of buckets, straight out of the memory where they are.

Invariant: concatenated, the buckets are what `pack` makes of the same tensors, and no more than one bucket
is copied at a time: a whole model goes over the wire without a second copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from services.common.weights import base
from services.common.weights.checksums import Checksum
from services.common.weights.side_streams import side_stream


def stream_checksum(tensors: Mapping[str, Tensor]) -> int:
    """The checksum of the stream's bytes, computed where the tensors are. Blocking; on CUDA it is on the
    current stream."""
    whole, offset = Checksum(), 0
    for tensor in tensors.values():
        flat = base.bytes_of(tensor)
        # What fills a tensor up are zeros, which count for nothing.
        whole.add(flat, offset)
        offset += base.padded(flat.numel())
    return whole.value(offset)


def buckets(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The stream as uint8 tensors of BUCKET_BYTES, the last one shorter; each is valid until the next. A
    bucket is a view of the tensor that it lies in, or is put together, on the tensors' device.

    Args:
        tensors: all on one device, complete there.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    beside: AbstractContextManager[torch.cuda.Stream | None] = (
        side_stream(device) if device.type == "cuda" else nullcontext()
    )
    with beside as stream:
        yield from _joined(tensors, _Joined(device, stream))


def _joined(tensors: Mapping[str, Tensor], joined: _Joined) -> Iterator[Tensor]:
    zeros = joined.of([torch.zeros(base.padded(1), dtype=torch.uint8)])
    parts: list[Tensor] = []
    filled = 0
    for piece in _pieces(tensors, zeros):
        while piece.numel():
            part = piece[: base.BUCKET_BYTES - filled]
            piece = piece[part.numel() :]
            parts.append(part)
            filled += part.numel()
            if filled == base.BUCKET_BYTES:
                yield joined.bucket(parts)
                parts, filled = [], 0
    if parts:
        yield joined.bucket(parts)


def _pieces(tensors: Mapping[str, Tensor], zeros: Tensor) -> Iterator[Tensor]:
    """Each tensor's bytes, and the zeros that fill them up."""
    for tensor in tensors.values():
        flat = base.bytes_of(tensor)
        yield flat
        yield zeros[: base.padded(flat.numel()) - flat.numel()]


class _Joined:
    """Puts bytes together on a device, on a stream beside what computes there; on a CPU there is none."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def bucket(self, parts: list[Tensor]) -> Tensor:
        """As `of`; a part that is all of it is not copied."""
        return parts[0] if len(parts) == 1 else self.of(parts)

    def of(self, parts: list[Tensor]) -> Tensor:
        """One after the other, uint8 [n], complete when this returns."""
        if self._stream is None:
            return torch.cat(parts)
        with torch.cuda.stream(self._stream):
            whole = torch.cat([part.to(self._device) for part in parts])
        self._stream.synchronize()
        return whole
