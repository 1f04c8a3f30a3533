"""Two trainers of one base model, of which one is cut off for a while and lives on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from services.common.state import keys
from tests.component.own_redis import redis_server
from tests.component.trainer.world import (
    EPOCH,
    TrainedModel,
    TrainerWorld,
    batch,
    forward_backward,
    logprobs,
    make_model,
    step,
)
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.heavy


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[tuple[TrainerWorld, TrainerWorld]]:
    model_dir = make_model(tmp_path / "tiny")
    found: list[TrainerWorld] = []
    with redis_server(tmp_path) as url:
        try:
            for _ in range(2):
                found.append(TrainerWorld(url, model_dir, tmp_path / "data", 1, 0))
            yield found[0], found[1]
        finally:
            for world in found:
                world.kill()


def test_a_trainer_that_was_cut_off_changes_nothing_and_catches_up(
    trainers: tuple[TrainerWorld, TrainerWorld], tmp_path: Path
) -> None:
    cut_off, other = trainers
    model = TrainedModel(cut_off)
    model.create()
    model.forward_backward(batch(0, 12))
    model.step()
    cut_off.wait_durable(model.model_id, 2)
    early = cut_off.send(model_operation(model.model_id, 9, forward_backward=forward_backward(batch(3, 12))))

    # The gateway turns to the other trainer, under a higher epoch.
    meta, epoch = keys.journal_meta(model.model_id), EPOCH + 1
    cut_off.redis.set(keys.epoch(model.model_id), epoch)
    assert other.restore(model.model_id, epoch) == 2
    model.step()
    model.forward_backward(batch(1, 12))
    model.step()
    for operation in model.sent[3:]:
        other.send(operation, epoch=epoch).result()
    other.wait_durable(model.model_id, 5)
    volume, _, snapshot = cut_off.redis.hget(meta, "location").decode().partition("/")
    assert snapshot == f"5-{epoch}", "the first moves no pointer any more"
    assert volume == (tmp_path / "data" / "volume_id").read_text().strip()
    other.send(model_operation(model.model_id, 6, optim_step=step()), epoch=epoch).result()
    other.wait_durable(model.model_id, 6)

    # And back to the first, which never had the last operation.
    cut_off.redis.set(keys.epoch(model.model_id), epoch + 1)
    assert cut_off.restore(model.model_id, epoch + 1) == 6
    with pytest.raises(grpc.RpcError, match="went on without this copy"):
        early.result(60)
    asked = model_operation(model.model_id, 7, forward_backward=forward_backward(batch(2, 12)))
    answers = [logprobs(world.send(asked, epoch=epoch + 1).result()) for world in (cut_off, other)]
    for first, second in zip(*answers, strict=True):
        np.testing.assert_array_equal(first, second)


def model_operation(model_id: str, seq_id: int, **kind: object) -> operation_pb2.Operation:
    return operation_pb2.Operation(model_id=model_id, seq_id=seq_id, **kind)
