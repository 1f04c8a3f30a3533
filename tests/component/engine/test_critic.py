"""A critic on one rank's engine against a plain PyTorch loop, alone and beside a policy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import LoraSpec, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import (
    ADAM,
    CRITIC,
    LORA,
    NO_CLIP,
    ce_row,
    critic_row,
    flat,
    op,
    trained_model,
    work,
)
from tests.component.engine.reference import ReferenceModel, assert_same_outputs, values

pytestmark = pytest.mark.heavy

LENGTHS = (5, 33, 12)


def value_output(result: RowResult) -> np.ndarray:
    assert result.failure is None
    assert result.outputs.keys() == {"values"}
    return values(result.outputs["values"])


def test_a_fresh_critic_answers_zero_everywhere(engine: Engine) -> None:
    engine.create_model("v", CRITIC)
    rows = [critic_row(seed, length) for seed, length in enumerate(LENGTHS)]
    for row, result in zip(
        rows, engine.run_pass(work((op("v", 1, "ppo_critic", forward_only=True), rows))), strict=True
    ):
        assert value_output(result).shape == (row.length,)
        assert not value_output(result).any()


@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize(
    "lora",
    [CRITIC, LoraSpec(4, 2, train_mlp=False, role="critic"), LoraSpec(4, 2, False, False, role="critic")],
    ids=["all", "attn", "head only"],
)
def test_training_a_critic_equals_a_plain_pytorch_loop(
    engine: Engine, directory: Path, lora: LoraSpec, clip: float
) -> None:
    state = trained_model(engine, "v", lora)
    reference = ReferenceModel(directory, state.adapter)
    for step in range(3):
        rows = [critic_row(10 * step + seed, length) for seed, length in enumerate(LENGTHS)]
        operation = msgspec.structs.replace(op("v", step + 1, "ppo_critic"), loss_config={"value_clip": clip})
        results = engine.run_pass(work((operation, rows)))
        for row, result in zip(rows, results, strict=True):
            assert_same_outputs(value_output(result), reference.values(row))
            loss = float(reference.loss(row, "ppo_critic", clip).detach())
            assert result.metrics["loss:sum"] == pytest.approx(loss, rel=5e-5)
        norm = reference.step(rows, "ppo_critic", ADAM, clip)
        assert engine.optim_step("v", ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        reference.assert_same_adapter(engine.state("v").adapter)
    assert np.abs(flat(engine.state("v")) - flat(state)).max() > 1e-2


def test_the_vocabulary_head_sees_no_position_of_a_critic(engine: Engine) -> None:
    trained_model(engine, "v", CRITIC)
    trained_model(engine, "p", LORA)
    seen: list[int] = []
    head = engine._base._scorer.head
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    engine.run_pass(work((op("v", 1, "ppo_critic"), [critic_row(1, 20)]), (op("p"), [ce_row(2, 7)])))
    engine.run_pass(work((op("v", 2, "ppo_critic"), [critic_row(1, 20)])))
    hook.remove()
    assert seen == [7, 0]


def test_a_critic_goes_on_bit_for_bit_from_its_saved_state(engine: Engine) -> None:
    def train(model_id: str, seq_id: int) -> None:
        engine.run_pass(work((op(model_id, seq_id, "ppo_critic"), [critic_row(seq_id, 15)])))
        engine.optim_step(model_id, NO_CLIP)

    trained_model(engine, "v", CRITIC)
    train("v", 1)
    saved = engine.state("v")
    assert saved.lora.role == "critic"
    train("v", 2)
    engine.create_model("resumed", saved.lora)
    engine.load_state("resumed", saved, optimizer=True)
    train("resumed", 2)
    assert engine.state("resumed") == engine.state("v")


def test_losses_and_states_of_the_other_role_are_refused(engine: Engine) -> None:
    engine.create_model("v", CRITIC)
    engine.create_model("p", LORA)
    results = engine.run_pass(work((op("v"), [ce_row(1, 5)]), (op("p", 1, "ppo_critic"), [critic_row(1, 5)])))
    failures = [result.failure for result in results]
    assert [failure.code if failure else "" for failure in failures] == ["wrong_role", "wrong_role"]
    assert engine.optim_step("v", ADAM)["skipped"] == engine.optim_step("p", ADAM)["skipped"] == 1
    with pytest.raises(InvalidRequest, match="other modules"):
        engine.load_state("p", engine.state("v"), optimizer=False)
