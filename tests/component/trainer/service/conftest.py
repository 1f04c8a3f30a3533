"""One world after the other, each for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.own_redis import redis_server
from tests.component.trainer.world import TrainerWorld, make_model


@pytest.fixture(scope="package")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


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
