"""With checkpointed activations an engine computes the same numbers, and every block twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.compute.data import RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import ADAM, CRITIC, LORA, ce_row, critic_row, flat, op, trained_model, work
from tests.component.engine.engines import engine_of

pytestmark = pytest.mark.heavy


def trained(engine: Engine) -> tuple[list[RowResult], list[np.ndarray]]:
    """What a step of two models in one micro-batch comes to, and what they are then."""
    trained_model(engine, "a", LORA)
    trained_model(engine, "v", CRITIC)
    placed = (
        (op("a"), [ce_row(1, 20), ce_row(2, 7, columns=2)]),
        (op("v", 1, "ppo_critic"), [critic_row(3, 9)]),
    )
    results = engine.run_pass(work(*placed))
    for model_id in ("a", "v"):
        engine.optim_step(model_id, ADAM)
    return results, [flat(engine.state(model_id)) for model_id in ("a", "v")]


def test_checkpointing_changes_no_number(engine: Engine, directory: Path) -> None:
    checkpointed = engine_of(directory, activation_checkpointing=True)
    blocks = [
        block
        for block in checkpointed._base._scorer.modules()
        if isinstance(block, GradientCheckpointingLayer)
    ]
    assert blocks
    computed: list[int] = []
    for number, block in enumerate(blocks):
        attention = block.self_attn
        attention.register_forward_hook(lambda *_, number=number: computed.append(number))
    results, states = trained(checkpointed)
    assert sorted(computed) == sorted([*range(len(blocks))] * 2)
    expected_results, expected_states = trained(engine)
    assert results == expected_results
    for found, expected in zip(states, expected_states, strict=True):
        assert np.array_equal(found, expected)
