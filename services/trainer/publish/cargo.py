"""What one broadcast sends: the bytes of a snapshot as they go over the wire.

Invariant: they are where the tensors are that they are made of, or the same bytes on the host once nothing is
to be sent from the device any more; a group takes bytes from wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common import weights
from services.common.contract.tensors import HostTensor, TensorSpec


@dataclass
class Cargo:
    """Bytes for one broadcast, or several. `buckets` makes the stream of bytes anew."""

    specs: list[TensorSpec]
    checksum: int
    buckets: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return weights.nbytes(self.specs)

    def leave_device(self, arrays: Mapping[str, HostTensor]) -> None:
        """From now on `buckets` gives what it is made of out of the host's memory: that of a device may go.

        Args:
            arrays: all weights of a model, as `whole_model` was given them.
        """
        self.buckets = lambda: weights.buckets(on_host({spec.name: arrays[spec.name] for spec in self.specs}))


def packed_adapter(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> Cargo:
    """An adapter's matrices in one buffer on their device. Blocking.

    Args:
        dtype: element type on the wire.
    """
    buffer, specs = weights.pack({name: matrix.to(dtype) for name, matrix in matrices.items()})
    return Cargo(specs, weights.checksum(buffer), lambda: buffer.split(weights.BUCKET_BYTES))


def whole_model(tensors: Mapping[str, Tensor]) -> Cargo:
    """All weights of a model as they are, without a copy. Blocking.

    Args:
        tensors: all on one device; nobody writes to them any more.
    """
    return Cargo(
        weights.specs_of(tensors), weights.stream_checksum(tensors), lambda: weights.buckets(tensors)
    )


def on_host(arrays: Mapping[str, HostTensor]) -> dict[str, Tensor]:
    """Tensors of the host, as torch has them. Those share their memory that could be written to."""
    return {
        name: torch.frombuffer(_writable(array.data), dtype=getattr(torch, array.dtype)).view(array.shape)
        for name, array in arrays.items()
    }


def _writable(data: bytes) -> memoryview | bytearray:
    """torch takes no other; it does not write."""
    view = memoryview(data)
    return bytearray(view) if view.readonly else view
