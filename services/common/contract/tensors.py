"""Arrays at the edges, as bytes: no torch, no numpy.

Invariant: a HostTensor that passed `check` has exactly the bytes its shape and dtype call for, and a shape
from outside is never multiplied before its length and its sizes are known to be small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.contract.errors import InvalidRequest
from tinsmith.v1 import types_pb2

ITEM_SIZE = {"float32": 4, "int64": 8, "int32": 4, "bfloat16": 2}

MAX_DIMENSIONS = 2
"""Everything that a client sends is a vector or a matrix."""

MAX_SIZE = 2**31 - 1
"""Largest size of a dimension."""

_TO_PB = {
    "float32": types_pb2.DATA_TYPE_FLOAT32,
    "int64": types_pb2.DATA_TYPE_INT64,
    "int32": types_pb2.DATA_TYPE_INT32,
    "bfloat16": types_pb2.DATA_TYPE_BFLOAT16,
}
_FROM_PB = {value: name for name, value in _TO_PB.items()}


def element_count(shape: Sequence[int], name: str) -> int:
    """Number of elements of a shape from outside; constant work, however long the shape is.

    Raises:
        InvalidRequest: it has too many dimensions, or one of a size that none can have.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"{name}: the shape has {len(shape)} dimensions; use at most {MAX_DIMENSIONS}", "wrong_shape"
        )
    if not all(0 <= size <= MAX_SIZE for size in shape):
        raise InvalidRequest(
            f"{name}: the shape is {list(shape)}; each size must be 0 to {MAX_SIZE}", "wrong_shape"
        )
    return math.prod(shape)


@dataclass(frozen=True)
class HostTensor:
    """A dense row-major array.

    Attributes:
        dtype: "float32", "int64", "int32" or "bfloat16".
        shape: dimensions, outermost first.
        data: the elements, little-endian.
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
        expected = element_count(self.shape, name) * ITEM_SIZE[self.dtype]
        if len(self.data) != expected:
            raise InvalidRequest(
                f"{name}: {len(self.data)} bytes of data do not match shape {list(self.shape)} "
                f"of {self.dtype} ({expected} bytes)"
            )
        return self


def from_pb(pb: types_pb2.Tensor, name: str = "tensor") -> HostTensor:
    """A checked HostTensor of a protobuf Tensor.

    Raises:
        InvalidRequest: unknown dtype, a shape that no tensor here can have, or bytes that do not match it.
    """
    dtype = _FROM_PB.get(pb.dtype)
    if dtype is None:
        raise InvalidRequest(f"{name}: dtype is not set; use float32, int64, int32 or bfloat16")
    element_count(pb.shape, name)
    return HostTensor(dtype, tuple(pb.shape), pb.data).check(name)


def to_pb(tensor: HostTensor) -> types_pb2.Tensor:
    """The protobuf Tensor of a HostTensor."""
    return types_pb2.Tensor(dtype=_TO_PB[tensor.dtype], shape=tensor.shape, data=tensor.data)


def dtype_to_pb(dtype: str) -> types_pb2.DataType.ValueType:
    """Enum value of a dtype name."""
    return _TO_PB[dtype]


def dtype_from_pb(value: int) -> str:
    """Dtype name of an enum value.

    Raises:
        InvalidRequest: the value names no dtype.
    """
    if value not in _FROM_PB:
        raise InvalidRequest(f"dtype {value} is unknown; use float32, int64, int32 or bfloat16")
    return _FROM_PB[value]  # type: ignore[index]
