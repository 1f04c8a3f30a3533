"""Worlds of one and two ranks, ZeRO 0 and 3, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.component.engine.data import ADAM
from tests.component.engine.ranks.world import ROWS_A, ROWS_B, ROWS_C, ROWS_V, Report
from tests.component.engine.ranks.worlds import WORLDS, Reports
from tests.component.engine.reference import ReferenceModel, values

pytestmark = pytest.mark.heavy


@pytest.fixture
def played(worlds: dict[str, list[Reports]]) -> dict[str, list[Report]]:
    return {name: [each.world for each in reports] for name, reports in worlds.items()}


@pytest.fixture(params=WORLDS)
def reports(played: dict[str, list[Report]], request: pytest.FixtureRequest) -> list[Report]:
    return played[request.param]


def test_training_equals_a_plain_pytorch_loop(reports: list[Report], untied: Path) -> None:
    report = reports[0]
    a = ReferenceModel(untied, report.initial["a"].adapter)
    b = ReferenceModel(untied, report.initial["b"].adapter)
    c = ReferenceModel(untied, report.initial["c"].adapter)
    rows = [(a, row) for row in ROWS_A] + [(b, row) for row in ROWS_B] + [(c, row) for row in ROWS_C]
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert [(result.op, result.index) for result in report.passes[0]] == order
    for (model, row), result in zip(rows, report.passes[0][:6], strict=True):
        expected = model.logprobs(row).detach().numpy()
        np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=1e-5)

    assert report.steps["a1"]["grad_norm"] == pytest.approx(a.step(ROWS_A, "cross_entropy", ADAM), rel=1e-4)
    norm = b.step(ROWS_B, "importance_sampling", ADAM)
    assert report.steps["b1"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert report.steps["c1"]["skipped"] == 1
    _check_critic(report, untied)
    for row, result in zip(ROWS_A, report.passes[1][:3], strict=True):
        expected = a.logprobs(row).detach().numpy()
        np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=1e-5)
    assert report.steps["a4"]["grad_norm"] == pytest.approx(a.step(ROWS_A, "cross_entropy", ADAM), rel=1e-4)
    a.assert_same_adapter(report.states["a"].adapter)
    b.assert_same_adapter(report.states["b"].adapter)


def test_an_output_head_computes_each_position_once_for_values_and_gradient(reports: list[Report]) -> None:
    rows = [*ROWS_A, *ROWS_B, *ROWS_C]
    # Where ranks take part in each other's micro-batches, one without rows computes a position of nobody's.
    idle = sum(report.head for report in reports) - sum(row.length for row in rows)
    assert idle in (0, 1)


def _check_critic(report: Report, untied: Path) -> None:
    critic = ReferenceModel(untied, report.initial["v"].adapter)
    for row, result in zip(ROWS_V, report.passes[0][6:], strict=True):
        expected = critic.values(row).detach().numpy()
        assert result.outputs.keys() == {"values"}
        np.testing.assert_allclose(values(result.outputs["values"]), expected, rtol=0, atol=1e-5)
    norm = critic.step(ROWS_V, "ppo_critic", ADAM)
    assert report.steps["v1"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    critic.assert_same_adapter(report.states["v"].adapter)


def test_a_refused_operation_and_an_overflowing_gradient_harm_nobody(reports: list[Report]) -> None:
    report = reports[0]
    refused = [result.failure for result in report.passes[1][3:]]
    assert [failure.code if failure else "" for failure in refused] == ["token_out_of_range"] * 2
    assert report.non_finite == "non_finite_gradient"
    assert report.states["c"].adapter == report.initial["c"].adapter
    assert all(np.isfinite(values(array)).all() for array in report.states["a"].adapter.values())


def test_all_ranks_compute_with_the_same_weights_bit_for_bit(reports: list[Report]) -> None:
    for other in reports[1:]:
        assert other.weights_of == reports[0].weights_of
        assert other.steps == reports[0].steps
        assert all(not results for results in other.passes)


def test_a_model_alone_replays_bit_for_bit_however_its_passes_are_cut(reports: list[Report]) -> None:
    states = reports[0].states
    assert states["r0"] == states["r1"]


def test_the_number_of_ranks_and_the_zero_stage_change_nothing(played: dict[str, list[Report]]) -> None:
    alone = played["1 rank"][0]
    for name in ("2 ranks", "2 ranks ZeRO-3"):
        for model_id, state in played[name][0].states.items():
            for key, array in state.adapter.items():
                expected = values(alone.states[model_id].adapter[key])
                np.testing.assert_allclose(values(array), expected, rtol=1e-5, atol=1e-6)


def test_zero_3_holds_a_share_of_the_weights_on_each_rank(played: dict[str, list[Report]]) -> None:
    for report in played["2 ranks ZeRO-3"]:
        assert report.weights_here < 0.1 * report.weights
    assert played["2 ranks"][0].weights_here == played["2 ranks"][0].weights


def test_a_rank_with_much_to_do_is_waited_for_by_those_that_have_done_theirs(
    worlds: dict[str, list[Reports]],
) -> None:
    reports = [report.slow for report in worlds["2 ranks"] if report.slow is not None]
    assert len(reports) == 2
    (result,) = reports[0].results
    assert result.failure is None and not reports[1].results
