"""An output head that computes its positions in chunks trains as one that computes them at once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from services.trainer.compute.engine import Engine
from tests.component.engine.data import (
    CRITIC,
    LORA,
    Placed,
    ce_row,
    critic_row,
    is_row,
    op,
    trained_model,
    work,
)

pytestmark = pytest.mark.heavy

PLACED: list[Placed] = [
    (op("a"), [ce_row(1, 20), ce_row(2, 7, columns=3)]),
    (op("b", 1, "importance_sampling"), [is_row(3, 15)]),
    (op("v", 1, "ppo_critic"), [critic_row(4, 9)]),
]
HEAD_ONLY = msgspec.structs.replace(LORA, train_attn=False, train_mlp=False, train_unembed=True)
SEQUENCE_RATIO: Placed = (op("g", 1, "gspo"), [is_row(5, 12)])


@pytest.mark.parametrize(("more", "times"), [([], 1), ([SEQUENCE_RATIO], 2)], ids=["by token", "by sequence"])
def test_chunks_change_no_number_and_are_computed_twice_only_for_a_sequences_ratio(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, more: list[Placed], times: int
) -> None:
    head, placed = engine._base._scorer.head, [*PLACED, *more]
    chunk, computed, came_to = head._chunk, [0], []

    def counted(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        computed[0] += hidden.shape[0]
        return chunk(hidden, *rest)

    monkeypatch.setattr(head, "_chunk", counted)
    for positions in (head.chunk_positions, 6):
        monkeypatch.setattr(head, "chunk_positions", positions)
        for operation, _ in placed:
            trained_model(engine, operation.model_id, CRITIC if operation.model_id == "v" else LORA)
        computed[0] = 0
        results = engine.run_pass(work(*placed))
        gradients = [
            engine._tenants[operation.model_id].gradient(1)[0].numpy().copy()  # type: ignore[union-attr]
            for operation, _ in placed
        ]
        came_to.append((results, gradients, computed[0]))
        for operation, _ in placed:
            engine.drop_model(operation.model_id)
    (at_once, expected, once), (in_chunks, found, again) = came_to
    assert again == times * once
    for ours, theirs in zip(in_chunks, at_once, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.any()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


def test_an_adapter_of_the_output_head_alone_trains_in_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, gradients = engine._base._scorer.head, []
    for positions in (head.chunk_positions, 6):
        monkeypatch.setattr(head, "chunk_positions", positions)
        trained_model(engine, "h", HEAD_ONLY)
        (result,) = engine.run_pass(work((op("h"), [ce_row(1, 20)])))
        assert result.failure is None
        gradients.append(engine._tenants["h"].gradient(1)[0].numpy().copy())  # type: ignore[union-attr]
        engine.drop_model("h")
    at_once, in_chunks = gradients
    assert at_once.any()
    np.testing.assert_allclose(in_chunks, at_once, rtol=0, atol=1e-5 * max(1.0, float(np.abs(at_once).max())))
