"""What `make bench` compares a cluster with starts and answers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from bench.sampling.bare_vllm import BareVllm
from bench.training.bare_engine import BareEngine
from tests.component.sampler.process import make_adapter, make_model, prompt, write_snapshot

pytestmark = pytest.mark.heavy


def test_the_trainers_engine_alone_trains_takes_steps_and_scores(tmp_path: Path) -> None:
    batch = [prompt(seed, 12) for seed in range(4)]
    with closing(BareEngine(make_model(tmp_path / "model", tied=True), 1, tmp_path / "log")) as engine:
        assert engine.train(batch, 1e-4) > 0
        assert engine.train_together([batch, batch[:1]], 1e-4) > 0
        assert engine.forward(batch) > 0


def test_vllm_alone_generates_with_adapters(tmp_path: Path) -> None:
    adapters = [write_snapshot(tmp_path / str(seed), make_adapter(seed, 8), 8) for seed in range(2)]
    with closing(BareVllm(make_model(tmp_path / "model", tied=True), 1, "lora", tmp_path / "log")) as vllm:
        assert vllm.generate([prompt(seed, 12) for seed in range(4)], 4, adapters, group=2) > 0
