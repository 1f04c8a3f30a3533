"""The trainer service with models that train all weights: durable snapshots at intervals, room for one."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from services.trainer.execution.room import IDLE_S
from tests.component.trainer.world import (
    BASE_MODEL,
    VOCAB,
    TrainedModel,
    TrainerWorld,
    batch,
    forward_backward,
    step,
)
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2

pytestmark = pytest.mark.heavy

FLAGS = ("--micro-batch-tokens", "64", "--full-snapshot-steps", "2")
FULL = operation_pb2.CreateModel(base_model=BASE_MODEL, full=models_pb2.FullFineTuning())


def test_full_models_survive_a_killed_world_and_make_room_for_each_other(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    data, more = batch(1), batch(2, rows=3)
    first = TrainerWorld(redis_url, model_dir, tmp_path / "data", 2, 2, *FLAGS)
    model = TrainedModel(first)
    try:
        created = model.run(create_model=FULL)
        assert created.HasField("create_model") and not created.create_model.HasField("lora")
        results = []
        for _ in range(2):
            results += [model.forward_backward(data), model.step()]
        first.wait_durable(model.model_id, 4)
        # The third step is in no snapshot, nor is the gradient after it.
        results += [model.forward_backward(data), model.step(), model.forward_backward(more)]
        assert first.status(model.model_id).durable_seq_id == 4  # type: ignore[union-attr]
    finally:
        first.kill()
    losses = [result.forward_backward.metrics["loss:sum"] for result in results[0:6:2]]
    assert losses[0] > losses[1] > losses[2]

    second = TrainerWorld(redis_url, model_dir, tmp_path / "data", 2, 2, *FLAGS)
    try:
        assert second.restore(model.model_id) == 4
        replayed = [second.send(operation) for operation in model.sent[5:]]
        assert [call.result() for call in replayed] == results[4:]

        # Another one needs its room, and does all the same from the start.
        model.world = second
        twin = TrainedModel(second)
        time.sleep(IDLE_S)
        twin.run(create_model=FULL)
        assert second.status(model.model_id) is None
        for _ in range(3):
            twin.forward_backward(data)
            twin.step()
        twin.forward_backward(more)
        expected = [twin.step(), *twin.forward(data)]

        time.sleep(IDLE_S)
        late = model.operation(optim_step=step())
        with pytest.raises(grpc.RpcError) as refused:
            second.send(late).result()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        # It was brought up to date before it left.
        assert second.restore(model.model_id) == 6
        assert second.send(model.sent[7]).result() == results[6]
        assert second.send(late).result() == expected[0]
        for ours, theirs in zip(model.forward(data), expected[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)

        # An operation that cannot be run harms nobody.
        beyond = forward_backward(data)
        beyond.data[0].tokens.data = np.full(len(data[0].tokens) - 1, VOCAB, "<i4").tobytes()
        assert model.run(forward_backward=beyond).error.code == "token_out_of_range"
        assert model.step().optim_step.metrics["skipped"] == 1
    finally:
        second.kill()
