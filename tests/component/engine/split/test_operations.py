"""A sequence that all ranks compute together comes to what one rank comes to: values and gradients."""

from __future__ import annotations

import numpy as np
import pytest

from services.trainer.compute.memory.capacity import COPIES
from tests.component.engine.ranks.worlds import WORLDS, Reports
from tests.component.engine.reference import values
from tests.component.engine.split.models import OWN_TOKENS
from tests.component.engine.split.operations import CASES, Report
from tests.unit.trainer.compute.architectures import FLAT, HYBRID

pytestmark = pytest.mark.heavy

SEVERAL = [name for name, (ranks, _) in WORLDS.items() if ranks > 1]
NAMES = [f"{case}, {chunk}" for case in CASES for chunk in ("whole", "chunks")]


@pytest.fixture
def alone(worlds: dict[str, list[Reports]]) -> Report:
    (report,) = worlds["1 rank"]
    return report.split


@pytest.fixture(params=SEVERAL)
def ranks(worlds: dict[str, list[Reports]], request: pytest.FixtureRequest) -> list[Report]:
    return [report.split for report in worlds[request.param]]


def test_ranks_split_sequences_and_one_rank_cannot(alone: Report, ranks: list[Report]) -> None:
    assert not alone.splits
    assert all(report.splits for report in ranks)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_sequence_comes_to_is_what_it_comes_to_on_one_rank(
    alone: Report, ranks: list[Report], name: str
) -> None:
    expected, found = alone.results[name], ranks[0].results[name]
    assert [(row.op, row.index) for row in found] == [(row.op, row.index) for row in expected]
    for row, one in zip(found, expected, strict=True):
        assert row.failure is None
        (output,), (wanted,) = row.outputs.values(), one.outputs.values()
        assert output.shape == wanted.shape
        np.testing.assert_allclose(values(output), values(wanted), rtol=0, atol=1e-5)
        assert row.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-5)
    assert all(not other.results[name] for other in ranks[1:])


@pytest.mark.parametrize("name", NAMES)
def test_its_gradient_and_the_step_are_those_of_one_rank(
    alone: Report, ranks: list[Report], name: str
) -> None:
    expected, found = values(alone.gradients[name]), values(ranks[0].gradients[name])
    largest = np.abs(expected).max()
    assert largest > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, largest))
    assert ranks[0].steps[name] == pytest.approx(alone.steps[name], rel=1e-5)
    np.testing.assert_allclose(
        values(ranks[0].states[name]), values(alone.states[name]), rtol=1e-5, atol=1e-6
    )
    assert all(other.states[name] == ranks[0].states[name] for other in ranks[1:])


@pytest.mark.parametrize("case", CASES)
def test_in_chunks_each_position_is_computed_once_but_for_a_sequences_ratio(
    alone: Report, ranks: list[Report], case: str
) -> None:
    times = 2 if case == "gspo" else 1
    for reports in ([alone], ranks):
        once, found = (
            sum(report.heads[f"{case}, {chunk}"] for report in reports) for chunk in ("whole", "chunks")
        )
        assert found == times * once


def test_a_replay_on_as_many_ranks_is_bit_for_bit_the_same(ranks: list[Report]) -> None:
    for report in ranks:
        assert report.replayed["first"] == report.replayed["again"]


@pytest.mark.parametrize("name", ["full", "full, stepped"])
def test_a_model_that_trains_all_weights_splits_sequences_too(
    alone: Report, ranks: list[Report], name: str
) -> None:
    for row, one in zip(ranks[0].results[name], alone.results[name], strict=True):
        np.testing.assert_allclose(
            values(row.outputs["logprobs"]), values(one.outputs["logprobs"]), rtol=0, atol=1e-5
        )
    assert ranks[0].steps["full"] == pytest.approx(alone.steps["full"], rel=1e-4)


@pytest.mark.parametrize("kept", ["kept", "checkpointed"])
@pytest.mark.parametrize("model_type", [*FLAT, "gpt_oss by a kernel"])
def test_every_architecture_that_ranks_can_share_comes_to_the_same(
    worlds: dict[str, list[Reports]], model_type: str, kept: str
) -> None:
    for rank in worlds["2 ranks"]:
        assert rank.models is not None
        found = rank.models.models[f"{model_type}, {kept}"]
        assert found.plain or found.splits == (model_type in (*HYBRID, "gpt_oss by a kernel"))
        assert found.outputs <= 1e-5
        assert found.gradient <= 1e-5


def test_a_rank_is_given_the_tokens_before_its_own_however_few_each_rank_has(
    worlds: dict[str, list[Reports]],
) -> None:
    for rank in worlds["2 ranks"]:
        assert rank.models is not None
        assert rank.models.before == dict.fromkeys(OWN_TOKENS, True)


def test_the_exchange_takes_no_more_memory_than_is_counted_nor_an_eighth_of_that(
    worlds: dict[str, list[Reports]],
) -> None:
    for rank in worlds["2 ranks"]:
        assert rank.models is not None and rank.models.memory is not None
        beside = rank.models.memory.together - rank.models.memory.alone
        assert COPIES / 8 <= beside <= COPIES
