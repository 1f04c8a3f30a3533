"""What the trainer makes of an operation's message, and of what came out of it."""

import numpy as np
import pytest

from services.common.contract.tensors import from_values
from services.trainer import convert
from services.trainer.compute.data import RowResult
from services.trainer.convert import Datum, Forward
from tinsmith.v1 import training_pb2


def result_of(*shapes: tuple[int, ...]) -> training_pb2.BatchedTensor:
    """The result of a cross_entropy whose datums have log-probabilities of these shapes, counted up."""
    start, rows = 0, []
    for index, shape in enumerate(shapes):
        size = int(np.prod(shape))
        values = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        rows.append(RowResult(0, index, {"logprobs": from_values(values)}, {"loss:sum": 0.5}))
        start += size
    work = Forward(tuple(Datum(b"", {}) for _ in rows), "cross_entropy", {}, False, ())
    return convert.forwarded(work, rows).forward_backward.outputs["logprobs"]


@pytest.mark.parametrize(
    ("shapes", "trailing", "columns"),
    [
        ([(3,), (2,)], [], []),
        ([(3, 2), (1, 2)], [2], []),
        ([(3,), (2, 1), (1, 4)], [], [0, 1, 4]),
    ],
    ids=["one target each", "as many each", "different numbers"],
)
def test_outputs_say_what_shape_each_datum_has(
    shapes: list[tuple[int, ...]], trailing: list[int], columns: list[int]
) -> None:
    batched = result_of(*shapes)
    assert list(batched.trailing_shape) == trailing
    assert list(batched.columns) == columns
    sizes = [4 * int(np.prod(shape)) for shape in shapes]
    assert list(batched.offsets) == [0, *np.cumsum(sizes)]
    assert np.frombuffer(batched.data, "<f4").tolist() == list(range(sum(sizes) // 4))
