"""What a batch answers tells whether it changed the model, by which a replay repeats it or passes over it."""

from __future__ import annotations

import asyncio

import numpy as np

from services.common.contract.errors import Internal
from services.common.contract.tensors import from_values
from services.trainer.compute.data import RowResult
from services.trainer.convert import Datum, Forward
from services.trainer.execution.passes import forward_result
from services.trainer.execution.resident_models import Operation

WORK = Forward((Datum(b"\0\0\0\0", {}),), "cross_entropy", {}, forward_only=False, units=())
OUTPUTS = {"logprobs": from_values(np.zeros(1, "float32"))}


async def operation(*rows: RowResult) -> Operation:
    result = asyncio.get_running_loop().create_future()
    made = Operation(
        seq_id=1, units=(), forward_only=False, model_id="s:train:0", work=WORK, size=0, result=result
    )
    made.rows = dict(enumerate(rows))
    return made


async def test_a_batch_that_ran_answers_with_its_rows() -> None:
    ran = await operation(RowResult(0, 0, OUTPUTS, {"loss:sum": 1.0}))
    assert forward_result(ran).forward_backward.metrics["loss:sum"] == 1.0


async def test_a_batch_that_failed_left_nothing_and_says_why() -> None:
    failed = await operation()
    failed.failed = Internal("out of device memory", "out_of_memory")
    assert forward_result(failed).error.code == "out_of_memory"


async def test_a_batch_that_ran_and_whose_result_cannot_be_built_says_that_it_ran() -> None:
    unbuilt = await operation(RowResult(0, 0, {}, {"loss:sum": "much"}))  # type: ignore[dict-item]
    found = forward_result(unbuilt).error
    assert found.code == "result_lost"
    assert "was executed" in found.message
