"""A grammar that takes longer to make than an engine may do nothing fails its request, and not the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.component.sampler.process import make_model, prompt, replica, request, sample
from tinsmith.v1 import sampling_pb2

pytestmark = pytest.mark.heavy

# It is read in a tenth of a second, and compiled in a minute.
NAMES = {f"p{number}": {"type": "integer"} for number in range(300)}
SLOW = json.dumps({"type": "object", "properties": NAMES, "minProperties": 150})


async def test_an_engine_that_waits_for_a_grammar_alone_is_not_stuck(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", tied=True)
    with replica(tmp_path, model_dir, "--stall-seconds", "6") as started:
        async with started.client() as stub:
            wanted = request(prompt(1, 4), stop=sampling_pb2.StopCondition(model_eos={}))
            wanted.constraint.json_schema = SLOW
            response = await stub.Sample(wanted, timeout=60)
            assert response.error.code == "constraint_too_large"
            await sample(stub, request(prompt(1, 4)))
