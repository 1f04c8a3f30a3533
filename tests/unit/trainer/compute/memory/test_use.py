"""What a rank's memory is for is what its capacity was found from."""

from __future__ import annotations

import numpy as np
import pytest

from services.trainer.compute.data import MicroBatch, Pass, PassOp, Row
from services.trainer.compute.lora.adapter import LinearShape
from services.trainer.compute.memory.capacity import (
    GIB,
    Capacity,
    Footprint,
    adapter_bytes,
    capacity,
    head_bytes,
    needed,
)
from services.trainer.compute.memory.use import by_purpose, largest_pass_bytes, pass_bytes

TAKEN = Footprint(weights=2 * GIB, token=1e5, square=3.0, masks=2.0, window=50, exchange=2e4)
VOCAB = 1000
OPS = [PassOp("a", 1, "cross_entropy"), PassOp("b", 1, "cross_entropy", forward_only=True)]


def batch(*lengths: int, op: int = 0, split: bool = False) -> MicroBatch:
    rows = [Row(op, index, np.zeros(size, "<i4").tobytes(), {}) for index, size in enumerate(lengths)]
    return MicroBatch(rows, split)


def counted(*batches: MicroBatch) -> int:
    return pass_bytes(Pass(OPS, list(batches)), TAKEN, VOCAB, ranks=2)


def test_of_a_pass_the_largest_micro_batch_counts_of_those_with_a_backward_pass() -> None:
    small, large, forward = batch(10), batch(30, 60), batch(5000, op=1)
    squares = 3 * 30**2 + (3 + 2) * 60**2
    assert counted(small, large, forward) == 90 * 1e5 + squares + head_bytes(90, VOCAB)
    assert counted(forward) == counted() == 0


def test_of_a_sequence_that_ranks_compute_together_each_counts_its_part() -> None:
    assert counted(batch(901, split=True)) == needed(TAKEN, 901, VOCAB, 2)


def test_no_pass_that_is_let_in_takes_more_than_the_largest() -> None:
    alone = Capacity(900, 900, 900, 10**6, 0)
    most = largest_pass_bytes(TAKEN, alone, VOCAB, 1000, ranks=1)
    assert max(counted(batch(900)), counted(batch(400, 600)), counted(batch(30, 60, 910))) <= most
    assert most == int(TAKEN.of_one(1000)) + head_bytes(1000, VOCAB)
    together = Capacity(900, 10**6, 900, 10**6, 0)
    assert largest_pass_bytes(TAKEN, together, VOCAB, 1000, ranks=2) == counted(batch(10**6, split=True))


@pytest.mark.parametrize("square", [0.0, 40.0])
def test_the_longest_sequence_that_is_announced_takes_what_there_is_for_it(square: float) -> None:
    taken = Footprint(weights=2 * GIB, token=1e5, square=square)
    found = capacity(16 * GIB, GIB, taken, 10**9, 0, 1)
    room = 16 * GIB - taken.weights - GIB // 2 - found.adapter_bytes
    assert taken.of_one(found.one_rank_tokens) <= room < taken.of_one(found.one_rank_tokens + 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("item", [4, 2])
def test_adapters_are_told_apart_from_their_gradients_and_moments(item: int, ranks: int) -> None:
    taken = adapter_bytes({"q_proj": LinearShape(64, 32)}, 8, 0, item, ranks)
    elements = 8 * (64 + 32)
    masters = 4 * elements if item == 4 else 2 * elements + 4 * elements // ranks
    found = by_purpose(TAKEN, taken, item, ranks, in_pass=7)
    assert found == {
        "weights": 2 * GIB,
        # With what is stacked of them in a micro-batch.
        "adapters": masters + (item + 4) * elements,
        "gradients": 8 * elements,
        "moments": 8 * elements // ranks,
        "pass": 7,
    }
