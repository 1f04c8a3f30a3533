"""What the trainer makes of an operation's message, and of what came out of it."""

import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import Routing, ids_of
from services.common.contract.tensors import from_values
from services.trainer import convert
from services.trainer.compute.data import RowResult
from services.trainer.convert import Datum, Forward, Target
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import training_pb2, types_pb2


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


def units_of(
    splits: bool, forward_only: bool = False, journaled: int = 10, of_the_trainer: int = 0
) -> list[tuple[int, bool]]:
    """Tokens of the units of an operation that was journaled for ranks of so many tokens, and which are
    split."""
    data = [
        training_pb2.Datum(
            tokens=types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[length], data=bytes(4 * length))
        )
        for length in (10, 11)
    ]
    operation = operation_pb2.Operation(
        forward_backward=training_pb2.ForwardBackward(
            data=data, loss_fn="cross_entropy", forward_only=forward_only
        ),
        ranks=2,
        one_rank_tokens=journaled,
    )
    target = Target("base", 8, shares_prefixes=False, splits=splits, one_rank_tokens=of_the_trainer)
    work = convert.from_pb(operation, target)
    assert isinstance(work, Forward)
    return sorted((unit.tokens, unit.split) for unit in work.units)


def test_what_one_rank_of_the_journal_does_not_hold_all_ranks_compute() -> None:
    assert units_of(splits=True) == [(10, False), (11, True)]


@pytest.mark.parametrize(
    ("journaled", "of_the_trainer", "split"),
    [(11, 10, [False, True]), (11, 9, [True, True]), (10, 11, [False, True]), (0, 10, [False, True])],
    ids=["that holds one less", "that holds neither", "that holds more cuts it alike", "not said"],
)
def test_all_ranks_compute_what_one_rank_of_a_trainer_with_less_memory_does_not_hold(
    journaled: int, of_the_trainer: int, split: list[bool]
) -> None:
    found = units_of(splits=True, journaled=journaled, of_the_trainer=of_the_trainer)
    assert found == list(zip((10, 11), split, strict=True))


def test_a_trainer_that_cannot_split_computes_it_on_one_rank() -> None:
    assert units_of(splits=False) == [(10, False), (11, False)]


def test_what_only_runs_forward_is_computed_by_one_rank() -> None:
    assert units_of(splits=True, forward_only=True) == [(10, False), (11, False)]


@pytest.mark.parametrize(
    ("journaled", "of_the_trainer", "units"),
    [(32, 1024, 4), (0, 64, 2), (1024, 32, 4)],
    ids=["a trainer with larger ones cuts it alike", "not said", "a trainer with smaller ones keeps to them"],
)
def test_an_operation_is_cut_into_micro_batches_as_it_was_journaled(
    journaled: int, of_the_trainer: int, units: int
) -> None:
    operation = operation_with(*[b""] * 4)
    operation.micro_batch_tokens = journaled
    work = convert.from_pb(operation, Target("base", of_the_trainer, shares_prefixes=False))
    assert isinstance(work, Forward)
    assert len(work.units) == units


ROUTING = Routing(layers=1, top_k=2, experts=4)


def operation_with(*experts: bytes) -> operation_pb2.Operation:
    """Datums of 32 equal tokens, each with these experts."""
    tokens = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[32], data=bytes(4 * 32))
    data = [training_pb2.Datum(tokens=tokens) for _ in experts]
    for datum, ids in zip(data, experts, strict=True):
        if ids:
            datum.routed_experts.CopyFrom(types_pb2.RoutedExperts(ids=ids, shape=[32, 1, 2]))
    return operation_pb2.Operation(
        forward_backward=training_pb2.ForwardBackward(data=data, loss_fn="cross_entropy")
    )


def test_what_datums_begin_with_counts_once_only_as_far_as_they_have_the_same_experts() -> None:
    some, others = bytes([0, 1]) * 32, bytes([0, 1]) * 16 + bytes([2, 3]) * 16
    target = Target("base", 64, shares_prefixes=True, routing=ROUTING)

    def tokens(*experts: bytes) -> int:
        work = convert.from_pb(operation_with(*experts), target)
        assert isinstance(work, Forward)
        assert [ids_of(datum.routed) for datum in work.data] == list(experts)
        return sum(unit.tokens for unit in work.units)

    assert tokens(some, some) == 32
    assert tokens(some, others) == 48
    assert tokens(some, b"") == 64


def test_experts_that_the_model_cannot_compute_with_are_refused() -> None:
    target = Target("base", 64, shares_prefixes=True, routing=ROUTING)
    with pytest.raises(InvalidRequest, match=r"data\[0\]: routed_experts has expert 4"):
        convert.from_pb(operation_with(bytes([0, 4]) * 32), target)
    with pytest.raises(InvalidRequest, match="this trainer replays none"):
        convert.from_pb(operation_with(bytes([0, 1]) * 32), Target("base", 64, shares_prefixes=True))
