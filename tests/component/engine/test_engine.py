"""One rank's engine against a plain PyTorch loop: values, gradients, isolation of tenants, state."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from services.common.contract.errors import InvalidRequest, ModelNotResident
from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import LoraSpec, ModelState, Row, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.losses import LOSSES
from tests.component.engine.data import (
    ADAM,
    CRITIC,
    LORA,
    NO_CLIP,
    VOCAB,
    ce_row,
    critic_row,
    flat,
    is_row,
    op,
    trained_model,
    with_input,
    work,
)
from tests.component.engine.engines import engine_of
from tests.component.engine.reference import ReferenceModel, assert_same_outputs, values

pytestmark = pytest.mark.heavy

LENGTHS = (5, 33, 12, 64)


def logprobs(result: RowResult) -> np.ndarray:
    assert result.failure is None
    return values(result.outputs["logprobs"])


def test_a_fresh_adapter_equals_the_base_model(engine: Engine, directory: Path) -> None:
    engine.create_model("m", LORA)
    rows = [ce_row(seed, length) for seed, length in enumerate(LENGTHS)]
    results = engine.run_pass(work((op("m", forward_only=True), rows)))
    reference = ReferenceModel(directory)
    for row, result in zip(rows, results, strict=True):
        expected = reference.logprobs(row).numpy()
        np.testing.assert_allclose(logprobs(result), expected, rtol=0, atol=1e-5)
        assert result.metrics["loss:sum"] == pytest.approx(
            float(reference.loss(row, "cross_entropy")), rel=1e-5
        )


def test_several_targets_per_position_come_back_in_their_shape(engine: Engine, directory: Path) -> None:
    state = trained_model(engine, "m")
    rows = [ce_row(1, 9, columns=3), ce_row(2, 14), ce_row(3, 4, columns=1)]
    results = engine.run_pass(work((op("m"), rows)))
    reference = ReferenceModel(directory, state.adapter)
    for row, result in zip(rows, results, strict=True):
        assert logprobs(result).shape == row.loss_inputs["target_tokens"].shape
        np.testing.assert_allclose(logprobs(result), reference.logprobs(row).detach(), rtol=0, atol=1e-5)
    norm = reference.step(rows, "cross_entropy", ADAM)
    assert engine.optim_step("m", ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
@pytest.mark.parametrize(
    "lora",
    [
        LoraSpec(8, 1),
        LoraSpec(4, 2, train_mlp=False, train_unembed=False),
        LoraSpec(4, 3, train_attn=False, train_unembed=False),
        LoraSpec(4, 4, train_attn=False, train_mlp=False),
    ],
    ids=["all", "attn", "mlp", "unembed"],
)
def test_training_equals_a_plain_pytorch_loop(
    engine: Engine, directory: Path, lora: LoraSpec, loss_fn: str
) -> None:
    state = trained_model(engine, "m", lora)
    reference = ReferenceModel(directory, state.adapter)
    make = ce_row if loss_fn == "cross_entropy" else is_row
    for step in range(3):
        rows = [make(10 * step + seed, length) for seed, length in enumerate(LENGTHS)]
        results = engine.run_pass(work((op("m", step + 1, loss_fn), rows)))
        for row, result in zip(rows, results, strict=True):
            assert_same_outputs(logprobs(result), reference.logprobs(row))
        expected_norm = reference.step(rows, loss_fn, ADAM)
        assert engine.optim_step("m", ADAM)["grad_norm"] == pytest.approx(expected_norm, rel=1e-4)
        reference.assert_same_adapter(engine.state("m").adapter)
    assert np.abs(flat(engine.state("m")) - flat(state)).max() > 1e-2


def test_gradients_of_operations_add_up_until_the_step(engine: Engine, directory: Path) -> None:
    state = trained_model(engine, "m")
    reference = ReferenceModel(directory, state.adapter)
    rows = [ce_row(seed, 10 + seed) for seed in range(4)]
    engine.run_pass(work((op("m", 1), rows[:1]), (op("m", 2), rows[1:3])))
    engine.run_pass(work((op("m", 3), rows[3:])))
    engine.optim_step("m", ADAM)
    reference.step(rows, "cross_entropy", ADAM)
    reference.assert_same_adapter(engine.state("m").adapter)


def test_forward_only_leaves_no_gradient(engine: Engine) -> None:
    state = trained_model(engine, "m")
    engine.run_pass(work((op("m", forward_only=True), [ce_row(1, 8)])))
    metrics = engine.optim_step("m", ADAM)
    assert metrics["skipped"] == 1
    assert np.array_equal(flat(engine.state("m")), flat(state))


def test_a_step_clears_the_gradient(engine: Engine) -> None:
    trained_model(engine, "m")
    engine.run_pass(work((op("m"), [ce_row(1, 8)])))
    assert "skipped" not in engine.optim_step("m", ADAM)
    assert engine.optim_step("m", ADAM)["skipped"] == 1


def test_tenants_in_one_batch_train_as_if_alone(engine: Engine) -> None:
    tenants = {
        "a": (LoraSpec(8, 1), op("a", 1), [ce_row(1, 20), ce_row(2, 7)]),
        "b": (LoraSpec(3, 2, train_unembed=False), op("b", 1, "importance_sampling"), [is_row(3, 30)]),
        "c": (LoraSpec(16, 3, train_attn=False), op("c", 1), [ce_row(4, 5, columns=2)]),
        "d": (LoraSpec(4, 4), op("d", 1, forward_only=True), [ce_row(5, 11)]),
    }
    alone: dict[str, tuple[list[np.ndarray], dict[str, float], np.ndarray]] = {}
    for model_id, (lora, operation, rows) in tenants.items():
        trained_model(engine, model_id, lora, seed=len(alone))
        results = engine.run_pass(work((operation, rows)))
        step = engine.optim_step(model_id, NO_CLIP)
        alone[model_id] = ([logprobs(result) for result in results], step, flat(engine.state(model_id)))
        engine.drop_model(model_id)

    for number, (model_id, (lora, _, _)) in enumerate(tenants.items()):
        trained_model(engine, model_id, lora, seed=number)
    # Rows of all tenants, in a mixed order, in one micro-batch.
    placed = [(operation, rows) for _, operation, rows in tenants.values()]
    cut = [[(3, 0), (0, 1), (2, 0), (1, 0), (0, 0)]]
    results = engine.run_pass(work(*placed, cut=cut))
    assert [(result.op, result.index) for result in results] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    for number, (model_id, (expected_logprobs, expected_step, expected_weights)) in enumerate(alone.items()):
        mine = [logprobs(result) for result in results if result.op == number]
        for ours, theirs in zip(mine, expected_logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        step = engine.optim_step(model_id, NO_CLIP)
        assert step == pytest.approx(expected_step, rel=1e-4)
        np.testing.assert_allclose(flat(engine.state(model_id)), expected_weights, rtol=1e-4, atol=1e-5)


def test_every_loss_in_one_pass_trains_as_if_alone(engine: Engine) -> None:
    sampled = (np.arange(30) >= 10).astype(np.float32)
    clipped = with_input(is_row(4, 14), "clip_low_threshold", np.full(14, 0.9, np.float32))
    tenants: dict[str, tuple[dict[str, float], list[Row]]] = {
        "cross_entropy": ({}, [ce_row(1, 20), ce_row(2, 7)]),
        "importance_sampling": ({}, [is_row(2, 25)]),
        "ppo": ({"clip_high_threshold": 1.1}, [is_row(3, 21), clipped]),
        "cispo": ({"clip_high_threshold": 1.2}, [is_row(5, 18)]),
        "dro": ({"beta": 0.5}, [is_row(6, 23)]),
        "gspo": ({}, [with_input(is_row(7, 30), "sequence_ratio_mask", sampled)]),
    }
    tenants["ppo_critic"] = ({"value_clip": 0.2}, [critic_row(8, 22), critic_row(9, 13, weighted=False)])
    assert tenants.keys() == LOSSES.keys()
    loras = {name: CRITIC if name == "ppo_critic" else LORA for name in tenants}
    placed = [
        (msgspec.structs.replace(op(name, 1, name), loss_config=config), rows)
        for name, (config, rows) in tenants.items()
    ]
    alone: list[tuple[list[dict[str, float]], dict[str, float], np.ndarray]] = []
    for operation, rows in placed:
        start = flat(trained_model(engine, operation.model_id, loras[operation.model_id]))
        metrics = [result.metrics for result in engine.run_pass(work((operation, rows)))]
        step = engine.optim_step(operation.model_id, NO_CLIP)
        alone.append((metrics, step, flat(engine.state(operation.model_id))))
        assert np.abs(alone[-1][2] - start).max() > 1e-4
        engine.drop_model(operation.model_id)

    for name in tenants:
        trained_model(engine, name, loras[name])
    cut = [[(2, 1), (6, 0), (0, 0), (5, 0), (1, 0)], [(3, 0), (0, 1), (4, 0), (6, 1), (2, 0)]]
    results = engine.run_pass(work(*placed, cut=cut))
    for number, (operation, _) in enumerate(placed):
        metrics, step, weights = alone[number]
        mine = [result.metrics for result in results if result.op == number]
        assert mine == [pytest.approx(expected, rel=1e-4, abs=1e-5) for expected in metrics]
        assert engine.optim_step(operation.model_id, NO_CLIP) == pytest.approx(step, rel=1e-4)
        np.testing.assert_allclose(flat(engine.state(operation.model_id)), weights, rtol=1e-4, atol=1e-5)


def test_micro_batches_do_not_change_the_result(engine: Engine) -> None:
    rows = [ce_row(seed, 6 + 5 * seed) for seed in range(6)]
    weights = []
    for cut in (None, [[(0, 5), (0, 4)], [(0, 3)], [(0, 0), (0, 1), (0, 2)]]):
        trained_model(engine, "m")
        engine.run_pass(work((op("m"), rows), cut=cut))
        engine.optim_step("m", NO_CLIP)
        weights.append(flat(engine.state("m")))
        engine.drop_model("m")
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_how_passes_are_composed_changes_nothing_bit_for_bit(engine: Engine) -> None:
    first = (op("m", 1), [ce_row(1, 20), ce_row(2, 9)])
    second = (op("m", 2), [ce_row(3, 15), ce_row(4, 31)])
    compositions = [
        [work(first, second, cut=[[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]])],
        [
            work(first, cut=[[(0, 0)]]),
            work(first, second, cut=[[(0, 1)], [(1, 0)]]),
            work(second, cut=[[(0, 1)]]),
        ],
    ]
    weights = []
    for passes in compositions:
        trained_model(engine, "m")
        for each in passes:
            engine.run_pass(each)
        engine.optim_step("m", ADAM)
        weights.append(flat(engine.state("m")))
        engine.drop_model("m")
    assert np.array_equal(weights[0], weights[1])


def test_garbage_at_masked_positions_does_no_harm(engine: Engine) -> None:
    clean = is_row(1, 12)
    advantages = values(clean.loss_inputs["advantages"])
    q = values(clean.loss_inputs["logprobs"]).copy()
    q[advantages == 0] = -1e30
    weights = []
    for row in (clean, with_input(clean, "logprobs", q)):
        trained_model(engine, "m")
        (result,) = engine.run_pass(work((op("m", 1, "importance_sampling"), [row])))
        assert np.isfinite(result.metrics["loss:sum"])
        engine.optim_step("m", ADAM)
        weights.append(flat(engine.state("m")))
        engine.drop_model("m")
    assert np.array_equal(weights[0], weights[1])


def test_a_gradient_that_is_not_finite_hurts_neither_its_model_nor_its_neighbour(engine: Engine) -> None:
    state = trained_model(engine, "bad")
    trained_model(engine, "good", seed=1)
    row = is_row(1, 12)
    overflowing = with_input(row, "logprobs", np.full(12, -1e30, np.float32))
    good = (op("good"), [ce_row(2, 20)])
    results = engine.run_pass(work((op("bad", 1, "importance_sampling"), [overflowing]), good))
    assert not np.isfinite(results[0].metrics["loss:sum"])
    assert np.isfinite(results[1].metrics["loss:sum"])
    with pytest.raises(InvalidRequest, match="the step was not applied") as error:
        engine.optim_step("bad", ADAM)
    assert error.value.code == "non_finite_gradient"
    assert np.array_equal(flat(engine.state("bad")), flat(state))
    assert engine.state("bad").step == 0
    assert np.isfinite(engine.optim_step("good", ADAM)["grad_norm"])
    assert np.isfinite(flat(engine.state("good"))).all()
    engine.run_pass(work((op("bad", 3, "importance_sampling"), [row])))
    assert np.isfinite(engine.optim_step("bad", ADAM)["grad_norm"])


def test_a_bad_row_fails_its_whole_operation_and_no_other(engine: Engine) -> None:
    state = trained_model(engine, "bad")
    trained_model(engine, "good", seed=1)
    beyond = with_input(ce_row(1, 5), "target_tokens", np.full(5, VOCAB))
    cut = [[(0, 0), (1, 0)], [(0, 1)]]
    results = engine.run_pass(
        work((op("bad"), [ce_row(2, 6), beyond]), (op("good"), [ce_row(3, 7)]), cut=cut)
    )
    assert [result.failure is not None for result in results] == [True, True, False]
    failure = results[0].failure
    assert failure is not None
    assert (failure.category, failure.code) == ("user", "token_out_of_range")
    assert engine.optim_step("bad", ADAM)["skipped"] == 1
    assert np.array_equal(flat(engine.state("bad")), flat(state))
    assert "skipped" not in engine.optim_step("good", ADAM)


def test_running_out_of_memory_fails_the_operations_of_that_batch_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_model(engine, "big")
    trained_model(engine, "small", seed=1)
    original = engine._base.score

    def limited(tokens: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if tokens.shape[1] > 40:
            raise torch.OutOfMemoryError("no memory")
        return original(tokens, *rest)

    monkeypatch.setattr(engine._base, "score", limited)
    big = (op("big"), [ce_row(1, 10), ce_row(2, 41)])
    small = (op("small"), [ce_row(3, 7)])
    results = engine.run_pass(work(big, small, cut=[[(0, 0), (1, 0)], [(0, 1)]]))
    assert [result.failure is not None for result in results] == [True, True, False]
    failure = results[0].failure
    assert failure is not None
    assert failure.category == "server"
    assert "--micro-batch-tokens" in failure.message
    # What is left of the operation, in a later pass, fails too; then the model goes on.
    (rest,) = engine.run_pass(work((op("big"), [ce_row(4, 5)])))
    assert rest.failure == failure
    assert engine.optim_step("big", ADAM)["skipped"] == 1
    assert "skipped" not in engine.optim_step("small", ADAM)
    engine.run_pass(work((op("big", 3), [ce_row(4, 5)])))
    assert "skipped" not in engine.optim_step("big", ADAM)


def test_a_model_goes_on_bit_for_bit_from_its_saved_state(engine: Engine) -> None:
    def train(model_id: str, steps: range) -> None:
        for step in steps:
            engine.run_pass(work((op(model_id, 2 * step), [ce_row(step, 12), ce_row(step + 100, 5)])))
            engine.optim_step(model_id, ADAM)

    trained_model(engine, "m")
    train("m", range(2))
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.state("m")), type=ModelState)
    assert saved.step == 2
    train("m", range(2, 4))
    engine.create_model("resumed", saved.lora)
    engine.load_state("resumed", saved, optimizer=True)
    assert engine.state("resumed") == saved
    train("resumed", range(2, 4))
    assert engine.state("resumed") == engine.state("m")


def test_loading_without_optimizer_state_starts_it_afresh(engine: Engine) -> None:
    trained_model(engine, "m")
    engine.run_pass(work((op("m"), [ce_row(1, 12)])))
    engine.optim_step("m", ADAM)
    saved = engine.state("m")
    engine.create_model("fresh", saved.lora)
    engine.load_state("fresh", saved, optimizer=False)
    state = engine.state("fresh")
    assert state.adapter == saved.adapter
    assert (state.step, state.optimizer) == (0, {})


def test_loading_clears_the_gradient(engine: Engine) -> None:
    state = trained_model(engine, "m")
    engine.run_pass(work((op("m"), [ce_row(1, 12)])))
    engine.load_state("m", state, optimizer=True)
    assert engine.optim_step("m", ADAM)["skipped"] == 1


def test_a_state_of_another_shape_is_refused_and_changes_nothing(engine: Engine) -> None:
    state = trained_model(engine, "m")
    other_rank = trained_model(engine, "rank", LoraSpec(4, 1))
    other_targets = trained_model(engine, "targets", LoraSpec(8, 1, train_mlp=False))
    for other in (other_rank, other_targets):
        with pytest.raises(InvalidRequest, match="create the model from the state"):
            engine.load_state("m", other, optimizer=True)
    assert engine.state("m") == state


def test_the_same_seed_gives_the_same_adapter(engine: Engine) -> None:
    for model_id, lora in (("a", LORA), ("b", LORA), ("c", LoraSpec(8)), ("d", LoraSpec(8))):
        engine.create_model(model_id, lora)
    a, b, c, d = (flat(engine.state(model_id)) for model_id in "abcd")
    assert np.array_equal(a, b)
    assert not np.array_equal(c, d)


def test_a_model_that_is_not_there_is_named(engine: Engine) -> None:
    with pytest.raises(ModelNotResident, match="ghost"):
        engine.optim_step("ghost", ADAM)
    (result,) = engine.run_pass(work((op("ghost"), [ce_row(1, 5)])))
    assert result.failure is not None
    assert result.failure.code == "model_not_resident"


def test_a_bfloat16_base_trains_float32_adapters(directory: Path, one_rank: None) -> None:
    engine = engine_of(directory, dtype="bfloat16")
    state = trained_model(engine, "m")
    rows = [ce_row(seed, 24) for seed in range(4)]
    rows = [with_input(row, "weights", np.ones(24, np.float32)) for row in rows]
    reference = ReferenceModel(directory, state.adapter)
    losses = []
    for step in range(12):
        results = engine.run_pass(work((op("m", step + 1), rows)))
        if step == 0:
            for row, result in zip(rows, results, strict=True):
                np.testing.assert_allclose(logprobs(result), reference.logprobs(row).detach(), atol=0.1)
        losses.append(sum(result.metrics["loss:sum"] for result in results))
        engine.optim_step("m", msgspec.structs.replace(ADAM, learning_rate=5e-3, eps=1e-8))
    assert losses[-1] < 0.8 * losses[0]
    assert all(array.dtype == "float32" for array in engine.state("m").adapter.values())


def test_a_state_is_a_copy(engine: Engine) -> None:
    state = trained_model(engine, "m")
    before = {name: HostTensor(held.dtype, held.shape, held.data) for name, held in state.adapter.items()}
    engine.run_pass(work((op("m"), [ce_row(1, 12)])))
    engine.optim_step("m", ADAM)
    assert state.adapter == before
