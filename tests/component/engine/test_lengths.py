"""How long an example may be, and what becomes of one that was accepted when it might be longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.component.engine.data import LORA, ce_row, op, work
from tests.component.engine.engines import engine_of
from tests.component.engine.reference import ReferenceModel, values

pytestmark = pytest.mark.heavy


@pytest.mark.usefixtures("engine")
def test_what_was_accepted_is_computed_although_examples_may_be_less_long_now(directory: Path) -> None:
    told = engine_of(directory, max_context=16)
    assert told.context_length == 16
    told.create_model("m", LORA)
    (result,) = told.run_pass(work((op("m", forward_only=True), [ce_row(0, 40)])))
    assert result.failure is None
    expected = ReferenceModel(directory).logprobs(ce_row(0, 40)).numpy()
    np.testing.assert_allclose(values(result.outputs["logprobs"]), expected, rtol=0, atol=1e-5)
