"""A micro-batch that does not fit into memory runs in parts, and comes to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.common.contract.errors import ModelNotResident
from services.trainer.compute import engine as engine_module
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.engine import Engine
from services.trainer.compute.lora.adapter import Adapter
from services.trainer.compute.memory.failures import LacksMemory, NoMemory
from services.trainer.compute.optimizer import AdapterOptimizer
from services.trainer.compute.tenant import LoraTenant
from tests.component.engine.data import NO_CLIP, ce_row, flat, op, trained_model, work

pytestmark = pytest.mark.heavy


def trained(engine: Engine) -> list[np.ndarray]:
    """Two models after a step on two passes, of which the second adds to gradients that are there."""
    for model_id in ("a", "b"):
        trained_model(engine, model_id)
    rows = [ce_row(seed, 6 + 5 * seed) for seed in range(4)]
    for pair in (rows[:2], rows[2:]):
        results = engine.run_pass(work((op("a"), pair), (op("b"), rows[:1])))
        assert all(result.failure is None for result in results)
    states = []
    for model_id in ("a", "b"):
        engine.optim_step(model_id, NO_CLIP)
        states.append(flat(engine.state(model_id)))
        engine.drop_model(model_id)
    return states


def of_cuda() -> None:
    raise torch.OutOfMemoryError("no memory")


def of_the_cpu() -> None:
    """Asks for more than a process can address."""
    torch.empty(1 << 50)


@pytest.mark.parametrize("refused", [of_cuda, of_the_cpu])
@pytest.mark.parametrize("where", ["score", "backward"])
def test_a_batch_that_does_not_fit_is_split_until_it_does(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str, refused: Callable[[], None]
) -> None:
    expected = trained(engine)
    score, backward, tokens = engine._base.score, engine._base.backward, [0]

    def watched(given: torch.Tensor, *rest: Any) -> Any:
        tokens[0] = given.shape[1]
        if where == "score" and tokens[0] > 21:
            refused()
        return score(given, *rest)

    def limited(loss: torch.Tensor) -> None:
        backward(loss)
        if where == "backward" and tokens[0] > 21:
            refused()

    monkeypatch.setattr(engine._base, "score", watched)
    monkeypatch.setattr(engine._base, "backward", limited)
    for found, wanted in zip(trained(engine), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["score", "backward"])
def test_of_a_model_that_trains_all_weights_the_world_is_to_end_and_go_on_with_half_the_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine.create_model("full", None)
    rows = [ce_row(seed, 20) for seed in range(4)]
    engine.run_pass(work((op("full"), rows[:2])))
    full = engine._tenants["full"]
    original = getattr(full, where)

    def refused(*given: Any) -> Any:
        original(*given)
        of_the_cpu()

    monkeypatch.setattr(full, where, refused)
    with pytest.raises(LacksMemory) as several:
        engine.run_pass(work((op("full"), rows)))
    assert (several.value.tokens, several.value.operation) == (40, None)
    with pytest.raises(LacksMemory, match="on one sequence of 20 tokens") as alone:
        engine.run_pass(work((op("full"), rows[:1])))
    assert alone.value.operation == ("full", 1)


def test_a_sequence_that_does_not_fit_fails_its_operation_and_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_model(engine, "big")
    trained_model(engine, "small", seed=1)
    score = engine._base.score

    def limited(given: torch.Tensor, *rest: Any) -> Any:
        if given.shape[1] > 40:
            raise torch.OutOfMemoryError("no memory")
        return score(given, *rest)

    monkeypatch.setattr(engine._base, "score", limited)
    results = engine.run_pass(
        work((op("big"), [ce_row(1, 10), ce_row(2, 41)]), (op("small"), [ce_row(3, 7)]))
    )
    assert [result.failure is not None for result in results] == [True, True, False]
    assert engine.optim_step("big", NO_CLIP)["skipped"] == 1
    assert "skipped" not in engine.optim_step("small", NO_CLIP)


def test_an_adapter_that_does_not_fit_is_not_made_and_may_be_made_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Adapter:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "Adapter", refused)
        with pytest.raises(NoMemory, match="out of memory on a new adapter of rank 4, which was not made"):
            engine.create_model("late", LoraSpec(4))
        with pytest.raises(ModelNotResident):
            engine.state("late")
    trained_model(engine, "late")
    engine.run_pass(work((op("late"), [ce_row(1, 10)])))
    assert "skipped" not in engine.optim_step("late", NO_CLIP)


def test_a_step_that_does_not_fit_is_refused_and_its_gradient_waits_for_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(engine)
    start = AdapterOptimizer.start
    for model_id in ("a", "b"):
        trained_model(engine, model_id)
    rows = [ce_row(seed, 6 + 5 * seed) for seed in range(4)]
    full = engine._tenants["a"]
    assert isinstance(full, LoraTenant)

    def refused(optimizer: AdapterOptimizer) -> None:
        if optimizer is full._optimizer:
            raise torch.OutOfMemoryError("no memory")
        start(optimizer)

    engine.run_pass(work((op("a"), rows[:2]), (op("b"), rows[:1])))
    with monkeypatch.context() as patched:
        patched.setattr(AdapterOptimizer, "start", refused)
        lacks, stepped = engine.optim_steps([("a", NO_CLIP), ("b", NO_CLIP)])
        assert isinstance(lacks, NoMemory) and isinstance(stepped, dict)
    engine.run_pass(work((op("a", 3), rows[2:])))
    engine.optim_step("a", NO_CLIP)
    np.testing.assert_allclose(flat(engine.state("a")), expected[0], rtol=1e-5, atol=1e-6)
