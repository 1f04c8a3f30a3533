"""With checkpointed activations an engine computes the same numbers, and twice the blocks that keep none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.compute.data import RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.capacity import PROCESS_BYTES, head_bytes
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


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_last_blocks_keep_their_activations_as_far_as_there_is_room_and_no_number_changes(
    kept: int, engine: Engine, directory: Path
) -> None:
    checkpointed = engine_of(directory, activation_checkpointing=True)
    blocks = [
        block
        for block in checkpointed._base._scorer.modules()
        if isinstance(block, GradientCheckpointingLayer)
    ]
    assert len(blocks) == 2
    computed: list[int] = []
    for number, block in enumerate(blocks):
        block.self_attn.register_forward_hook(lambda *_, number=number: computed.append(number))
    found, tokens = checkpointed.footprint, 20 + 7 + 9
    needed = tokens * (found.token + (kept + 0.5) * found.block) + head_bytes(tokens, checkpointed.vocab_size)
    checkpointed.keep_blocks(int((needed + PROCESS_BYTES) * 8 / 7))
    results, states = trained(checkpointed)
    taken = tokens * (found.token + kept * found.block) + head_bytes(tokens, checkpointed.vocab_size)
    assert checkpointed.memory(0)["pass"] == int(taken)
    again = [number for number in range(2) if number < 2 - kept]
    assert sorted(computed) == sorted([0, 1, *again])
    expected_results, expected_states = trained(engine)
    assert results == expected_results
    for state, expected in zip(states, expected_states, strict=True):
        assert np.array_equal(state, expected)


def test_a_micro_batch_that_kept_too_much_runs_again_and_later_ones_keep_less(
    engine: Engine, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointed = engine_of(directory, activation_checkpointing=True)
    checkpointed.keep_blocks(0)
    blocks, score, kept = checkpointed._base.blocks, checkpointed._base.score, []
    assert blocks is not None

    def limited(*given: Any) -> Any:
        kept.append(blocks.kept)
        if blocks.kept:
            raise torch.OutOfMemoryError("no memory")
        return score(*given)

    monkeypatch.setattr(checkpointed._base, "score", limited)
    results, states = trained(checkpointed)
    # The micro-batch itself stays whole.
    assert kept == [2, 1, 0]
    assert "kept their activations was refused memory" in caplog.text
    expected_results, expected_states = trained(engine)
    assert results == expected_results
    for state, expected in zip(states, expected_states, strict=True):
        assert np.array_equal(state, expected)
