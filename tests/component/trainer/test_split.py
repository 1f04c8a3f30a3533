"""A trainer whose ranks have little memory each takes sequences that none of them holds, and replays them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from services.common.process.crashes import CrashLedger
from services.common.process.faults import armed
from tests.component.trainer.world import (
    VOCAB,
    Datum,
    TrainedModel,
    TrainerWorld,
    batch,
    forward_backward,
    logprobs,
)
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2

# Each starts a world or two of two ranks.
pytestmark = [pytest.mark.heavy, pytest.mark.long]

LITTLE = ("--memory-gib", "0.006")


def datums(lengths: list[int]) -> list[Datum]:
    random = np.random.default_rng(5)
    return [Datum(random.integers(0, VOCAB, length + 1).tolist()) for length in lengths]


def break_off(
    world: TrainerWorld, faults: Path, point: str, action: str, long: TrainedModel, short: TrainedModel
) -> list[operation_pb2.Operation]:
    """Has a world end of a sequence that its ranks compute together, beside small work of another model; the
    operations."""
    for model in (long, short):
        model.create(rank=1)
        world.wait_durable(model.model_id, 0)
    armed.arm(faults, point, action)
    one_rank, longest = world.record.one_rank_tokens, world.record.max_sequence_tokens
    operations = [
        model.operation(forward_backward=forward_backward(data), ranks=2, one_rank_tokens=one_rank)
        for model, data in ((long, datums([longest])), (short, batch(3, rows=4, longest=one_rank)))
    ]
    calls = [world.send(operation) for operation in operations]
    # The other rank is in a collective, which it does not wait for until its deadline.
    assert world.process.wait(240) != 0
    assert not armed.armed(faults)
    assert calls[0].exception() is not None
    return operations


def trained(model: TrainedModel, data: list[Datum], one_rank: int) -> results_pb2.OperationResult:
    """A forward_backward as a gateway journals it for two ranks that hold so many tokens each."""
    return model.run(forward_backward=forward_backward(data), ranks=2, one_rank_tokens=one_rank)


def test_sequences_that_no_rank_holds_are_trained_on_all_and_replayed_bit_for_bit(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    first = TrainerWorld(redis_url, model_dir, tmp_path / "little", 2, 0, *LITTLE)
    try:
        one_rank, longest = first.record.one_rank_tokens, first.record.max_sequence_tokens
        assert 8 < one_rank < longest < first.record.context_length
        assert one_rank <= first.record.max_forward_tokens <= first.record.context_length
        data = datums([longest, one_rank + 1, one_rank, 5])
        model = TrainedModel(first)
        model.create(rank=1)
        results = [trained(model, data, one_rank), model.step()]
        first.wait_durable(model.model_id, 2)
        # The gradient of this one is in no snapshot.
        results.append(trained(model, data, one_rank))
        psutil.Process(first.rank_pid(1)).kill()
        assert first.process.wait(120) != 0
    finally:
        first.kill()

    second = TrainerWorld(redis_url, model_dir, tmp_path / "little", 2, 0, *LITTLE)
    try:
        assert second.restore(model.model_id) == 2
        assert second.send(model.sent[3]).result() == results[2]
        model.world = second
        model.step()
        probed = model.forward(data)
    finally:
        second.kill()

    # The same on one rank, which has the memory.
    alone = TrainerWorld(redis_url, model_dir, tmp_path / "much", 1, 0)
    try:
        assert alone.record.one_rank_tokens == 0
        twin = TrainedModel(alone)
        twin.create(rank=1)
        expected = [trained(twin, data, one_rank), twin.step(), trained(twin, data, one_rank)]
        twin.step()
        for number in (0, 2):
            for found, wanted in zip(logprobs(results[number]), logprobs(expected[number]), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
        for found, wanted in zip(probed, twin.forward(data), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-5)
    finally:
        alone.kill()


def test_a_rank_that_fails_within_such_a_sequence_ends_the_world_at_once_and_its_operation_alone_is_blamed(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path
) -> None:
    world = TrainerWorld(redis_url, model_dir, tmp_path / "data", 2, 0, *LITTLE)
    try:
        long, short = (TrainedModel(world) for _ in range(2))
        break_off(world, faults, "trainer.mid_split", "error", long, short)
    finally:
        world.kill()
    ledger = tmp_path / "data" / "run" / f"{world.name}.executing"
    crashes = CrashLedger[tuple[str, int]](ledger, tuple[str, int], "trainer")
    assert crashes.deaths((long.model_id, 1)) == 1
    assert not crashes.is_suspect((short.model_id, 1))


def test_a_rank_that_runs_out_of_memory_within_such_a_sequence_fails_its_operation_and_no_other(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path
) -> None:
    first = TrainerWorld(redis_url, model_dir, tmp_path / "data", 2, 0, *LITTLE)
    try:
        one_rank, longest = first.record.one_rank_tokens, first.record.max_sequence_tokens
        long, short = (TrainedModel(first) for _ in range(2))
        operations = break_off(first, faults, "trainer.mid_split[trainer-1]", "oom", long, short)
    finally:
        first.kill()
    second = TrainerWorld(redis_url, model_dir, tmp_path / "data", 2, 0, *LITTLE, name=first.name)
    try:
        for model in (long, short):
            model.world = second
            second.restore(model.model_id)
        failed, went_on = [second.send(operation).result() for operation in operations]
        assert failed.error.code == "out_of_memory"
        assert f"on one sequence of {longest} tokens" in failed.error.message
        assert not went_on.HasField("error")
        # Nothing of it is left, and a shorter one is trained on.
        assert long.step().optim_step.metrics["skipped"] == 1
        assert not trained(long, datums([one_rank]), one_rank).HasField("error")
    finally:
        second.kill()


def test_a_long_sequence_of_one_tenant_and_small_work_of_another_go_on_beside_each_other(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    world = TrainerWorld(redis_url, model_dir, tmp_path, 2, 3, *LITTLE)
    try:
        one_rank, longest = world.record.one_rank_tokens, world.record.max_sequence_tokens
        long, short = TrainedModel(world), TrainedModel(world)
        for model in (long, short):
            model.create(rank=1)
        small = batch(3, rows=4, longest=one_rank)
        expected = trained(short, small, one_rank)
        calls = [
            world.send(
                model.operation(forward_backward=forward_backward(data), ranks=2, one_rank_tokens=one_rank)
            )
            for _ in range(3)
            for model, data in ((long, datums([longest])), (short, small))
        ]
        found = [call.result() for call in calls]
        assert not any(result.HasField("error") for result in found)
        for result in found[1::2]:
            for one, other in zip(logprobs(result), logprobs(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    finally:
        world.kill()
