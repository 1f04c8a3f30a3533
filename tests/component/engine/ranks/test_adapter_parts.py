"""Adapters whose optimizer is spread over 2 and 3 ranks, of sizes that these do not divide, and over one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.compute.lora.parts import ROW
from tests.component.engine.ranks.adapter_parts import SPECS, Report, play
from tests.component.engine.reference import values

Worlds = dict[int, dict[str, list[Report]]]
RANKS = [2, 3]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return {ranks: play(ranks, tmp_path_factory.mktemp("world")) for ranks in (1, *RANKS)}


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_come_to_the_same_bits_as_the_whole_on_one_rank(played: Worlds, ranks: int, dtype: str) -> None:
    (alone,), several = played[1][dtype], played[ranks][dtype]
    assert alone.metrics[0][0]["grad_norm"] > 3 and len(alone.metrics[0]) == len(SPECS) + 1
    assert several[0].stepped == alone.stepped
    assert all(state.step == 3 and len(state.optimizer) for state in alone.stepped.values())
    for report in several:
        # Weights that compute are all ranks', and so is what a step is answered with.
        assert report.computes == alone.computes
        assert report.heads == alone.heads
        assert report.metrics == several[0].metrics
        for mine, other in zip(report.metrics, alone.metrics, strict=True):
            for one, another in zip(mine, other, strict=True):
                # Each is put together from those of the same rows, in another order.
                assert one["grad_norm"] == pytest.approx(another["grad_norm"], rel=1e-12)
                assert one["update_norm"] == pytest.approx(another["update_norm"], rel=1e-12)


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_neither_who_steps_with_a_model_nor_a_stay_on_the_host_changes_anything(
    played: Worlds, ranks: int, dtype: str
) -> None:
    report = played[ranks][dtype][0]
    assert report.alone == report.stepped


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_a_model_that_is_saved_and_loaded_goes_on_bit_for_bit(played: Worlds, ranks: int, dtype: str) -> None:
    report = played[ranks][dtype][0]
    assert report.resumed == report.stepped


@pytest.mark.parametrize("ranks", RANKS)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    played: Worlds, ranks: int, dtype: str
) -> None:
    report = played[ranks][dtype][0]
    assert report.refused["a"] == report.resumed["a"]


@pytest.mark.parametrize("ranks", RANKS)
def test_no_rank_holds_more_than_its_part_of_moments_and_of_masters_beside_a_copy(
    played: Worlds, ranks: int, dtype: str
) -> None:
    for report in played[ranks][dtype]:
        filled = 4 * ROW
        assert 0 < report.moments <= 2 * (report.whole / ranks + filled)
        if dtype == "bfloat16":
            assert report.masters <= report.whole / ranks + filled
    (alone,) = played[1][dtype]
    assert (alone.moments, alone.masters) == (2 * alone.whole, alone.whole)


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_gather_what_none_has_and_rank_0_alone_gets_it(played: Worlds, ranks: int, dtype: str) -> None:
    for rank, report in enumerate(played[ranks][dtype]):
        assert report.gathers == (True, dtype == "bfloat16")
        if rank:
            assert not report.stepped["critic"].adapter and not report.stepped["critic"].optimizer
            assert report.stepped["critic"].step == 3
    assert played[1][dtype][0].gathers == (False, False)


def test_what_is_published_is_float32_whatever_computes(played: Worlds) -> None:
    for ranks in (1, *RANKS):
        report = played[ranks]["bfloat16"][0]
        state = report.stepped["a"]
        masters = np.concatenate([values(array).ravel() for array in state.adapter.values()])
        computes = values(report.computes["a"])
        assert masters.dtype == np.float32 and not np.array_equal(masters, computes)
        rounded = torch.from_numpy(masters).bfloat16().float().numpy()
        assert np.array_equal(rounded, computes)


def test_a_value_head_computes_with_its_masters_bits_on_every_rank(played: Worlds, dtype: str) -> None:
    saved = played[1][dtype][0].stepped["critic"].adapter["value_head.weight"]
    for ranks in (1, *RANKS):
        for report in played[ranks][dtype]:
            assert report.heads["trained"] == saved
            assert np.signbit(values(report.heads["untrained"])).all()
