"""Models with routed experts on several ranks come to what they come to on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.component.engine.data import flat
from tests.component.engine.process import play
from tests.component.engine.ranks.experts import ROWS, STEPS, Report
from tests.component.engine.reference import values

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def alone(experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    (report,) = play("ranks.experts", experts, tmp_path_factory.mktemp("out"), Report, 1, stage=0)
    return report


def test_a_step_of_experts_changes_what_comes_out(alone: Report) -> None:
    assert len(alone.results) == STEPS and len(alone.steps) == STEPS * len(ROWS)
    first, second = ([row.metrics for row in results] for results in alone.results)
    assert first != second
    trained = alone.trained["whole"].adapter
    assert {name.rpartition(".experts.")[2] for name in trained if ".experts." in name} == {
        f"{part}.{matrix}" for part in ("w1", "w2", "w3") for matrix in ("lora_A", "lora_B")
    }
    assert not any(".experts." in name for name in alone.trained["without"].adapter)


@pytest.mark.parametrize(("ranks", "stage"), [pytest.param(2, 0, marks=pytest.mark.long), (3, 3)])
def test_several_ranks_come_to_what_one_comes_to(
    experts: Path, alone: Report, ranks: int, stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found, *_ = play("ranks.experts", experts, tmp_path_factory.mktemp("out"), Report, ranks, stage=stage)
    for one, several in zip(alone.results, found.results, strict=True):
        for expected, result in zip(one, several, strict=True):
            np.testing.assert_allclose(
                values(result.outputs["logprobs"]), values(expected.outputs["logprobs"]), rtol=0, atol=2e-5
            )
    for expected, step in zip(alone.steps, found.steps, strict=True):
        assert step == pytest.approx(expected, rel=1e-4)
    for name in ROWS:
        np.testing.assert_allclose(flat(found.trained[name]), flat(alone.trained[name]), rtol=1e-4, atol=1e-5)
