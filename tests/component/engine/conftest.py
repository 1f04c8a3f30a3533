"""Small models, an engine of one rank in this process, and worlds of several, each started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.engine import Engine
from tests.component.engine.data import VOCAB
from tests.component.engine.engines import engine_of
from tests.component.engine.process import play
from tests.component.engine.ranks.worlds import WORLDS, Reports
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab=VOCAB, layers=2)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is not the embedding, so that ZeRO-3 shards it apart."""
    path = tmp_path_factory.mktemp("untied")
    return make_tiny_model(path, vocab=VOCAB, layers=2, tie_embeddings=False)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts."""
    path = tmp_path_factory.mktemp("experts")
    config = config_of("qwen3_moe", {**FLAT["qwen3_moe"], "vocab_size": VOCAB})
    random_model(config, "eager").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def worlds(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Reports]]:
    """What the ranks of each world report. They take a while to start, so that each is started once."""
    return {
        name: play("ranks.worlds", untied, tmp_path_factory.mktemp("world"), Reports, ranks, stage)
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
    return engine_of(directory)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """The engine without any model."""
    made: list[str] = []
    original = loaded.create_model

    def create(model_id: str, lora: LoraSpec | None, **how: Any) -> None:
        original(model_id, lora, **how)
        made.append(model_id)

    loaded.create_model = create  # type: ignore[method-assign]
    yield loaded
    loaded.create_model = original  # type: ignore[method-assign]
    for model_id in made:
        loaded.drop_model(model_id)
