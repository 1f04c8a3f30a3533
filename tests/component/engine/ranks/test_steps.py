"""Steps that are due together, and what a world says that it can hold: one and two ranks, ZeRO 0 and 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.compute.data import Row
from tests.component.engine.data import ADAM
from tests.component.engine.ranks.steps import GIB, ROWS, Report
from tests.component.engine.ranks.worlds import WORLDS, Reports
from tests.component.engine.reference import ReferenceModel

pytestmark = pytest.mark.heavy


@pytest.fixture(params=WORLDS)
def reports(worlds: dict[str, list[Reports]], request: pytest.FixtureRequest) -> list[Report]:
    return [each.steps for each in worlds[request.param]]


def test_steps_that_run_together_come_to_the_same_bits_as_each_alone(reports: list[Report]) -> None:
    for report in reports:
        assert report.together == report.alone
        assert report.together.steps == reports[0].together.steps
        assert report.together.weights == reports[0].together.weights
    codes = [each for each in reports[0].together.steps if isinstance(each, str)]
    assert codes == ["non_finite_gradient", "model_not_resident"] * 2


def test_they_are_those_of_a_plain_pytorch_loop(reports: list[Report], untied: Path) -> None:
    rows: list[Row] = ROWS
    reference = ReferenceModel(untied, reports[0].initial.adapter)
    for step in (reports[0].together.steps[0], reports[0].together.steps[4]):
        assert isinstance(step, dict)
        norm = reference.step(rows, "cross_entropy", ADAM)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    reference.assert_same_adapter(reports[0].together.states["a"].adapter)


def test_a_model_whose_gradient_is_not_finite_stays_as_it_was(reports: list[Report]) -> None:
    assert reports[0].together.states["c"].step == 0
    assert reports[0].together.states["a"].step == 2


def test_all_ranks_say_what_the_one_with_the_least_memory_holds(reports: list[Report]) -> None:
    assert all(report.capacity == reports[0].capacity for report in reports)
    *_, operation, adapters = reports[0].capacity
    assert operation == GIB // 4 // 256
    assert 0 < adapters < GIB


def test_a_dry_run_leaves_nothing_behind(reports: list[Report]) -> None:
    assert all(report.left == [] for report in reports)
