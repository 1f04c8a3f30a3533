"""The bytes of many tensors as a stream of buckets, straight out of host memory.

Invariant: concatenated, the buckets are what `pack` makes of the same tensors, and no more than one bucket
exists at a time: a whole model goes over the wire without a second copy of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from services.common.weights import base
from services.common.weights.base import TensorSpec


@dataclass(frozen=True)
class HostBytes:
    """One tensor in host memory: what it is, and its elements little-endian and row-major."""

    spec: TensorSpec
    data: bytes


def stream_crc32(tensors: Iterable[HostBytes]) -> int:
    """CRC-32 of the stream's bytes."""
    checksum = 0
    for piece in _pieces(tensors):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def buckets(tensors: Iterable[HostBytes]) -> Iterator[torch.Tensor]:
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


def _pieces(tensors: Iterable[HostBytes]) -> Iterator[bytes]:
    for tensor in tensors:
        yield tensor.data
        yield bytes(base.nbytes([tensor.spec]) - len(tensor.data))
