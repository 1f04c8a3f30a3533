"""In bfloat16 what all ranks compute together is as near to float32 as what one of them computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.component.engine.ranks.worlds import Reports
from tests.component.engine.reference import values
from tests.component.engine.split.bfloat16 import LOSSES, Numbers, Report

pytestmark = pytest.mark.heavy

EPSILON = 2**-8
"""Half of the distance from 1 to the next number of bfloat16, which has 8 bits."""


@pytest.fixture
def report(worlds: dict[str, list[Reports]]) -> Report:
    found = worlds["2 ranks"][0].bfloat16
    assert found is not None
    return found


def outputs(numbers: Numbers) -> np.ndarray:
    assert all(row.failure is None for row in numbers.results)
    return np.concatenate([values(*row.outputs.values()).ravel() for row in numbers.results])


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """How far, as a part of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("what", ["outputs", "gradient"])
def test_ranks_together_are_as_exact_as_one_and_agree_with_it(report: Report, loss: str, what: str) -> None:
    exact, alone, every = (
        outputs(each[loss]) if what == "outputs" else values(each[loss].gradient)
        for each in (report.exact, report.alone, report.all)
    )
    assert np.abs(exact).max() > 1e-3
    of_one, of_all = apart(alone, exact), apart(every, exact)
    # It is bfloat16 that is compared, and no worse than a few roundings in a row.
    assert EPSILON / 100 < of_one < 10 * EPSILON
    assert of_one / 1.5 < of_all < 1.5 * of_one
    assert apart(every, alone) < of_one
