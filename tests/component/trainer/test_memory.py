"""A trainer that runs out of memory where its ranks wait for one another goes on with less at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.common.process.crashes import MOST_CRASHES, CrashLedger
from services.common.process.faults import armed
from services.trainer.world.shortage import Shortage
from tests.component.trainer.world import (
    BASE_MODEL,
    VOCAB,
    Datum,
    TrainedModel,
    TrainerWorld,
    forward_backward,
    logprobs,
    step,
)
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2, results_pb2

# Each starts several worlds.
pytestmark = [pytest.mark.heavy, pytest.mark.long]

FULL = operation_pb2.CreateModel(base_model=BASE_MODEL, full=models_pb2.FullFineTuning())
BUDGET = 64


def datums(seed: int, rows: int) -> list[Datum]:
    """Each computes four tokens."""
    random = np.random.default_rng(seed)
    return [Datum(random.integers(0, VOCAB, 5).tolist()) for _ in range(rows)]


class Trainer:
    """One that is started again under its name, as a supervisor does.

    Args:
        ranks, stage: of the world, and its ZeRO stage.
    """

    def __init__(self, redis_url: str, model_dir: Path, data: Path, ranks: int, stage: int) -> None:
        self._given = redis_url, model_dir, data, ranks, stage
        self.world = self._start("")
        self.shortage = Shortage(data / "run", self.world.name)

    def _start(self, name: str) -> TrainerWorld:
        flags = ("--micro-batch-tokens", str(BUDGET), "--max-full-models", "2")
        return TrainerWorld(*self._given, *flags, name=name)

    def ends(self) -> None:
        """Waits until the world has ended by itself."""
        assert self.world.process.wait(240) != 0

    def starts(self, *models: TrainedModel) -> None:
        """Brings models back in the next world."""
        self.world = self._start(self.world.name)
        for model in models:
            model.world = self.world
            self.world.restore(model.model_id)

    def crashes(self) -> CrashLedger[tuple[str, int]]:
        """What the world that has ended blames its operations with."""
        run = self._given[2] / "run"
        return CrashLedger(run / f"{self.world.name}.executing", tuple[str, int], "trainer")


def assert_close(found: results_pb2.OperationResult, wanted: results_pb2.OperationResult) -> None:
    assert not found.HasField("error"), found.error
    for one, other in zip(logprobs(found), logprobs(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_full_model_goes_on_with_ever_smaller_micro_batches_and_a_sequence_that_does_not_fit_is_given_up(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path
) -> None:
    many, one = datums(1, rows=8), datums(2, rows=1)
    trainer = Trainer(redis_url, model_dir, tmp_path / "data", 1, 0)
    try:
        model, twin = TrainedModel(trainer.world), TrainedModel(trainer.world)
        for each in (model, twin):
            each.run(create_model=FULL)
        expected = twin.forward_backward(many), twin.step(), twin.forward_backward(one)
        trainer.world.wait_durable(model.model_id, 0)

        armed.arm(faults, "trainer.mid_batch", "oom*2")
        batch = model.operation(forward_backward=forward_backward(many))
        assert trainer.world.send(batch).exception() is not None
        trainer.ends()
        # What it died of before, and nobody could tell.
        for _ in range(MOST_CRASHES - 1):
            trainer.crashes().begin([(model.model_id, batch.seq_id)])
        trainer.starts(model)
        assert trainer.shortage.tokens(BUDGET) == 16
        assert trainer.world.send(batch).exception() is not None
        trainer.ends()
        trainer.starts(model)
        assert trainer.shortage.tokens(BUDGET) == 8
        assert_close(trainer.world.send(batch).result(), expected[0])
        stepped = model.step().optim_step.metrics
        for name, value in expected[1].optim_step.metrics.items():
            assert stepped[name] == pytest.approx(value, rel=1e-4)

        assert not armed.armed(faults)
        armed.arm(faults, "trainer.mid_batch", "oom")
        alone = model.operation(forward_backward=forward_backward(one))
        assert trainer.world.send(alone).exception() is not None
        trainer.ends()
        trainer.starts(model)
        for operation in model.sent[1:3]:
            assert not trainer.world.send(operation).result().HasField("error")
        refused = trainer.world.send(alone).result().error
        assert refused.code == "out_of_memory"
        assert "out of device memory on one sequence of 4 tokens" in refused.message
        assert_close(model.forward_backward(one), expected[2])

        assert trainer.world.stop() == 0
        assert trainer.shortage.tokens(BUDGET) == BUDGET
    finally:
        trainer.world.kill()


def test_of_tenants_that_share_a_pass_in_which_a_rank_lacks_memory_none_loses_its_operation_or_is_blamed(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path
) -> None:
    trainer = Trainer(redis_url, model_dir, tmp_path / "data", 2, 3)
    try:
        models = [TrainedModel(trainer.world) for _ in range(2)]
        for model in models:
            model.create(rank=1)
            trainer.world.wait_durable(model.model_id, 0)
        # Of each a micro-batch for each rank.
        batches = [datums(seed, rows=32) for seed in range(2)]
        expected = [model.forward_backward(data) for model, data in zip(models, batches, strict=True)]
        armed.arm(faults, "trainer.mid_batch[trainer-1]", "oom")
        operations = [
            model.operation(forward_backward=forward_backward(data))
            for model, data in zip(models, batches, strict=True)
        ]
        calls = [trainer.world.send(operation) for operation in operations]
        assert [call.exception() is not None for call in calls] == [True, True]
        assert not armed.armed(faults)
        trainer.ends()
        assert trainer.shortage.cause() is not None
        trainer.starts(*models)
        assert trainer.shortage.tokens(BUDGET) == BUDGET // 2
        for model, wanted in zip(models, expected, strict=True):
            for operation in model.sent[1:]:
                assert_close(trainer.world.send(operation).result(), wanted)
            assert "skipped" not in model.run(optim_step=step()).optim_step.metrics
    finally:
        trainer.world.kill()
    crashes = trainer.crashes()
    assert not any(crashes.is_suspect((model.model_id, 2)) for model in models)


@pytest.mark.parametrize(("kind", "stage"), [("adapter", 0), ("full", 0), ("full", 3)])
def test_a_step_for_which_a_rank_lacks_memory_fails_alone_and_may_be_sent_again(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path, kind: str, stage: int
) -> None:
    trainer = Trainer(redis_url, model_dir, tmp_path / "data", 2, stage)

    def create(model: TrainedModel) -> None:
        if kind == "full":
            model.run(create_model=FULL)
        else:
            model.create()

    try:
        twin = TrainedModel(trainer.world)
        create(twin)
        first, second = datums(1, rows=8), datums(2, rows=4)
        expected = twin.forward_backward(first), twin.forward_backward(second), twin.step()
        weights = twin.forward(first)
        twin.run(unload_model=operation_pb2.UnloadModel())

        model = TrainedModel(trainer.world)
        create(model)
        found = [model.forward_backward(first)]
        # Once more after it has let go of what it keeps for later.
        armed.arm(faults, "trainer.before_step_memory[trainer-1]", "oom*2")
        refused = model.step().error
        assert refused.code == "out_of_memory"
        assert "weights and gradient are as they were" in refused.message
        assert "send it again later" in refused.message
        assert not armed.armed(faults)
        found += [model.forward_backward(second), model.step()]
        for one, other in zip(found, expected, strict=True):
            assert one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)
        for mine, theirs in zip(model.forward(first), weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert trainer.world.stop() == 0
    finally:
        trainer.world.kill()
    assert not trainer.crashes().is_suspect((model.model_id, 2))
