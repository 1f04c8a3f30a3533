"""Models that train all weights, with an output head that has a bias: ranks add the same to each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from tests.component.engine.data import VOCAB
from tests.component.engine.full.biased import CHUNKS, ROW, Report
from tests.component.engine.full.world import ADAM_FULL
from tests.component.engine.process import play
from tests.component.engine.reference import ReferenceModel

pytestmark = pytest.mark.heavy


def make_model(path: Path) -> Path:
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias, std=0.3)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_computes_the_head_in_chunks_and_one_without_work_come_to_the_reference(
    stage: int, tmp_path: Path
) -> None:
    directory = make_model(tmp_path / "model")
    report, _ = play("full.biased", directory, tmp_path, Report, ranks=2, stage=stage)
    for name in CHUNKS:
        reference = ReferenceModel(directory, train_all=True)
        norm = reference.step([ROW], "cross_entropy", ADAM_FULL)
        assert report.steps[name]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        reference.assert_same_adapter(report.states[name].adapter, tolerance=1e-6)
