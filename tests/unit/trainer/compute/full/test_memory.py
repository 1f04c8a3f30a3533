"""What a model that trains all weights takes of memory before it begins, by numbers and on a CPU."""

from __future__ import annotations

import pytest
import torch

from services.common.worlds.sharding import Sharding
from services.trainer.compute.full.config import FullModelConfig
from services.trainer.compute.full.memory import Sizes, load_pieces, model_pieces, step_pieces, taken_before
from services.trainer.compute.memory.buffers import FlatBuffers

MIB, GIB = 2**20, 2**30
ELEMENTS, LARGEST = 8_000_000_000, 600_000_000
NO_PROCESS_ADDRESSES = 1 << 50


def config(stage: int, dtype: torch.dtype, *, offload: bool = False) -> FullModelConfig:
    return FullModelConfig("model", "cuda:0", dtype, stage, offload, True, Sharding())


def sizes(ranks: int) -> Sizes:
    part = ELEMENTS // ranks
    return Sizes((part,), part + LARGEST, ELEMENTS, LARGEST)


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "most_gib"),
    [
        # Gradients are flat already, and a norm is taken of the largest.
        (0, torch.bfloat16, 1, 4.6),
        (2, torch.bfloat16, 8, 4.6),
        # They are made flat.
        (3, torch.bfloat16, 8, 4.6),
        (2, torch.float32, 8, 8.4),
        # They are reduced first.
        (1, torch.float32, 8, 10.6),
    ],
)
def test_a_step_is_not_kept_from_beginning_by_memory_that_it_does_not_take(
    stage: int, dtype: torch.dtype, ranks: int, most_gib: float
) -> None:
    taken = sum(step_pieces(config(stage, dtype), sizes(ranks)))
    assert taken <= most_gib * GIB


def test_of_a_sharded_model_one_tensor_of_masters_is_made_flat_after_the_other() -> None:
    several = sizes(8)._replace(parts=(1_000_000_000, 500_000), largest=100_000_000)
    assert sum(step_pieces(config(3, torch.float32), several)) < 4_000_000_000 + 48 * MIB


def test_a_load_takes_more_where_a_gradient_has_to_go() -> None:
    for dtype, again in ((torch.bfloat16, 0), (torch.float32, ELEMENTS // 8 + LARGEST)):
        kind = config(2, dtype)
        without, beside = (sum(load_pieces(kind, sizes(8), there)) for there in (False, True))
        assert beside - without == 4 * (again + 2 * LARGEST)


def test_a_model_takes_its_weights_and_a_ranks_part_of_what_its_steps_keep() -> None:
    def gib(stage: int, ranks: int, *, offload: bool = False) -> float:
        return sum(model_pieces(config(stage, torch.bfloat16, offload=offload), ELEMENTS, ranks)) / GIB

    of_all = 1e9 / GIB
    assert gib(2, 1) == pytest.approx(8 * (2 + 12) * of_all, rel=1e-3)
    assert gib(2, 8) == pytest.approx((8 * 2 + 12) * of_all, rel=1e-3)
    assert gib(3, 8) == pytest.approx((2 + 16) * of_all, rel=1e-2), "its gradient is there, too"
    assert gib(3, 8, offload=True) == pytest.approx(2 * of_all, rel=4e-2)


def test_where_one_piece_is_not_there_nothing_is_taken_and_what_is_kept_for_adapters_goes(
    world_of_one: None,
) -> None:
    buffers = FlatBuffers()
    buffers.give(torch.empty(1000))
    assert taken_before([MIB, MIB], "cpu", buffers)
    assert buffers._bytes == 4000, "there was memory, so it is kept"
    assert not taken_before([MIB, NO_PROCESS_ADDRESSES], "cpu", buffers)
    assert buffers._bytes == 0
