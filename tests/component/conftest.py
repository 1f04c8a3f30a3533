"""One sampler process for all component tests that need one, and the judge of its answers.

Weight groups are numbered by the tests: test_sampler.py uses epochs below 10, test_sampler_full.py others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from services.common.process import rpc
from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.engine import Engine
from tests.component.engine_data import VOCAB
from tests.component.engine_process import play
from tests.component.engine_worlds import WORLDS, Reports
from tests.component.own_redis import redis_server
from tests.component.sampler_process import (
    MODEL_ID,
    Sampler,
    launch,
    make_adapter,
    make_model,
    wait_ready,
    write_snapshot,
)
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2_grpc

# (rank, what it adapts) of the stored snapshots; three of them, and the engine has two slots.
STORED = {
    1: (8, {}),
    2: (4, {"mlp": False, "unembed": False}),
    3: (16, {"attn": False}),
}


SHARED = ("sampler", "worlds")
"""What is started once, and takes a while: those who use it stay in one process."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes (loadgroup) take whole files, or all that share one thing. Before xdist looks."""
    for item in items:
        used = getattr(item, "fixturenames", ())
        group = next((name for name in SHARED if name in used), item.path.stem)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    directory = tmp_path_factory.mktemp("sampler")
    model_dir = make_model(directory / "model", tied=True)
    with redis_server(directory) as redis_url:
        started = launch(
            directory,
            model_dir,
            redis_url,
            *("--max-loras", "2", "--max-sequences", "64"),
            # Two of the tiny full models fit, a third pushes one out.
            *("--full-snapshot-cache-gib", "0.001"),
        )
        for version, (rank, targets) in STORED.items():
            write_snapshot(
                started.data_dir.snapshot(MODEL_ID, version), make_adapter(version, rank, **targets), rank
            )
        try:
            yield wait_ready(started)
        finally:
            assert started.stop() == 0, started.log.read_text()[-3000:]


@pytest.fixture
async def stub(sampler: Sampler) -> AsyncIterator[sampler_pb2_grpc.SamplerServiceStub]:
    async with rpc.channel(sampler.address) as channel:
        yield sampler_pb2_grpc.SamplerServiceStub(channel)


@pytest.fixture(scope="session")
def judge(sampler: Sampler):  # type: ignore[no-untyped-def]
    """version -> the independent model of that stored snapshot (0 = base)."""

    @cache
    def made(version: int) -> Reference:
        directory = sampler.data_dir.snapshot(MODEL_ID, version)
        if (directory / "config.json").exists():
            return Reference(directory)
        return Reference(sampler.model_dir, directory if version else None)

    return made


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab=VOCAB, layers=2)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is not the embedding, so that ZeRO-3 shards it apart."""
    path = tmp_path_factory.mktemp("untied")
    return make_tiny_model(path, vocab=VOCAB, layers=2, tie_embeddings=False)


@pytest.fixture(scope="session")
def worlds(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Reports]]:
    """What the ranks of each world report. They take a while to start, so that each is started once."""
    return {
        name: play("engine_worlds.py", untied, tmp_path_factory.mktemp("world"), Reports, ranks, stage)
        for name, (ranks, stage) in WORLDS.items()
    }


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    environment = pytest.MonkeyPatch()
    environment.setenv("DS_ACCELERATOR", "cpu")
    environment.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    environment.undo()


@pytest.fixture(scope="session")
def loaded(directory: Path, one_rank: None) -> Engine:
    return Engine(
        model_path=str(directory), device="cpu", dtype="float32", zero_stage=0, rank=0, world_size=1
    )


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """The engine without any model."""
    made: list[str] = []
    original = loaded.create_model

    def create(model_id: str, lora: LoraSpec | None) -> None:
        original(model_id, lora)
        made.append(model_id)

    loaded.create_model = create  # type: ignore[method-assign]
    yield loaded
    loaded.create_model = original  # type: ignore[method-assign]
    for model_id in made:
        loaded.drop_model(model_id)
