"""Dense arrays in host memory, as bytes with a type and a shape: what requests, commands and files carry.

Invariant: a HostTensor that passed `check` has exactly the bytes its shape and dtype call for, and a shape
from outside is never multiplied before its length and its sizes are known to be small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from services.common.contract.errors import InvalidRequest
from tinsmith.v1 import types_pb2

MAX_DIMENSIONS = 2
"""Everything that a client sends is a vector or a matrix."""

MAX_SIZE = 2**31 - 1
"""Largest size of a dimension."""


def element_count(shape: Sequence[int], name: str) -> int:
    """Number of elements of a shape from outside; constant work, however long the shape is.

    Raises:
        InvalidRequest: it has too many dimensions, or one of a size that none can have.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"{name}: the shape has {len(shape)} dimensions; use at most {MAX_DIMENSIONS}", "wrong_shape"
        )
    count = 1
    for size in shape:
        if not 0 <= size <= MAX_SIZE:
            raise InvalidRequest(
                f"{name}: the shape is {list(shape)}; each size must be 0 to {MAX_SIZE}", "wrong_shape"
            )
        count *= size
    return count


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        item_size: bytes of an element.
        pb: its number in protobuf.
        numpy: little-endian; None: numpy has no such type.
    """

    item_size: int
    pb: types_pb2.DataType.ValueType
    numpy: np.dtype[Any] | None


DTYPES = {
    "float32": DType(4, types_pb2.DATA_TYPE_FLOAT32, np.dtype("<f4")),
    "int64": DType(8, types_pb2.DATA_TYPE_INT64, np.dtype("<i8")),
    "int32": DType(4, types_pb2.DATA_TYPE_INT32, np.dtype("<i4")),
    "bfloat16": DType(2, types_pb2.DATA_TYPE_BFLOAT16, None),
}
"""Every element type, by the name that torch gives it too."""

_NAMES = {dtype.pb: name for name, dtype in DTYPES.items()}


class TensorSpec(msgspec.Struct, frozen=True):
    """What one tensor is, without its elements. `dtype`: a key of DTYPES; `shape`: outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].item_size


class HostTensor(msgspec.Struct, frozen=True):
    """A dense row-major array.

    Attributes:
        dtype: a key of DTYPES.
        shape: dimensions, outermost first.
        data: the elements, little-endian; or a view of memory that nobody writes to any more.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def check(self, name: str = "tensor") -> HostTensor:
        """Itself when bytes, shape and dtype agree.

        Raises:
            InvalidRequest: they do not, or the shape is none that a tensor here can have.
        """
        expected = element_count(self.shape, name) * DTYPES[self.dtype].item_size
        if len(self.data) != expected:
            raise InvalidRequest(
                f"{name}: {len(self.data)} bytes of data do not match shape {list(self.shape)} "
                f"of {self.dtype} ({expected} bytes)",
                "length_mismatch",
            )
        return self

    def values(self) -> np.ndarray:
        """Read-only view of the elements, in their shape. Raises TypeError for bfloat16."""
        dtype = DTYPES[self.dtype].numpy
        if dtype is None:
            raise TypeError(f"numpy has no {self.dtype}")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


def from_values(values: np.ndarray) -> HostTensor:
    """A host tensor of an array whose type is in DTYPES."""
    little = values.astype(DTYPES[values.dtype.name].numpy, copy=False)
    return HostTensor(values.dtype.name, tuple(values.shape), little.tobytes())


def sharing(values: np.ndarray) -> HostTensor:
    """As `from_values`, of an array that nobody writes to any more: it is not copied."""
    little = np.ascontiguousarray(values, DTYPES[values.dtype.name].numpy)
    return HostTensor(
        values.dtype.name, tuple(values.shape), cast(bytes, little.reshape(-1).view(np.uint8).data)
    )


def from_pb(pb: types_pb2.Tensor, name: str = "tensor") -> HostTensor:
    """A checked HostTensor of a protobuf Tensor.

    Raises:
        InvalidRequest: unknown dtype, a shape that no tensor here can have, or bytes that do not match it.
    """
    dtype = _NAMES.get(pb.dtype)
    if dtype is None:
        raise InvalidRequest(f"{name}: dtype is not set; use float32, int64, int32 or bfloat16")
    if len(pb.shape) > MAX_DIMENSIONS:
        # It is refused, and not copied before.
        element_count(pb.shape, name)
    return HostTensor(dtype, tuple(pb.shape), pb.data).check(name)


def to_pb(tensor: HostTensor) -> types_pb2.Tensor:
    """The protobuf Tensor of a HostTensor."""
    return types_pb2.Tensor(dtype=DTYPES[tensor.dtype].pb, shape=tensor.shape, data=tensor.data)


def dtype_from_pb(value: int) -> str:
    """Dtype name of an enum value.

    Raises:
        InvalidRequest: the value names no dtype.
    """
    if value not in _NAMES:
        raise InvalidRequest(f"dtype {value} is unknown; use float32, int64, int32 or bfloat16")
    return _NAMES[value]  # type: ignore[index]
