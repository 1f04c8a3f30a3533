"""What one broadcast sends: the bytes of a snapshot as they go over the wire.

Invariant: they are where the tensors are that they are made of. What is packed out of device memory stays
there until a group sends it; a group takes bytes from wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common import weights
from services.common.contract.tensors import HostTensor, TensorSpec


@dataclass(frozen=True)
class Cargo:
    """Bytes for one broadcast, or several. `buckets` makes the stream of bytes anew."""

    specs: list[TensorSpec]
    crc32: int
    buckets: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return weights.nbytes(self.specs)


def packed_adapter(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> Cargo:
    """An adapter's matrices in one buffer on their device. Blocking.

    Args:
        dtype: element type on the wire.
    """
    buffer, specs = weights.pack({name: matrix.to(dtype) for name, matrix in matrices.items()})
    return Cargo(specs, weights.crc32(buffer), lambda: buffer.split(weights.BUCKET_BYTES))


def stored_adapter(arrays: Mapping[str, HostTensor], dtype: torch.dtype) -> Cargo:
    """The same of matrices on the host, float32."""
    matrices = {
        name: torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(array.shape)
        for name, array in arrays.items()
    }
    return packed_adapter(matrices, dtype)


def whole_model(arrays: Mapping[str, HostTensor]) -> Cargo:
    """All weights of a model as they are, without a copy. Blocking."""
    return Cargo(weights.specs(arrays), weights.stream_crc32(arrays), lambda: weights.buckets(arrays))
