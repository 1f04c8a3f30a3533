"""Numbers change their type when a loss takes another, and never their value."""

import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest
from services.gateway.training.coerce import coerce
from tests.unit.gateway.tensors import tensor
from tinsmith.v1 import training_pb2, types_pb2


def batch(loss_fn: str = "cross_entropy", **inputs: types_pb2.Tensor) -> training_pb2.ForwardBackward:
    operation = training_pb2.ForwardBackward(loss_fn=loss_fn)
    datum = operation.data.add(tokens=tensor([1, 2], "<i4"))
    for name, value in inputs.items():
        datum.loss_inputs[name].CopyFrom(value)
    return operation


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("weights", tensor([0, 1, -(2**24)], "<i8"), tensor([0, 1, -(2**24)], "<f4")),
        ("weights", tensor([2**40, 3], "<i8"), tensor([2**40, 3], "<f4")),
        ("weights", tensor([0, 1], "<i4"), tensor([0, 1], "<f4")),
        ("target_tokens", tensor([0, 5, 2**24], "<f4"), tensor([0, 5, 2**24], "<i8")),
        ("target_tokens", tensor([7, -1], "<i4"), tensor([7, -1], "<i8")),
        ("weights", tensor([[1, 2], [3, 4]], "<i8"), tensor([[1, 2], [3, 4]], "<f4")),
        ("weights", tensor([], "<i8"), tensor([], "<f4")),
    ],
)
def test_equal_numbers_of_another_type_are_taken(
    name: str, given: types_pb2.Tensor, wanted: types_pb2.Tensor
) -> None:
    operation = batch(**{name: given})
    coerce(operation)
    assert operation.data[0].loss_inputs[name] == wanted


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("weights", tensor([1, 2**24 + 1], "<i8"), "16777217, which is no float32"),
        ("weights", tensor([2**63 - 1], "<i8"), "no float32"),
        ("weights", tensor([-(2**63)], "<i8"), "no float32"),
        ("target_tokens", tensor([1, 1.5], "<f4"), "1.5, which is no int64"),
        ("target_tokens", tensor([np.nan], "<f4"), "nan"),
        ("target_tokens", tensor([np.inf], "<f4"), "inf"),
        ("target_tokens", tensor([2.0**63], "<f4"), "no int64"),
        ("target_tokens", tensor([1e30], "<f4"), "no int64"),
    ],
)
def test_a_number_that_the_type_does_not_have_is_refused(
    name: str, given: types_pb2.Tensor, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        coerce(batch(**{name: given}))
    assert refused.value.code == "wrong_dtype"
    assert name in refused.value.message


def test_what_no_loss_takes_is_left_for_the_checks_that_say_so() -> None:
    halves = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_BFLOAT16, shape=[1], data=b"..")
    for operation in (batch("no such loss", weights=tensor([1], "<i8")), batch(other=halves, weights=halves)):
        before = training_pb2.ForwardBackward.FromString(operation.SerializeToString())
        coerce(operation)
        assert operation == before


def test_a_tensor_whose_bytes_are_not_its_shape_is_refused() -> None:
    broken = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT64, shape=[3], data=b"12345678")
    with pytest.raises(InvalidRequest, match="do not match shape"):
        coerce(batch(weights=broken))
