"""The bytes of many tensors as a stream of buckets, straight out of host memory.

Invariant: concatenated, the buckets are what `pack` makes of the same tensors, and no more than one bucket
exists at a time: a whole model goes over the wire without a second copy of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from services.common.contract.tensors import HostTensor, TensorSpec
from services.common.weights import base


def stream_crc32(tensors: Mapping[str, HostTensor]) -> int:
    """CRC-32 of the stream's bytes."""
    checksum = 0
    for piece in _pieces(tensors):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def buckets(tensors: Mapping[str, HostTensor]) -> Iterator[torch.Tensor]:
    """The stream as uint8 tensors of BUCKET_BYTES, the last one shorter; each is valid until the next."""
    bucket = torch.empty(base.BUCKET_BYTES, dtype=torch.uint8)
    target = bucket.numpy().data
    filled = 0
    for piece in _pieces(tensors):
        source = memoryview(piece)
        while source:
            count = min(len(source), len(target) - filled)
            target[filled : filled + count] = source[:count]
            source = source[count:]
            filled += count
            if filled == len(target):
                yield bucket
                filled = 0
    if filled:
        yield bucket[:filled]


def specs(tensors: Mapping[str, HostTensor]) -> list[TensorSpec]:
    """What the stream holds, in order."""
    return [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _pieces(tensors: Mapping[str, HostTensor]) -> Iterator[bytes]:
    for spec, tensor in zip(specs(tensors), tensors.values(), strict=True):
        yield tensor.data
        yield bytes(base.nbytes([spec]) - len(tensor.data))
