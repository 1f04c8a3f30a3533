"""Matrices at the edges: what is well formed, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.contract import matrices
from services.common.contract.errors import InvalidRequest
from tinsmith.v1 import types_pb2


def tensor(values: list[int], dtype: str = "<i8") -> types_pb2.Tensor:
    kind = types_pb2.DATA_TYPE_INT64 if dtype == "<i8" else types_pb2.DATA_TYPE_FLOAT32
    return types_pb2.Tensor(dtype=kind, shape=[len(values)], data=np.array(values, dtype).tobytes())


def sparse(values: list[int], crow: list[int], col: list[int], shape: list[int]) -> types_pb2.Matrix:
    return types_pb2.Matrix(
        values=tensor(values), crow_indices=tensor(crow), col_indices=tensor(col), shape=shape
    )


def test_a_dense_matrix_is_read_row_by_row() -> None:
    matrix = matrices.from_pb(types_pb2.Matrix(values=tensor([1, 2, 3, 4, 5, 6]), shape=[2, 3]), "m")
    assert (matrix.shape, matrix.values.tolist()) == ((2, 3), [1, 2, 3, 4, 5, 6])
    assert matrix.row_starts().tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("crow", "col"),
    [([0, 2, 2, 3], [1, 4, 0]), ([0, 0, 0, 3], [1, 2, 4]), ([0, 3, 3, 3], [0, 1, 2])],
)
def test_a_sparse_matrix_keeps_its_layout(crow: list[int], col: list[int]) -> None:
    matrix = matrices.from_pb(sparse([7, 8, 9], crow, col, [3, 5]), "m")
    assert matrix.row_starts().tolist() == crow
    scored = matrices.to_pb(matrix.with_values(np.array([-1, -2, -3], np.float32)))
    assert scored.values.dtype == types_pb2.DATA_TYPE_FLOAT32
    assert np.frombuffer(scored.values.data, "<f4").tolist() == [-1, -2, -3]
    assert np.frombuffer(scored.crow_indices.data, "<i8").tolist() == crow
    assert np.frombuffer(scored.col_indices.data, "<i8").tolist() == col
    assert list(scored.shape) == [3, 5]


def test_a_sparse_matrix_without_cells_is_well_formed() -> None:
    assert matrices.from_pb(sparse([], [0, 0], [], [1, 5]), "m").values.size == 0
    assert matrices.from_pb(sparse([], [0], [], [0, 5]), "m").values.size == 0


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (types_pb2.Matrix(values=tensor([1]), shape=[1]), "shape"),
        (types_pb2.Matrix(values=tensor([1]), shape=[-1, -1]), "shape"),
        (types_pb2.Matrix(values=tensor([1]), shape=[1, 2]), "1 values"),
        (types_pb2.Matrix(values=tensor([1], "<f4"), shape=[1, 1]), "int64"),
        (types_pb2.Matrix(values=tensor([1]), crow_indices=tensor([0, 1]), shape=[1, 1]), "both"),
        (sparse([1], [0, 1, 1], [0], [1, 1]), "row indices"),
        (sparse([1], [1, 1], [0], [1, 1]), "row indices"),
        (sparse([1, 2], [0, 2, 1, 2], [0, 1], [3, 2]), "row indices"),
        (sparse([1], [0, 0], [0], [1, 1]), "row indices"),
        (sparse([1, 2], [0, 2], [0], [1, 2]), "1 column indices"),
        (sparse([1], [0, 1], [2], [1, 2]), "0 to 1"),
        (sparse([1], [0, 1], [-1], [1, 2]), "0 to 1"),
        (sparse([1, 2], [0, 2], [1, 0], [1, 2]), "increase"),
        (sparse([1, 2], [0, 2], [1, 1], [1, 2]), "increase"),
        (sparse([1, 2, 3], [0, 1, 3], [0, 1, 1], [2, 2]), "increase"),
    ],
)
def test_a_malformed_matrix_is_refused(matrix: types_pb2.Matrix, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        matrices.from_pb(matrix, "m")
