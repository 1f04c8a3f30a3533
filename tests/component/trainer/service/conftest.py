"""One world after the other, each for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.own_redis import started_redis
from tests.component.trainer.world import TrainerWorld, made_model

redis_url = pytest.fixture(started_redis, scope="package", name="redis_url")
model_dir = pytest.fixture(made_model, scope="package", name="model_dir")


@pytest.fixture(scope="package", params=[(1, 0), (2, 3)], ids=["1-rank-zero-0", "2-ranks-zero-3"])
def trainer_service(
    request: pytest.FixtureRequest, redis_url: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerWorld]:
    ranks, zero_stage = request.param
    started = TrainerWorld(
        redis_url, model_dir, tmp_path_factory.mktemp("data"), ranks, zero_stage, "--micro-batch-tokens", "64"
    )
    yield started
    assert started.stop() == 0


@pytest.fixture
def world(trainer_service: TrainerWorld) -> TrainerWorld:
    return trainer_service
