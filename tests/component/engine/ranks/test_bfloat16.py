"""Adapters on a base in bfloat16 that two ranks share (ZeRO-3) train as on one that one rank has whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.trainer.compute.data import ModelState
from tests.component.engine.data import flat
from tests.component.engine.process import play
from tests.component.engine.ranks.bfloat16 import LORAS, STEPS, Played, Report
from tests.component.engine.reference import values
from tests.component.engine.split.test_bfloat16 import EPSILON, apart

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def worlds(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Report]]:
    return [
        play(
            "ranks.bfloat16",
            untied,
            tmp_path_factory.mktemp("out"),
            Report,
            ranks,
            stage=stage,
            dtype="bfloat16",
        )
        for ranks, stage in ((1, 0), (2, 3))
    ]


@pytest.fixture(scope="module")
def played(worlds: list[list[Report]]) -> tuple[Played, Played, Played]:
    """In float32, in bfloat16 on one rank, and on two."""
    (alone,), (first, _) = worlds
    assert alone.exact is not None
    return alone.exact, alone.found, first.found


def logprobs(played: Played, number: int) -> np.ndarray:
    rows = played.results[number]
    assert all(row.failure is None for row in rows)
    return np.concatenate([values(row.outputs["logprobs"]).ravel() for row in rows])


def change(played: Played, name: str) -> np.ndarray:
    return flat(played.trained[name]) - flat(played.initial[name])


def test_each_rank_holds_half_of_the_weights_and_all_of_them_are_bfloat16(
    worlds: list[list[Report]],
) -> None:
    (alone,), shared = worlds
    for report in shared:
        assert report.held == pytest.approx(alone.held / 2, rel=1e-2)
        assert report.dtypes == alone.dtypes == ["torch.bfloat16"]


def test_log_probabilities_are_the_same_bits_before_anything_is_trained(
    played: tuple[Played, Played, Played],
) -> None:
    """A row is computed by one rank, of the same weights once they are gathered. So nothing is rounded
    otherwise, as frequencies would be that had been held in bfloat16."""
    exact, alone, shared = (logprobs(each, 0) for each in played)
    assert np.array_equal(shared, alone)
    assert EPSILON / 100 < apart(alone, exact) < EPSILON


def test_steps_are_those_of_one_rank_up_to_rounding(played: tuple[Played, Played, Played]) -> None:
    """Gradients go through sharded linears by another product than through whole ones, so that an element may
    be rounded to the other side; a norm is of thousands, of which such errors are nearly all made good."""
    _, alone, shared = played
    for one, two in zip(alone.steps[0], shared.steps[0], strict=True):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=EPSILON)
        assert two["update_norm"] == pytest.approx(one["update_norm"], rel=EPSILON)


def test_what_is_trained_is_no_further_from_what_one_rank_trains_than_roundings_carry_that(
    played: tuple[Played, Played, Played],
) -> None:
    """Each step magnifies what was rounded before it, on one rank as on two: so the measure is how far one
    rank in bfloat16 is from float32, which is a few roundings."""
    exact, alone, shared = played
    for number in range(1, STEPS):
        one, two, wanted = (logprobs(each, number) for each in (alone, shared, exact))
        assert 0 < apart(one, wanted) < 10 * EPSILON
        assert apart(two, one) < 2 * apart(one, wanted)
    for name in LORAS:
        one, two, wanted = (change(each, name) for each in (alone, shared, exact))
        assert np.linalg.norm(wanted) > 0.1 * np.linalg.norm(flat(exact.initial[name]))
        assert 0 < apart(one, wanted) < 10 * EPSILON
        assert apart(two, one) < 2 * apart(one, wanted)


def test_all_ranks_step_alike(worlds: list[list[Report]]) -> None:
    (_, (first, other)) = worlds
    assert other.found.steps == first.found.steps
    states: list[ModelState] = [*other.found.trained.values()]
    assert not any(state.adapter for state in states), "masters are rank 0's to tell"
