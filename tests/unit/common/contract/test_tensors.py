"""A tensor from outside: its shape is looked at before anything is computed from it."""

from __future__ import annotations

import time

import pytest

from services.common.contract import matrices, tensors
from services.common.contract.errors import InvalidRequest
from services.common.contract.tensors import HostTensor
from tinsmith.v1 import types_pb2

HUGE = 2**62


def pb(shape: list[int], data: bytes = b"") -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=shape, data=data)


@pytest.mark.parametrize(("shape", "count"), [([], 1), ([0], 0), ([3], 3), ([3, 2], 6), ([0, 5], 0)])
def test_up_to_two_dimensions_are_counted(shape: list[int], count: int) -> None:
    assert tensors.element_count(shape, "t") == count
    assert tensors.from_pb(pb(shape, bytes(4 * count))).shape == tuple(shape)


@pytest.mark.parametrize("shape", [[-1], [1, -1], [2**31], [HUGE, 0], [1, 1, 1], [0] * 5])
def test_more_dimensions_or_one_out_of_range_are_refused(shape: list[int]) -> None:
    for check in (
        lambda: tensors.element_count(shape, "t"),
        lambda: tensors.from_pb(pb(shape, bytes(4)), "t"),
        lambda: HostTensor("float32", tuple(shape), b"").check("t"),
    ):
        with pytest.raises(InvalidRequest, match="t: ") as caught:
            check()
        assert len(caught.value.message) < 200


def test_a_shape_is_never_multiplied_before_its_length_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiplied(shape: object) -> int:
        raise AssertionError("multiplied")

    monkeypatch.setattr(tensors.math, "prod", multiplied)
    hostile = pb([HUGE] * 60_000)
    matrix = types_pb2.Matrix(values=pb([0]), shape=[HUGE] * 60_000)
    started = time.process_time()
    with pytest.raises(InvalidRequest):
        tensors.from_pb(hostile)
    with pytest.raises(InvalidRequest) as caught:
        matrices.from_pb(matrix, "targets")
    assert time.process_time() - started < 1
    assert len(caught.value.message) < 200
