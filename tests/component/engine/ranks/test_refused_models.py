"""An engine does not start with a model that does more than the trainer does with it, on any of its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.base_model import init_distributed
from tests.component.engine.engines import engine_of
from tests.component.engine.process import run_ranks
from tests.unit.trainer.compute.architectures import SINGLE, config_of, random_model

pytestmark = pytest.mark.heavy

MODELS = {
    "falcon_h1": {**SINGLE["falcon_h1"], "lm_head_multiplier": 0.0195},
    "granite": {"logits_scaling": 8.0},
    "granite with a head of its own": {"logits_scaling": 8.0, "tie_word_embeddings": False},
}


def refused(directory: Path, stage: int, dtype: str) -> None:
    """What a rank does."""
    init_distributed("cpu")
    with pytest.raises(InvalidRequest, match=rf"^{directory}: \w+ForCausalLM changes its logits"):
        engine_of(directory, dtype=dtype, stage=stage)
    (directory.parent / f"refused{os.environ['RANK']}").touch()


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "dtype"),
    [
        ("falcon_h1", 1, 0, "float32"),
        ("falcon_h1", 2, 0, "bfloat16"),
        ("falcon_h1", 2, 3, "float32"),
        ("granite", 2, 3, "float32"),
        ("granite with a head of its own", 2, 3, "bfloat16"),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(
    tmp_path: Path, name: str, ranks: int, stage: int, dtype: str
) -> None:
    # Of a vocabulary so large that its weights are sharded.
    config = config_of(name.split()[0], {**MODELS[name], "vocab_size": 512})
    model = random_model(config, "eager").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    run_ranks(refused, ranks, tmp_path, tmp_path / "model", stage, dtype)
    assert all((tmp_path / f"refused{rank}").exists() for rank in range(ranks))
