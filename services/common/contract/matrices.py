"""Matrices at the edges, dense or in compressed sparse rows.

Invariant: a HostMatrix that came from `from_pb` is well formed: as many values as its layout calls
for, and column indices that are in range and increase within each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.contract import tensors
from services.common.contract.errors import InvalidRequest
from tinsmith.v1 import types_pb2

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class HostMatrix:
    """A matrix of int64 or float32.

    Attributes:
        shape: rows, columns.
        values: 1-D; all cells row by row, or the listed cells of a sparse matrix.
        crow_indices: int64 [rows + 1], or None when dense: row i has the listed cells crow_indices[i] up to
            crow_indices[i + 1].
        col_indices: int64 [listed cells], or None when dense.
    """

    shape: tuple[int, int]
    values: Array
    crow_indices: npt.NDArray[np.int64] | None = None
    col_indices: npt.NDArray[np.int64] | None = None

    def row_starts(self) -> npt.NDArray[np.int64]:
        """Where each row's values begin, and the end of the last one: int64 [rows + 1]."""
        if self.crow_indices is not None:
            return self.crow_indices
        rows, columns = self.shape
        return np.arange(rows + 1, dtype=np.int64) * columns

    def with_values(self, values: Array) -> HostMatrix:
        """A matrix of the same layout with other values."""
        return HostMatrix(self.shape, values, self.crow_indices, self.col_indices)


def from_pb(pb: types_pb2.Matrix, name: str) -> HostMatrix:
    """A checked int64 matrix.

    Raises:
        InvalidRequest: another dtype, a shape that is not two-dimensional or does not match the values,
            or sparse indices that are no compressed sparse rows.
    """
    tensors.element_count(pb.shape, name)
    if len(pb.shape) != 2:
        raise InvalidRequest(f"{name} must have a shape of [rows, columns], not {list(pb.shape)}")
    rows, columns = pb.shape
    values = _int64(pb.values, name)
    if pb.HasField("crow_indices") != pb.HasField("col_indices"):
        raise InvalidRequest(f"{name}: a sparse matrix needs both row and column indices")
    if not pb.HasField("crow_indices"):
        if values.size != rows * columns:
            raise InvalidRequest(f"{name} has {values.size} values for a shape of [{rows}, {columns}]")
        return HostMatrix((rows, columns), values)
    crow, col = _int64(pb.crow_indices, f"{name}: row"), _int64(pb.col_indices, f"{name}: column")
    _check_sparse(name, rows, columns, values.size, crow, col)
    return HostMatrix((rows, columns), values, crow, col)


def _int64(pb: types_pb2.Tensor, name: str) -> npt.NDArray[np.int64]:
    tensor = tensors.from_pb(pb, name)
    if tensor.dtype != "int64":
        raise InvalidRequest(f"{name}: values and indices must be int64, not {tensor.dtype}", "bad_dtype")
    return np.frombuffer(tensor.data, dtype="<i8")


def _check_sparse(
    name: str,
    rows: int,
    columns: int,
    cells: int,
    crow: npt.NDArray[np.int64],
    col: npt.NDArray[np.int64],
) -> None:
    if crow.size != rows + 1 or crow[0] != 0 or crow[-1] != cells or (np.diff(crow) < 0).any():
        raise InvalidRequest(
            f"{name}: row indices must be {rows + 1} numbers that start at 0, never decrease and end at the "
            f"number of values, {cells}"
        )
    if col.size != cells:
        raise InvalidRequest(f"{name} has {cells} values and {col.size} column indices")
    if cells and not (col.min() >= 0 and col.max() < columns):
        raise InvalidRequest(f"{name}: column indices must be 0 to {columns - 1}")
    same_row = np.ones(max(cells - 1, 0), dtype=bool)
    begins = crow[1:-1]
    same_row[begins[(begins > 0) & (begins < cells)] - 1] = False
    if (np.diff(col)[same_row] <= 0).any():
        raise InvalidRequest(f"{name}: column indices must increase within each row")


def to_pb(matrix: HostMatrix) -> types_pb2.Matrix:
    """The protobuf Matrix, with values of float32 or int64."""
    pb = types_pb2.Matrix(values=_to_pb(matrix.values), shape=matrix.shape)
    if matrix.crow_indices is not None and matrix.col_indices is not None:
        pb.crow_indices.CopyFrom(_to_pb(matrix.crow_indices))
        pb.col_indices.CopyFrom(_to_pb(matrix.col_indices))
    return pb


def _to_pb(values: Array) -> types_pb2.Tensor:
    return tensors.to_pb(tensors.from_values(values))
